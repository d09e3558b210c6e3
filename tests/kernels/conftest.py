"""Triton kernels run on the GPU where there is one, else under Triton's interpreter, which is chosen at import."""

from __future__ import annotations

import torch
from support.triton_interpreter import use_interpreter

if not torch.cuda.is_available():
    use_interpreter()
