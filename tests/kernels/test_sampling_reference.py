from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_runner.kernels.reference_sampling import (
    SamplingRows,
    ban_ids,
    greedy,
    gumbel_noise,
    kept,
    sample,
    scaled_distance,
    uniform_bits,
)

VOCAB = 1003  # not a multiple of any vector width
SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": VOCAB},
    {"top_k": 1_000_000},
    {"top_k": -1},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 1e-6},
    {"top_p": 0.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-30},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 1, "top_p": 0.8},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.1},
    {"temperature": 0.3, "top_p": 0.7},
    {"temperature": 2.0, "top_k": 100, "top_p": 0.99, "min_p": 0.001},
]


def rows(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | Tensor = 0,
    position: int | Tensor = 0,
) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k, dtype=torch.int32),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        seed=torch.as_tensor(seed, dtype=torch.int64).expand(count).contiguous(),
        position=torch.as_tensor(position, dtype=torch.int32).expand(count).contiguous(),
    )


def concatenated(parts: list[SamplingRows]) -> SamplingRows:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    return SamplingRows(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def random_logits(count: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def naive_kept(logits: np.ndarray, setting: SamplingRows) -> np.ndarray:
    """One row, in float64, by sorting: temperature, top-k, top-p, min-p; ids that tie with the threshold stay."""
    temperature, top_k = float(setting.temperature[0]), int(setting.top_k[0])
    top_p, min_p = float(setting.top_p[0]), float(setting.min_p[0])
    scaled = logits.astype(np.float64) / temperature
    keep = np.ones(len(scaled), dtype=bool)
    if 0 < top_k < len(scaled):
        keep &= scaled >= np.sort(scaled)[-top_k]
    weight = np.where(keep, np.exp(scaled - scaled.max()), 0.0)
    if top_p < 1.0:
        order = np.argsort(-weight, kind="stable")
        before = np.cumsum(weight[order]) - weight[order]
        last = max(int((before < top_p * weight.sum()).sum()) - 1, 0)
        keep &= weight >= weight[order[last]]
    return keep & (np.exp(scaled - scaled.max()) >= min_p)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_kept_ids_are_those_of_a_naive_float64_reference(setting: dict[str, Any]) -> None:
    logits = random_logits(5)
    chosen = rows(5, **setting)
    mask = kept(scaled_distance(logits, chosen.temperature), chosen)
    for row in range(5):
        np.testing.assert_array_equal(mask[row].numpy(), naive_kept(logits[row].numpy(), chosen))


def test_ids_that_tie_with_the_threshold_all_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    distance = scaled_distance(logits, torch.ones(1))
    assert kept(distance, rows(1, top_k=2)).tolist() == [[False, True, True, True, False, True]]
    assert kept(distance, rows(1, top_p=0.5)).tolist() == [[False, True, True, True, False, True]]
    assert kept(distance, rows(1, top_k=1)).sum() == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.0},
        {"temperature": 9.9e-6},
        {"temperature": 1e-30},
        {"temperature": 5e-324},
        {"temperature": 1e-5},
        {"top_p": 0.0},
        {"top_p": 1e-6},
        {"top_k": 1},
        {"top_k": 1, "top_p": 0.8},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_settings_that_leave_one_id_are_greedy(setting: dict[str, Any]) -> None:
    logits = random_logits(40)
    drawn = sample(logits, rows(40, seed=torch.arange(40), **setting), filtered=True)
    assert torch.equal(drawn, logits.argmax(dim=-1))
    assert torch.equal(greedy(logits), drawn)


def test_greedy_takes_the_smallest_of_equally_good_ids() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    assert greedy(logits).tolist() == [1]
    assert sample(logits, rows(1, temperature=0.0, seed=3), filtered=False).tolist() == [1]


@pytest.mark.parametrize("filtered", [False, True])
def test_filters_that_are_off_change_nothing(filtered: bool) -> None:
    logits = random_logits(30)
    plain = sample(logits, rows(30, seed=torch.arange(30)), filtered=False)
    assert torch.equal(sample(logits, rows(30, top_k=VOCAB + 5, seed=torch.arange(30)), filtered=filtered), plain)


def test_a_row_draws_the_same_token_at_any_place_in_a_batch_of_any_size() -> None:
    for vocab in (VOCAB, 49152):
        logits = random_logits(len(SETTINGS), vocab)
        parts = [rows(1, **setting, seed=row * 77 - 5, position=row) for row, setting in enumerate(SETTINGS)]
        alone = [int(sample(logits[row : row + 1], part, filtered=True)) for row, part in enumerate(parts)]
        order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(1))
        shuffled = sample(logits[order], concatenated([parts[row] for row in order]), filtered=True)
        assert [alone[row] for row in order] == shuffled.tolist()


def test_noise_is_bitwise_the_same_at_any_place_in_a_batch() -> None:
    seeds, positions = torch.arange(9) * 2**40 - 2**41, torch.arange(9) * 1000
    together = gumbel_noise(seeds, positions, VOCAB)
    for row in range(9):
        assert torch.equal(gumbel_noise(seeds[row : row + 1], positions[row : row + 1], VOCAB)[0], together[row])


def test_the_bits_follow_the_documented_recipe() -> None:
    mask = 2**32 - 1

    def mix(x: int, between: int = 0) -> int:
        x ^= x >> 16
        x = (x * 0x7FEB352D + between) & mask
        x ^= x >> 15
        x = (x * 0x846CA68B) & mask
        return x ^ (x >> 16)

    for seed, position in ((0, 0), (-1, 5), (2**63 - 1, 2**31 - 1), (-(2**63), 1), (123456789012345, 77)):
        low, high = seed & mask, (seed >> 32) & mask
        k0 = mix(mix(mix((low + 0x9E3779B9) & mask) ^ high) ^ position)
        k1 = mix(mix(mix((position + 0x85EBCA6B) & mask) ^ high) ^ low)
        expected = [mix((k0 + token * 0x9E3779B9) & mask, k1) for token in range(300)]
        bits = uniform_bits(torch.tensor([seed]), torch.tensor([position]), 300)[0]
        assert [value & mask for value in bits.tolist()] == expected


def test_noise_is_finite_and_gumbel_distributed() -> None:
    noise = gumbel_noise(torch.arange(64), torch.full((64,), 3), 16384).double()
    assert noise.isfinite().all()
    count = noise.numel()
    # mean: Euler's constant, variance: pi^2 / 6; six standard errors
    assert abs(noise.mean().item() - 0.5772156649) < 6 * math.sqrt(math.pi**2 / 6 / count)
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    for x in (-1.0, 0.0, 1.0, 3.0, 8.0):
        share = math.exp(-math.exp(-x))
        expected_error = math.sqrt(share * (1 - share) / count)
        assert abs((noise <= x).double().mean().item() - share) < 6 * expected_error


def chi_square(drawn: Tensor, probability: Tensor) -> float:
    observed = torch.bincount(drawn, minlength=len(probability)).double()
    expected = probability * len(drawn)
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("varies", ["seed", "position"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_follow_the_softmax_over_seeds_and_over_positions(varies: str, temperature: float) -> None:
    count, vocab = 20_000, 24
    logits = random_logits(1, vocab, seed=3) / 2
    setting: dict[str, Any] = {"seed": 12345, "position": 678, varies: torch.arange(count)}
    drawn = sample(logits.expand(count, vocab), rows(count, temperature=temperature, **setting), filtered=False)
    probability = (logits[0].double() / temperature).softmax(dim=0)
    # 23 degrees of freedom: chi-square above 61 has probability 3e-5
    assert chi_square(drawn, probability) < 61


def test_filtered_tokens_follow_the_softmax_over_the_kept_ids() -> None:
    count, vocab = 3_000, 64
    logits = random_logits(1, vocab, seed=8) / 2
    setting = rows(count, top_k=20, top_p=0.9, min_p=0.02, seed=torch.arange(count), position=9)
    drawn = sample(logits.expand(count, vocab), setting, filtered=True)
    keep = torch.from_numpy(naive_kept(logits[0].numpy(), setting))
    assert 5 < keep.sum() < 20
    assert keep[drawn].all()
    probability = logits[0].double()[keep].softmax(dim=0)
    compact = keep.long().cumsum(0)[drawn] - 1
    assert chi_square(compact, probability) < 55


def test_neighbouring_seeds_positions_and_ids_are_uncorrelated() -> None:
    base = gumbel_noise(torch.tensor([5]), torch.tensor([10]), 50_000)[0]
    others = [
        gumbel_noise(torch.tensor([6]), torch.tensor([10]), 50_000)[0],
        gumbel_noise(torch.tensor([5 + 2**32]), torch.tensor([10]), 50_000)[0],
        gumbel_noise(torch.tensor([5]), torch.tensor([11]), 50_000)[0],
        gumbel_noise(torch.tensor([10]), torch.tensor([5]), 50_000)[0],
        base.roll(1),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack((base, other)))[0, 1].item()) < 6 / math.sqrt(50_000)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
def test_logits_that_are_not_finite_never_yield_an_id_outside_the_vocabulary(
    filtered: bool, temperature: float
) -> None:
    inf, nan = math.inf, math.nan
    logits = torch.zeros(6, VOCAB)
    logits[0] = nan
    logits[1] = -inf
    logits[2] = inf
    logits[3, 5], logits[3, 9] = nan, 1.0
    logits[4, 7] = inf
    logits[5, ::2], logits[5, 8], logits[5, 1] = -inf, nan, 3e38
    chosen = rows(6, temperature=temperature, top_k=50, top_p=0.9, min_p=0.1, seed=torch.arange(6))
    drawn = sample(logits, chosen, filtered=filtered)
    assert ((drawn >= 0) & (drawn < VOCAB)).all()
    assert drawn[3] != 5
    assert drawn[4] == 7
    assert drawn[5] == 1
    assert ((greedy(logits) >= 0) & (greedy(logits) < VOCAB)).all()


def test_banned_ids_are_those_of_banned_rows_and_within_the_vocabulary() -> None:
    logits = torch.ones(3, 5)
    ids = torch.tensor([[0, 4, -1], [2, 7, 2**31 - 1], [1, -1, -1]], dtype=torch.int32)
    ban_ids(logits, ids, torch.tensor([True, True, False]))
    low = -math.inf
    assert logits.tolist() == [[low, 1, 1, 1, low], [1, 1, low, 1, 1], [1, 1, 1, 1, 1]]


def test_a_banned_id_is_never_drawn() -> None:
    logits = random_logits(50)
    best = logits.argmax(dim=-1, keepdim=True)
    ban_ids(logits, best, torch.ones(50, dtype=torch.bool))
    drawn = sample(logits, rows(50, top_k=2, seed=torch.arange(50)), filtered=True)
    assert (drawn != best[:, 0]).all()


@pytest.mark.gpu
def test_a_gpu_draws_the_bits_of_the_cpu_and_the_same_tokens_from_the_same_logits() -> None:
    seeds, positions = torch.arange(18) * 2**40 - 2**41, torch.arange(18, dtype=torch.int32) * 1000
    bits = uniform_bits(seeds, positions, VOCAB)
    assert torch.equal(uniform_bits(seeds.cuda(), positions.cuda(), VOCAB).cpu(), bits)
    noise = gumbel_noise(seeds, positions, VOCAB)
    torch.testing.assert_close(gumbel_noise(seeds.cuda(), positions.cuda(), VOCAB).cpu(), noise, rtol=1e-6, atol=1e-6)

    logits = random_logits(len(SETTINGS))
    chosen = concatenated([rows(1, **setting, seed=row, position=row) for row, setting in enumerate(SETTINGS)])
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    on_gpu = SamplingRows(**{name: getattr(chosen, name).cuda() for name in names})
    tokens = sample(logits, chosen, filtered=True)
    assert torch.equal(sample(logits.cuda(), on_gpu, filtered=True).cpu(), tokens)
    for row in range(len(SETTINGS)):
        part = slice(row, row + 1)
        assert int(sample(logits.cuda()[part], on_gpu[part], filtered=True)) == int(tokens[row])
