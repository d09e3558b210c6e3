"""What a test's child processes need on PYTHONPATH: the doubles in `tests/`, and this checkout's packages before any
installed ones."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
PYTHON_PATH = os.pathsep.join((str(TESTS.parent), str(TESTS)))
