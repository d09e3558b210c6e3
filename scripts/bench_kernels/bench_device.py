"""Where a kernel benchmark runs: on the GPU, or with `--smoke` under Triton's interpreter, at tiny shapes and without
meaning, to see that the script runs. Import it before anything that imports triton."""

from __future__ import annotations

import sys
from pathlib import Path

SMOKE = "--smoke" in sys.argv
if SMOKE:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from support.triton_interpreter import use_interpreter

    use_interpreter()

import torch  # noqa: E402 - after the interpreter was chosen
import triton  # noqa: E402

DEVICE = torch.device("cpu" if SMOKE else "cuda")
DTYPE = torch.float32 if SMOKE else torch.bfloat16
BYTES_PER_US = 4.5e6
"""Of an H200's memory, in practice."""
CANNOT_RUN = (triton.runtime.errors.OutOfResources, triton.CompilationError, RuntimeError)
"""What a kernel raises that this device cannot run."""
