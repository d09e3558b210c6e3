"""The logits that a device's steps computed, whether they are captured graphs or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpu_runner.models.decoder import Decoder
from gpu_runner.schedule.plan import StepPlan, StepResult


class LogitsTap:
    """Stands before an executor and keeps the logits of every sampled token, in the order of tokens.

    The executor must have been built within `tapping`, so that each step, or graph, ends in a copy of its logits to
    `buffer`. One step in flight: the copy is the last step's.
    """

    def __init__(self, executor: Any, buffer: Tensor) -> None:
        self._executor = executor
        self._buffer = buffer
        self._plan: StepPlan | None = None
        self.rows: list[tuple[int, int, Tensor]] = []  # (slot, generation, [vocab] on the host)

    def launch(self, plan: StepPlan) -> None:
        assert self._plan is None
        self._plan = plan
        self._executor.launch(plan)

    def collect(self) -> StepResult:
        plan, self._plan = self._plan, None
        assert plan is not None
        result: StepResult = self._executor.collect()
        logits = self._buffer[: int(plan.row_samples.sum())].cpu()
        slots, gens = plan.row_slot[plan.row_samples].tolist(), plan.row_gen[plan.row_samples].tolist()
        for slot, gen, row, token in zip(slots, gens, logits, result.tokens[plan.row_samples], strict=True):
            if token >= 0:
                self.rows.append((slot, gen, row.clone()))
        return result

    def by_request(self, rid_of: dict[tuple[int, int], int]) -> dict[int, Tensor]:
        """[output tokens, vocab] by rid. rid_of: by slot and generation."""
        found: dict[int, list[Tensor]] = {}
        for slot, gen, row in self.rows:
            found.setdefault(rid_of[slot, gen], []).append(row)
        return {rid: torch.stack(rows) for rid, rows in found.items()}


@contextmanager
def tapping(*, max_rows: int, vocab_size: int, device: torch.device) -> Iterator[Tensor]:
    """The logits of decoders that are made within are also copied to the buffer that this yields; computed for that
    alone where a step chooses its tokens without."""
    buffer = torch.zeros(max_rows, vocab_size, dtype=torch.float32, device=device)
    plain_init = Decoder.__init__

    def init(self: Decoder, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        plain_factors = self.head_factors

        def head_factors(hidden: Tensor) -> tuple[Tensor, Tensor]:
            factors = plain_factors(hidden)
            result = self._ops.logits(*factors)
            if not result.is_meta:  # a sketch, of which only the kernels are wanted
                buffer[: len(result)].copy_(result)
            return factors

        self.head_factors = head_factors  # type: ignore[method-assign]

    Decoder.__init__ = init  # type: ignore[method-assign]
    try:
        yield buffer
    finally:
        Decoder.__init__ = plain_init  # type: ignore[method-assign]
