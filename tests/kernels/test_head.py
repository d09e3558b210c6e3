"""The head's product with the choice of tokens fused in, against the references of the two: the same tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gpu_runner.kernels import reference_sampling
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.head import HeadSampler
from gpu_runner.kernels.head_config import HeadConfig, choose_head
from gpu_runner.kernels.reference_sampling import SamplingRows
from gpu_runner.kernels.step_meta import StepMeta, new_step_meta

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter does not know bf16 products.
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
# Integers that wrap and floats that overflow to infinity are meant; only the interpreter warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# Some vocabularies in tiles that divide nothing, one of a single tile.
CONFIGS = [
    HeadConfig(tokens=64, ids=64, block_k=64, stages=3, num_warps=4, noise_ids=16),
    HeadConfig(tokens=64, ids=256, block_k=64, stages=2, num_warps=4),
    HeadConfig(tokens=128, ids=128, block_k=64, stages=3, num_warps=8, noise_ids=128),
]


class Case:
    """Integers, so that any order of sums gives the same logits and many of them tie; rows beyond the samples are
    poisoned, and so is what a result or scratch must not hold."""

    def __init__(self, samples: int, vocab: int, k: int, *, padding: int = 0, seed: int = 0, spread: int = 2) -> None:
        generator = torch.Generator().manual_seed(seed)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-spread, spread + 1, shape, generator=generator).to(DTYPE).to(DEVICE)

        self.samples, self.size, self.vocab = samples, samples + padding, vocab
        self.x, self.weight = integers(self.size, k), integers(vocab, k)
        self.x[samples:] = math.nan
        row = torch.randperm(self.size, generator=generator)[:samples].to(DEVICE)
        slot = torch.randperm(self.size + 3, generator=generator)[:samples].to(DEVICE)
        self.rows = SamplingRows(
            temperature=(torch.rand(samples, generator=generator) * 9).to(DEVICE),
            top_k=torch.zeros(samples, dtype=torch.int32, device=DEVICE),
            top_p=torch.ones(samples, device=DEVICE),
            min_p=torch.zeros(samples, device=DEVICE),
            seed=torch.randint(-(2**62), 2**62, (samples,), generator=generator).to(DEVICE),
            position=torch.randint(1, 2**20, (samples,), generator=generator).to(DEVICE, torch.int32),
        )
        self.rows.temperature[::5] = 0.0
        self.state = DeviceState(num_slots=self.size + 3, pages_per_seq=1, device=DEVICE)
        self.state.temperature.fill_(-7)[slot] = self.rows.temperature
        self.state.seed.fill_(-7)[slot] = self.rows.seed
        self.meta: StepMeta = new_step_meta(max_rows=self.size, max_tokens=1, device=DEVICE)
        for tensor in (self.meta.row_slot, self.meta.row_start, self.meta.row_len, self.meta.sample_row):
            tensor.fill_(-(2**20))
        self.meta.counts[3] = samples
        self.meta.sample_row[:samples] = row.to(torch.int32)
        self.meta.row_slot[row] = slot.to(torch.int32)
        self.meta.row_len[row] = 1
        self.meta.row_start[row] = self.rows.position - 1

    def logits(self) -> Tensor:
        return self.x[: self.samples].float() @ self.weight.float().t()

    def expected(self, *, noise: bool) -> Tensor:
        logits = self.logits()
        return (
            reference_sampling.sample(logits, self.rows, filtered=False) if noise else reference_sampling.greedy(logits)
        )

    def tokens(self, config: HeadConfig, *, noise: bool, sampler: HeadSampler | None = None) -> Tensor:
        sampler = sampler or HeadSampler(max_rows=self.size, device=DEVICE)
        out = torch.full((self.size,), -7, dtype=torch.int32, device=DEVICE)
        sampler.choose(self.x, self.weight, self.state, self.meta, out, noise=noise, config=config)
        assert out[self.samples :].tolist() == [0] * (self.size - self.samples)
        return out[: self.samples].to(torch.int64)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    ("samples", "padding", "vocab", "k"), [(1, 0, 256, 64), (3, 2, 1000, 72), (64, 0, 515, 64), (130, 37, 515, 136)]
)
def test_tokens_are_those_of_the_logits(
    samples: int, padding: int, vocab: int, k: int, config: HeadConfig, noise: bool
) -> None:
    case = Case(samples, vocab, k, padding=padding)
    assert torch.equal(case.tokens(config, noise=noise), case.expected(noise=noise))


@pytest.mark.parametrize("noise", [False, True])
def test_of_equal_logits_the_smallest_id_is_chosen_and_noise_tells_them_apart(noise: bool) -> None:
    case = Case(33, 900, 64, spread=0)
    if not noise:
        case.weight[700:] = case.x[0] = 1
    tokens = case.tokens(CONFIGS[0], noise=noise)
    assert torch.equal(tokens, case.expected(noise=noise))
    if noise:
        assert len(set(tokens.tolist())) > 20
    else:
        assert tokens.tolist() == [700] + [0] * 32


def test_negative_zero_ties_with_zero() -> None:
    case = Case(2, 300, 64, spread=0)
    case.x[:, 0] = 1
    case.weight[:, 0] = -1
    case.weight[70, 0] = -0.0
    case.weight[200:] = 0
    assert case.tokens(CONFIGS[0], noise=False).tolist() == [70, 70]


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_never_yield_an_id_outside_the_vocabulary(noise: bool, temperature: float) -> None:
    inf, nan = math.inf, math.nan
    logits = torch.zeros(7, 300, device=DEVICE)
    logits[0] = nan
    logits[1] = -inf
    logits[2, :20] = inf
    logits[3, 5], logits[3, 9] = nan, 64.0
    logits[4, 7] = inf
    logits[5, ::2], logits[5, 8], logits[5, 1] = -inf, nan, 1e38
    logits[6] = -inf
    logits[6, 299] = -1e38
    for index in range(7):  # an infinity times zero would be NaN, so each is alone
        case = Case(1, 300, 64, spread=0)
        case.x[0, 0] = 1
        case.weight[:, 0] = logits[index]
        case.weight[:, 1:] = 0
        case.state.temperature.fill_(temperature)
        case.rows.temperature.fill_(temperature)
        assert torch.equal(case.tokens(CONFIGS[0], noise=noise), case.expected(noise=noise))


@pytest.mark.parametrize("noise", [False, True])
def test_a_row_without_samples_in_its_tile_and_a_step_without_any_give_id_zero(noise: bool) -> None:
    config = CONFIGS[0]
    case = Case(3, 300, 64, padding=140)
    assert torch.equal(case.tokens(config, noise=noise), case.expected(noise=noise))
    empty = Case(0, 300, 64, padding=70)
    assert len(empty.tokens(config, noise=noise)) == 0


def test_calls_leave_nothing_behind_that_changes_the_next_ones() -> None:
    sampler = HeadSampler(max_rows=150, device=DEVICE)
    for seed in range(4):
        case = Case(50 + 20 * seed, 300, 64, padding=20 - seed, seed=seed)
        noise = seed % 2 == 0
        tokens = case.tokens(CONFIGS[seed % 2], noise=noise, sampler=sampler)
        assert torch.equal(tokens, case.expected(noise=noise))


@pytest.mark.parametrize("noise", [False, True])
def test_a_row_gets_the_same_token_in_any_number_of_rows_and_any_place(noise: bool) -> None:
    """Of logits whose sums do depend on their order."""
    case = Case(80, 400, 136)
    generator = torch.Generator().manual_seed(8)
    case.x = torch.randn(80, 136, generator=generator).to(DTYPE).to(DEVICE)
    case.weight = torch.randn(400, 136, generator=generator).to(DTYPE).to(DEVICE)
    together = case.tokens(CONFIGS[2], noise=noise)
    for config in CONFIGS:
        assert torch.equal(case.tokens(config, noise=noise), together)
    turned = torch.arange(79, 40, -1, device=DEVICE)
    case.x, case.samples, case.size = case.x[turned].contiguous(), len(turned), len(turned)
    case.meta.sample_row[: len(turned)] = case.meta.sample_row[turned]
    case.meta.counts[3] = len(turned)
    assert torch.equal(case.tokens(CONFIGS[0], noise=noise), together[turned])


def test_a_vocabulary_smaller_than_a_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 40 is smaller than a tile, 64"):
        Case(1, 40, 64).tokens(CONFIGS[0], noise=False)


def test_heads_are_fused_where_their_memory_lies_even_and_a_tile_fits() -> None:
    config = choose_head(512, 151936, 1024, torch.bfloat16)
    assert config is not None
    assert choose_head(512, config.ids, 1024, torch.float16) == config
    assert choose_head(512, config.ids - 1, 1024, torch.bfloat16) is None
    assert choose_head(512, 151936, 1024, torch.float32) is None
    assert choose_head(512, 151936, 1028, torch.bfloat16) is None


@pytest.mark.gpu
@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize(("rows", "vocab", "k"), [(40, 151936, 1024), (200, 128256, 4096), (500, 49152, 576)])
def test_replayed_graphs_choose_by_the_logits_of_torch(rows: int, vocab: int, k: int, noise: bool) -> None:
    config = choose_head(rows, vocab, k, DTYPE)
    assert config is not None
    case = Case(rows, vocab, k)
    case.weight.normal_().mul_(3 * k**-0.5)
    sampler = HeadSampler(max_rows=rows, device=DEVICE)
    out = torch.full((rows,), -7, dtype=torch.int32, device=DEVICE)

    def run() -> None:
        sampler.choose(case.x, case.weight, case.state, case.meta, out, noise=noise, config=config)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        case.x.normal_()
        out.fill_(-7)
        graph.replay()
        scores = torch.mm(case.x, case.weight.t(), out_dtype=torch.float32)
        if noise:
            noises = reference_sampling.gumbel_noise(case.rows.seed, case.rows.position, vocab)
            scores += case.rows.temperature[:, None] * noises
        chosen = scores.gather(1, out[:, None].long())[:, 0]
        assert (scores.max(dim=1).values - chosen).max() < 1e-3
