"""Launches that overlap: programmatic dependent launch (PDL), which compute capability 9.0 has.

A kernel starts while the one before it in the stream still runs, does what does not depend on that one, waits for its
end (`gdc_wait`), and lets the next one start in turn (`gdc_launch_dependents`). Every kernel here is launched so on a
GPU, inside captured graphs too; Triton's interpreter knows none of it.
"""

from __future__ import annotations

from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether kernels on such tensors are a GPU's, if only sketched ("meta"), or are interpreted."""
    return x.device.type != "cpu"


def uses_pdl(x: Tensor) -> bool:
    """Always on a GPU; a test turns it off to see that results do not depend on it."""
    return on_gpu(x)


def launch_options(x: Tensor, num_warps: int) -> dict[str, int | bool]:
    """What all kernels are launched with, the constant `PDL` among it. x: any of the launch's tensors."""
    pdl = uses_pdl(x)
    return {"PDL": pdl, "launch_pdl": pdl, "num_warps": num_warps}
