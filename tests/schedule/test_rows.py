"""Rows and their memory, without plans."""

from __future__ import annotations

import numpy as np

from asyncengine.sampling import SamplingParams
from gpu_runner.schedule.host_tier import recompute_ns
from gpu_runner.schedule.request import Request
from gpu_runner.schedule.rows import Rows


def request_of(rid: int, prompt: np.ndarray) -> Request:
    return Request(
        rid=rid,
        tokens=prompt,
        prompt_len=len(prompt),
        params=SamplingParams(),
        seed=0,
        limit=len(prompt) + 1,
        detok=b"",
        namespace="",
        arrival=rid,
    )


def test_a_row_does_not_hold_another_rows_pages_for_tokens_that_it_has_computed_itself() -> None:
    rows = Rows(
        num_slots=4,
        max_model_len=128,
        num_pages=21,
        caching=True,
        session_pin_share=0.25,
        clock=lambda: 0,
        host_pages=0,
        page_load_ns=0,
        prefill_ns=recompute_ns,
    )
    first, second = (request_of(rid, np.arange(100, dtype=np.int32)) for rid in (1, 2))
    assert rows.start(first, watermark=0, alone=True)
    assert rows.start(second, watermark=0, alone=False)
    for request, computed in ((first, 64), (second, 80), (first, 96)):
        rows.slots.computed[request.slot] = computed
        rows.share(request.slot)
        rows.check_integrity()
    rows.end(first.slot)
    rows.check_integrity()
    assert rows.missing_pages(20 - 7) == 0  # all but the 7 of the second
    rows.end(second.slot)
    rows.check_integrity()
    assert rows.pool.num_free + rows.tree.num_evictable == 20
