"""A model on a device behind the scheduler, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.engine_core import EngineCore
from support.logits_tap import LogitsTap, tapping
from torch import Tensor

from asyncengine.config import Device, DType, EngineConfig, LoadFormat
from asyncengine.sampling import SamplingParams
from gpu_runner.device.build import build_executor
from gpu_runner.device.executor import Executor
from gpu_runner.models.registry import read_model_config
from gpu_runner.schedule.scheduler import num_slots_for


@dataclass(frozen=True, slots=True)
class DeviceEngine:
    """An executor, and the buffer of its last step's logits: see `LogitsTap`."""

    executor: Executor
    buffer: Tensor
    max_num_seqs: int

    def core(self, *, device: Any = None, **options: Any) -> EngineCore:
        """Requests of their own, over the executor. options: of `EngineCore`."""
        executor = self.executor
        return EngineCore(
            num_pages=executor.num_pages,
            max_model_len=executor.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=executor.max_step_tokens,
            vocab_size=executor.model_config.vocab_size,
            eos_ids=executor.model_config.eos_ids,
            device=device or executor,
            **options,
        )

    def run(self, prompts: list[np.ndarray], params: list[SamplingParams], **options: Any) -> list[list[int]]:
        """Outputs of requests that arrive together. options: of `EngineCore`."""
        core = self.core(**options)
        add_all(core, prompts, params)
        core.run()
        core.assert_nothing_held()
        return [core.outputs[rid] for rid in range(len(prompts))]

    def run_with_logits(
        self, prompts: list[np.ndarray], params: list[SamplingParams], **options: Any
    ) -> list[tuple[list[int], Tensor]]:
        """Each request's tokens and the logits that they were chosen from, [tokens, vocab]; one step at a time."""
        tap = LogitsTap(self.executor, self.buffer)
        core = self.core(device=tap, depth=1, **options)
        add_all(core, prompts, params)
        core.run()
        logits = tap.by_request(core.row_of)
        return [(core.outputs[rid], logits[rid]) for rid in range(len(prompts))]


def add_all(core: EngineCore, prompts: list[np.ndarray], params: list[SamplingParams]) -> None:
    for rid, (prompt, request) in enumerate(zip(prompts, params, strict=True)):
        core.add_request(rid, prompt, request)


@contextmanager
def device_engine(
    model: str,
    *,
    device: Device,
    dtype: DType = "auto",
    load_format: LoadFormat = "auto",
    max_num_seqs: int = 6,
    step_tokens: int = 32,
    kv_cache_tokens: int = 4096,
    kv_host_memory_gib: float = 0.0,
    max_model_len: int | None = None,
    batch_invariant: bool = False,
    graphs: bool = True,
) -> Iterator[DeviceEngine]:
    """A model by its path, ready to run. Few rows and step tokens, so that there are few graphs to capture."""
    config = EngineConfig(
        load_format=load_format,
        device=device,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=step_tokens,
        kv_cache_tokens=kv_cache_tokens,
        kv_host_memory_gib=kv_host_memory_gib,
        max_model_len=max_model_len,
        batch_invariant=batch_invariant,
    )
    with tapping(
        max_rows=max_num_seqs, vocab_size=read_model_config(model).vocab_size, device=torch.device(device)
    ) as buffer:
        executor = build_executor(config, model, lambda *_: None, num_slots=num_slots_for(max_num_seqs), graphs=graphs)
    yield DeviceEngine(executor=executor, buffer=buffer, max_num_seqs=max_num_seqs)
    executor.close()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def random_prompts(lengths: list[int], vocab_size: int, *, seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, length, dtype=np.int32) for length in lengths]
