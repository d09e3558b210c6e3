"""What became of each request of a simulation, and the figures of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from simulation.traces import TraceRequest

NONE = -1
"""A time that has not come."""


class Records:
    """Arrays by request index; times in ns of the virtual clock. gaps: between the tokens of a request, over all, in
    arrays of any length."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        count = len(requests)
        self.prompt_tokens = np.array([request.prompt_tokens for request in requests], np.int64)
        self.output_tokens = np.array([request.output_tokens for request in requests], np.int64)
        self.priority = np.array([request.priority for request in requests], np.int64)
        self.arrival = np.full(count, NONE, np.int64)
        self.started = np.full(count, NONE, np.int64)
        self.first = np.full(count, NONE, np.int64)
        self.end = np.full(count, NONE, np.int64)
        self.cached = np.zeros(count, np.int64)
        self.is_refused = np.zeros(count, np.bool_)
        self.gaps: list[NDArray[np.int64]] = []

    def came(self, request: TraceRequest, at_ns: int) -> None:
        self._set(self.arrival, request.index, at_ns)

    def refused(self, index: int) -> None:
        self.is_refused[index] = True

    def first_token(self, index: int, started_ns: int, now_ns: int, cached_tokens: int) -> None:
        self._set(self.first, index, now_ns)
        self.started[index] = started_ns
        self.cached[index] = cached_tokens

    def ended(self, index: int, now_ns: int) -> None:
        self._set(self.end, index, now_ns)

    @property
    def ran(self) -> NDArray[np.bool_]:
        return self.end != NONE

    @property
    def ttft_ms(self) -> NDArray[np.float64]:
        """Of the requests that ran, from their arrival."""
        return (self.first - self.arrival)[self.ran] / 1e6

    @property
    def tpot_ms(self) -> NDArray[np.float64]:
        """Of the requests that ran: the mean time between its tokens; NaN where there is but one."""
        ran = self.ran
        gaps = (self.output_tokens[ran] - 1).astype(np.float64)
        gaps[gaps == 0] = np.nan
        return (self.end - self.first)[ran] / 1e6 / gaps

    def figures(self, *, ttft_target_ms: float, tpot_target_ms: float) -> dict[str, Any]:
        """Times in ms. A request is good if its TTFT and its mean time between tokens are within the targets."""
        ran, ttft, tpot = self.ran, self.ttft_ms, self.tpot_ms
        if not ran.any():
            return {"requests": len(ran), "refused": int(self.is_refused.sum()), "ended": 0}
        gaps = np.concatenate(self.gaps) / 1e6
        seconds = (self.end.max() - self.arrival[ran].min()) / 1e9
        good = (ttft <= ttft_target_ms) & ~(tpot > tpot_target_ms)
        urgent = ttft[self.priority[ran] == 0]
        rest = ttft[self.priority[ran] != 0]
        return {
            "requests": len(ran),
            "refused": int(self.is_refused.sum()),
            "ended": int(ran.sum()),
            "seconds": float(seconds),
            "prompt_tokens": int(self.prompt_tokens[ran].sum()),
            "output_tokens": int(self.output_tokens[ran].sum()),
            "requests_per_s": float(ran.sum() / seconds),
            "output_tokens_per_s": float(self.output_tokens[ran].sum() / seconds),
            "total_tokens_per_s": float((self.output_tokens + self.prompt_tokens)[ran].sum() / seconds),
            "hit_rate": float(self.cached[ran].sum() / self.prompt_tokens[ran].sum()),
            "ttft_ms": spread(ttft),
            "tpot_ms": spread(tpot[~np.isnan(tpot)]),
            "gap_ms": spread(gaps),
            "wait_ms": spread((self.started - self.arrival)[ran] / 1e6),
            "urgent_ttft_ms": spread(urgent),
            "other_ttft_ms": spread(rest),
            "good_share": float(good.mean()),
            "goodput_per_s": float(good.sum() / seconds),
        }

    @staticmethod
    def _set(times: NDArray[np.int64], index: int, ns: int) -> None:
        if times[index] != NONE:
            raise RuntimeError(f"request {index} came, began or ended twice")
        times[index] = ns


def spread(values: NDArray[np.float64]) -> dict[str, float] | None:
    """None of no values."""
    if not len(values):
        return None
    p50, p90, p99 = np.percentile(values, (50, 90, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}
