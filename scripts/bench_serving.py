"""The command `asyncengine bench` under the name that scripts call it by; --help tells its options."""

from __future__ import annotations

import sys

from asyncengine.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
