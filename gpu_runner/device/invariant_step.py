"""A CPU's step in which a row's results do not depend on other rows, bit for bit. Its decoder runs on
`kernels.invariant_reference_ops`."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from gpu_runner.device.step import Step
from gpu_runner.kernels.reference_adjust import TopLogprobs
from gpu_runner.kernels.reference_sampling import SamplingRows


class InvariantStep(Step):
    """Exponentials and logarithms, and sums of them, are computed a row at a time."""

    def _draw(self, logits: Tensor, rows: SamplingRows, *, filtered: bool) -> Tensor:
        each = [slice(row, row + 1) for row in range(len(logits))]
        return torch.cat([super(InvariantStep, self)._draw(logits[row], rows[row], filtered=filtered) for row in each])

    def _tops(self, logits: Tensor, chosen: Tensor, wanted: Tensor) -> TopLogprobs:
        rows = zip(logits.split(1), chosen.split(1), wanted.split(1), strict=True)
        tops = [super(InvariantStep, self)._tops(*row) for row in rows]
        return TopLogprobs(
            **{field.name: torch.cat([getattr(top, field.name) for top in tops]) for field in fields(TopLogprobs)}
        )
