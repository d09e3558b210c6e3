"""What a test's child processes need on PYTHONPATH: the doubles in `tests/`, and this checkout's packages before any
installed ones; and what it already names, where packages may lie that are not installed."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
PYTHON_PATH = os.pathsep.join(filter(None, (str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH"))))
