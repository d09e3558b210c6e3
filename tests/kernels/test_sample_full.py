"""Penalties, logit bias and log-probabilities: the kernels against the torch reference, the reference against loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncengine import sampling
from asyncengine.config import MAX_BIAS_IDS, MAX_TOP_LOGPROBS, PAGE_SIZE
from gpu_runner.kernels import reference_adjust
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.reference_adjust import AdjustRows
from gpu_runner.kernels.result_layout import Results, result_words
from gpu_runner.kernels.sample import Sampler, Tiling
from gpu_runner.kernels.sample_full import TILING, FullSampling
from gpu_runner.kernels.step_meta import StepMeta, new_step_meta

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 1000
SMALL = Tiling(block=128, num_warps=4, stages=1, programs=24)
# Floats that overflow to infinity are meant; only the interpreter warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@dataclass
class Ask:
    """What one sampling row asks, and its sequence."""

    tokens: list[int]
    prompt: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    logprobs: int = -1
    temperature: float = 0.0
    was_done: bool = False


@dataclass(frozen=True)
class FullStep:
    """A step in shuffled rows, slots and pages, everything that is not theirs poisoned."""

    asks: list[Ask]
    state: DeviceState
    meta: StepMeta
    page_tokens: Tensor
    step_row: Tensor  # of each sample
    rows: AdjustRows  # of the samples, on the CPU
    history: Tensor  # [S, L], of the samples, on the CPU


def full_step(asks: list[Ask], *, padding: int = 0, seed: int = 0) -> FullStep:
    count, size = len(asks), len(asks) + padding
    generator = np.random.default_rng(seed)
    pages_per_seq = max(-(-len(ask.tokens) // PAGE_SIZE) for ask in asks)
    state = DeviceState(num_slots=size + 2, pages_per_seq=pages_per_seq, device=DEVICE)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_len"):
        getattr(state, name).fill_(3)
    state.num_bias.fill_(5)
    state.bias_ids.fill_(7)
    state.bias_values.fill_(1000.0)
    state.page_table.fill_(2**30)
    state.min_tokens_until.zero_()
    state.top_p.fill_(1.0)
    num_pages = 1 + size * pages_per_seq
    page_tokens = torch.full((num_pages, PAGE_SIZE), 2**31 - 1, dtype=torch.int32)
    free_pages = generator.permutation(np.arange(1, num_pages)).tolist()
    meta = new_step_meta(max_rows=size, max_tokens=1, device=DEVICE)
    for tensor in (meta.row_slot, meta.row_start, meta.row_len, meta.sample_row, meta.row_was_done):
        tensor.fill_(-(2**20))
    meta.counts[3] = count
    step_row = torch.from_numpy(generator.permutation(size)[:count])
    slots = generator.permutation(size + 2)[:count].tolist()
    history = torch.full((count, pages_per_seq * PAGE_SIZE), -1, dtype=torch.int32)
    for index, (ask, row, slot) in enumerate(zip(asks, step_row.tolist(), slots, strict=True)):
        length = len(ask.tokens)
        history[index, :length] = torch.tensor(ask.tokens, dtype=torch.int32)
        state.presence_penalty[slot], state.frequency_penalty[slot] = ask.presence, ask.frequency
        state.repetition_penalty[slot], state.logprobs[slot] = ask.repetition, ask.logprobs
        state.prompt_len[slot], state.num_bias[slot] = ask.prompt, len(ask.bias)
        state.temperature[slot], state.seed[slot] = ask.temperature, 11
        if ask.bias:
            state.bias_ids[slot, : len(ask.bias)] = torch.tensor(list(ask.bias), dtype=torch.int32, device=DEVICE)
            state.bias_values[slot, : len(ask.bias)] = torch.tensor(list(ask.bias.values()), device=DEVICE)
        meta.sample_row[index], meta.row_slot[row] = row, slot
        meta.row_len[row] = min(3, length)
        meta.row_start[row] = length - meta.row_len[row]
        meta.row_was_done[row] = int(ask.was_done)
        if ask.was_done:
            continue  # its pages are no longer its own
        for page_index in range(-(-length // PAGE_SIZE)):
            page = free_pages.pop()
            state.page_table[slot, page_index] = page
            part = ask.tokens[page_index * PAGE_SIZE : (page_index + 1) * PAGE_SIZE]
            page_tokens[page, : len(part)] = torch.tensor(part, dtype=torch.int32)
    at = torch.tensor(slots)
    rows = AdjustRows(
        presence_penalty=state.presence_penalty.cpu()[at],
        frequency_penalty=state.frequency_penalty.cpu()[at],
        repetition_penalty=state.repetition_penalty.cpu()[at],
        num_bias=state.num_bias.cpu()[at],
        bias_ids=state.bias_ids.cpu()[at],
        bias_values=state.bias_values.cpu()[at],
        prompt_len=state.prompt_len.cpu()[at],
        length=torch.tensor([len(ask.tokens) for ask in asks]),
    )
    return FullStep(asks, state, meta, page_tokens.to(DEVICE), step_row, rows, history)


def sequence(length: int, seed: int, vocab: int = VOCAB) -> list[int]:
    """Of few ids, so that many occur often."""
    return (torch.randint(0, 40, (length,), generator=torch.Generator().manual_seed(seed)) * 17 % vocab).tolist()


def ragged_asks(vocab: int = VOCAB) -> list[Ask]:
    most = {(7 * index) % vocab: (index - 150) / 2 for index in range(min(MAX_BIAS_IDS, vocab))}
    return [
        Ask(sequence(1, 1, vocab), prompt=1, presence=1.5, frequency=0.5),  # no output yet
        Ask(sequence(15, 2, vocab), prompt=4, presence=-2.0, logprobs=20),
        Ask(sequence(16, 3, vocab), prompt=15, frequency=1.25, logprobs=0),
        Ask(sequence(17, 4, vocab), prompt=8, repetition=1.3, logprobs=5),
        Ask(sequence(600, 5, vocab), prompt=300, repetition=0.01, presence=0.3, frequency=0.7, logprobs=20),
        Ask(sequence(1200, 6, vocab), prompt=2, repetition=10.0, presence=2.0, frequency=2.0),
        Ask(sequence(30, 7, vocab)),
        Ask(sequence(30, 8, vocab), logprobs=3),
        Ask(sequence(40, 9, vocab), prompt=20, bias={3: -100.0, 17: 4.0, vocab - 1: 2.5}, logprobs=4),
        Ask(sequence(40, 10, vocab), prompt=20, bias=most, repetition=1.7, frequency=-1.0, logprobs=20),
        Ask(sequence(33, 11, vocab), prompt=5, presence=1.0, bias={2**31 - 1: 50.0, vocab: 50.0}),
        Ask(sequence(50, 12, vocab), prompt=5, presence=1.0, logprobs=7, was_done=True),
        Ask([5] * 100, prompt=50, presence=0.5, frequency=0.25, repetition=1.1, logprobs=1),
    ]


def random_logits(count: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 4


def padded(logits: Tensor, step: FullStep) -> Tensor:
    whole = torch.full((len(step.meta.sample_row), logits.shape[1]), math.nan, device=DEVICE)
    whole[: len(logits)] = logits.to(DEVICE)
    return whole


def live_of(step: FullStep) -> Tensor:
    return torch.tensor([not ask.was_done for ask in step.asks])


def run_full(
    logits: Tensor, step: FullStep, tokens: Tensor, *, tiling: Tiling = SMALL, times: int = 1
) -> tuple[Tensor, Results]:
    """The adjusted logits, and results that were poisoned before. tokens: what is said to be sampled."""
    size = len(step.meta.sample_row)
    full = FullSampling(max_rows=size, vocab=logits.shape[1], device=DEVICE, tiling=tiling)
    sampled = torch.full((size,), 2**30, dtype=torch.int32, device=DEVICE)
    sampled[: len(tokens)] = tokens.to(DEVICE, torch.int32)
    for _ in range(times):
        adjusted = padded(logits, step)
        vector = torch.full((result_words(size),), -7, dtype=torch.int32, device=DEVICE)
        results = Results.of(vector)
        full.before(adjusted, step.state, step.meta, step.page_tokens)
        full.after(adjusted, sampled, step.state, step.meta, step.page_tokens, results)
        assert (full._table == 0).all(), "the table is clean for the next step"
        assert (vector[: 4 + 2 * size] == -7).all(), "times, tokens and finish values are not written"
    assert adjusted[len(logits) :].isnan().all()
    return adjusted[: len(logits)].cpu(), results


def check_logprobs(results: Results, step: FullStep, logits: Tensor, tokens: Tensor) -> None:
    wanted = torch.tensor([ask.logprobs for ask in step.asks])
    expected = reference_adjust.top_logprobs(logits, tokens, wanted.clamp(min=0), most=MAX_TOP_LOGPROBS)
    asking = torch.zeros(len(step.meta.sample_row), dtype=torch.bool)
    for index, ask in enumerate(step.asks):
        if ask.logprobs < 0 or ask.was_done:
            continue
        row, count = int(step.step_row[index]), int(expected.count[index])
        asking[row] = True
        assert int(results.num_tops[row]) == count
        assert results.top_ids[row, :count].tolist() == expected.ids[index, :count].tolist()
        torch.testing.assert_close(
            results.top_logprobs[row, :count].cpu(), expected.values[index, :count], rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(results.logprobs[row].cpu(), expected.chosen[index], rtol=1e-5, atol=2e-5)
    poison = torch.tensor(-7, dtype=torch.int32)
    assert (results.num_tops.cpu()[~asking] == poison).all()
    assert (results.logprobs.cpu().view(torch.int32)[~asking] == poison).all()
    assert (results.top_ids.cpu()[~asking] == poison).all()


def test_the_tables_hold_what_a_request_may_ask() -> None:
    assert (MAX_BIAS_IDS, MAX_TOP_LOGPROBS) == (sampling.MAX_LOGIT_BIAS, sampling.MAX_LOGPROBS)


def test_the_reference_adjusts_like_a_loop_over_the_ids() -> None:
    asks = [ask for ask in ragged_asks() if not ask.was_done]
    step, logits = full_step(asks), random_logits(len(asks))
    adjusted = reference_adjust.adjust(logits, step.history, step.rows)
    for index, ask in enumerate(asks):
        output = ask.tokens[ask.prompt :]
        for token in range(0, VOCAB, 17):
            x = np.float32(logits[index, token]) + np.float32(ask.bias.get(token, 0.0))
            if token in ask.tokens:
                x = x / np.float32(ask.repetition) if x > 0 else x * np.float32(ask.repetition)
            x = x - np.float32(ask.frequency) * np.float32(output.count(token))
            x = x - np.float32(ask.presence if token in output else 0.0)
            assert float(adjusted[index, token]) == float(x), (index, token)


def test_the_references_log_probabilities_are_those_of_the_softmax_in_order() -> None:
    logits = random_logits(3)
    logits[1, [3, 900, 40]] = 30.0
    logits[2, :] = -math.inf
    logits[2, [8, 5]] = torch.tensor([math.nan, 1.0])
    tops = reference_adjust.top_logprobs(logits, torch.tensor([4, 900, 8]), torch.tensor([20, 2, 20]), most=20)
    expected = logits.log_softmax(dim=1)
    assert tops.count.tolist() == [20, 2, 1]
    assert tops.ids[0].tolist() == logits[0].argsort(descending=True)[:20].tolist()
    assert tops.ids[1, :3].tolist() == [3, 40, 900]
    torch.testing.assert_close(tops.values[:2], expected.gather(1, tops.ids.long())[:2], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tops.chosen[:2], expected[[0, 1], [4, 900]], rtol=1e-6, atol=1e-6)
    assert (tops.ids[2, 0].item(), tops.values[2, 0].item(), tops.chosen[2].item()) == (5, 0.0, -math.inf)


@pytest.mark.parametrize(
    ("tiling", "times"), [(SMALL, 2), (Tiling(block=256, num_warps=1, stages=1, programs=1), 1), (TILING, 1)]
)
def test_ragged_rows_are_adjusted_and_reported_as_the_reference_does(tiling: Tiling, times: int) -> None:
    step = full_step(ragged_asks(), padding=3)
    logits = random_logits(len(step.asks), seed=1)
    tokens = torch.tensor([(index * 17) % 40 * 17 for index in range(len(step.asks))])
    adjusted, results = run_full(logits, step, tokens, tiling=tiling, times=times)
    expected = reference_adjust.adjust(logits, step.history, step.rows)
    live = live_of(step)
    assert torch.equal(adjusted[live], expected[live])
    assert torch.equal(adjusted[~live], logits[~live])
    check_logprobs(results, step, logits, tokens)


@pytest.mark.parametrize("vocab", [17, 4099])
def test_other_vocabularies(vocab: int) -> None:
    step = full_step(ragged_asks(vocab), padding=1, seed=3)
    logits = random_logits(len(step.asks), vocab, seed=2)
    tokens = logits.argmax(dim=1)
    adjusted, results = run_full(logits, step, tokens)
    expected = reference_adjust.adjust(logits, step.history, step.rows)
    live = live_of(step)
    assert torch.equal(adjusted[live], expected[live])
    check_logprobs(results, step, logits, tokens)


def test_ties_are_listed_from_the_smallest_id_and_ids_without_probability_not_at_all() -> None:
    step = full_step([Ask([1], logprobs=20), Ask([1], logprobs=6), Ask([1], logprobs=20), Ask([1], logprobs=20)])
    logits = random_logits(4, seed=4)
    logits[0] = 0.0
    logits[1] = logits[1].round()
    logits[2] = -math.inf
    logits[2, [900, 70]] = 1.5
    logits[3, 5], logits[3, 6], logits[3, 7] = math.nan, math.inf, -0.0
    tokens = torch.tensor([999, 500, 3, 6])
    _, results = run_full(logits, step, tokens)
    check_logprobs(results, step, logits, tokens)
    rows = step.step_row
    assert results.top_ids[rows[0]].tolist() == list(range(20))
    assert results.num_tops[rows[2]] == 2
    assert results.logprobs[rows[2]] == -math.inf
    assert results.top_ids[rows[3], 0] == 6


def test_an_adjusted_tokens_log_probability_is_the_unadjusted_ones() -> None:
    asks = [
        Ask(sequence(300, 5), prompt=100, repetition=r, presence=p, frequency=f, bias={17: b}, logprobs=0)
        for r in (0.01, 1.0, 1.3, 10.0)
        for p, f, b in ((0.0, 0.0, 100.0), (2.0, 0.0, -100.0), (-2.0, -2.0, 0.0), (0.7, 1.9, 33.3))
    ]
    step, logits = full_step(asks), random_logits(len(asks), seed=5)
    tokens = torch.full((len(asks),), 17)
    assert all(17 in ask.tokens for ask in asks)
    _, results = run_full(logits, step, tokens)
    actual = results.logprobs.cpu()[step.step_row]
    torch.testing.assert_close(actual, logits.log_softmax(dim=1)[:, 17], rtol=0, atol=1e-4)


def test_rows_that_ask_nothing_draw_the_tokens_of_the_other_variants_and_neighbours_change_nothing() -> None:
    asks = [Ask(sequence(40, seed), prompt=9, temperature=0.5 + seed % 2) for seed in range(4)]
    asks[1].presence, asks[1].frequency = 1.5, 0.5
    asks[2].bias, asks[2].logprobs = {3: 5.0}, 20
    step, logits = full_step(asks, padding=1), random_logits(4, seed=6)
    tokens = draw(logits, step)
    plain = torch.full((5,), -7, dtype=torch.int32, device=DEVICE)
    sampler = Sampler(max_rows=5, vocab=VOCAB, device=DEVICE, tiling=SMALL)
    sampler.sample(padded(logits, step), step.state, step.meta, plain, filtered=False, bans_stop_ids=False)
    assert tokens[[0, 3]].tolist() == plain[[0, 3]].tolist()
    for index, ask in enumerate(asks[1:3], start=1):
        assert draw(logits[index : index + 1], full_step([ask], padding=2, seed=9)) == tokens[index]


def draw(logits: Tensor, step: FullStep) -> Tensor:
    size, vocab = len(step.meta.sample_row), logits.shape[1]
    adjusted = padded(logits, step)
    out = torch.full((size,), -7, dtype=torch.int32, device=DEVICE)
    FullSampling(max_rows=size, vocab=vocab, device=DEVICE, tiling=SMALL).before(
        adjusted, step.state, step.meta, step.page_tokens
    )
    sampler = Sampler(max_rows=size, vocab=vocab, device=DEVICE, tiling=SMALL)
    sampler.sample(adjusted, step.state, step.meta, out, filtered=True, bans_stop_ids=True)
    return out[: len(logits)].cpu()


def test_logits_of_another_kind_are_refused() -> None:
    step = full_step([Ask([1])])
    full = FullSampling(max_rows=1, vocab=VOCAB, device=DEVICE)
    wide = torch.zeros(1, 2 * VOCAB, device=DEVICE)
    for logits in (wide[:, :999], wide[:, :VOCAB].bfloat16(), wide[:, ::2]):
        with pytest.raises(ValueError, match="contiguous float32 rows of 1000"):
            full.before(logits, step.state, step.meta, step.page_tokens)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), [(1, 151936), (33, 128256), (300, 49152)])
def test_replayed_graphs_adjust_and_report_as_the_reference_does(rows: int, vocab: int) -> None:
    kinds = ragged_asks(vocab)
    step = full_step([kinds[(4 + index) % len(kinds)] for index in range(rows)])
    logits = torch.empty(rows, vocab, device=DEVICE)
    sampled = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    full = FullSampling(max_rows=rows, vocab=vocab, device=DEVICE)
    results = Results.of(torch.full((result_words(rows),), -7, dtype=torch.int32, device=DEVICE))

    def run() -> None:
        full.before(logits, step.state, step.meta, step.page_tokens)
        full.after(logits, sampled, step.state, step.meta, step.page_tokens, results)

    logits.zero_()
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    live = live_of(step)
    for seed in range(3):
        raw = random_logits(rows, vocab, seed=seed)
        tokens = torch.randint(0, 40, (rows,), generator=torch.Generator().manual_seed(seed)) * 17
        sampled.copy_(tokens)
        logits.copy_(raw)
        graph.replay()
        expected = reference_adjust.adjust(raw, step.history, step.rows)
        assert torch.equal(logits.cpu()[live], expected[live])
        assert torch.equal(logits.cpu()[~live], raw[~live])
        check_logprobs(results, step, raw, tokens)
