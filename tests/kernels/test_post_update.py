"""The kernel that ends a step by hand-made cases, and both ends of a step against the torch step over long sequences of
random plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import pytest
import torch
from step_plans import DEVICE, STATE_TENSORS, PlanMaker, poisoned_state
from torch import Tensor

from asyncengine.config import MAX_STOP_IDS, PAGE_SIZE
from asyncengine.wire.base import Finish
from gpu_runner.device.buffers import RingSlot, pack
from gpu_runner.device.sampling_path import SamplingPaths
from gpu_runner.device.step import Step
from gpu_runner.device.stream import InlineStream
from gpu_runner.device.token_masks import TokenMasks
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.host_ring import HostRing
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.kernels.post_update import FINISH_LENGTH, FINISH_STOP, post_update, post_update_to_host
from gpu_runner.kernels.result_layout import Results, result_words, token_words
from gpu_runner.kernels.step_meta import StepMeta, new_step_meta, step_meta
from gpu_runner.kernels.upload_layout import HEADER_WORDS, TURN_WORD, upload_words


def device_int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def meta_of(
    *,
    row_slot: list[int],
    row_start: list[int],
    row_len: list[int],
    was_done: list[int],
    sample_row: list[int],
    size: int,
) -> StepMeta:
    """A meta whose rows and samples beyond the given ones are poisoned: the counts must keep them out."""
    meta = new_step_meta(max_rows=size, max_tokens=1, device=DEVICE)
    for item in fields(StepMeta):
        getattr(meta, item.name).fill_(-(2**20))
    meta.counts.copy_(device_int32(0, len(row_slot), sum(row_len), len(sample_row)))
    given = {"row_slot": row_slot, "row_start": row_start, "row_len": row_len, "row_was_done": was_done}
    for name, values in (given | {"sample_row": sample_row}).items():
        getattr(meta, name)[: len(values)] = device_int32(*values)
    return meta


def poisoned_results(num_slots: int) -> Tensor:
    return torch.full((result_words(num_slots),), -7, dtype=torch.int32, device=DEVICE)


def columns(results: Tensor) -> list[list[int]]:
    parts = Results.of(results)
    return [parts.tokens.tolist(), parts.finish.tolist()]


def running_state(num_slots: int) -> DeviceState:
    state = poisoned_state(num_slots, 1)
    state.done.fill_(False)
    state.limit.fill_(1000)
    state.stop_ids.fill_(-1)
    return state


def test_the_finish_values_are_those_of_the_wire() -> None:
    assert (FINISH_STOP, FINISH_LENGTH) == (Finish.STOP, Finish.LENGTH)


def test_rows_advance_finish_and_stay_as_they_should() -> None:
    state = running_state(7)
    state.stop_ids[2, MAX_STOP_IDS - 1] = 30  # the last of its ids
    state.stop_ids[3, 0], state.limit[3] = 31, 21  # at its limit too: STOP wins
    state.limit[4] = 21
    state.limit[5] = 22  # one token is left after this
    state.done[0] = True
    state.kv_len[:] = 5
    meta = meta_of(
        row_slot=[1, 2, 3, 4, 5, 0],
        row_start=[10, 19, 15, 19, 19, 5],
        row_len=[4, 1, 5, 1, 1, 1],
        was_done=[0, 0, 0, 0, 0, 1],
        sample_row=[1, 2, 3, 4, 5],  # row 0 is a chunk that is not the prompt's last
        size=8,
    )
    results = poisoned_results(8)
    post_update(device_int32(30, 31, 32, 33, 34, 35, 36), state, meta, results)
    assert columns(results) == [[-1, 30, 31, 32, 33, -1, -1, -1], [0, 1, 1, 2, 0, 0, 0, 0]]
    assert state.kv_len.tolist() == [5, 14, 20, 20, 20, 20, 5]
    assert state.last_token.tolist() == [7, 7, 30, 31, 32, 33, 7]
    assert state.done.tolist() == [True, False, True, True, True, False, False]


def test_a_step_in_which_no_row_samples_still_advances_its_rows() -> None:
    state = running_state(3)
    meta = meta_of(row_slot=[2], row_start=[32], row_len=[16], was_done=[0], sample_row=[], size=3)
    results = poisoned_results(3)
    post_update(device_int32(), state, meta, results)
    assert columns(results) == [[-1, -1, -1], [0, 0, 0]]
    assert state.kv_len.tolist() == [7, 7, 48]
    assert state.last_token.tolist() == [7, 7, 7]


def test_more_rows_and_samples_than_one_program_takes() -> None:
    rows, generator = 530, np.random.default_rng(4)
    slots = generator.permutation(rows).tolist()
    was_done = (generator.random(rows) < 0.2).astype(int).tolist()
    sampling = np.flatnonzero(generator.random(rows) < 0.6).tolist()
    state = running_state(rows)
    state.done[:] = torch.tensor(was_done, device=DEVICE)[torch.tensor(slots).argsort()] == 1
    begins = generator.integers(0, 900, rows).tolist()
    meta = meta_of(
        row_slot=slots, row_start=begins, row_len=[2] * rows, was_done=was_done, sample_row=sampling, size=rows
    )
    state.limit[:] = 500
    sampled = device_int32(*range(2000, 2000 + len(sampling)))
    results = poisoned_results(rows)
    post_update(sampled, state, meta, results)
    expected = {row: 2000 + index for index, row in enumerate(sampling) if not was_done[row]}
    finish = {row: 2 if begins[row] + 3 >= 500 else 0 for row in expected}
    assert columns(results) == [
        [expected.get(row, -1) for row in range(rows)],
        [finish.get(row, 0) for row in range(rows)],
    ]
    by_slot = {slot: row for row, slot in enumerate(slots)}
    ends = [7 if was_done[by_slot[slot]] else begins[by_slot[slot]] + 2 for slot in range(rows)]
    assert state.kv_len.tolist() == ends
    assert state.last_token.tolist() == [expected.get(by_slot[slot], 7) for slot in range(rows)]
    assert state.done.tolist() == [bool(was_done[by_slot[s]] or finish.get(by_slot[s], 0)) for s in range(rows)]


@pytest.mark.parametrize("connected", [True, False])
def test_results_go_to_the_turns_host_buffer_for_the_rows_that_there_are(connected: bool) -> None:
    num_slots, rows, turn = 80, 70, 1
    ring = HostRing.allocate(3, DEVICE)
    hosts = [
        torch.full((result_words(num_slots),), -7, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")
        for _ in range(3)
    ]
    plans = [torch.zeros(1, dtype=torch.int32) for _ in hosts]
    if connected:
        ring.connect(list(zip(plans, hosts, strict=True)))
    inputs = torch.zeros(HEADER_WORDS, dtype=torch.int32, device=DEVICE)
    inputs[TURN_WORD] = turn
    state = running_state(num_slots)
    state.stop_ids[9, 3] = 2009
    was_done = [int(row == 40) for row in range(rows)]
    every = list(range(rows))
    meta = meta_of(
        row_slot=every, row_start=every, row_len=[1] * rows, was_done=was_done, sample_row=every, size=num_slots
    )
    meta.begin_time.fill_(5)
    sampled = device_int32(*range(2000, 2000 + num_slots))
    post_update_to_host(sampled, state, meta, ring, inputs, num_slots=num_slots)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert state.kv_len.tolist() == [7 if row == 40 else row + 1 for row in range(rows)] + [7] * (num_slots - rows)
    tokens = [-1 if was_done[row] else 2000 + row for row in range(rows)]
    assert state.last_token.tolist() == [7 if row == 40 else tokens[row] for row in range(rows)] + [7] * 10
    assert state.done.nonzero().flatten().tolist() == [9]
    expected = torch.full((result_words(num_slots),), -7, dtype=torch.int32)
    if connected:
        parts = Results.of(hosts[turn])
        assert int(parts.times[0]) == 5
        expected[:4] = hosts[turn][:4]
        Results.of(expected).tokens[:rows] = torch.tensor(tokens)
        Results.of(expected).finish[:rows] = torch.tensor([int(row == 9) for row in range(rows)])
    assert torch.equal(hosts[turn], expected)
    assert all((hosts[other] == -7).all() for other in (0, 2))
    assert ring.next_upload.item() == (plans[2].data_ptr() if connected else 0)
    if connected:
        inputs[TURN_WORD] = 2
        sampled = sampled.clone()  # so that a launch stands between the turn's and the one that reads it early
        post_update_to_host(sampled, state, meta, ring, inputs, num_slots=num_slots)
        assert ring.next_upload.item() == plans[0].data_ptr()
        assert (hosts[2][token_words(num_slots) :] == -7).all()


def test_the_times_of_a_step_are_in_order_on_a_gpu_and_zero_under_the_interpreter() -> None:
    state, results = running_state(3), poisoned_results(3)
    meta = new_step_meta(max_rows=3, max_tokens=1, device=DEVICE)
    meta.begin_time.fill_(-7)
    nothing = torch.zeros(upload_words(num_slots=3, pages_per_seq=1, max_step_tokens=1), dtype=torch.int32)
    page_tokens = torch.zeros(1, PAGE_SIZE, dtype=torch.int32, device=DEVICE)
    step_meta(nothing.to(DEVICE), state, meta, page_tokens, num_tokens=1)
    post_update(device_int32(), state, meta, results)
    begin, end = Results.of(results).times.tolist()
    assert begin == int(meta.begin_time)
    if DEVICE.type == "cpu":
        assert begin == end == 0
    else:
        assert 0 < begin < end < begin + 10**10


class RecordingDecoder:
    """Knows no model: random logits, and what a step asked to compute."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.generator = torch.Generator().manual_seed(5)
        self.token_ids = torch.empty(0)
        self.meta: BatchMeta

    def forward(self, token_ids: Tensor, meta: BatchMeta, kv_cache: Tensor) -> Tensor:
        self.token_ids, self.meta = token_ids, meta
        return torch.zeros(len(token_ids), 1, device=DEVICE)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.randn(len(hidden), self.vocab, generator=self.generator).to(DEVICE)


def replayable(work: Callable[[], None]) -> Callable[[], object]:
    """`work` itself, or on a GPU a graph of it, so that only what lies in device memory may differ between calls."""
    if DEVICE.type == "cpu":
        return work
    work()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


@pytest.mark.parametrize(("seed", "num_slots", "most_starts"), [(0, 4, 3), (1, 11, 4), (2, 1, 1)])
def test_long_sequences_of_random_plans_leave_the_same_as_the_torch_step(
    seed: int, num_slots: int, most_starts: int
) -> None:
    pages_per_seq, vocab, max_step_tokens = 7, 13, 30 * num_slots
    words = upload_words(num_slots=num_slots, pages_per_seq=pages_per_seq, max_step_tokens=max_step_tokens)
    decoder, paths = RecordingDecoder(vocab), SamplingPaths(num_slots)
    expected, actual = (poisoned_state(num_slots, pages_per_seq) for _ in range(2))
    step = Step(
        decoder=decoder,
        kv_cache=torch.empty(0, 2, 1000, 0),
        state=expected,
        max_step_tokens=max_step_tokens,
        upload_words=words,
    )
    maker = PlanMaker(num_slots, pages_per_seq, vocab, np.random.default_rng(seed))
    meta = new_step_meta(max_rows=num_slots, max_tokens=max_step_tokens, device=DEVICE)
    host = RingSlot.allocate(upload_words=words, num_slots=num_slots, pinned=False, mark=InlineStream().mark())
    masks = TokenMasks(num_slots=num_slots, vocab=vocab, pinned=False)
    masks.array.fill(-1)
    step.connect([host], masks)
    upload = torch.zeros(words, dtype=torch.int32, device=DEVICE)  # a plan of nothing
    sampled = torch.zeros(num_slots, dtype=torch.int32, device=DEVICE)
    results = torch.zeros(result_words(num_slots), dtype=torch.int32, device=DEVICE)
    page_tokens = torch.zeros(1000, PAGE_SIZE, dtype=torch.int32, device=DEVICE)
    start_step = replayable(lambda: step_meta(upload, actual, meta, page_tokens, num_tokens=max_step_tokens))
    end_step = replayable(lambda: post_update(sampled, actual, meta, results))
    overshoots = stops = lengths = 0
    for _ in range(40):
        plan = maker.next_plan(set(expected.done.nonzero().flatten().tolist()), most_starts=most_starts)
        rows = plan.num_rows
        host.upload.fill_(-7)
        path = paths.choose(plan)
        packed = pack(
            plan,
            path,
            buffer=host.upload_array,
            result_words=host.wanted_words(path),
        )
        was_done = expected.done.clone()
        was_done[torch.from_numpy(plan.start.slot).long()] = False
        step.run(packed)

        for item in fields(StepMeta):
            getattr(meta, item.name).fill_(-7)
        upload.copy_(host.upload)
        start_step()
        slots = torch.from_numpy(plan.row_slot).long().to(DEVICE)
        unused = [0] * (max_step_tokens - plan.num_tokens)
        assert meta.token_ids.tolist() == [*decoder.token_ids.tolist(), *unused]
        assert meta.positions.tolist() == [*decoder.meta.positions.tolist(), *unused]
        assert meta.kv_index.tolist() == [*decoder.meta.kv_index.tolist(), *unused]
        assert meta.row_slot[:rows].tolist() == plan.row_slot.tolist()
        assert meta.row_was_done[:rows].tolist() == was_done[slots].int().tolist()
        alive = ~was_done[slots].cpu().numpy()
        assert (meta.row_start[:rows].cpu().numpy()[alive] == plan.row_start[alive]).all()

        host_results = host.results[: len(results)]
        expected_tokens = Results.of(host_results).tokens
        sample_row = torch.from_numpy(np.flatnonzero(plan.row_samples))
        sampled.fill_(3)
        chosen = torch.where(expected_tokens[sample_row] < 0, 5, expected_tokens[sample_row])
        sampled[: len(chosen)] = chosen.to(DEVICE)
        results.fill_(-7)
        end_step()
        assert columns(results) == columns(host_results)
        for name in STATE_TENSORS:
            assert torch.equal(getattr(actual, name), getattr(expected, name)), name
        overshoots += int(was_done[slots].sum())
        stops += int((Results.of(results).finish == Finish.STOP).sum())
        lengths += int((Results.of(results).finish == Finish.LENGTH).sum())
    assert min(overshoots, stops) > 0
    assert lengths > 0 or num_slots == 1
