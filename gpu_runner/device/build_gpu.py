"""Makes a GPU ready for its first step: weights and kernels at the same time, graphs, the KV cache in what is left.

    load weights                | estimate graphs | size and allocate | capture
    compile kernels (threads)   |                 | the KV cache      |

The KV cache takes what the limit leaves once weights, buffers and graphs have their share. Graphs hold the cache's
address, so it must be there before they are captured: what they will take is estimated from a few, captured over a
cache of one page. Should all of them then take more than the limit leaves, the cache is made smaller by that and they
are captured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from asyncengine.config import PAGE_SIZE, EngineConfig
from asyncengine.errors import StartupError
from asyncengine.wire.reports import MemoryAccount
from gpu_runner.device.buffers import pages_for
from gpu_runner.device.gpu_memory import GpuMemory, estimate_graph_bytes
from gpu_runner.device.graph_step import GraphStep
from gpu_runner.device.host import usable_cores
from gpu_runner.device.memory import (
    TOKEN_ID_BYTES,
    KvSize,
    allocate_kv_cache,
    gib,
    page_bytes,
    size_kv_cache,
    wanted_model_len,
)
from gpu_runner.device.ready import Progress, Ready
from gpu_runner.device.stream import Stream, Work
from gpu_runner.device.target import check_capability, make_stream
from gpu_runner.kernels.cuda_ops import CudaOps
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.invariant_cuda_ops import InvariantCudaOps
from gpu_runner.kernels.kernel_cache import use_writable_cache
from gpu_runner.kernels.kernel_compiler import KernelCompiler
from gpu_runner.kernels.linear_config import choose_invariant
from gpu_runner.kernels.ops import ModelOps
from gpu_runner.kernels.upload_layout import upload_words
from gpu_runner.models.config import ModelConfig
from gpu_runner.models.decoder import Decoder
from gpu_runner.models.registry import sketch_model
from gpu_runner.models.weights import linear_shapes

META = torch.device("meta")
HEAD_DIMS = (16, 32, 64, 128, 256)
"""Of attention: powers of two, of which more do not fit an SM's shared memory."""
ESTIMATE_MARGIN, MARGIN_BYTES = 0.05, 64 << 20
"""What the graphs' estimate may be too low by before they have to be captured again; kernels that the sample did not
load are in it."""


class GpuBuild:
    """One start-up. `run` does it."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        num_slots: int,
        progress: Progress,
        graphs: bool,
    ) -> None:
        """graphs: as for `build_executor`. Raises `StartupError` for a GPU or a model the kernels cannot serve."""
        _check_supported(model, device)
        if config.batch_invariant:
            _check_invariant(model, dtype)
        self._config = config
        self._model = model
        self._device = device
        self._dtype = dtype
        self._num_slots = num_slots
        self._progress = progress
        self._graphs = graphs
        self._step_tokens = config.step_tokens(on_gpu=True)
        self._pages_per_seq = pages_for(wanted_model_len(config, model))
        self._memory = GpuMemory(device, utilization=config.gpu_memory_utilization)

    def run(self, load: Callable[[ModelOps], Decoder]) -> Ready:
        """load: makes the model over these operations. Raises `StartupError` where memory does not suffice."""
        use_writable_cache()
        with KernelCompiler(self._rehearse, threads=usable_cores()) as compiler:
            decoder = load(self._ops(self._device))
            kernels = compiler.wait(partial(self._progress, "compiling kernels"))
        stream = make_stream(self._device)
        step = self._make_step(decoder, self._model, self._device, num_pages=1)
        # what was zeroed on the default stream must be so before the executor's own reads it
        torch.cuda.synchronize(self._device)
        self._memory.settle()
        workspace_bytes = self._memory.allocated - decoder.weight_bytes
        graph_bytes, step_bytes = self._measure(stream, step)
        self._memory.settle()
        fixed_bytes = self._memory.own
        size = self._fill(
            stream, step, weight_bytes=decoder.weight_bytes, graph_bytes=graph_bytes, step_bytes=step_bytes
        )
        own = self._memory.own
        account = MemoryAccount(
            total_bytes=self._memory.total,
            limit_bytes=self._memory.limit,
            used_bytes=own,
            weight_bytes=decoder.weight_bytes,
            workspace_bytes=workspace_bytes,
            context_bytes=max(0, fixed_bytes - decoder.weight_bytes - workspace_bytes),
            graph_bytes=max(0, own - fixed_bytes - step.kv_cache.nbytes),
            kv_cache_bytes=step.kv_cache.nbytes,
        )
        return Ready(
            step=step,
            page_memory=step.page_memory,
            stream=stream,
            size=size,
            pages_per_seq=self._pages_per_seq,
            device_name=torch.cuda.get_device_name(self._device),
            memory=account,
            num_graphs=sum(map(len, step.works())) if self._graphs else 0,
            num_kernels=kernels.kernels,
            kernels_compiled=kernels.compiled,
        )

    def _measure(self, stream: Stream, step: GraphStep) -> tuple[int, int]:
        """Bytes that the graphs will take, and that the largest step takes beside its buffers when it is not captured;
        without graphs, that one twice."""
        self._progress("measuring graphs", 0, 0)
        before, taken = self._memory.allocated, 0
        torch.cuda.reset_peak_memory_stats(self._device)

        def measure() -> None:
            nonlocal taken
            step.run_largest()
            if self._graphs:
                kinds = [[work for work, _ in kind] for kind in step.works()]
                taken = estimate_graph_bytes(kinds, self._memory)

        try:
            _run(stream, measure)
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"too little GPU memory for one step of max_num_batched_tokens {self._step_tokens} over "
                f"{self._config.max_num_seqs} rows: {gib(self._memory.free)} are free beside the weights"
            ) from error
        torch.cuda.empty_cache()
        step_bytes = torch.cuda.max_memory_allocated(self._device) - before
        return taken if self._graphs else step_bytes, step_bytes

    def _fill(self, stream: Stream, step: GraphStep, *, weight_bytes: int, graph_bytes: int, step_bytes: int) -> KvSize:
        """Allocate the KV cache and capture the graphs over it. graph_bytes, step_bytes: as `_measure` returns them."""
        memory = self._memory
        reserve = int(graph_bytes * (1 + ESTIMATE_MARGIN)) + MARGIN_BYTES
        page = page_bytes(self._model, self._dtype)
        while True:
            self._progress("sizing the KV cache", 0, 0)
            # While graphs are captured, the largest step runs beside them once more.
            available = memory.free - reserve - step_bytes
            budget = min(memory.limit - memory.own - reserve, available)
            size = size_kv_cache(
                self._config,
                self._model,
                self._dtype,
                memory_bytes=available * page // (page + TOKEN_ID_BYTES),
                budget_bytes=budget * page // (page + TOKEN_ID_BYTES),
                remedy=partial(self._remedy, weight_bytes, budget, available),
            )
            try:
                step.kv_cache = allocate_kv_cache(self._model, size.num_pages, self._dtype, self._device)
                torch.cuda.synchronize(self._device)
                self._progress("capturing graphs", 0, 0)
                _run(stream, partial(step.capture, partial(self._progress, "capturing graphs")))
            except torch.OutOfMemoryError as error:
                raise StartupError(
                    f"another process took GPU memory that was free a moment ago: {gib(available)} then, "
                    f"{gib(memory.free)} now beside this process"
                ) from error
            torch.cuda.empty_cache()
            memory.settle()
            excess = memory.own - memory.limit
            if excess <= 0 or self._config.kv_cache_tokens is not None:
                return size
            reserve += excess
            step.drop_graphs()
            step.kv_cache = allocate_kv_cache(self._model, 1, self._dtype, self._device)
            torch.cuda.empty_cache()

    def _remedy(self, weight_bytes: int, budget: int, available: int, missing_bytes: int) -> str:
        """What would give the cache, allowed `budget` of the `available` bytes, `missing_bytes` more for its keys and
        values."""
        memory, page = self._memory, page_bytes(self._model, self._dtype)
        missing = -(-missing_bytes * (page + TOKEN_ID_BYTES) // page)
        weights = f"the weights take {gib(weight_bytes)} of the GPU's {gib(memory.total)}"
        if budget + missing > available:
            return (
                f"free GPU memory: a cache of {gib(budget + missing)} is needed, and at any gpu_memory_utilization "
                f"{gib(max(0, available))} are left for it; {weights}"
            )
        # Three decimals, and what rounding to whole bytes and pages may cost.
        utilization = math.ceil(1000 * (memory.limit + missing + page) / memory.total) / 1000
        return f"raise gpu_memory_utilization from {self._config.gpu_memory_utilization} to {utilization}: {weights}"

    def _rehearse(self) -> None:
        """Every launch of every graph, over one layer of each kind and as many pages as there may be, all without
        memory: a kernel depends on the size of the cache by its strides, on its layer by its kind and by whether there
        are layers before and behind it."""
        all_windows = self._model.layer_windows
        windows = tuple(dict.fromkeys(all_windows))
        if len(windows) == 1:
            windows = all_windows[:2]
        model = replace(self._model, num_layers=len(windows), layer_windows=windows)
        decoder = sketch_model(model, dtype=self._dtype, ops=self._ops(META))
        tokens = self._config.kv_cache_tokens
        room = self._memory.limit // page_bytes(self._model, self._dtype)
        pages = room if tokens is None else tokens // PAGE_SIZE + 1
        step = self._make_step(decoder, model, META, num_pages=max(1, pages))
        for kind in step.works():
            for work, _ in kind:
                work()

    def _ops(self, device: torch.device) -> CudaOps:
        if self._config.batch_invariant:
            return InvariantCudaOps()
        return CudaOps.for_weights(linear_shapes(self._model), max_tokens=self._step_tokens, device=device)

    def _make_step(self, decoder: Decoder, model: ModelConfig, device: torch.device, *, num_pages: int) -> GraphStep:
        return GraphStep(
            decoder=decoder,
            model=model,
            kv_cache=allocate_kv_cache(model, num_pages, self._dtype, device),
            state=DeviceState(num_slots=self._num_slots, pages_per_seq=self._pages_per_seq, device=device),
            max_rows=self._config.max_num_seqs,
            max_step_tokens=self._step_tokens,
            upload_words=upload_words(
                num_slots=self._num_slots, pages_per_seq=self._pages_per_seq, max_step_tokens=self._step_tokens
            ),
            dtype=self._dtype,
            graphs=self._graphs,
            invariant=self._config.batch_invariant,
        )


def _run(stream: Stream, work: Work) -> None:
    """Run work on the stream and wait for it; raises what it raised."""
    stream.submit(torch.inference_mode()(work))
    mark = stream.mark()
    mark.record()
    mark.wait()


def _check_supported(model: ModelConfig, device: torch.device) -> None:
    check_capability(torch.cuda.get_device_capability(device))
    if model.head_dim not in HEAD_DIMS:
        raise StartupError(
            f"attention heads of {model.head_dim} dimensions are not supported on a GPU, only of "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )


def _check_invariant(model: ModelConfig, dtype: torch.dtype) -> None:
    try:
        for n, k in linear_shapes(model):
            choose_invariant(n, k, dtype.itemsize)
    except ValueError as error:
        raise StartupError(f"batch_invariant is not supported for this model on a GPU: {error}") from None
