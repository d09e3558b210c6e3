"""Makes an executor ready for its first step: model, memory, and on a GPU the graphs."""

from __future__ import annotations

from functools import partial

import msgspec
import torch

from asyncengine.config import PAGE_SIZE, EngineConfig
from asyncengine.errors import StartupError
from asyncengine.wire.reports import MemoryAccount, RunnerInfo
from gpu_runner.device.buffers import pages_for
from gpu_runner.device.executor import Executor
from gpu_runner.device.host import available_memory_bytes, usable_cores
from gpu_runner.device.host_memory import HostMemory, size_host_memory
from gpu_runner.device.invariant_step import InvariantStep
from gpu_runner.device.memory import (
    HOST_SHARE,
    TOKEN_ID_BYTES,
    allocate_kv_cache,
    gib,
    page_bytes,
    size_kv_cache,
    wanted_model_len,
)
from gpu_runner.device.page_copies import PageCopies
from gpu_runner.device.ready import Progress, Ready
from gpu_runner.device.step import Step
from gpu_runner.device.stream import InlineStream
from gpu_runner.device.target import choose_device, choose_dtype, make_stream
from gpu_runner.kernels import reference_page_copy
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.invariant_reference_ops import InvariantReferenceOps, rows_are_alike
from gpu_runner.kernels.ops import ModelOps
from gpu_runner.kernels.reference_ops import ReferenceOps
from gpu_runner.kernels.upload_layout import upload_words
from gpu_runner.models.config import ModelConfig
from gpu_runner.models.decoder import Decoder
from gpu_runner.models.registry import load_model, random_model, read_model_config


def build_executor(
    config: EngineConfig,
    model_path: str,
    progress: Progress,
    *,
    num_slots: int,
    graphs: bool = True,
) -> Executor:
    """Load the model and make everything ready for the first step.

    num_slots: rows of the device's state. graphs: whether a GPU replays captured graphs; off to check that
    results do not depend on them. Raises `StartupError`: no such device, a model that cannot be loaded, a context
    length or KV cache that does not fit.
    """
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    on_gpu = device.type == "cuda"
    model = read_model_config(model_path)
    # what cannot be is better refused before minutes of loading
    wanted_model_len(config, model)
    size_host_memory(config, model, dtype, available_bytes=available_memory_bytes())
    torch.set_num_threads(usable_cores())
    load = partial(_load, config, model_path, device, dtype, progress)
    if on_gpu:
        # Triton is imported only where there is a GPU to run its kernels.
        from gpu_runner.device.build_gpu import GpuBuild

        build = GpuBuild(
            config, model, device=device, dtype=dtype, num_slots=num_slots, progress=progress, graphs=graphs
        )
        ready = build.run(load)
    else:
        ready = _ready_cpu(config, load(_cpu_ops(config)), dtype, num_slots, progress)
    copies = _make_copies(config, model, dtype, device, ready, progress)
    page_load_ns = 0
    memory = ready.memory
    if copies is not None:
        progress("measuring host memory", 0, 0)
        page_load_ns = copies.measure()
        memory = msgspec.structs.replace(memory, host_kv_bytes=copies.host_bytes)
    info = RunnerInfo(
        device=ready.device_name,
        dtype=str(dtype).removeprefix("torch."),
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=ready.size.max_model_len,
        num_pages=ready.size.num_pages,
        weight_bytes=memory.weight_bytes,
        kv_cache_bytes=memory.kv_cache_bytes,
        memory=memory,
        num_host_pages=0 if copies is None else copies.host_pages,
        num_graphs=ready.num_graphs,
        num_kernels=ready.num_kernels,
        kernels_compiled=ready.kernels_compiled,
        batch_invariant=config.batch_invariant,
    )
    return Executor(
        step=ready.step,
        model_config=model,
        stream=ready.stream,
        info=info,
        num_slots=num_slots,
        pages_per_seq=ready.pages_per_seq,
        max_step_tokens=config.step_tokens(on_gpu=on_gpu),
        pinned=on_gpu,
        copies=copies,
        page_load_ns=page_load_ns,
    )


def _load(
    config: EngineConfig,
    model_path: str,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    ops: ModelOps,
) -> Decoder:
    phase = "loading weights"
    progress(phase, 0, 0)
    try:
        if config.load_format == "dummy":
            decoder = random_model(model_path, device=device, dtype=dtype, ops=ops)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return decoder
        return load_model(model_path, device=device, dtype=dtype, progress=partial(progress, phase), ops=ops)
    except torch.OutOfMemoryError as error:
        raise StartupError(f"too little memory on {device} for the model's weights: {error}") from error


def _cpu_ops(config: EngineConfig) -> ModelOps:
    return InvariantReferenceOps() if config.batch_invariant else ReferenceOps()


def _check_invariant(decoder: Decoder) -> None:
    if not all(map(rows_are_alike, decoder.linear_weights())):
        raise StartupError(
            "batch_invariant is not supported on this CPU: its library's matrix products depend on a row's place"
        )


def _ready_cpu(config: EngineConfig, decoder: Decoder, dtype: torch.dtype, num_slots: int, progress: Progress) -> Ready:
    """The KV cache takes a share of the memory that is available, unless told its size."""
    model, device = decoder.config, torch.device("cpu")
    progress("sizing the KV cache", 0, 0)
    available = available_memory_bytes()
    all_rows = pages_for(wanted_model_len(config, model)) * config.max_num_seqs + 1
    budget = min(available // HOST_SHARE, all_rows * page_bytes(model, dtype))
    size = size_kv_cache(
        config,
        model,
        dtype,
        memory_bytes=available,
        budget_bytes=budget,
        remedy=partial(_cpu_remedy, config, model, dtype, available),
    )
    kv_cache = allocate_kv_cache(model, size.num_pages, dtype, device)
    pages_per_seq = pages_for(size.max_model_len)
    step_tokens = config.step_tokens(on_gpu=False)
    if config.batch_invariant:
        _check_invariant(decoder)
    step = (InvariantStep if config.batch_invariant else Step)(
        decoder=decoder,
        kv_cache=kv_cache,
        state=DeviceState(num_slots=num_slots, pages_per_seq=pages_per_seq, device=device),
        max_step_tokens=step_tokens,
        upload_words=upload_words(num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=step_tokens),
    )
    weights, total = decoder.weight_bytes, available + decoder.weight_bytes
    return Ready(
        step=step,
        page_memory=step.page_memory,
        stream=make_stream(device),
        size=size,
        pages_per_seq=pages_per_seq,
        device_name="cpu",
        memory=MemoryAccount(
            total_bytes=total,
            limit_bytes=total,
            used_bytes=weights + kv_cache.nbytes,
            weight_bytes=weights,
            kv_cache_bytes=kv_cache.nbytes,
        ),
    )


def _make_copies(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ready: Ready,
    progress: Progress,
) -> PageCopies | None:
    """None: no host memory is asked for."""
    on_gpu = device.type == "cuda"
    # a CPU's KV cache takes none of what is available before it is written
    available = available_memory_bytes() - (0 if on_gpu else ready.memory.kv_cache_bytes)
    pages = size_host_memory(config, model, dtype, available_bytes=available)
    if not pages:
        return None
    size = pages * (page_bytes(model, dtype) + TOKEN_ID_BYTES)
    host = HostMemory(size, pinned=on_gpu, progress=partial(progress, "pinning host memory"))
    memory = ready.page_memory(host.words)
    if not on_gpu:
        return PageCopies(memory=memory, host=host, stream=InlineStream(), copy=reference_page_copy.copy_pages)
    from gpu_runner.kernels.page_copy import copy_pages

    return PageCopies(memory=memory, host=host, stream=make_stream(device), copy=copy_pages)


def _cpu_remedy(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, available: int, missing_bytes: int
) -> str:
    """Without a size of its own the cache takes a share of what is available; a size may take all of it."""
    pages = pages_for(config.max_model_len or PAGE_SIZE)
    needed = (pages + 1) * page_bytes(model, dtype)
    if needed <= available:
        return f"set kv_cache_tokens to {pages * PAGE_SIZE}, which take {gib(needed)} of the {gib(available)} available"
    return f"free {gib(needed - available)} of memory: {gib(needed)} are needed and {gib(available)} available"
