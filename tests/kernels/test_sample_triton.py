"""The sampling kernels against the torch reference: the same tokens, for every parameter and any cut of the work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncengine.config import MAX_STOP_IDS
from gpu_runner.kernels import reference_sampling
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.reference_sampling import SamplingRows
from gpu_runner.kernels.sample import Sampler, Tiling
from gpu_runner.kernels.sample_noise import gumbel, noise_bits, noise_keys, uniform
from gpu_runner.kernels.step_meta import StepMeta, new_step_meta

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 1000
# Integers that wrap and floats that overflow to infinity are meant; only the interpreter warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SMALL = Tiling(block=128, num_warps=4, stages=2, programs=40)
"""1000 ids in tiles of 128 with a ragged last one."""
Setting = dict[str, Any]
SETTINGS: list[Setting] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-30},
    {"temperature": 5e-324},
    {"temperature": 1e-5},
    {"temperature": 1e-5, "top_k": 3, "top_p": 0.5},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 1},
    {"top_k": 1, "top_p": 0.8},
    {"top_k": 7},
    {"top_k": 999},
    {"top_k": VOCAB},
    {"top_k": 1_000_000},
    {"top_k": 2**31 - 1},
    {"top_p": 0.0},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.99999994},
    {"top_p": 1.0, "min_p": 0.0},
    {"min_p": 1.0},
    {"min_p": 0.05},
    {"min_p": 1e-30},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.1},
    {"top_k": 600, "top_p": 0.5, "temperature": 2.0},
    {"temperature": 2.0, "top_p": 0.99, "min_p": 0.001},
    {"temperature": 0.1, "top_k": 100},
    {"temperature": 0.02, "top_k": 500, "top_p": 0.9},
]


@dataclass(frozen=True)
class Step:
    """A step's samples in shuffled rows and slots, everything that is not theirs poisoned."""

    state: DeviceState
    meta: StepMeta
    rows: SamplingRows  # of the samples, in order
    slot: Tensor  # of the samples


def step_of(settings: list[Setting], *, padding: int = 0, shuffle: int = 0) -> Step:
    """Setting i is sample i's; its seed and position depend on its "key", i if not given."""
    count = len(settings)
    size = count + padding
    generator = torch.Generator().manual_seed(shuffle)
    row = torch.randperm(size, generator=generator)[:count]
    slot = torch.randperm(size + 3, generator=generator)[:count]
    keys = torch.tensor([setting.get("key", index) for index, setting in enumerate(settings)])

    def of(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([setting.get(name, default) for setting in settings], dtype=dtype)

    rows = SamplingRows(
        temperature=of("temperature", 1.0, torch.float32),
        top_k=of("top_k", 0, torch.int32),
        top_p=of("top_p", 1.0, torch.float32),
        min_p=of("min_p", 0.0, torch.float32),
        seed=keys * 2**45 - 2**47 + 3,
        position=(keys * 37 + 1).to(torch.int32),
    )
    state = DeviceState(num_slots=size + 3, pages_per_seq=1, device=DEVICE)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        getattr(state, name).fill_(-7)[slot.to(DEVICE)] = getattr(rows, name).to(DEVICE)
    state.min_tokens_until.fill_(2**30)[slot.to(DEVICE)] = 0
    state.stop_ids.fill_(0)
    meta = new_step_meta(max_rows=size, max_tokens=1, device=DEVICE)
    for tensor in (meta.row_slot, meta.row_start, meta.row_len, meta.sample_row):
        tensor.fill_(-(2**20))
    meta.counts[3] = count
    meta.sample_row[:count] = row.to(DEVICE, torch.int32)
    meta.row_slot[row.to(DEVICE)] = slot.to(DEVICE, torch.int32)
    meta.row_len[row.to(DEVICE)] = 1
    meta.row_start[row.to(DEVICE)] = (rows.position - 1).to(DEVICE)
    return Step(state, meta, rows, slot)


def random_logits(count: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def drawn(
    logits: Tensor,
    step: Step,
    *,
    filtered: bool | None,
    tiling: Tiling | None = SMALL,
    candidates: int = 4096,
    bans_stop_ids: bool = False,
) -> Tensor:
    """Tokens of the step's samples; those of padding rows are checked to be ids. filtered: None draws greedily."""
    count, vocab = logits.shape
    size = len(step.meta.sample_row)
    padded = torch.full((size, vocab), math.nan, dtype=logits.dtype, device=DEVICE)
    padded[:count] = logits.to(DEVICE)
    out = torch.full((size,), -7, dtype=torch.int32, device=DEVICE)
    sampler = Sampler(max_rows=size, vocab=vocab, device=DEVICE, tiling=tiling, candidates=candidates)
    if filtered is None:
        sampler.greedy(padded, step.state, step.meta, out, bans_stop_ids=bans_stop_ids)
    else:
        sampler.sample(padded, step.state, step.meta, out, filtered=filtered, bans_stop_ids=bans_stop_ids)
    tokens = out.cpu().to(torch.int64)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    return tokens[:count]


@triton.jit
def _noise_kernel(bits, noise, seed, position, vocab, BLOCK: tl.constexpr):
    first_key, second_key = noise_keys(tl.load(seed), tl.load(position))
    ids = tl.arange(0, BLOCK)
    h = noise_bits(ids, first_key, second_key)
    tl.store(bits + ids, h.to(tl.int32, bitcast=True), mask=ids < vocab)
    tl.store(noise + ids, gumbel(uniform(h)), mask=ids < vocab)


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (-1, 5), (2**63 - 1, 2**31 - 1), (-(2**63), 1), (12345678901, 7)]
)
def test_noise_has_the_bits_of_the_reference_and_its_value_to_the_last_place(seed: int, position: int) -> None:
    bits = torch.full((VOCAB,), -7, dtype=torch.int32, device=DEVICE)
    noise = torch.full((VOCAB,), math.nan, device=DEVICE)
    seeds, positions = torch.tensor([seed]), torch.tensor([position], dtype=torch.int32)
    _noise_kernel[(1,)](bits, noise, seeds.to(DEVICE), positions.to(DEVICE), VOCAB, BLOCK=1024, enable_fp_fusion=False)
    assert torch.equal(bits.cpu(), reference_sampling.uniform_bits(seeds, positions, VOCAB)[0])
    expected = reference_sampling.gumbel_noise(seeds, positions, VOCAB)[0]
    torch.testing.assert_close(noise.cpu(), expected, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("vocab", [17, VOCAB, 4099])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_argmax(vocab: int, dtype: torch.dtype) -> None:
    logits = random_logits(6, vocab).to(dtype)
    tokens = drawn(logits, step_of([{}] * 6, padding=3), filtered=None)
    assert torch.equal(tokens, logits.float().argmax(dim=-1))


@pytest.mark.parametrize("filtered", [None, False, True])
def test_greedy_takes_the_smallest_of_equally_good_ids(filtered: bool | None) -> None:
    logits = random_logits(3).clamp(max=2.0)
    logits[1, [130, 999]] = 5.0
    logits[2] = 0.0
    step = step_of([{"temperature": 0.0, "top_k": 5}] * 3)
    assert torch.equal(drawn(logits, step, filtered=filtered), torch.stack([row.argmax() for row in logits]))


@pytest.mark.parametrize(("scale", "filtered"), [(3.0, False), (0.3, True), (3.0, True), (20.0, True)])
def test_every_setting_draws_the_token_of_the_reference(scale: float, filtered: bool) -> None:
    step = step_of(SETTINGS, padding=2)
    logits = random_logits(len(SETTINGS), scale=scale, seed=int(scale))
    expected = reference_sampling.sample(logits, step.rows, filtered=filtered)
    assert torch.equal(drawn(logits, step, filtered=filtered), expected)


@pytest.mark.parametrize("vocab", [17, 49152])
@pytest.mark.parametrize("filtered", [False, True])
def test_other_vocabularies_at_the_tables_own_tilings_and_in_bfloat16(vocab: int, filtered: bool) -> None:
    settings: list[Setting] = [{"top_k": 30, "top_p": 0.9}, {"top_p": 0.95, "temperature": 0.8}]
    step = step_of(settings, padding=1)
    logits = random_logits(len(settings), vocab, seed=4).to(torch.bfloat16)
    expected = reference_sampling.sample(logits.float(), step.rows, filtered=filtered)
    assert torch.equal(drawn(logits, step, filtered=filtered, tiling=None), expected)


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(block=64, num_warps=4, stages=1, programs=1),  # one part, and groups of ids that bound top-k
        Tiling(block=64, num_warps=1, stages=2, programs=60),
        Tiling(block=1024, num_warps=4, stages=1, programs=1000),
    ],
)
@pytest.mark.parametrize("filtered", [None, False, True])
def test_tokens_do_not_depend_on_how_the_vocabulary_is_cut(tiling: Tiling, filtered: bool | None) -> None:
    settings: list[Setting] = [SETTINGS[index] for index in (0, 1, 11, 12, 20, 27, 28, 31)]
    step = step_of(settings)
    logits = random_logits(len(settings), seed=9)
    if filtered is None:
        expected = reference_sampling.greedy(logits)
    else:
        expected = reference_sampling.sample(logits, step.rows, filtered=filtered)
    assert torch.equal(drawn(logits, step, filtered=filtered, tiling=tiling), expected)


def test_a_row_draws_the_same_token_at_any_place_in_a_batch_of_any_size_and_filters_that_are_off_change_nothing() -> (
    None
):
    settings: list[Setting] = [{**setting, "key": index} for index, setting in enumerate(SETTINGS[::3])]
    logits = random_logits(len(settings), seed=5)
    together = drawn(logits, step_of(settings), filtered=True)
    order = torch.randperm(len(settings), generator=torch.Generator().manual_seed(1))
    shuffled = step_of([settings[index] for index in order], padding=4, shuffle=8)
    assert torch.equal(drawn(logits[order], shuffled, filtered=True), together[order])
    for index, setting in enumerate(settings[:4]):
        alone = step_of([setting], padding=1)
        assert drawn(logits[index : index + 1], alone, filtered=True) == together[index]
    plain: list[Setting] = [{"key": index} for index in range(5)]
    assert torch.equal(
        drawn(logits[:5], step_of(plain), filtered=False), drawn(logits[:5], step_of(plain), filtered=True)
    )


@pytest.mark.parametrize("candidates", [1, 16])
def test_more_candidates_than_have_a_place_are_found_in_the_row(candidates: int) -> None:
    settings: list[Setting] = [
        {"top_k": 20},
        {"top_p": 0.7},
        {"top_k": 500, "top_p": 0.6},
        {"top_p": 0.5},
        {"top_k": 100},
    ]
    logits = random_logits(5, seed=2, scale=0.01)
    logits[3] = 1.5  # a bin of all ids
    logits[4] = logits[4].sign()
    step = step_of(settings)
    expected = reference_sampling.sample(logits, step.rows, filtered=True)
    assert torch.equal(drawn(logits, step, filtered=True, candidates=candidates), expected)


@pytest.mark.parametrize(("rounds", "programs"), [(1, 60), (2, 1), (4, 60)])
def test_proposals_that_the_filters_reject_are_followed_by_others(rounds: int, programs: int) -> None:
    kinds: list[Setting] = [
        {"top_p": 0.001},
        {"top_p": 0.1},
        {"top_p": 0.5},
        {"top_p": 0.3, "min_p": 0.5},
        {"min_p": 0.9},
        {"top_k": 800},
        {"top_k": 800, "min_p": 0.7},
        {"top_k": 1000, "top_p": 0.4},
    ]
    step = step_of(kinds)
    logits = random_logits(len(kinds), 1500, seed=12, scale=0.5)
    tiling = Tiling(block=256, num_warps=4, stages=1, programs=programs, rounds=rounds)
    expected = reference_sampling.sample(logits, step.rows, filtered=True)
    assert torch.equal(drawn(logits, step, filtered=True, tiling=tiling), expected)


def test_calls_leave_nothing_behind_that_changes_the_next_ones() -> None:
    settings: list[Setting] = [{"top_p": 0.2}, {"top_k": 900}, {"top_k": 20, "top_p": 0.8}, {}, {"min_p": 0.8}]
    step = step_of(settings, padding=2)
    sampler = Sampler(max_rows=7, vocab=VOCAB, device=DEVICE, tiling=SMALL)
    for seed in range(4):
        logits = random_logits(7, seed=seed, scale=0.4)
        out = torch.full((7,), -7, dtype=torch.int32, device=DEVICE)
        sampler.sample(logits.to(DEVICE), step.state, step.meta, out, filtered=seed != 2, bans_stop_ids=False)
        expected = reference_sampling.sample(logits[:5], step.rows, filtered=seed != 2)
        assert torch.equal(out[:5].cpu().to(torch.int64), expected)
        assert out[5:].tolist() == [0, 0]


def test_ids_that_tie_with_the_threshold_all_stay() -> None:
    count = 24
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0, 2.0]).expand(count, 6)
    settings: list[Setting] = [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9}] * (count // 3)
    step = step_of(settings)
    tokens = drawn(logits, step, filtered=True, tiling=Tiling(block=16, num_warps=1, stages=1, programs=1))
    assert torch.equal(tokens, reference_sampling.sample(logits, step.rows, filtered=True))
    assert set(tokens.tolist()) == {1, 2, 3, 5}


@pytest.mark.parametrize("filtered", [None, False, True])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_logits_that_are_not_finite_never_yield_an_id_outside_the_vocabulary(
    filtered: bool | None, temperature: float
) -> None:
    inf, nan = math.inf, math.nan
    logits = torch.zeros(7, VOCAB)
    logits[0] = nan
    logits[1] = -inf
    logits[2] = inf
    logits[3, 5], logits[3, 9] = nan, 1.0
    logits[4, 7] = inf
    logits[5, ::2], logits[5, 8], logits[5, 1] = -inf, nan, 3e38
    logits[6] = -inf
    logits[6, 999] = -3e38
    step = step_of([{"temperature": temperature, "top_k": 50, "top_p": 0.9, "min_p": 0.1}] * 7)
    tokens = drawn(logits, step, filtered=filtered)
    assert tokens[3] != 5
    assert tokens[[0, 1, 4, 5, 6]].tolist() == [0, 0, 7, 1, 999]
    if filtered is None:
        assert torch.equal(tokens, reference_sampling.greedy(logits))
    else:
        assert torch.equal(tokens, reference_sampling.sample(logits, step.rows, filtered=filtered))


@pytest.mark.parametrize("filtered", [None, False, True])
def test_stop_ids_cannot_be_drawn_below_min_tokens(filtered: bool | None) -> None:
    settings: list[Setting] = [
        {"temperature": 0.0},
        {"top_k": 2},
        {"min_p": 0.2},
        {"top_p": 0.4},
        {},
        {"temperature": 0.0},
    ]
    step = step_of(settings, padding=2)
    logits = random_logits(len(settings), seed=6)
    best = logits.topk(MAX_STOP_IDS, dim=-1).indices
    ids = torch.full((len(settings), MAX_STOP_IDS), -1, dtype=torch.int32)
    ids[:, ::3] = best[:, : len(range(0, MAX_STOP_IDS, 3))].to(torch.int32)
    ids[:, 1] = 2**31 - 1
    ids[:, 2] = VOCAB
    position = step.rows.position
    until = torch.where(torch.arange(len(settings)) % 5 == 4, position, position + 1)
    step.state.stop_ids[step.slot.to(DEVICE)] = ids.to(DEVICE)
    step.state.min_tokens_until[step.slot.to(DEVICE)] = until.to(DEVICE)

    tokens = drawn(logits, step, filtered=filtered, bans_stop_ids=True)
    reference_sampling.ban_ids(logits, ids, position < until)
    if filtered is None:
        expected = reference_sampling.greedy(logits)
    else:
        expected = reference_sampling.sample(logits, step.rows, filtered=filtered)
    assert torch.equal(tokens, expected)


def test_logits_of_another_vocabulary_are_refused() -> None:
    step = step_of([{}])
    sampler = Sampler(max_rows=1, vocab=VOCAB, device=DEVICE)
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="rows of 1000"):
        sampler.greedy(torch.zeros(1, 999, device=DEVICE), step.state, step.meta, out, bans_stop_ids=False)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [(1, 151936), (33, 128256), (300, 49152)])
def test_replayed_graphs_draw_the_tokens_of_the_reference(rows: int, vocab: int) -> None:
    choices: list[Setting] = [
        {"top_k": 50},
        {"top_p": 0.9},
        {},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 0.0},
    ]
    settings: list[Setting] = [choices[index % 5] for index in range(rows)]
    step = step_of(settings)
    logits = torch.empty(rows, vocab, device=DEVICE)
    sampler = Sampler(max_rows=rows, vocab=vocab, device=DEVICE)
    outs = torch.full((3, rows), -7, dtype=torch.int32, device=DEVICE)

    def run() -> None:
        sampler.greedy(logits, step.state, step.meta, outs[0], bans_stop_ids=False)
        sampler.sample(logits, step.state, step.meta, outs[1], filtered=False, bans_stop_ids=True)
        sampler.sample(logits, step.state, step.meta, outs[2], filtered=True, bans_stop_ids=True)

    logits.zero_()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(3):
        logits.copy_(random_logits(rows, vocab, seed))
        outs.fill_(-7)
        graph.replay()
        on_gpu = SamplingRows(
            **{name: getattr(step.rows, name).to(DEVICE) for name in SamplingRows.__dataclass_fields__}
        )
        assert torch.equal(outs[0], reference_sampling.greedy(logits).int())
        for out, filtered in ((outs[1], False), (outs[2], True)):
            assert torch.equal(out, reference_sampling.sample(logits, on_gpu, filtered=filtered).int())
