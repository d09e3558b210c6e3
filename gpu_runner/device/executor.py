"""Executes step plans on a device, two in flight. The same code drives a CPU and a GPU; `stream` hides which."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from asyncengine.config import EngineConfig
from asyncengine.errors import StartupError
from asyncengine.wire.messages import RunnerInfo
from gpu_runner.device.buffers import RingSlot, pack, pages_for, upload_words
from gpu_runner.device.host import available_memory_bytes, usable_cores
from gpu_runner.device.largest_step import measure_step_bytes
from gpu_runner.device.memory import HOST_SHARE, allocate_kv_cache, page_bytes, size_kv_cache, wanted_model_len
from gpu_runner.device.sampling_path import SamplingPaths
from gpu_runner.device.state import DeviceState
from gpu_runner.device.step import DecoderLike, Step
from gpu_runner.device.stream import Stream
from gpu_runner.device.target import choose_device, choose_dtype, make_stream
from gpu_runner.models.config import ModelConfig
from gpu_runner.models.decoder import Decoder
from gpu_runner.models.registry import load_model, read_model_config
from gpu_runner.schedule.plan import StepPlan, StepResult

MAX_IN_FLIGHT = 2
RING_DEPTH = MAX_IN_FLIGHT + 1

Progress = Callable[[str, int, int], None]
"""A phase's name, how much of it is done and of how much; total 0 = no measure."""


class Executor:
    """Launches plans without waiting and hands back results one step late.

        host     | launch N | launch N+1 | collect N ... commit N, plan N+2 | launch N+2 | collect N+1 ...
        device            | run N ................ | run N+1 ................ | run N+2 ...
        ring slot           N % 3                    (N+1) % 3                  (N+2) % 3

    Step N+1 is planned and launched before anyone has seen N's tokens: its decode rows read `last_token`, `kv_len` and
    `done` as step N leaves them on the device. A row that N ends is in N+1 all the same (an overshoot row) and is
    neutralised there by `done`; the host sees its end in N's result and leaves it out of N+2, the first step in which
    its slot may start another request.

    The host writes a ring slot while the device may still read the two before it. It may be written again for step
    N+3 because launching that requires N+1, and so N, to have been collected, which waits for N's mark.
    """

    def __init__(
        self,
        *,
        decoder: DecoderLike,
        model_config: ModelConfig,
        kv_cache: Tensor,
        stream: Stream,
        info: RunnerInfo,
        num_slots: int,
        max_step_tokens: int,
    ) -> None:
        """kv_cache: as `gpu_runner.kernels.ops` shapes it, page 0 the dummy. max_step_tokens: of any plan."""
        self.model_config = model_config
        self.info = info
        self.num_slots = num_slots
        self.max_step_tokens = max_step_tokens
        self.max_model_len = info.max_model_len
        self.num_pages = info.num_pages
        self.weight_bytes = info.weight_bytes
        self.kv_cache_bytes = info.kv_cache_bytes
        self.pages_per_seq = pages_for(info.max_model_len)
        self._stream = stream
        self._paths = SamplingPaths(num_slots)
        words = upload_words(num_slots=num_slots, pages_per_seq=self.pages_per_seq, max_step_tokens=max_step_tokens)
        self._step = Step(
            decoder=decoder,
            kv_cache=kv_cache,
            state=DeviceState(num_slots=num_slots, pages_per_seq=self.pages_per_seq, device=kv_cache.device),
            max_step_tokens=max_step_tokens,
            upload_words=words,
        )
        pinned = kv_cache.is_cuda
        self._ring = [
            RingSlot(
                upload=torch.empty(words, dtype=torch.int32, pin_memory=pinned),
                results=torch.empty(2 * num_slots, dtype=torch.int32, pin_memory=pinned),
                mark=stream.mark(),
            )
            for _ in range(RING_DEPTH)
        ]
        if pinned:
            # What was zeroed on the default stream must be so before the executor's own stream reads it.
            torch.cuda.synchronize(kv_cache.device)
        self._launched = 0
        self._in_flight: deque[tuple[StepPlan, RingSlot]] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def launch(self, plan: StepPlan) -> None:
        """Hand a step to the device and return at once. Raises RuntimeError when two are in flight already; what the
        step itself raises comes out of `collect`.

        The plan's arrays must not change until the step was collected.
        """
        if len(self._in_flight) == MAX_IN_FLIGHT:
            raise RuntimeError(f"{MAX_IN_FLIGHT} steps are in flight; collect one before launching step {plan.step}")
        slot = self._ring[self._launched % RING_DEPTH]
        packed = pack(plan, self._paths.choose(plan), pages_per_seq=self.pages_per_seq, buffer=slot.upload.numpy())
        self._stream.submit(partial(self._step.run, packed, slot.upload, slot.results))
        slot.mark.record()
        self._launched += 1
        self._in_flight.append((plan, slot))

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight; there must be one.

        Raises what that step or one before it raised; the executor is then of no more use.
        """
        plan, slot = self._in_flight.popleft()
        slot.mark.wait()
        tokens, finish = slot.results[: 2 * plan.num_rows].numpy().reshape(2, plan.num_rows)
        return StepResult(step=plan.step, tokens=tokens.copy(), finish=finish.astype(np.uint8))

    def close(self) -> None:
        """Wait for what was launched and stop; uncollected results are lost."""
        self._in_flight.clear()
        self._stream.close()


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
    try:
        decoder = load_model(model_path, device=device, dtype=dtype, progress=partial(progress, "loading weights"))
    except torch.OutOfMemoryError as error:
        raise StartupError(f"too little memory on {device} for the model's weights: {error}") from error

    progress("sizing the KV cache", 0, 0)
    memory_bytes, budget_bytes = _kv_memory(config, decoder, dtype, device, num_slots=num_slots)
    size = size_kv_cache(config, model, dtype, memory_bytes=memory_bytes, budget_bytes=budget_bytes)
    kv_cache = allocate_kv_cache(model, size.num_pages, dtype, device)
    info = RunnerInfo(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=size.max_model_len,
        num_pages=size.num_pages,
        weight_bytes=decoder.weight_bytes,
        kv_cache_bytes=kv_cache.nbytes,
    )
    return Executor(
        decoder=decoder,
        model_config=model,
        kv_cache=kv_cache,
        stream=make_stream(device),
        info=info,
        num_slots=num_slots,
        max_step_tokens=config.step_tokens(on_gpu=device.type == "cuda"),
    )


def _kv_memory(
    config: EngineConfig, decoder: Decoder, dtype: torch.dtype, device: torch.device, *, num_slots: int
) -> tuple[int, int]:
    """Bytes that the KV cache could take at most, and the share of them it takes unless told its size."""
    if device.type == "cpu":
        available = available_memory_bytes()
        all_rows = pages_for(wanted_model_len(config, decoder.config)) * config.max_num_seqs + 1
        return available, min(available // HOST_SHARE, all_rows * page_bytes(decoder.config, dtype))
    step_bytes = measure_step_bytes(
        decoder,
        decoder.config,
        dtype,
        device,
        num_slots=num_slots,
        max_step_tokens=config.step_tokens(on_gpu=True),
        max_model_len=wanted_model_len(config, decoder.config),
    )
    free, total = torch.cuda.mem_get_info(device)
    available = free - step_bytes
    # The limit is on this process's own bytes: what a neighbour holds counts only where it leaves less than that.
    own = int(config.gpu_memory_utilization * total) - torch.cuda.memory_reserved(device) - step_bytes
    return available, min(own, available)
