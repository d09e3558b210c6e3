"""Makes an executor ready for its first step: model, memory, and on a GPU the graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import StartupError
from asyncengine.wire.messages import RunnerInfo
from gpu_runner.device.buffers import pages_for
from gpu_runner.device.executor import Executor, StepRunner
from gpu_runner.device.host import available_memory_bytes, usable_cores
from gpu_runner.device.memory import (
    HOST_SHARE,
    KvSize,
    allocate_kv_cache,
    page_bytes,
    size_kv_cache,
    wanted_model_len,
)
from gpu_runner.device.state import DeviceState
from gpu_runner.device.step import Step
from gpu_runner.device.stream import Stream
from gpu_runner.device.target import check_capability, choose_device, choose_dtype, make_stream
from gpu_runner.kernels.ops import ModelOps
from gpu_runner.kernels.upload_layout import upload_words
from gpu_runner.models.config import ModelConfig
from gpu_runner.models.decoder import Decoder
from gpu_runner.models.registry import load_model, random_model, read_model_config

Progress = Callable[[str, int, int], None]
"""A phase's name, how much of it is done and of how much; total 0 = no measure."""
GRAPH_RESERVE_BYTES = 1 << 30
"""Kept free for what the driver holds of captured graphs and loaded kernels."""


def build_executor(config: EngineConfig, model_path: str, progress: Progress, *, num_slots: int) -> Executor:
    """Load the model and make everything ready for the first step.

    num_slots: rows of the device's state. Raises `StartupError`: no such device, a model that cannot be loaded, a
    context length or KV cache that does not fit.
    """
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    model = read_model_config(model_path)
    wanted_model_len(config, model)  # a length the model cannot have is better refused before minutes of loading
    torch.set_num_threads(usable_cores())
    progress("loading weights", 0, 0)
    ops = _gpu_ops(model, device) if device.type == "cuda" else None
    try:
        if config.load_format == "dummy":
            decoder = random_model(model_path, device=device, dtype=dtype, ops=ops)
        else:
            report = partial(progress, "loading weights")
            decoder = load_model(model_path, device=device, dtype=dtype, progress=report, ops=ops)
    except torch.OutOfMemoryError as error:
        raise StartupError(f"too little memory on {device} for the model's weights: {error}") from error
    stream = make_stream(device)
    build = _build_graphs if device.type == "cuda" else _build_step
    step, size, pages_per_seq, kv_bytes = build(config, decoder, dtype, device, stream, progress, num_slots)
    info = RunnerInfo(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=size.max_model_len,
        num_pages=size.num_pages,
        weight_bytes=decoder.weight_bytes,
        kv_cache_bytes=kv_bytes,
    )
    return Executor(
        step=step,
        model_config=model,
        stream=stream,
        info=info,
        num_slots=num_slots,
        pages_per_seq=pages_per_seq,
        max_step_tokens=config.step_tokens(on_gpu=device.type == "cuda"),
        pinned=device.type == "cuda",
    )


def _build_step(
    config: EngineConfig,
    decoder: Decoder,
    dtype: torch.dtype,
    device: torch.device,
    stream: Stream,
    progress: Progress,
    num_slots: int,
) -> tuple[StepRunner, KvSize, int, int]:
    """For a CPU. The KV cache takes a share of the memory that is available, unless told its size."""
    model = decoder.config
    progress("sizing the KV cache", 0, 0)
    available = available_memory_bytes()
    all_rows = pages_for(wanted_model_len(config, model)) * config.max_num_seqs + 1
    budget = min(available // HOST_SHARE, all_rows * page_bytes(model, dtype))
    size = size_kv_cache(config, model, dtype, memory_bytes=available, budget_bytes=budget)
    kv_cache = allocate_kv_cache(model, size.num_pages, dtype, device)
    pages_per_seq = pages_for(size.max_model_len)
    step = Step(
        decoder=decoder,
        kv_cache=kv_cache,
        state=DeviceState(num_slots=num_slots, pages_per_seq=pages_per_seq, device=device),
        max_step_tokens=config.step_tokens(on_gpu=False),
        upload_words=upload_words(
            num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=config.step_tokens(on_gpu=False)
        ),
    )
    return step, size, pages_per_seq, kv_cache.nbytes


def _build_graphs(
    config: EngineConfig,
    decoder: Decoder,
    dtype: torch.dtype,
    device: torch.device,
    stream: Stream,
    progress: Progress,
    num_slots: int,
) -> tuple[StepRunner, KvSize, int, int]:
    """For a GPU. The largest step runs once over a dummy cache, then the cache takes what is left of the budget, then
    every graph is captured."""
    from gpu_runner.device.graph_step import GraphStep

    model, step_tokens = decoder.config, config.step_tokens(on_gpu=True)
    pages_per_seq = pages_for(wanted_model_len(config, model))
    progress("compiling kernels", 0, 0)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        step = GraphStep(
            decoder=decoder,
            model=model,
            kv_cache=allocate_kv_cache(model, 1, dtype, device),
            state=DeviceState(num_slots=num_slots, pages_per_seq=pages_per_seq, device=device),
            max_rows=config.max_num_seqs,
            max_step_tokens=step_tokens,
            upload_words=upload_words(num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=step_tokens),
            dtype=dtype,
        )
        # what was zeroed on the default stream must be so before the executor's own reads it
        torch.cuda.synchronize(device)
        stream.submit(torch.inference_mode()(step.run_largest))
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise StartupError(
            f"too little GPU memory for one step of max_num_batched_tokens {step_tokens} over {config.max_num_seqs} "
            f"rows: {torch.cuda.mem_get_info(device)[0]:,} bytes are free beside the weights"
        ) from error
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()

    progress("sizing the KV cache", 0, 0)
    free, total = torch.cuda.mem_get_info(device)
    reserve = step_bytes + GRAPH_RESERVE_BYTES
    # The limit is on this process's own bytes: what a neighbour holds counts only where it leaves less than that.
    own = int(config.gpu_memory_utilization * total) - torch.cuda.memory_reserved(device) - reserve
    available = free - reserve
    size = size_kv_cache(config, model, dtype, memory_bytes=available, budget_bytes=min(own, available))
    step.kv_cache = allocate_kv_cache(model, size.num_pages, dtype, device)
    torch.cuda.synchronize(device)
    progress("capturing graphs", 0, 0)
    stream.submit(torch.inference_mode()(partial(step.capture, partial(progress, "capturing graphs"))))
    torch.cuda.synchronize(device)
    return step, size, pages_per_seq, step.kv_cache.nbytes


def _gpu_ops(model: ModelConfig, device: torch.device) -> ModelOps:
    """The Triton operations; imported only where there is a GPU to run them."""
    check_capability(torch.cuda.get_device_capability(device))
    if model.head_dim & (model.head_dim - 1) or model.head_dim < 16:
        raise StartupError(
            f"attention heads of {model.head_dim} dimensions are not supported on a GPU, only powers of two from 16 on"
        )
    from gpu_runner.kernels.cuda_ops import CudaOps

    return CudaOps(device)
