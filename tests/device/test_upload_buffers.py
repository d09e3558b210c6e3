"""What the host prepares of a step: the packed buffer's views and the way to sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from device_harness import Prefill, Rig, Row

from asyncengine.config import MAX_BIAS_IDS
from gpu_runner.device.buffers import Packer, pack
from gpu_runner.device.sampling_path import SamplingPath, SamplingPaths
from gpu_runner.device.upload_views import UploadViews
from gpu_runner.kernels.upload_layout import upload_words
from gpu_runner.schedule.plan import StepPlan

GREEDY = SamplingPath(greedy=True, filtered=False, bans_stop_ids=False)


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
        return self.last._replace(row_start=np.full_like(self.last.row_start, position))


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


def test_penalties_biases_and_log_probabilities_take_the_full_path_only_while_their_rows_sample() -> None:
    plans, paths = Plans(), SamplingPaths(8)
    asking = {
        1: Row(presence_penalty=0.5),
        2: Row(frequency_penalty=-0.5),
        3: Row(repetition_penalty=1.1),
        4: Row(logit_bias={5: 1.0}),
        5: Row(logprobs=0),
        6: Row(),
    }
    path = paths.choose(plans.prefill(asking))
    assert (path.full, path.adjusts, path.logprobs) == (True, True, True)
    for slot in asking:
        path = paths.choose(plans.decode([6, slot], 3))
        assert (path.adjusts, path.logprobs) == (slot < 5, slot == 5)
        assert (paths.logprob_rows is None) == (slot != 5)
    chunk = plans.decode([5, 6], 4)._replace(row_samples=np.array([False, True]))
    assert paths.choose(chunk) == GREEDY
    assert paths.choose(plans.decode([6, 5], 3)).full
    assert paths.logprob_rows is not None
    assert paths.logprob_rows.tolist() == [1]
    paths.choose(plans.prefill({slot: Row() for slot in asking}))
    assert paths.choose(plans.decode([1, 2, 3, 4, 5, 6], 3)) == GREEDY


def test_biases_find_their_cells_whichever_rows_have_some() -> None:
    plans, num_slots = Plans(), 8
    rows = {6: Row(logit_bias={5: 1.0, 9: -2.0}), 1: Row(), 3: Row(logit_bias={0: 0.5})}
    plan = plans.prefill(rows)
    buffer = np.full(upload_words(num_slots=num_slots, pages_per_seq=1, max_step_tokens=6), -7, np.int32)
    packed = pack(plan, GREEDY, buffer=buffer)
    tensor = torch.from_numpy(buffer)
    views = UploadViews(packed, tensor, tensor)
    assert views.bias_cell.tolist() == [6 * MAX_BIAS_IDS, 6 * MAX_BIAS_IDS + 1, 3 * MAX_BIAS_IDS]
    assert views.bias_id.tolist() == [5, 9, 0]
    assert views.bias_value.tolist() == [1.0, -2.0, 0.5]
    assert views.start("num_bias").tolist() == [2, 0, 1]


def test_the_largest_plan_fits_the_upload_buffer() -> None:
    plans, num_slots, pages_per_seq = Plans(), 4, 3
    row = Row(logit_bias=dict.fromkeys(range(MAX_BIAS_IDS), 0.5), stop_ids=(1, 2))
    plan = plans.rig.plan(
        prefill=[Prefill(slot, 0, [5] * 48) for slot in range(num_slots)],
        start=dict.fromkeys(range(num_slots), row),
        pages=[(slot, index, 1) for slot in range(num_slots) for index in range(pages_per_seq)],
    )
    words = upload_words(num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=48 * num_slots)
    packed = pack(plan, GREEDY, buffer=np.empty(words, np.int32))
    assert packed.words <= words


def test_other_rows_get_an_answer_of_their_own() -> None:
    plans, paths = Plans(), SamplingPaths(8)
    paths.choose(plans.prefill({1: Row(), 2: Row(temperature=1.0, top_p=0.5)}))
    assert paths.choose(plans.decode([1], 2)) == GREEDY
    assert paths.choose(plans.decode([1, 2], 3)) == SamplingPath(greedy=False, filtered=True, bans_stop_ids=False)
    assert paths.choose(plans.decode([1], 4)) == GREEDY


def test_a_plan_of_the_same_rows_lies_in_the_buffer_as_if_it_were_packed_anew() -> None:
    plans = Plans()
    words = upload_words(num_slots=8, pages_per_seq=16, max_step_tokens=512)
    reused = np.full(words, -7, np.int32)
    packer = Packer(reused, 2)

    def check(plan: StepPlan, path: SamplingPath = GREEDY) -> None:
        fresh = np.full(words, -7, np.int32)
        packed = packer.pack(plan, path, 40)
        expected = pack(plan, path, buffer=fresh, turn=2, result_words=40)
        assert packed.words == expected.words
        assert packed.path is path
        assert packed.plan is plan
        assert packed[:-1] == expected[:-1]
        views, wanted = (UploadViews(expected, torch.from_numpy(b), torch.from_numpy(b)) for b in (reused, fresh))
        assert reused[:40].tolist() == fresh[:40].tolist()
        for name in (
            "row_slot",
            "row_len",
            "prefill_tokens",
            "sample_row",
            "sample_token",
            "page_slot",
            "page_index",
            "page_id",
        ):
            assert getattr(views, name).tolist() == getattr(wanted, name).tolist(), name
        assert views.row_start.tolist()[plan.num_decode_rows :] == plan.row_start.tolist()[plan.num_decode_rows :]

    def with_pages(plan: StepPlan, *ids: int) -> StepPlan:
        writes = np.array(ids, np.int32)
        return plan._replace(page_slot=writes % 8, page_index=writes % 16, page_id=writes)

    check(plans.prefill({1: Row(), 5: Row()}))
    check(plans.decode([1, 5, 6], 20))
    check(with_pages(plans.decode_again(21), 9, 10, 11))
    check(plans.decode_again(22))
    check(plans.decode_again(23))
    check(with_pages(plans.decode_again(24), 33, 44))
    check(with_pages(plans.decode_again(25), 55))
    check(plans.decode_again(26), replace(GREEDY, greedy=False))
    check(plans.decode_again(27)._replace(row_samples=np.array([True, False, True])), replace(GREEDY, greedy=False))
    check(plans.decode([1, 6], 28))
    check(plans.prefill({7: Row(logit_bias={3: 1.0})}))
    check(plans.decode_again(29))
