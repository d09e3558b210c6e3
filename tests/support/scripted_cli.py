"""The `asyncengine` command with the scripted runner in place of gpu_runner."""

from __future__ import annotations

import functools
import sys

from asyncengine.cli import main
from asyncengine.engine import AsyncEngine

if __name__ == "__main__":
    scripted = functools.partial(AsyncEngine.start, modules={"gpu_runner": "support.scripted_runner"})
    AsyncEngine.start = scripted  # type: ignore[method-assign, assignment]
    sys.exit(main())
