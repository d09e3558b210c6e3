"""What became of each request of a simulation, and the figures of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from simulation.traces import TraceRequest

from asyncengine.config import ServiceClass

NONE = -1
"""A time that has not come."""


class Target(NamedTuple):
    """What a request's TTFT, and the mean time between its tokens, should not take longer than."""

    ttft_ms: float
    gap_ms: float


Targets = Mapping[ServiceClass, Target]


class Records:
    """Arrays by request index; times in ns of the virtual clock. tenant: place in `tenants`, the names in order. gaps:
    between the tokens of a request, over all, in arrays of any length."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        count = len(requests)
        self.prompt_tokens = np.array([request.prompt_tokens for request in requests], np.int64)
        self.output_tokens = np.array([request.output_tokens for request in requests], np.int64)
        self.priority = np.array([request.priority for request in requests], np.int64)
        self.is_background = np.array([request.terms.service_class == "background" for request in requests], np.bool_)
        self.tenants = sorted({request.terms.tenant for request in requests})
        codes = {name: code for code, name in enumerate(self.tenants)}
        self.tenant = np.array([codes[request.terms.tenant] for request in requests], np.int32)
        self.arrival = np.full(count, NONE, np.int64)
        self.started = np.full(count, NONE, np.int64)
        self.first = np.full(count, NONE, np.int64)
        self.end = np.full(count, NONE, np.int64)
        self.cached = np.zeros(count, np.int64)
        self.is_refused = np.zeros(count, np.bool_)
        self.gaps: list[NDArray[np.int64]] = []
        self._later: list[NDArray[np.int32]] = []  # whose they are
        self._later_ns: list[int] = []  # of each array, when they came

    def came(self, request: TraceRequest, at_ns: int) -> None:
        self._set(self.arrival, request.index, at_ns)

    def refused(self, index: int) -> None:
        self.is_refused[index] = True

    def first_token(self, index: int, started_ns: int, now_ns: int, cached_tokens: int) -> None:
        self._set(self.first, index, now_ns)
        self.started[index] = started_ns
        self.cached[index] = cached_tokens

    def later_tokens(self, requests: NDArray[np.int32], gaps: NDArray[np.int64], now_ns: int) -> None:
        """One token of each of them came, so long after its last."""
        self._later.append(requests)
        self.gaps.append(gaps)
        self._later_ns.append(now_ns)

    def ended(self, index: int, now_ns: int) -> None:
        self._set(self.end, index, now_ns)

    @property
    def ran(self) -> NDArray[np.bool_]:
        return self.end != NONE

    @property
    def ttft_ms(self) -> NDArray[np.float64]:
        """Of the requests that ran, from their arrival."""
        return self._ttft_ms(self.ran)

    @property
    def tpot_ms(self) -> NDArray[np.float64]:
        """Of the requests that ran: the mean time between its tokens; NaN where there is but one."""
        return self._tpot_ms(self.ran)

    def later(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Of all tokens but the requests' first, as they came: whose, and when."""
        if not self._later:
            return np.zeros(0, np.int32), np.zeros(0, np.int64)
        times = np.repeat(np.array(self._later_ns, np.int64), [len(requests) for requests in self._later])
        return np.concatenate(self._later), times

    def figures(self, targets: Targets) -> dict[str, Any]:
        """Of all, and under `classes` and `tenants` of each where there are several. Times in ms. A request is good if
        its TTFT and its mean time between tokens are within the targets of its class."""
        ran = self.ran
        if not ran.any():
            return {"requests": len(ran), "refused": int(self.is_refused.sum()), "ended": 0}
        gaps, later = np.concatenate(self.gaps) / 1e6, self.later()[0]
        seconds = float((self.end.max() - self.arrival[ran].min()) / 1e9)
        everyone = np.ones(len(ran), np.bool_)
        urgent = self.priority == 0

        def of(members: NDArray[np.bool_]) -> dict[str, Any]:
            return self._of(members, gaps if members is everyone else gaps[members[later]], seconds, targets)

        figures = of(everyone) | {
            "seconds": seconds,
            "requests_per_s": float(ran.sum() / seconds),
            "total_tokens_per_s": float((self.output_tokens + self.prompt_tokens)[ran].sum() / seconds),
            "wait_ms": spread((self.started - self.arrival)[ran] / 1e6),
            "urgent_ttft_ms": spread(self._ttft_ms(ran & urgent)),
            "other_ttft_ms": spread(self._ttft_ms(ran & ~urgent)),
        }
        if self.is_background.any() and not self.is_background.all():
            figures["classes"] = {"interactive": of(~self.is_background), "background": of(self.is_background)}
        if len(self.tenants) > 1:
            figures["tenants"] = {name: of(self.tenant == code) for code, name in enumerate(self.tenants)}
        return figures

    def _of(
        self, members: NDArray[np.bool_], gaps: NDArray[np.float64], seconds: float, targets: Targets
    ) -> dict[str, Any]:
        ran = self.ran & members
        late = self.is_background[ran]
        ttft, tpot, count = self._ttft_ms(ran), self._tpot_ms(ran), max(1, int(ran.sum()))
        ttft_target, tpot_target = (
            np.where(late, background, interactive)
            for background, interactive in zip(targets["background"], targets["interactive"], strict=True)
        )
        good = (ttft <= ttft_target) & ~(tpot > tpot_target)
        output = int(self.output_tokens[ran].sum())
        return {
            "requests": int(members.sum()),
            "refused": int(self.is_refused[members].sum()),
            "ended": int(ran.sum()),
            "prompt_tokens": int(self.prompt_tokens[ran].sum()),
            "output_tokens": output,
            "output_tokens_per_s": output / seconds,
            "hit_rate": int(self.cached[ran].sum()) / max(1, int(self.prompt_tokens[ran].sum())),
            "ttft_ms": spread(ttft),
            "tpot_ms": spread(tpot[~np.isnan(tpot)]),
            "gap_ms": spread(gaps),
            "good_share": float(good.sum() / count),
            "goodput_per_s": float(good.sum() / seconds),
        }

    def _ttft_ms(self, ran: NDArray[np.bool_]) -> NDArray[np.float64]:
        return (self.first - self.arrival)[ran] / 1e6

    def _tpot_ms(self, ran: NDArray[np.bool_]) -> NDArray[np.float64]:
        gaps = (self.output_tokens[ran] - 1).astype(np.float64)
        gaps[gaps == 0] = np.nan
        return (self.end - self.first)[ran] / 1e6 / gaps

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
