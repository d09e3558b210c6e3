"""How long a step takes: a few coefficients per GPU and model, from a file of `scripts/step_models`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from gpu_runner.schedule.plan import StepPlan


class Coefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step's time is the sum of

    base        of the step's padded token count, linear between `base_tokens` and beyond the last two: `base_us` at
                each. Weights, linear layers, norms and what every step has of launches.
    sampled_row_us      for each row that samples: head and choice of a token.
    decode_context_us   for each cached token that a decode row attends to, in all layers.
    prefill_pair_us     for each pair of a prefill token and a token that it attends to, in all layers.
    mixed_us            if there are both decode rows and chunks of prompts in it.

    What the host does for a step, which the device does not wait for while a step is in flight, is linear in the rows
    between `host_rows` and the same beyond them: `host_us` at each.
    """

    base_tokens: tuple[int, ...]
    base_us: tuple[float, ...]
    sampled_row_us: float
    decode_context_us: float
    prefill_pair_us: float
    mixed_us: float = 0.0
    host_rows: tuple[int, ...]
    host_us: tuple[float, ...]


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """tokens: what the KV cache holds. bytes_per_token: in all layers. source: where the figures are from."""

    tokens: int
    bytes_per_token: int
    source: str


class StepModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """figures: what was measured, and `errors` how far the model is off; see `fit_step_model.py`."""

    gpu: str
    model: str
    max_model_len: int
    kv_cache: Cache
    coefficients: Coefficients


class StepModel:
    """Times in ns. Calls look nothing up twice: the base of each token count is kept."""

    def __init__(self, coefficients: Coefficients) -> None:
        """Raises ValueError for coefficients that say nothing or go backwards."""
        c = coefficients
        for xs, ys in ((c.base_tokens, c.base_us), (c.host_rows, c.host_us)):
            if len(xs) != len(ys) or len(xs) < 2 or list(xs) != sorted(set(xs)):
                raise ValueError("a step model needs at least two ascending places and as many times")
        self._c = c
        self._base: dict[float, float] = {}

    def step_ns(self, plan: StepPlan) -> int:
        """What the device takes for it."""
        decodes = plan.num_decode_rows
        context = int(plan.row_start[:decodes].sum()) + decodes
        start = plan.row_start[decodes:].astype(np.int64)
        length = plan.row_len[decodes:].astype(np.int64)
        pairs = int((length * start + length * (length + 1) // 2).sum()) if len(length) else 0
        sampled = int(np.count_nonzero(plan.row_samples))
        mixed = 0 < decodes < plan.num_rows
        return self.time_ns(tokens=plan.bucket, sampled=sampled, context=context, pairs=pairs, mixed=mixed)

    def time_ns(self, *, tokens: float, sampled: float, context: float, pairs: float, mixed: bool = False) -> int:
        """Of a step of `tokens`, padding included; the others as in `Coefficients`."""
        base = self._base.get(tokens)
        if base is None:
            base = self._base[tokens] = along(tokens, self._c.base_tokens, self._c.base_us)
        c = self._c
        us = base + c.sampled_row_us * sampled + c.decode_context_us * context + c.prefill_pair_us * pairs
        return round(1e3 * (us + c.mixed_us * mixed))

    def host_ns(self, rows: int) -> int:
        """What the loop takes for a step of so many rows, beside waiting."""
        return round(1e3 * float(np.interp(rows, self._c.host_rows, self._c.host_us)))


def along(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear between the places `xs`; the line through the last two goes on beyond them."""
    if x <= xs[-1]:
        return float(np.interp(x, xs, ys))
    return ys[-1] + (x - xs[-1]) * (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])


def read_step_model(path: Path) -> StepModelFile:
    """Raises ValueError (msgspec's) for a file that is none."""
    return msgspec.json.decode(path.read_bytes(), type=StepModelFile)
