"""What the host prepares of a step: the packed buffer's views and the way to sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_harness import Prefill, Rig, Row

from gpu_runner.device.buffers import Prefixes
from gpu_runner.device.sampling_path import SamplingPath, SamplingPaths
from gpu_runner.schedule.plan import StepPlan

GREEDY = SamplingPath(greedy=True, filtered=False, bans_stop_ids=False)


@pytest.mark.parametrize("size", [1, 2, 33, 64, 100])
def test_a_prefix_holds_the_words_asked_for_and_at_most_twice_as_many(size: int) -> None:
    buffer = torch.arange(size)
    prefixes = Prefixes(buffer)
    for words in range(1, size + 1):
        prefix = prefixes.holding(words)
        assert words <= len(prefix) <= min(2 * words, size)
        assert prefix.data_ptr() == buffer.data_ptr()
        assert prefix is prefixes.holding(words), "it is made once"


class Plans:
    """Prefill plans that start slots, then decode plans over the same row arrays."""

    def __init__(self) -> None:
        self.rig = Rig(executor=None, kv_cache=torch.empty(0), decoder=None, device=torch.device("cpu"))  # type: ignore[arg-type]
        self.last: StepPlan | None = None

    def prefill(self, rows: dict[int, Row]) -> StepPlan:
        return self.rig.plan(prefill=[Prefill(slot, 0, [5, 6]) for slot in rows], start=rows)

    def decode(self, slots: Sequence[int], position: int) -> StepPlan:
        self.last = self.rig.plan(decode=[(slot, position) for slot in slots])
        return self.last

    def decode_again(self, position: int) -> StepPlan:
        assert self.last is not None
        return replace(self.last, row_start=np.full_like(self.last.row_start, position))


def test_rows_that_stay_below_min_tokens_ban_stop_ids_until_they_have_them() -> None:
    plans, paths = Plans(), SamplingPaths(8)
    assert paths.choose(plans.prefill({1: Row(min_tokens_until=5)})).bans_stop_ids
    decisions = [paths.choose(plans.decode([1], 2)), *(paths.choose(plans.decode_again(at)) for at in (3, 4, 5))]
    assert [path.bans_stop_ids for path in decisions] == [True, True, False, False]


def test_the_same_rows_get_the_same_answer_without_a_look_at_them() -> None:
    plans, paths = Plans(), SamplingPaths(8)
    paths.choose(plans.prefill({1: Row(temperature=1.0), 2: Row()}))
    first = paths.choose(plans.decode([1, 2], 2))
    assert first == SamplingPath(greedy=False, filtered=False, bans_stop_ids=False)
    assert paths.choose(plans.decode_again(3)) is first


def test_the_same_slots_with_new_parameters_get_a_new_answer() -> None:
    plans, paths = Plans(), SamplingPaths(8)
    paths.choose(plans.prefill({1: Row()}))
    assert paths.choose(plans.decode([1], 2)) == GREEDY
    paths.choose(plans.prefill({1: Row(temperature=0.5, top_k=3)}))
    assert paths.choose(plans.decode_again(2)) == SamplingPath(greedy=False, filtered=True, bans_stop_ids=False)


def test_other_rows_get_an_answer_of_their_own() -> None:
    plans, paths = Plans(), SamplingPaths(8)
    paths.choose(plans.prefill({1: Row(), 2: Row(temperature=1.0, top_p=0.5)}))
    assert paths.choose(plans.decode([1], 2)) == GREEDY
    assert paths.choose(plans.decode([1, 2], 3)) == SamplingPath(greedy=False, filtered=True, bans_stop_ids=False)
    assert paths.choose(plans.decode([1], 4)) == GREEDY
