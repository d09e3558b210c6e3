"""The real gpu_runner on a device that computes nothing (`paged_model`) and cannot bear some tokens; with one more, its
cache loses a page."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from support.paged_model import PagedModel

from asyncengine.config import PAGE_SIZE
from asyncengine.wire.reports import RunnerInfo
from asyncengine.wire.sidecar import run_sidecar
from gpu_runner import __main__ as runner
from gpu_runner.schedule import scheduler
from gpu_runner.schedule.plan import Int32, StepPlan, StepResult
from gpu_runner.schedule.scheduler import Scheduler

SEGFAULT, EXCEPTION, LATE = 40_001, 40_002, 40_003
"""Tokens: the first two crash the step that has them, the last one its row as that reaches `LATE_POSITION`."""
LATE_POSITION = 50
LEAK = 40_004
AFTER_40, AFTER_200 = 40_040, 40_200
"""Tokens that crash the step in which their row has so many tokens in this process, wherever it went on."""
OUTPUT_IDS = 1000
NUM_PAGES, CONTEXT = 1025, 2048
STEP_SECONDS = 0.004
FAULT = "an illegal memory access was encountered"


class PoisonedModel(PagedModel):
    """With what `gpu_runner.__main__` needs of an executor."""

    num_pages, max_model_len, max_step_tokens = NUM_PAGES, CONTEXT, 256
    host_pages = page_load_ns = 0
    model_config = SimpleNamespace(eos_ids=(), vocab_size=49152)
    masks = SimpleNamespace(readable=False)
    info = RunnerInfo(
        device="cuda",
        dtype="float32",
        architecture="poisoned",
        vocab_size=49152,
        max_model_len=CONTEXT,
        num_pages=NUM_PAGES,
        weight_bytes=1,
        kv_cache_bytes=NUM_PAGES * PAGE_SIZE,
    )

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.sampled: Counter[tuple[int, int]] = Counter()  # by slot and generation

    def collect(self) -> StepResult:
        time.sleep(STEP_SECONDS)
        tokens = self.in_flight[0].prefill_tokens
        if SEGFAULT in tokens:
            os.kill(os.getpid(), signal.SIGSEGV)
        if EXCEPTION in tokens:
            raise RuntimeError(FAULT)
        return super().collect()

    def _sample(self, plan: StepPlan, row: int) -> tuple[int, int]:
        slot, gen = int(plan.row_slot[row]), int(plan.row_gen[row])
        self.sampled[slot, gen] += 1
        if self.kv_len[slot] == LATE_POSITION:
            self._check(slot, LATE)
        for token, count in ((AFTER_40, 40), (AFTER_200, 200)):
            if self.sampled[slot, gen] == count:
                self._check(slot, token)
        return super()._sample(plan, row)

    def _check(self, slot: int, token: int) -> None:
        positions = np.arange(self.kv_len[slot])
        if token in self.pages[self.page_table[slot, positions // PAGE_SIZE], positions % PAGE_SIZE]:
            raise RuntimeError(FAULT)

    def close(self) -> None:
        pass


class LeakingScheduler(Scheduler):
    def add(self, *, prompt: Int32, **rest: Any) -> None:
        if LEAK in prompt:
            self.rows.pool.allocate(1)
        super().add(prompt=prompt, **rest)


def build_executor(config: Any, model_path: str, progress: Any, *, num_slots: int) -> PoisonedModel:
    return PoisonedModel(num_slots=num_slots, num_pages=NUM_PAGES, max_model_len=CONTEXT, vocab_size=OUTPUT_IDS)


if __name__ == "__main__":
    build = ModuleType("gpu_runner.device.build")
    build.build_executor = build_executor  # type: ignore[attr-defined]
    sys.modules[build.__name__] = build  # in place of the one that takes seconds to import torch
    scheduler.Scheduler = LeakingScheduler  # type: ignore[misc]
    run_sidecar("gpu_runner", runner.serve)
