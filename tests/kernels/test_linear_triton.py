"""The skinny linear kernels against the reference operations in float64, on the GPU or under the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_runner.kernels import linear, reference
from gpu_runner.kernels.linear import SplitScratch
from gpu_runner.kernels.linear_config import (
    DotConfig,
    FmaConfig,
    LinearConfig,
    TileConfig,
    choose,
    largest_scratch,
    scratch_size,
)
from gpu_runner.kernels.residual import Gained

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter does not know bf16 products.
DTYPES = [torch.bfloat16, torch.float32] if ON_GPU else [torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
EPS = 1e-5

# Blocks that divide nothing, a depth below and above the chunks, one chunk only.
FMA_CONFIGS = [
    FmaConfig(rows=4, block_k=32, depth=2, num_warps=1),
    FmaConfig(rows=8, block_k=64, depth=5, num_warps=2),
    FmaConfig(rows=2, block_k=256, depth=1, num_warps=4),
]
# K split and whole, each operand first, more tokens than a tile has.
DOT_CONFIGS = [
    DotConfig(rows=16, block_k=32, stages=3, num_warps=2, prefetch_k=128),
    DotConfig(rows=32, block_k=16, stages=2, num_warps=4, split_k=3, prefetch_k=64),
    DotConfig(rows=64, block_k=64, stages=2, num_warps=4, split_k=2, weight_first=True, tokens=16),
]
# A tile that holds all, groups that hold all tiles, several groups.
TILE_CONFIGS = [
    TileConfig(tokens=64, rows=128, block_k=128, stages=2, num_warps=4, group=1),
    TileConfig(tokens=16, rows=32, block_k=32, stages=3, num_warps=4, group=2),
    TileConfig(tokens=32, rows=32, block_k=64, stages=2, num_warps=4, group=8),
]
# Tiles shared by programs: a turn and parts of two programs, parts of many, whole turns only, no more than blocks.
SHARED_TILE_CONFIGS = [
    TileConfig(tokens=16, rows=32, block_k=16, stages=2, num_warps=4, group=2, programs=4, prefetch_k=64),
    TileConfig(tokens=64, rows=64, block_k=16, stages=2, num_warps=4, group=1, programs=5),
    TileConfig(tokens=32, rows=32, block_k=32, stages=2, num_warps=4, group=8, programs=2),
    TileConfig(tokens=16, rows=32, block_k=16, stages=2, num_warps=4, group=4, programs=64),
]
FMA_CASES = [(FMA_CONFIGS[0], 1), (FMA_CONFIGS[1], 3), (FMA_CONFIGS[2], 2)]
CASES: list[tuple[LinearConfig, int]] = [
    *FMA_CASES,
    *[(DOT_CONFIGS[0], 8), (DOT_CONFIGS[1], 17), (DOT_CONFIGS[2], 40)],
    *[(TILE_CONFIGS[0], 40), (TILE_CONFIGS[1], 70), (TILE_CONFIGS[2], 65)],
    *[(SHARED_TILE_CONFIGS[0], 50), (SHARED_TILE_CONFIGS[1], 40)],
    *[(SHARED_TILE_CONFIGS[2], 33), (SHARED_TILE_CONFIGS[3], 21)],
]
DOT_CASES = [(config, tokens) for config in DOT_CONFIGS for tokens in (1, 17, 40)]
N, K = 44, 136  # of gate-up: 22 rows each


@dataclass(frozen=True)
class Inputs:
    x: Tensor  # [T, K]
    weight: Tensor  # [N, K]
    norm: Tensor  # [K]
    bias: Tensor  # [N]
    residual: Tensor  # [T, N]


def draw(tokens: int, dtype: torch.dtype, *, n: int = N, k: int = K, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

    return Inputs(normal(tokens, k), normal(n, k) / k**0.5, normal(k), normal(n), normal(tokens, n))


def poisoned(tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.full((tokens, columns), float("nan"), dtype=dtype, device=DEVICE)


def poisoned_gained(config: DotConfig, gain: Tensor, tokens: int) -> Gained:
    n = len(gain)
    squares = poisoned(linear.row_tiles(config, n), tokens, torch.float32)
    return Gained(gain=gain, values=poisoned(tokens, n, gain.dtype), squares=squares)


def gained_of(x: Tensor, gain: Tensor, *, parts: int) -> Gained:
    """In parts of columns that are no two alike; what lies behind them in memory is poisoned."""
    tokens, k = x.shape
    memory = poisoned(parts + 20, tokens, torch.float32)
    bounds = [k * part * part // (parts * parts) for part in range(parts + 1)]
    for part, (first, last) in enumerate(pairwise(bounds)):
        memory[part] = x[:, first:last].float().square().sum(dim=1)
    return Gained(gain=gain, values=(x.float() * gain.float()).to(x.dtype), squares=memory[:parts])


def poisoned_scratch() -> SplitScratch:
    scratch = SplitScratch.allocate(max_values=1 << 21, max_tiles=64, device=DEVICE)
    scratch.partials.fill_(float("nan"))
    return scratch


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float64, rounded to x's type as the unfused path does."""
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


def assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Relative error of the whole, and none of an element beyond a few roundings; NaN never passes."""
    error = out.double() - expected.double()
    assert float(error.norm() / expected.double().norm()) < TOLERANCE[dtype]
    assert float(error.abs().max()) < 10 * TOLERANCE[dtype] * float(expected.abs().max())


def pytest_ids(case: object) -> str:
    return str(case).replace("Config", "")


parametrize_cases = pytest.mark.parametrize(("config", "tokens"), CASES, ids=pytest_ids)
parametrize_fma_cases = pytest.mark.parametrize(("config", "tokens"), FMA_CASES, ids=pytest_ids)
parametrize_dot_cases = pytest.mark.parametrize(("config", "tokens"), DOT_CASES, ids=pytest_ids)
parametrize_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@parametrize_dtypes
@parametrize_cases
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_reference(config: LinearConfig, tokens: int, with_bias: bool, dtype: torch.dtype) -> None:
    given = draw(tokens, dtype)
    bias = given.bias if with_bias else None
    out = poisoned(tokens, N, dtype)
    linear.linear(given.x, given.weight, out=out, config=config, bias=bias, scratch=poisoned_scratch())
    assert_close(out, wide_linear(given.x, given.weight, bias), dtype)


@parametrize_dtypes
@parametrize_cases
def test_gate_up_equals_linear_and_silu(config: LinearConfig, tokens: int, dtype: torch.dtype) -> None:
    given = draw(tokens, dtype, seed=2)
    out = poisoned(tokens, N // 2, dtype)
    linear.linear(
        given.x, given.weight, out=out, config=config, bias=given.bias, scratch=poisoned_scratch(), gate_up=True
    )
    assert_close(out, reference.silu_mul(wide_linear(given.x, given.weight, given.bias)), dtype)


@parametrize_dtypes
@parametrize_fma_cases
def test_norm_linear_equals_norm_then_linear(config: FmaConfig, tokens: int, dtype: torch.dtype) -> None:
    given = draw(tokens, dtype, seed=1)
    out = poisoned(tokens, N, dtype)
    linear.linear(given.x, given.weight, out=out, config=config, bias=given.bias, norm=given.norm, eps=EPS)
    assert_close(out, wide_linear(reference.rms_norm(given.x, given.norm, EPS), given.weight, given.bias), dtype)


@parametrize_dtypes
@parametrize_fma_cases
def test_norm_gate_up_equals_norm_then_gate_up(config: FmaConfig, tokens: int, dtype: torch.dtype) -> None:
    given = draw(tokens, dtype, seed=2)
    out = poisoned(tokens, N // 2, dtype)
    linear.linear(
        given.x, given.weight, out=out, config=config, bias=given.bias, norm=given.norm, eps=EPS, gate_up=True
    )
    x = reference.rms_norm(given.x, given.norm, EPS)
    assert_close(out, reference.silu_mul(wide_linear(x, given.weight, given.bias)), dtype)


@pytest.mark.parametrize("gate_up", [False, True])
def test_a_residual_whose_gained_values_or_squares_exceed_float16_is_normed(gate_up: bool) -> None:
    given = draw(2, torch.float16, seed=15)
    x, gain = given.x.clamp(-3, 3) * 20_000, given.norm.clamp(-3, 3) * 20
    out = poisoned(2, N // 2 if gate_up else N, torch.float16)
    linear.linear(
        x, given.weight / 16, out=out, config=FMA_CONFIGS[0], bias=given.bias, norm=gain, eps=EPS, gate_up=gate_up
    )
    expected = wide_linear(reference.rms_norm(x, gain, EPS), given.weight / 16, given.bias)
    assert_close(out, reference.silu_mul(expected) if gate_up else expected, torch.float16)


@parametrize_dtypes
@parametrize_cases
def test_linear_add_adds_to_the_residual_in_place(config: LinearConfig, tokens: int, dtype: torch.dtype) -> None:
    given = draw(tokens, dtype, seed=3)
    bias, residual = given.bias, given.residual.clone()
    linear.linear(given.x, given.weight, out=residual, config=config, bias=bias, scratch=poisoned_scratch(), add=True)
    assert_close(residual, given.residual + wide_linear(given.x, given.weight, bias), dtype)


@parametrize_dtypes
@parametrize_dot_cases
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_sum_is_written_times_the_next_gain_too_with_its_squares(
    config: DotConfig, tokens: int, with_bias: bool, dtype: torch.dtype
) -> None:
    given, gain = draw(tokens, dtype, seed=10), draw(1, dtype, seed=11).bias
    bias, plain, residual = given.bias if with_bias else None, given.residual.clone(), given.residual.clone()
    gained = poisoned_gained(config, gain, tokens)
    scratch = poisoned_scratch()
    linear.linear(given.x, given.weight, out=plain, config=config, bias=bias, scratch=scratch, add=True)
    linear.linear(
        given.x, given.weight, out=residual, config=config, bias=bias, scratch=scratch, add=True, gained=gained
    )
    assert torch.equal(residual, plain)
    assert torch.equal(gained.values, (residual.float() * gain.float()).to(dtype))
    for part, columns in enumerate(residual.float().split(config.rows, dim=1)):
        torch.testing.assert_close(gained.squares[part], columns.square().sum(dim=1), rtol=1e-5, atol=0)


@parametrize_dtypes
@parametrize_dot_cases
@pytest.mark.parametrize("parts", [1, 16, 21])
def test_a_linear_of_gained_values_equals_norm_then_linear(
    config: DotConfig, tokens: int, parts: int, dtype: torch.dtype
) -> None:
    given = draw(tokens, dtype, seed=12)
    gained, out = gained_of(given.x, given.norm, parts=parts), poisoned(tokens, N, dtype)
    linear.linear(
        *(gained, given.weight),
        out=out,
        config=config,
        bias=given.bias,
        scratch=poisoned_scratch(),
        eps=EPS,
    )
    assert_close(out, wide_linear(reference.rms_norm(given.x, given.norm, EPS), given.weight, given.bias), dtype)


@parametrize_dtypes
@parametrize_dot_cases
def test_gate_up_of_gained_values_equals_norm_then_gate_up(config: DotConfig, tokens: int, dtype: torch.dtype) -> None:
    given = draw(tokens, dtype, seed=13)
    gained, out = gained_of(given.x, given.norm, parts=3), poisoned(tokens, N // 2, dtype)
    linear.linear(
        *(gained, given.weight),
        out=out,
        config=config,
        bias=given.bias,
        scratch=poisoned_scratch(),
        eps=EPS,
        gate_up=True,
    )
    x = reference.rms_norm(given.x, given.norm, EPS)
    assert_close(out, reference.silu_mul(wide_linear(x, given.weight, given.bias)), dtype)


@pytest.mark.parametrize("config", DOT_CONFIGS[:2], ids=pytest_ids)
def test_what_a_norm_is_folded_into_repeats_exactly(config: DotConfig) -> None:
    given, scratch = draw(40, DTYPES[0], n=K, seed=14), poisoned_scratch()
    results = []
    for _ in range(2):
        residual, out = given.residual.clone(), poisoned(40, K, DTYPES[0])
        gained = poisoned_gained(config, given.norm, 40)
        linear.linear(given.x, given.weight, out=residual, config=config, scratch=scratch, add=True, gained=gained)
        linear.linear(gained, given.weight, out=out, config=config, scratch=scratch, eps=EPS)
        results.append((gained, out))
    (first, first_out), (second, second_out) = results
    assert torch.equal(first.values, second.values)
    assert torch.equal(first.squares, second.squares)
    assert torch.equal(first_out, second_out)
    x = reference.rms_norm(given.residual + wide_linear(given.x, given.weight, None), given.norm, EPS)
    assert_close(first_out, wide_linear(x, given.weight, None), DTYPES[0])


@pytest.mark.parametrize("config", [FMA_CONFIGS[0], DOT_CONFIGS[0]], ids=pytest_ids)
def test_float32_outputs_are_not_rounded(config: LinearConfig) -> None:
    dtype = DTYPES[0]
    given = draw(3, dtype, seed=4)
    out = poisoned(3, N, torch.float32)
    linear.linear(given.x, given.weight, out=out, config=config)
    assert_close(out, F.linear(given.x.double(), given.weight.double()), torch.float32)


@pytest.mark.parametrize("config", [DOT_CONFIGS[1], SHARED_TILE_CONFIGS[0], SHARED_TILE_CONFIGS[1]], ids=pytest_ids)
def test_a_split_leaves_its_scratch_as_it_found_it_and_repeats_exactly(config: LinearConfig) -> None:
    given = draw(40, DTYPES[0], seed=5)
    scratch = poisoned_scratch()
    first, second = poisoned(40, N, DTYPES[0]), poisoned(40, N, DTYPES[0])
    for out in (first, second):
        linear.linear(given.x, given.weight, out=out, config=config, scratch=scratch)
        assert not scratch.arrivals.any()
    assert torch.equal(first, second)


@pytest.mark.parametrize("config", SHARED_TILE_CONFIGS, ids=pytest_ids)
def test_a_token_has_the_same_outputs_in_every_tile_that_programs_share(config: TileConfig) -> None:
    tokens = 3 * config.tokens
    given = draw(tokens, DTYPES[0], seed=8)
    given.x.copy_(given.x[0].expand_as(given.x))
    out = poisoned(tokens, N, DTYPES[0])
    linear.linear(given.x, given.weight, out=out, config=config, scratch=poisoned_scratch())
    assert torch.equal(out, out[0].expand_as(out))


@pytest.mark.parametrize(("row_tiles", "k"), [(9, 64), (10, 64), (13, 48), (23, 80), (9, 16)])
@pytest.mark.parametrize("tokens", [16, 40])
def test_the_last_row_tiles_are_right_however_few_blocks_programs_have_to_share(
    row_tiles: int, k: int, tokens: int
) -> None:
    """Behind whole turns of eight programs, or of two for each of three tiles of tokens, one to seven row tiles of one
    to five blocks each are left."""
    config = TileConfig(tokens=16, rows=32, block_k=16, stages=2, num_warps=4, group=2, programs=8)
    given, scratch = draw(tokens, torch.float32, n=32 * row_tiles, k=k), poisoned_scratch()
    out = poisoned(tokens, 32 * row_tiles, torch.float32)
    linear.linear(given.x, given.weight, out=out, config=config, scratch=scratch)
    assert_close(out, wide_linear(given.x, given.weight, None), torch.float32)
    assert not scratch.arrivals.any()


def test_programs_too_few_for_the_tiles_of_tokens_leave_each_tile_one() -> None:
    given = draw(96, DTYPES[0], seed=9)
    out = poisoned(96, N, DTYPES[0])
    linear.linear(given.x, given.weight, out=out, config=SHARED_TILE_CONFIGS[2])
    assert_close(out, wide_linear(given.x, given.weight, None), DTYPES[0])


@pytest.mark.parametrize("config", [FMA_CONFIGS[0], TILE_CONFIGS[0]], ids=pytest_ids)
def test_only_one_of_the_kernels_takes_or_writes_a_norm_without_its_root(config: LinearConfig) -> None:
    given = draw(2, DTYPES[0])
    rootless, written = gained_of(given.x, given.norm, parts=1), poisoned_gained(DOT_CONFIGS[0], given.bias, 2)
    with pytest.raises(ValueError, match="neither takes nor writes a norm that lacks its root"):
        linear.linear(rootless, given.weight, out=given.residual, config=config, eps=EPS)
    with pytest.raises(ValueError, match="neither takes nor writes a norm that lacks its root"):
        linear.linear(given.x, given.weight, out=given.residual, config=config, add=True, gained=written)


@pytest.mark.parametrize("config", [DOT_CONFIGS[0], TILE_CONFIGS[0]], ids=pytest_ids)
def test_a_norm_is_refused_where_it_would_not_be_taken(config: LinearConfig) -> None:
    given = draw(2, DTYPES[0])
    with pytest.raises(ValueError, match="does not norm its input"):
        linear.linear(given.x, given.weight, out=given.residual, config=config, norm=given.norm, eps=EPS)


@pytest.mark.parametrize("size", [(3 * 8 * N - 1, 64), (3 * 8 * N, 1)])
def test_a_scratch_too_small_is_refused(size: tuple[int, int]) -> None:
    given = draw(8, DTYPES[0])
    scratch = SplitScratch.allocate(max_values=size[0], max_tiles=size[1], device=DEVICE)
    for refused in (scratch, None):
        with pytest.raises(ValueError, match=r"of 8 x 44 needs a scratch of 1056 values, 2 tiles"):
            linear.linear(given.x, given.weight, out=given.residual, config=DOT_CONFIGS[1], scratch=refused)


@pytest.mark.parametrize("size", [(8 * 64 * 32 - 1, 64), (8 * 64 * 32, 3)])
def test_a_scratch_too_small_for_shared_tiles_is_refused(size: tuple[int, int]) -> None:
    given = draw(40, DTYPES[0])
    scratch = SplitScratch.allocate(max_values=size[0], max_tiles=size[1], device=DEVICE)
    config = replace(SHARED_TILE_CONFIGS[0], tokens=64)
    for refused in (scratch, None):
        with pytest.raises(ValueError, match=r"of 40 x 44 needs a scratch of 16384 values, 4 tiles"):
            linear.linear(given.x, given.weight, out=given.residual, config=config, scratch=refused)


def power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


SHARED_BYTES = 227 << 10  # of an SM, in bf16
SHAPES = [
    *[(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)],
    *[(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    *[(960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)],
    *[(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)],
    *[(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944), (152064, 3584)],
    *[(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (32000, 4096)],
    *[(7168, 5120), (5120, 5120), (34816, 5120), (5120, 17408), (151936, 5120)],
]
"""Of a model's linear layers and head, model after model."""


@pytest.mark.parametrize("shape", SHAPES)
def test_choice_is_a_configuration_the_kernels_can_run(shape: tuple[int, int]) -> None:
    assert isinstance(choose(1, *shape), FmaConfig)
    for tokens in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 4096):
        config = choose(tokens, *shape)
        if config is None:
            continue
        assert power_of_two(config.rows)
        assert power_of_two(config.block_k)
        assert config.num_warps in (1, 2, 4, 8)
        if isinstance(config, FmaConfig):
            continue
        assert config.prefetch_k == 0 or power_of_two(config.prefetch_k)
        tile_tokens = min(config.tokens, max(16, 1 << (tokens - 1).bit_length()))
        assert config.stages * (config.rows + tile_tokens) * config.block_k * 2 <= SHARED_BYTES
        if isinstance(config, TileConfig):
            assert power_of_two(config.tokens)


@pytest.mark.parametrize("max_tokens", [8, 100, 4096])
@pytest.mark.parametrize("first", range(0, len(SHAPES), 5))
def test_the_largest_scratch_suffices_for_every_choice_and_is_one_of_them(first: int, max_tokens: int) -> None:
    shapes = SHAPES[first : first + 5]
    values, tiles = largest_scratch(shapes, max_tokens)
    needed = [(0, 0)]
    for tokens in range(1, max_tokens + 1):
        for n, k in shapes:
            config = choose(tokens, n, k)
            if config is not None:
                needed.append(scratch_size(config, tokens, n))
    assert values == max(values for values, _ in needed)
    assert tiles == max(tiles for _, tiles in needed)


def test_a_model_without_shared_tiles_needs_no_scratch() -> None:
    assert largest_scratch([(192, 72), (72, 192)], 1) == (0, 0)


def test_gate_and_up_rows_of_many_tokens_are_tiles_where_their_memory_lies_even() -> None:
    assert isinstance(choose(512, 6144, 1024), TileConfig)
    assert choose(512, 4096, 1024) is None
    assert isinstance(choose(256, 28672, 4096), TileConfig)
    assert choose(256, 28672, 4092) is None
    for shape in ((4096, 1024), (1024, 2048), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096)):
        assert choose(2048, *shape) is None


@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("shape", [(192, 72), (72, 576)])
def test_chosen_configurations_equal_reference(shape: tuple[int, int], tokens: int) -> None:
    config = choose(tokens, *shape)
    assert config is not None
    given = draw(tokens, DTYPES[0], n=shape[0], k=shape[1], seed=6)
    out = poisoned(tokens, shape[0], DTYPES[0])
    linear.linear(given.x, given.weight, out=out, config=config, scratch=poisoned_scratch())
    assert_close(out, wide_linear(given.x, given.weight, None), DTYPES[0])
