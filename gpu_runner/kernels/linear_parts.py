"""What the kernels of skinny linear layers share: which rows a program owns, a norm's root, the epilogue."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_rows(tile, N: tl.constexpr, ROWS: tl.constexpr, GATE_UP: tl.constexpr):
    """Rows of W [N, K] in a program's tile, [ROWS], and which of them exist.

    Of a gate-up weight, even places hold gate rows and odd places the up rows that belong to them.
    """
    place = tl.arange(0, ROWS)
    if GATE_UP:
        output = tile * (ROWS // 2) + place // 2
        return output + (place % 2) * (N // 2), output < N // 2
    else:
        row = tile * ROWS + place
        return row, row < N


@triton.jit
def squares_of(squares, token, num_tokens, num_parts, PARTS: tl.constexpr):
    """[PARTS, tokens] of a `residual.Gained`'s squares; zeros past the last token and part."""
    source = tl.arange(0, PARTS)[:, None]
    mask = (source < num_parts) & (token < num_tokens)[None, :]
    return tl.load(squares + source * num_tokens + token[None, :], mask=mask, other=0.0)


@triton.jit
def inverse_root(squares, eps, K: tl.constexpr):
    """[tokens], what the sums of a `residual.Gained` lack. squares: as `squares_of` has them."""
    return tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit
def output_places(out, token, tile, num_tokens, N: tl.constexpr, ROWS: tl.constexpr, GATE_UP: tl.constexpr):
    """Where a tile's outputs for `token` lie, [tokens, columns] pointers, and which of them exist."""
    width: tl.constexpr = N // 2 if GATE_UP else N
    columns: tl.constexpr = ROWS // 2 if GATE_UP else ROWS
    column = tile * columns + tl.arange(0, columns)
    places = out + token.to(tl.int64)[:, None] * width + column[None, :]
    return places, (token[:, None] < num_tokens) & (column[None, :] < width)


@triton.jit
def row_values(line, tile, N: tl.constexpr, ROWS: tl.constexpr, GATE_UP: tl.constexpr, EXISTS: tl.constexpr):
    """[1, ROWS] float32: of a bias or gain, `line`, [N], what belongs to the tile's rows; zeros where there is none."""
    if EXISTS:
        row, exists = weight_rows(tile, N, ROWS, GATE_UP)
        return tl.load(line + row, mask=exists, other=0.0).to(tl.float32)[None, :]
    else:
        return tl.zeros((1, ROWS), dtype=tl.float32)


@triton.jit
def prefetch_to_l2(row_start, start, K: tl.constexpr, DEPTH_K: tl.constexpr):
    """Ask for the first DEPTH_K weights of each row, one request for each 128 bytes. row_start: [ROWS, 1] pointers."""
    LINE: tl.constexpr = 64
    k = tl.minimum(start + tl.arange(0, DEPTH_K // LINE) * LINE, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(row_start + k[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def silu_product(gate, up, DTYPE: tl.constexpr):
    """silu(gate) * up, float32, rounding to the activations' type DTYPE where the unfused path does."""
    gate = gate.to(DTYPE).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up.to(DTYPE).to(tl.float32)


@triton.jit
def outputs_of(y, residual, DTYPE: tl.constexpr, GATE_UP: tl.constexpr, ADD: tl.constexpr):
    """SiLU and product, or sum with the residual, rounding to the activations' type DTYPE where the unfused path does.

    y: [tokens, ROWS] float32, with the bias. residual: [tokens, ROWS] if ADD. Returns float32, rounded by the store.
    """
    if GATE_UP:
        gate, up = tl.split(tl.reshape(y, (y.shape[0], y.shape[1] // 2, 2)))
        return silu_product(gate, up, DTYPE)
    elif ADD:
        return y.to(DTYPE).to(tl.float32) + residual.to(tl.float32)
    else:
        return y
