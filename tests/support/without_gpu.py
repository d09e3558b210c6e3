"""`compile_without_gpu` in a process of its own, which has Triton's compiler: the tests' one has its interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from support.python_path import PYTHON_PATH


class WithoutGpu(Protocol):
    def __call__(self, model: str | Path, *options: str) -> Any:
        """What is printed of a model's folder."""


@contextmanager
def without_gpu(*, cache: Path | None = None) -> Iterator[WithoutGpu]:
    """One process, for any number of models. cache: where kernels are kept; None: where they are by default."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"DISABLE_PTXAS_OPT": "1", "PYTHONPATH": PYTHON_PATH}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "support.compile_without_gpu"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def ask(model: str | Path, *options: str) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps([str(model), *options]), file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, "it ended; the reason is in what was written to stderr"
            content = json.loads(answer)
            assert "error" not in content, content["error"]
            return content["done"]

        yield ask
