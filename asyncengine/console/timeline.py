"""What the engine's processes and its device just did, out of their rings of accounts, for somebody who watches.

A viewer asks again and again, each time for what came after the answer before. Whoever answers keeps nothing about
viewers: the records' numbers, which are the same for all API processes, are the cursor. Reading takes no lock, and the
writers never know of it; an answer holds at most `MAX_RECORDS`, which cost this process about 1 us each.

    ring       | ... 96 | 97 ... 120 | 121 122 ->        answer 1: next 120, more      ?since=engine.0:120
    answers             |  1         |  2               answer 2: next 122
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from asyncengine.errors import InvalidRequestError
from asyncengine.wire.accounting import SUFFIX, RingError, RingReader, StepRecord, TurnRecord

HISTORY_NS = 6_000_000_000
"""Older records are of no interest to anybody who watches."""
FIRST_NS = 1_000_000_000
"""What a new viewer gets, who should not begin with being behind."""
MAX_RECORDS = 3072
"""In one answer, over all lanes."""
MAX_CURSOR_CHARS = 8192
ROLES = ("gpu_runner", "tokenizer_proc", "detokenizer_proc", "engine")
"""In the order of the lanes."""
NOTICE_NS = 10_000
"""From the end of a step to the host's noticing it, on an H200."""
SAME_CLOCK_NS = 3_600_000_000_000
_PLACE = re.compile(r"([a-z_]+\.\d{1,3}):(\d{1,18})")
_STEP_COLUMNS: tuple[str, ...] = ("step", "rows", "prefill_tokens", "collected")
_STEP_TIMES: tuple[str, ...] = ("drain", "plan", "launch", "report", "wait", "commit", "send", "end")
_TURN_COLUMNS = ("messages", "items")
_TURN_TIMES = ("begin", "middle", "end")


class LaneJson(msgspec.Struct, frozen=True):
    """One process's records after the cursor, as columns: fields of `StepRecord` or `TurnRecord`, whose times here are
    ns after `origin_ms`, and null where there is none. device_begin is by the host's clock, device_ns how long it took.

    next: of the last one, for the next cursor. lost: records that were asked for and are not here. more: there are
    newer ones.
    """

    role: str
    index: int
    next: int
    lost: int
    more: bool
    origin_ms: float
    columns: dict[str, list[int | None]]


class LiveLanes:
    """The rings of one engine, those of its lost processes' successors too."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._rings: dict[Path, RingReader[StepRecord] | RingReader[TurnRecord]] = {}

    def read(self, cursor: Mapping[str, int], now_ns: int) -> list[LaneJson]:
        """cursor: by `role.index`, the number after which a lane's records are wanted; of the others all that are
        recent. now_ns: by CLOCK_MONOTONIC."""
        self._follow()
        known = [ring for ring in self._rings.values() if ring.role in ROLES]
        rings = sorted(known, key=lambda ring: (ROLES.index(ring.role), ring.index))
        limit = max(1, MAX_RECORDS // max(1, len(rings)))
        return [self._lane(ring, cursor.get(f"{ring.role}.{ring.index}"), now_ns, limit) for ring in rings]

    def close(self) -> None:
        for ring in self._rings.values():
            ring.close()

    def _follow(self) -> None:
        """Open the rings that are new."""
        for path in self._run_dir.glob(f"*{SUFFIX}"):
            before = self._rings.get(path)
            if before is not None and not before.superseded():
                continue
            try:
                if path.name.startswith("gpu_runner."):
                    self._rings[path] = RingReader(path, StepRecord)
                else:
                    self._rings[path] = RingReader(path, TurnRecord)
            except (RingError, OSError):  # no ring of ours, or its process has just ended
                continue
            if before is not None:
                before.close()

    def _lane(
        self, ring: RingReader[StepRecord] | RingReader[TurnRecord], since: int | None, now_ns: int, limit: int
    ) -> LaneJson:
        if since is None or since > ring.written:  # a number of an engine that was here before
            since = ring.ended_before(now_ns - FIRST_NS)
        records = ring.snapshot(max(since, ring.ended_before(now_ns - HISTORY_NS)), limit)
        last = records[-1].number if records else since
        columns, origin = _columns(records)
        return LaneJson(
            role=ring.role,
            index=ring.index,
            next=last,
            lost=last - since - len(records),
            more=ring.written - last > 0 and len(records) == limit,
            origin_ms=origin / 1e6,
            columns=columns,
        )


def parse_cursor(text: str) -> dict[str, int]:
    """`role.index:number,...` -> by `role.index`; raises `InvalidRequestError`."""
    places = text.split(",") if text else []
    found = [_PLACE.fullmatch(place) for place in places] if len(text) <= MAX_CURSOR_CHARS else [None]
    if None in found:
        message = f"since must be role.index:number, several of them with commas, up to {MAX_CURSOR_CHARS} characters"
        raise InvalidRequestError(message, code="invalid_cursor", param="since")
    return {match[1]: int(match[2]) for match in found if match}


def device_shift(commits_and_ends: Iterable[tuple[int, int]]) -> int:
    """What to add to the device's times, in ns, so that they are the host's, as well as a picture needs it: no step has
    ended after its results were there. `scripts/profile_host.py` knows better, from more of them."""
    least = min((commit - end for commit, end in commits_and_ends if end), default=0)
    return 0 if 0 <= least < SAME_CLOCK_NS else least - NOTICE_NS


def _columns(records: list[StepRecord] | list[TurnRecord]) -> tuple[dict[str, list[int | None]], int]:
    """And the time that theirs are counted from."""
    if not records:
        return {}, 0
    of_steps = isinstance(records[0], StepRecord)
    times, others = (_STEP_TIMES, _STEP_COLUMNS) if of_steps else (_TURN_TIMES, _TURN_COLUMNS)
    fields: dict[str, tuple[int, ...]] = dict(zip(records[0]._fields, zip(*records, strict=True), strict=True))
    origin = fields[times[0]][0]
    columns: dict[str, list[int | None]]
    columns = {name: [time - origin if time else None for time in fields[name]] for name in times}
    columns |= {name: list(fields[name]) for name in others}
    if of_steps:
        shift = device_shift(zip(fields["commit"], fields["device_end"], strict=True)) - origin
        columns["device_begin"] = [time + shift if time else None for time in fields["device_begin"]]
        columns["device_ns"] = [e - b for b, e in zip(fields["device_begin"], fields["device_end"], strict=True)]
    return columns, origin
