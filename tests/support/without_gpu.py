"""`compile_without_gpu` in a process of its own, which has Triton's compiler: the tests' one has its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.python_path import PYTHON_PATH


def run_without_gpu(model: str | Path, *options: str, cache: Path | None = None) -> Any:
    """What it prints. cache: where kernels are kept; None: where they are by default."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"DISABLE_PTXAS_OPT": "1", "PYTHONPATH": PYTHON_PATH}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "support.compile_without_gpu", str(model), *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
