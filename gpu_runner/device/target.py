"""Which device and number type an engine runs on, and the stream that goes with it."""

from __future__ import annotations

from functools import partial

import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import StartupError
from gpu_runner.device.host import usable_cores
from gpu_runner.device.stream import CudaStream, Stream, WorkerStream

MIN_CAPABILITY = (9, 0)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(config: EngineConfig) -> torch.device:
    """Raises `StartupError` where CUDA is asked for and there is none."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise StartupError(
            "device is cuda, but torch finds no NVIDIA GPU it can use; cpu runs without one, auto takes what there is"
        )
    return torch.device("cuda", 0) if has_cuda and config.device != "cpu" else torch.device("cpu")


def check_capability(capability: tuple[int, int]) -> None:
    """Raise `StartupError` for a GPU without programmatic dependent launch, which the kernels rely on."""
    if capability < MIN_CAPABILITY:
        raise StartupError(
            "the GPU has compute capability {}.{}, and {}.{} or newer is needed; --device cpu runs without it".format(
                *capability, *MIN_CAPABILITY
            )
        )


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def make_stream(device: torch.device) -> Stream:
    if device.type == "cuda":
        return CudaStream(device)
    return WorkerStream(prepare=partial(torch.set_num_threads, usable_cores()))
