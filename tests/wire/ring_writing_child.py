"""Writes a ring as fast as it can until its stdin ends; all fields of a record are the record's number."""

from __future__ import annotations

import select
import sys

from asyncengine.wire.accounting import RingWriter, TurnRecord

if __name__ == "__main__":
    ring = RingWriter(sys.argv[1], "child", 0, TurnRecord)
    print("ready", flush=True)
    number = 0
    while number % 1000 or not select.select([sys.stdin], [], [], 0)[0]:
        number += 1
        ring.write((number,) * 7)
