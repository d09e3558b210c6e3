"""The kernel that starts a step, against plans worked out by hand; `test_post_update` runs whole sequences."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from step_plans import DEVICE, STATE_TENSORS, int32, poisoned_state, start_rows, uploaded
from torch import Tensor

from asyncengine.config import MAX_BIAS_IDS, MAX_STOP_IDS, PAGE_SIZE
from gpu_runner.device.upload_views import START_SECTIONS
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.host_ring import HostRing
from gpu_runner.kernels.step_meta import FETCH_BLOCK, StepMeta, new_step_meta, step_meta
from gpu_runner.kernels.upload_layout import HEADER_WORDS, USED_WORDS_WORD, offset_word
from gpu_runner.kernels.work_list import RangeCut, WorkList, allocate_work_list, build_work_list
from gpu_runner.schedule.plan import StepPlan

PAGES_PER_SEQ = 5
NUM_SLOTS = 9
VOCAB = 50


def empty_plan(**changes: object) -> StepPlan:
    none = int32()
    plan = StepPlan(
        step=1,
        bucket=0,
        num_decode_rows=0,
        row_slot=none,
        row_gen=none,
        row_start=none,
        row_len=none,
        row_samples=np.zeros(0, dtype=np.bool_),
        prefill_tokens=none,
        page_slot=none,
        page_index=none,
        page_id=none,
        start=start_rows(np.random.default_rng(0), [], [], VOCAB),
    )
    return plan._replace(**changes)  # type: ignore[arg-type]


def run(
    plan: StepPlan, state: DeviceState, *, bucket: int, max_rows: int = 6, max_tokens: int | None = None
) -> dict[str, list[int]]:
    """What the kernel fills, over poisoned buffers."""
    meta = new_step_meta(max_rows=max_rows, max_tokens=max_tokens or bucket, device=DEVICE)
    poison(meta)
    page_tokens = torch.full((100, PAGE_SIZE), -7, dtype=torch.int32, device=DEVICE)
    upload = uploaded(plan, num_slots=NUM_SLOTS, pages_per_seq=PAGES_PER_SEQ)
    step_meta(upload, state, meta, page_tokens, num_tokens=bucket)
    written = meta.kv_index[: plan.num_tokens].long()
    expected = torch.full_like(page_tokens, -7).view(-1)
    expected[written] = meta.token_ids[: plan.num_tokens]
    assert torch.equal(page_tokens.view(-1)[PAGE_SIZE:], expected[PAGE_SIZE:])
    return {item.name: getattr(meta, item.name).tolist() for item in fields(StepMeta) if item.name != "begin_time"}


def poison(meta: StepMeta) -> None:
    for item in fields(StepMeta):
        getattr(meta, item.name).fill_(-7)


def snapshot(state: DeviceState) -> dict[str, Tensor]:
    return {name: getattr(state, name).clone() for name in STATE_TENSORS}


def test_decode_rows_take_tokens_and_positions_from_the_device_and_padding_is_neutral() -> None:
    state = poisoned_state(NUM_SLOTS, PAGES_PER_SEQ)
    state.done[:] = False
    state.page_table[:] = torch.arange(NUM_SLOTS * PAGES_PER_SEQ, device=DEVICE).view(NUM_SLOTS, -1) + 1
    for slot, length, token in ((4, 15, 40), (0, 16, 41), (8, 79, 42)):
        state.kv_len[slot], state.last_token[slot] = length, token
    before = snapshot(state)
    plan = empty_plan(
        num_decode_rows=3,
        row_slot=int32(4, 0, 8),
        row_start=int32(99, 99, 99),  # the device knows better
        row_len=int32(1, 1, 1),
        row_samples=np.array([True, True, True]),
    )
    assert run(plan, state, bucket=5, max_tokens=7) == {
        "counts": [3, 3, 3, 3],
        "row_slot": [4, 0, 8, 0, 0, 0],
        "row_start": [15, 16, 79, 0, 0, 0],
        "row_len": [1, 1, 1, 0, 0, 0],
        "row_token": [0, 1, 2, 3, 3, 3],
        "row_was_done": [0, 0, 0, 0, 0, 0],
        "token_ids": [40, 41, 42, 0, 0, -7, -7],
        "positions": [15, 16, 79, 0, 0, -7, -7],
        "kv_index": [21 * 16 + 15, 2 * 16, 45 * 16 + 15, 0, 0, -7, -7],
        "sample_row": [0, 1, 2, -1, -1, -1],
        "sample_token": [0, 1, 2, 0, 0, 0],
    }
    assert all(torch.equal(getattr(state, name), before[name]) for name in STATE_TENSORS)


def test_an_overshoot_row_writes_to_the_dummy_page_even_behind_its_last_page() -> None:
    state = poisoned_state(NUM_SLOTS, PAGES_PER_SEQ)
    state.done[3] = False
    state.kv_len[2] = PAGES_PER_SEQ * PAGE_SIZE  # one past what its pages hold
    plan = empty_plan(
        num_decode_rows=2,
        row_slot=int32(2, 3),
        row_start=int32(0, 0),
        row_len=int32(1, 1),
        row_samples=np.ones(2, bool),
    )
    meta = run(plan, state, bucket=2)
    assert meta["row_was_done"][:2] == [1, 0]
    assert meta["positions"] == [80, 7]
    assert meta["kv_index"] == [0, 7 * PAGE_SIZE + 7]
    assert state.done.tolist() == [slot != 3 for slot in range(NUM_SLOTS)]


def test_prefill_rows_start_resume_and_use_pages_written_in_the_same_step() -> None:
    state = poisoned_state(NUM_SLOTS, PAGES_PER_SEQ)
    state.done[1] = False
    state.kv_len[1], state.page_table[1, 0], state.last_token[1] = 3, 90, 33
    before = snapshot(state)
    start = start_rows(np.random.default_rng(1), [6, 5], [60, 61], VOCAB)
    plan = empty_plan(
        num_decode_rows=1,
        row_slot=int32(1, 6, 5, 0),
        row_start=int32(0, 0, 32, 14),
        row_len=int32(1, 17, 2, 3),
        row_samples=np.array([True, False, True, True]),
        prefill_tokens=np.arange(100, 122, dtype=np.int32),
        page_slot=int32(6, 5, 6, 0),
        page_index=int32(0, 2, 1, 0),
        page_id=int32(11, 12, 13, 14),
        start=start,
    )
    assert run(plan, state, bucket=24) == {
        "counts": [1, 4, 23, 3],
        "row_slot": [1, 6, 5, 0, 0, 0],
        "row_start": [3, 0, 32, 14, 0, 0],
        "row_len": [1, 17, 2, 3, 0, 0],
        "row_token": [0, 1, 18, 20, 23, 23],
        # Slot 0 had ended and does not start here, though no scheduler would plan that.
        "row_was_done": [0, 0, 0, 1, 0, 0],
        "token_ids": [33, *range(100, 122), 0],
        "positions": [3, *range(17), 32, 33, 14, 15, 16, 0],
        "kv_index": [90 * 16 + 3, *range(176, 192), 13 * 16, 12 * 16, 12 * 16 + 1, 14, 15, 0, 0],
        "sample_row": [0, 2, 3, -1, -1, -1],
        "sample_token": [0, 19, 22, 0, 0, 0],
    }
    expected = before
    for slot, page_index, page in ((6, 0, 11), (5, 2, 12), (6, 1, 13), (0, 0, 14)):
        expected["page_table"][slot, page_index] = page
    expected["kv_len"][[6, 5, 0]] = torch.tensor([0, 32, 14], dtype=torch.int32, device=DEVICE)
    expected["done"][[6, 5]] = False
    for name in START_SECTIONS:
        expected[name][[6, 5]] = torch.from_numpy(getattr(start, name)).to(DEVICE)
    first, second = start.num_bias
    assert min(first, second) > 0
    for name in ("bias_ids", "bias_values"):
        values = torch.from_numpy(getattr(start, name)).to(DEVICE)
        expected[name][6, :first], expected[name][5, :second] = values[:first], values[first:]
    assert {name: getattr(state, name).tolist() for name in STATE_TENSORS} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }


@pytest.mark.parametrize("num_decode_rows", [0, 300])
def test_more_rows_tokens_starts_and_pages_than_one_program_takes(num_decode_rows: int) -> None:
    num_slots, num_prefill, pages_per_seq = 620, 310, 3
    generator = np.random.default_rng(2)
    lengths = generator.integers(1, 4, num_prefill).astype(np.int32)
    slots = generator.permutation(num_slots).astype(np.int32)[: num_decode_rows + num_prefill]
    begins = generator.integers(0, 40, len(slots)).astype(np.int32)
    prefill_slots = slots[num_decode_rows:]
    state = poisoned_state(num_slots, pages_per_seq)
    state.kv_len[:] = torch.arange(num_slots, device=DEVICE) % 40
    cells = generator.permutation(num_slots * pages_per_seq).astype(np.int32)[:700]
    plan = empty_plan(
        num_decode_rows=num_decode_rows,
        row_slot=slots,
        row_start=begins,
        row_len=np.concatenate((np.ones(num_decode_rows, np.int32), lengths)),
        row_samples=np.ones(len(slots), np.bool_),
        prefill_tokens=np.arange(lengths.sum(), dtype=np.int32),
        page_slot=cells // pages_per_seq,
        page_index=cells % pages_per_seq,
        page_id=np.arange(1000, 1700, dtype=np.int32),
        start=start_rows(generator, prefill_slots.tolist(), [50] * num_prefill, VOCAB),
    )
    bucket = plan.num_tokens + 5
    meta = new_step_meta(max_rows=num_slots, max_tokens=bucket, device=DEVICE)
    poison(meta)
    page_tokens = torch.full((1700, PAGE_SIZE), -7, dtype=torch.int32, device=DEVICE)
    upload = uploaded(plan, num_slots=num_slots, pages_per_seq=pages_per_seq)
    step_meta(upload, state, meta, page_tokens, num_tokens=bucket)

    table = np.full(num_slots * pages_per_seq, 7, dtype=np.int32)
    table[cells] = plan.page_id
    assert state.page_table.flatten().tolist() == table.tolist()
    assert torch.equal(state.stop_ids[prefill_slots], torch.from_numpy(plan.start.stop_ids).to(DEVICE))
    assert torch.equal(state.seed[prefill_slots], torch.from_numpy(plan.start.seed).to(DEVICE))
    assert torch.equal(state.num_bias[prefill_slots], torch.from_numpy(plan.start.num_bias).to(DEVICE))
    biased = torch.arange(MAX_BIAS_IDS) < torch.from_numpy(plan.start.num_bias)[:, None]
    for name in ("bias_ids", "bias_values"):
        expected_values = torch.full((num_prefill, MAX_BIAS_IDS), 7).to(getattr(state, name).dtype)
        expected_values[biased] = torch.from_numpy(getattr(plan.start, name))
        assert torch.equal(getattr(state, name)[prefill_slots].cpu(), expected_values)
    begins[:num_decode_rows] = slots[:num_decode_rows] % 40
    token_row = np.repeat(np.arange(len(slots)), plan.row_len)
    first_token = np.cumsum(plan.row_len) - plan.row_len
    position = begins[token_row] + np.arange(plan.num_tokens) - first_token[token_row]
    page = table.reshape(num_slots, -1)[slots[token_row], np.minimum(position // PAGE_SIZE, pages_per_seq - 1)]
    page[token_row < num_decode_rows] = 0  # all had ended
    used, rows = plan.num_tokens, len(slots)
    assert meta.counts.tolist() == [num_decode_rows, rows, used, rows]
    assert meta.row_token.tolist() == [*first_token, *[used] * (num_slots - rows)]
    assert meta.row_start.tolist() == [*begins, *[0] * (num_slots - rows)]
    assert meta.positions.tolist() == [*position, 0, 0, 0, 0, 0]
    assert meta.kv_index.tolist() == [*(page * PAGE_SIZE + position % PAGE_SIZE), 0, 0, 0, 0, 0]
    decoded = [7] * num_decode_rows  # the poisoned state's last token
    assert meta.token_ids.tolist() == [*decoded, *range(len(plan.prefill_tokens)), 0, 0, 0, 0, 0]
    assert meta.sample_token.tolist()[:rows] == (first_token + plan.row_len - 1).tolist()


def random_plan(*, num_decode_rows: int, num_prefill: int, num_slots: int, pages_per_seq: int) -> StepPlan:
    generator = np.random.default_rng(num_decode_rows)
    slots = generator.permutation(num_slots).astype(np.int32)[: num_decode_rows + num_prefill]
    lengths = generator.integers(1, 40, num_prefill).astype(np.int32)
    cells = np.arange(num_slots * pages_per_seq, dtype=np.int32)
    return empty_plan(
        num_decode_rows=num_decode_rows,
        row_slot=slots,
        row_start=generator.integers(0, 40, len(slots)).astype(np.int32),
        row_len=np.concatenate((np.ones(num_decode_rows, np.int32), lengths)),
        row_samples=np.ones(len(slots), np.bool_),
        prefill_tokens=np.arange(lengths.sum(), dtype=np.int32),
        page_slot=cells // pages_per_seq,
        page_index=cells % pages_per_seq,
        page_id=cells + 1,
    )


@pytest.mark.parametrize(("num_decode_rows", "num_prefill"), [(3, 0), (290, 0), (0, 4), (280, 5)])
def test_work_is_listed_beside_as_it_is_by_a_launch_of_its_own(num_decode_rows: int, num_prefill: int) -> None:
    num_slots, pages_per_seq = 300, 4
    plan = random_plan(
        num_decode_rows=num_decode_rows, num_prefill=num_prefill, num_slots=num_slots, pages_per_seq=pages_per_seq
    )
    state = poisoned_state(num_slots, pages_per_seq)
    state.kv_len[:] = torch.arange(num_slots, device=DEVICE) * 7 % 64
    bucket, prefill = plan.num_tokens, num_prefill > 0
    meta = new_step_meta(max_rows=num_slots, max_tokens=bucket, device=DEVICE)
    page_tokens = torch.zeros(num_slots * pages_per_seq + 1, PAGE_SIZE, dtype=torch.int32, device=DEVICE)
    beside, alone = (
        allocate_work_list(
            max_rows=num_slots, max_tokens=max(bucket, num_slots), num_heads=4, num_kv_heads=2, head_dim=16,
            window=None, device=DEVICE, cut=RangeCut(programs=8, split_step=16), tile_rows=16,
        ).recut(RangeCut(programs=6, split_step=32))
        for _ in range(2)
    )  # fmt: skip
    poison(meta)
    upload = uploaded(plan, num_slots=num_slots, pages_per_seq=pages_per_seq)
    step_meta(upload, state, meta, page_tokens, num_tokens=bucket, work=beside, prefill=prefill)
    rows = (meta.counts, meta.row_slot, meta.row_start, meta.row_len, meta.row_token)
    counts, row_slot, row_start, row_len, row_token = (tensor.clone() for tensor in rows)
    build_work_list(
        alone, counts=counts, row_slot=row_slot, row_start=row_start, row_len=row_len, row_token=row_token,
        page_table=state.page_table, prefill=prefill,
    )  # fmt: skip
    assert alone.lengths.sum() > 0
    assert meta.row_len.tolist() == [*plan.row_len, *[0] * (num_slots - plan.num_rows)]
    for name in ("lengths", "items", "tiles"):
        assert torch.equal(getattr(beside, name), getattr(alone, name)), name


def list_for(num_slots: int) -> WorkList:
    return allocate_work_list(
        max_rows=num_slots, max_tokens=num_slots, num_heads=2, num_kv_heads=1, head_dim=16, window=None, device=DEVICE
    )


@pytest.mark.parametrize(("num_slots", "pages_per_seq", "num_tokens"), [(5, 1, 4), (5, 9, 4), (300, 9, 300)])
def test_a_plan_is_fetched_from_the_turns_host_buffer_however_long_it_is(
    num_slots: int, pages_per_seq: int, num_tokens: int
) -> None:
    plan = random_plan(num_decode_rows=num_tokens, num_prefill=0, num_slots=num_slots, pages_per_seq=pages_per_seq)
    plan_words = uploaded(plan, num_slots=num_slots, pages_per_seq=pages_per_seq).cpu()
    used = int(plan_words[USED_WORDS_WORD])
    assert (used > FETCH_BLOCK) == (num_slots == 300)
    assert (used > HEADER_WORDS + 8 * num_tokens + 16) == (pages_per_seq == 9)
    hosts = [torch.full_like(plan_words, -9, pin_memory=DEVICE.type == "cuda") for _ in range(3)]
    hosts[1].copy_(plan_words)
    ring = HostRing.allocate(3, DEVICE)
    ring.connect([(host, torch.zeros(1, dtype=torch.int32)) for host in hosts])
    ring.next_upload.copy_(ring.uploads[1:2])
    page_tokens = torch.zeros(num_slots * pages_per_seq + 1, PAGE_SIZE, dtype=torch.int32, device=DEVICE)
    found = []
    for fetches in (True, False):
        state = poisoned_state(num_slots, pages_per_seq)
        state.done[:] = False
        upload = torch.full_like(plan_words, -5) if fetches else plan_words
        upload = upload.to(DEVICE)
        meta = new_step_meta(max_rows=num_slots, max_tokens=num_tokens, device=DEVICE)
        poison(meta)
        step_meta(
            upload, state, meta, page_tokens, num_tokens=num_tokens, ring=ring if fetches else None,
            work=list_for(num_slots), prefill=False,
        )  # fmt: skip
        assert torch.equal(upload[:used].cpu(), plan_words[:used])
        laid_out = {item.name: getattr(meta, item.name).tolist() for item in fields(StepMeta)[1:]}
        found.append((laid_out, state.page_table.tolist()))
    assert found[0] == found[1]
    assert found[0][0]["counts"] == [num_tokens] * 4


def test_a_plan_of_nothing_leaves_the_state_and_marks_everything_as_padding() -> None:
    state = poisoned_state(NUM_SLOTS, PAGES_PER_SEQ)
    before = snapshot(state)
    meta = run(empty_plan(), state, bucket=2, max_rows=2)
    assert meta["counts"] == [0, 0, 0, 0]
    assert meta["row_len"] == meta["token_ids"] == meta["kv_index"] == meta["row_token"] == [0, 0]
    assert meta["sample_row"] == [-1, -1]
    assert all(torch.equal(getattr(state, name), before[name]) for name in STATE_TENSORS)


def test_sections_are_packed_behind_the_header_at_even_words() -> None:
    start = start_rows(np.random.default_rng(3), [2, 1, 0], [9, 9, 9], VOCAB)
    plan = empty_plan(
        row_slot=int32(2, 1, 0),
        row_start=int32(0, 0, 0),
        row_len=int32(1, 1, 1),
        row_samples=np.array([False, True, False]),
        prefill_tokens=int32(5, 6, 7),
        start=start,
    )
    buffer = uploaded(plan, num_slots=NUM_SLOTS, pages_per_seq=PAGES_PER_SEQ).cpu().numpy()
    assert buffer[:7].tolist() == [3, 0, 3, 1, 3, 0, len(start.bias_ids)]
    assert (buffer[8:34] % 2 == 0).all()
    assert buffer[8] == HEADER_WORDS
    seed, stop_ids = buffer[offset_word("seed")], buffer[offset_word("stop_ids")]
    assert buffer[seed : seed + 6].view(np.int64).tolist() == start.seed.tolist()
    assert buffer[stop_ids : stop_ids + 3 * MAX_STOP_IDS].reshape(3, -1).tolist() == start.stop_ids.tolist()
    bias_cell, bias_value = buffer[offset_word("bias_cell")], buffer[offset_word("bias_value")]
    count = len(start.bias_ids)
    slots = np.repeat(start.slot, start.num_bias)
    assert (buffer[bias_cell : bias_cell + count] // MAX_BIAS_IDS).tolist() == slots.tolist()
    assert buffer[bias_value : bias_value + count].view(np.float32).tolist() == start.bias_values.tolist()
    assert (buffer[bias_value + count :] == -7).all()
