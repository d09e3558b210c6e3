"""Rows are spread evenly over detokenizers, which have the slots that are congruent to their number."""

from __future__ import annotations

import numpy as np
import pytest

from asyncengine.sampling import SamplingParams
from gpu_runner.schedule.request import Request
from gpu_runner.schedule.slots import Slots

DETOKENIZERS = 4
MOST = 1.25
"""The busiest detokenizer's tokens over the mean."""


def request(rid: int) -> Request:
    return Request(
        rid=rid, tokens=np.zeros(1, np.int32), prompt_len=1, params=SamplingParams(), seed=0, limit=2,
        detok=b"", namespace="", arrival=rid,
    )  # fmt: skip


@pytest.mark.parametrize(("load", "turnover"), [((512,), 500), ((512, 64), 2000), ((512, 16, 128), 2000)])
def test_the_busiest_detokenizer_has_little_more_than_the_mean_whatever_the_load_was_before(
    load: tuple[int, ...], turnover: int
) -> None:
    """One load after the other; answers of very different lengths, so that any row may be the next that ends."""
    slots = Slots(512, 4)
    rng = np.random.default_rng(5)
    left: dict[int, int] = {}
    tokens = np.zeros(DETOKENIZERS, np.int64)
    rids = iter(range(1 << 30))
    for streams in load:
        ended = 0
        while ended < turnover:
            while len(left) < streams:
                left[slots.take(request(next(rids)))] = int(rng.integers(1, 200))
            if ended >= turnover // 2 and streams == load[-1]:
                tokens += np.bincount(np.fromiter(left, np.int64) % DETOKENIZERS, minlength=DETOKENIZERS)
            for slot in list(left):
                left[slot] -= 1
                if not left[slot]:
                    del left[slot]
                    slots.release(slot)
                    ended += 1
    assert tokens.min() > 0
    assert tokens.max() < MOST * tokens.mean()
