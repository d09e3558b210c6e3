"""The `asyncengine` command with the scripted runner in place of gpu_runner."""

from __future__ import annotations

import sys

from asyncengine.cli import main

if __name__ == "__main__":
    sys.exit(main(modules={"gpu_runner": "support.scripted_runner"}))
