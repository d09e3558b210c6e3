"""The qkv product that norms, rotates and writes its heads, against the references one after the other, on the GPU or
under the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from support.attention_step import AttentionStep, make_step
from torch import Tensor

from gpu_runner.kernels import cuda_ops, reference
from gpu_runner.kernels.cuda_ops import CudaMeta, CudaOps
from gpu_runner.kernels.decode_way import DecodeWay
from gpu_runner.kernels.linear_config import TileConfig, choose_heads
from gpu_runner.kernels.linear_heads import qkv_norm_rope_write
from gpu_runner.kernels.residual import Gained, NormedLinear, Residual
from gpu_runner.kernels.step_meta import new_step_meta
from gpu_runner.kernels.work_list import LARGE_CUT, allocate_work_list
from gpu_runner.schedule.buckets import token_buckets

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter does not know bf16 products.
DTYPES = [torch.bfloat16, torch.float32] if ON_GPU else [torch.float32]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
PAGE = 16
EPS, X_EPS = 1e-6, 1e-2
K = 72

# Heads of queries, of keys, dimensions: groups of one and more; tiles of one kind of head, of several, not all of them.
SHAPES = [(4, 2, 64), (3, 1, 128), (2, 2, 32), (5, 1, 64)]
# One head in a tile and two, a tile that holds all tokens and several, groups of one and more.
TILES = [
    TileConfig(tokens=16, rows=128, block_k=32, stages=2, num_warps=4, group=2, prefetch_k=64),
    TileConfig(tokens=64, rows=128, block_k=64, stages=2, num_warps=4, group=1),
]


@dataclass(frozen=True)
class Given:
    x: Tensor  # [T, K]
    weight: Tensor  # [N, K]
    bias: Tensor | None
    positions: Tensor
    kv_index: Tensor
    inv_freq: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int

    def empty_cache(self) -> Tensor:
        pages = len(self.x) // PAGE + 3
        shape = (2, pages, self.kv_heads, PAGE, self.head_dim)
        return torch.full(shape, torch.nan, dtype=self.x.dtype, device=DEVICE)


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def draw(
    tokens: int, shape: tuple[int, int, int], dtype: torch.dtype, *, normed: bool = False, bias: bool = False
) -> Given:
    """Places are all different, in no order, and leave some free; the last two tokens, if there are more, write to the
    dummy page."""
    heads, kv_heads, head_dim = shape
    rows = (heads + 2 * kv_heads) * head_dim
    generator = torch.Generator().manual_seed(tokens)
    kv_index = PAGE + torch.randperm((tokens // PAGE + 2) * PAGE, generator=generator)[:tokens]
    if tokens > 2:
        kv_index[-2:] = 3
    positions = torch.randint(131_072, (tokens,), generator=generator)
    positions[0] = 131_071
    return Given(
        x=normal(tokens, K, dtype=dtype, seed=1),
        weight=normal(rows, K, dtype=dtype, seed=2) / K**0.5,
        bias=normal(rows, dtype=dtype, seed=3) if bias else None,
        positions=positions.to(torch.int32).to(DEVICE),
        kv_index=kv_index.to(torch.int32).to(DEVICE),
        inv_freq=(500_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)).to(DEVICE),
        q_norm=1 + 0.3 * normal(head_dim, dtype=dtype, seed=4) if normed else None,
        k_norm=1 + 0.3 * normal(head_dim, dtype=dtype, seed=5) if normed else None,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def gained_of(x: Tensor, gain: Tensor) -> Gained:
    """In three parts of columns that are no two alike; what lies behind them in memory is poisoned."""
    memory = torch.full((20, len(x)), torch.nan, device=DEVICE)
    for part, columns in enumerate(x.float().split([8, 24, K - 32], dim=1)):
        memory[part] = columns.square().sum(dim=1)
    return Gained(gain=gain, values=(x.float() * gain.float()).to(x.dtype), squares=memory[:3])


def run(given: Given, config: TileConfig, *, x: Gained | None = None) -> tuple[Tensor, Tensor]:
    """Queries and pages. x: in place of that which is given."""
    out = torch.full((len(given.x), given.heads, given.head_dim), torch.nan, dtype=given.x.dtype, device=DEVICE)
    kv_layer = given.empty_cache()
    qkv_norm_rope_write(
        *(x or given.x, given.weight, given.positions, given.kv_index, given.inv_freq, kv_layer),
        out=out,
        config=config,
        q_norm=given.q_norm,
        k_norm=given.k_norm,
        eps=EPS,
        bias=given.bias,
        x_eps=X_EPS,
    )
    return out, kv_layer


def expected_of(given: Given) -> tuple[Tensor, Tensor]:
    """The product in float64, rounded to x's type as the unfused path does."""
    product = given.x.double() @ given.weight.double().t()
    if given.bias is not None:
        product += given.bias
    kv_layer = given.empty_cache()
    q = reference.qk_norm_rope_write(
        product.to(given.x.dtype),
        reference.rope_cos_sin(given.positions, given.inv_freq),
        kv_layer,
        given.kv_index.long(),
        num_heads=given.heads,
        q_norm=given.q_norm,
        k_norm=given.k_norm,
        eps=EPS,
    )
    return q, kv_layer


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Relative error of the whole, and none of an element beyond a few roundings; NaN never passes."""
    tolerance = TOLERANCE[actual.dtype]
    error = actual.double() - expected.double()
    assert float(error.norm() / expected.double().norm()) < tolerance
    assert float(error.abs().max()) < 10 * tolerance * float(expected.abs().max())


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Of all queries, and of all places in pages but those of the dummy; where nothing was written nothing is."""
    (q, kv_layer), (expected_q, expected_kv) = actual, expected
    assert_close(q, expected_q)
    written = ~expected_kv[:, 1:].isnan()
    assert torch.equal(~kv_layer[:, 1:].isnan(), written)
    for plane in range(2):
        assert_close(kv_layer[plane, 1:][written[plane]], expected_kv[plane, 1:][written[plane]])


parametrize_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
parametrize_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@parametrize_dtypes
@parametrize_shapes
@pytest.mark.parametrize(("normed", "bias"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize(("config", "tokens"), [(TILES[0], 37), (TILES[1], 65), (TILES[1], 1)], ids=str)
def test_heads_equal_those_of_separate_operations(
    config: TileConfig, tokens: int, normed: bool, bias: bool, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    given = draw(tokens, shape, dtype, normed=normed, bias=bias)
    assert_same(run(given, config), expected_of(given))


@parametrize_dtypes
@pytest.mark.parametrize("tokens", [16, 32, 129])
def test_tokens_fill_tiles_or_leave_one_in_the_last(tokens: int, dtype: torch.dtype) -> None:
    given = draw(tokens, SHAPES[0], dtype, normed=True)
    assert_same(run(given, replace(TILES[0], group=4)), expected_of(given))


@parametrize_dtypes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("config", TILES, ids=str)
def test_heads_of_a_norm_that_lacks_its_root_equal_those_behind_the_norm(
    config: TileConfig, bias: bool, dtype: torch.dtype
) -> None:
    given = draw(37, SHAPES[0], dtype, normed=True, bias=bias)
    gain = 1 + 0.3 * normal(K, dtype=dtype, seed=6)
    found = run(given, config, x=gained_of(given.x, gain))
    assert_same(found, expected_of(replace(given, x=reference.rms_norm(given.x, gain, X_EPS))))


def test_values_are_the_product_and_all_is_the_same_again() -> None:
    """Of heads that are not normed, at position 0: nothing is changed behind the product."""
    given = draw(50, SHAPES[0], DTYPES[0])
    given.positions.zero_()
    q, kv_layer = run(given, TILES[0])
    product = F.linear(given.x.double(), given.weight.double()).view(50, -1, given.head_dim)
    queries, keys, values = product.split([given.heads, given.kv_heads, given.kv_heads], dim=1)
    page, offset = given.kv_index[:-2].long() // PAGE, given.kv_index[:-2].long() % PAGE
    assert_close(q, queries)
    assert_close(kv_layer[0, page, :, offset], keys[:-2])
    assert_close(kv_layer[1, page, :, offset], values[:-2])
    again, kv_again = run(given, TILES[0])
    assert torch.equal(q, again)
    assert torch.equal(kv_layer[:, 1:].nan_to_num(7.0), kv_again[:, 1:].nan_to_num(7.0))


def test_rotation_is_exact_at_large_positions() -> None:
    """Products of one in the first half and of zero in the second leave cosines and sines; float64 of the same float32
    angles."""
    positions = torch.tensor([1, 4096, 105_616, 131_071, 1_000_003], dtype=torch.int32, device=DEVICE)
    inv_freq = torch.logspace(0, -5, 32).to(DEVICE)
    x, weight = torch.ones(5, 64, device=DEVICE), torch.zeros(3 * 64, 64, device=DEVICE)
    weight[:32, 0] = 1.0
    q = torch.full((5, 1, 64), torch.nan, device=DEVICE)
    qkv_norm_rope_write(
        *(x, weight, positions, torch.zeros_like(positions), inv_freq, torch.zeros(2, 1, 1, PAGE, 64, device=DEVICE)),
        out=q,
        config=replace(TILES[0], rows=64),
        q_norm=None,
        k_norm=None,
        eps=EPS,
    )
    angles = (positions.float()[:, None] * inv_freq).double()
    torch.testing.assert_close(q[:, 0, :32].double(), angles.cos(), rtol=0, atol=2e-6)
    torch.testing.assert_close(q[:, 0, 32:].double(), angles.sin(), rtol=0, atol=2e-6)


def test_what_is_no_qkv_of_whole_heads_is_refused() -> None:
    given = draw(3, SHAPES[0], torch.float32)
    with pytest.raises(ValueError, match="does not give whole heads of 64 rows"):
        run(given, replace(TILES[0], rows=32))
    with pytest.raises(ValueError, match="does not give whole heads"):
        run(given, replace(TILES[0], programs=4))
    with pytest.raises(ValueError, match="511 rows; 8 heads of 64"):
        run(replace(given, weight=given.weight[:-1]), TILES[0])
    with pytest.raises(ValueError, match="both normed"):
        run(replace(given, q_norm=given.x[0]), TILES[0])


SHARED_BYTES = 227 << 10  # of an SM, in bf16


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("shape", [(4096, 1024), (6144, 4096), (6144, 1024), (960, 576), (3072, 2048), (4608, 3584)])
def test_choice_is_of_many_tokens_and_one_that_the_kernel_can_run(shape: tuple[int, int], head_dim: int) -> None:
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        assert choose_heads(tokens, *shape, head_dim) is None
    for tokens in (65, 96, 128, 256, 384, 512, 1024, 4096, 8192):
        config = choose_heads(tokens, *shape, head_dim)
        if config is not None:
            assert config.programs == 0
            assert config.rows % head_dim == 0
            assert config.stages * (config.rows + config.tokens) * config.block_k * 2 <= SHARED_BYTES


def test_heads_are_in_the_product_at_the_sizes_where_that_is_faster() -> None:
    sizes = token_buckets(8192)

    def left_out(n: int, k: int) -> list[int]:
        return [tokens for tokens in sizes if tokens > 64 and choose_heads(tokens, n, k, 128) is None]

    assert left_out(4096, 1024) == [1280]
    assert left_out(6144, 4096) == [
        *(80, 96, 112, 128, 160, 192, 256, 320, 384, 448, 512),
        *(768, 896, 1024, 1536, 1792, 2560, 3072),
    ]
    assert all(choose_heads(tokens, n, k, 128) is None for n, k in ((960, 576), (10240, 8192)) for tokens in sizes)


def test_heads_wider_than_a_tile_or_rows_of_uneven_memory_are_left_to_kernels_of_their_own() -> None:
    assert choose_heads(256, 4096, 1024, 128) is not None
    assert choose_heads(256, 4096, 1024, 256) is None
    assert choose_heads(256, 4096, 1020, 128) is None


# ---------------------------------------------------------------------------------------------------- in a layer


def attend(step: AttentionStep, given: Given, kv_layer: Tensor, *, gained: bool) -> Tensor:
    """By `CudaOps`, of the step's rows. gained: the layer before has left the norm without its root."""
    work = allocate_work_list(
        max_rows=8, max_tokens=len(given.x), num_heads=given.heads, num_kv_heads=given.kv_heads,
        head_dim=given.head_dim, window=None, device=DEVICE,
    )  # fmt: skip
    step.list_work(work, prefill=True)
    meta = new_step_meta(max_rows=8, max_tokens=len(given.x), device=DEVICE)
    meta.counts.copy_(step.counts)
    meta.positions.copy_(given.positions)
    meta.kv_index.copy_(given.kv_index)
    gain = 1 + 0.1 * given.x[0]
    residual = Residual(given.x, gained_of(given.x, gain) if gained else None)
    return CudaOps().attend(
        *(residual, NormedLinear(gain, X_EPS, given.weight, given.bias), kv_layer),
        CudaMeta(step=meta, work={None: work}, page_table=step.page_table, prefill=True, way=DecodeWay(LARGE_CUT)),
        inv_freq=given.inv_freq,
        num_heads=given.heads,
        q_norm=given.q_norm,
        k_norm=given.k_norm,
        eps=EPS,
        scale=given.head_dim**-0.5,
        window=None,
    )


@parametrize_dtypes
@pytest.mark.parametrize("gained", [False, True])
def test_attention_is_the_same_with_heads_in_the_product_and_behind_it(
    gained: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(
        decode_lens=[5, 33], chunks=[(0, 20), (30, 18)], heads=4, kv_heads=2, head_dim=64, max_rows=8, dtype=dtype,
        device=DEVICE.type,
    )  # fmt: skip
    positions = torch.cat([torch.arange(start, start + length) for _, start, length in step.rows]).to(DEVICE)
    slots = torch.cat([step.row_slot[row].repeat(length) for row, (_, _, length) in enumerate(step.rows)])
    kv_index = step.page_table[slots.long(), positions // PAGE] * PAGE + (positions % PAGE).int()
    given = replace(
        draw(step.num_tokens, SHAPES[0], dtype, normed=True, bias=True), positions=positions.int(), kv_index=kv_index
    )
    results = []
    for config in (None, replace(TILES[0], prefetch_k=0)):
        monkeypatch.setattr(cuda_ops, "_chosen_heads", Mock(return_value=config))
        kv_layer = step.kv_layer.clone()
        out = attend(step, given, kv_layer, gained=gained)
        results.append((out, kv_layer.nan_to_num(7.0)))
    (expected, expected_kv), (out, kv_layer) = results
    assert_close(out, expected)
    assert_close(kv_layer, expected_kv)
    assert not torch.equal(kv_layer, step.kv_layer.nan_to_num(7.0))
