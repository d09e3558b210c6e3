"""The plain-torch operations against independent arithmetic in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from gpu_runner.kernels import reference
from gpu_runner.kernels.ops import BatchMeta

PAGE = 16
HEAD_DIM = 8


def naive_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """Softmax written out. q: [count, heads, d]; keys, values: [end, kv_heads, d], q's tokens last in them."""
    count, heads, _ = q.shape
    end, kv_heads, _ = keys.shape
    out = torch.empty(q.shape, dtype=torch.float64)
    for token in range(count):
        last = end - count + token
        first = 0 if window is None else max(0, last + 1 - window)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = (keys[first : last + 1, shared].double() @ q[token, head].double()) * scale
            weights = (scores - scores.max()).exp()
            out[token, head] = (weights / weights.sum()) @ values[first : last + 1, shared].double()
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("block_bytes", [reference.BLOCK_BYTES, 1, 5000])
def test_paged_attention_equals_softmax_over_each_rows_own_tokens(
    heads: int, kv_heads: int, window: int | None, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "BLOCK_BYTES", block_bytes)
    generator = torch.Generator().manual_seed(heads)
    starts = np.array([0, 15, 16, 17, 31, 99, 0, 0, 16, 31, 5], dtype=np.int32)
    counts = np.array([1, 1, 1, 1, 1, 1, 1, 16, 17, 2, 60], dtype=np.int32)
    num_decode_rows, num_rows, pages_per_seq, num_slots = 6, len(starts), 8, 13
    slots = torch.randperm(num_slots, generator=generator)[:num_rows]
    pages = (torch.randperm(num_slots * pages_per_seq, generator=generator) + 1).view(num_slots, pages_per_seq)
    page_table = torch.zeros((num_slots, pages_per_seq), dtype=torch.int32)
    kv_layer = torch.full((2, num_slots * pages_per_seq + 1, kv_heads, PAGE, HEAD_DIM), torch.nan)
    keys, values = [], []
    for slot, end in zip(slots.tolist(), (starts + counts).tolist(), strict=True):
        keys.append(torch.randn((end, kv_heads, HEAD_DIM), generator=generator))
        values.append(torch.randn((end, kv_heads, HEAD_DIM), generator=generator))
        page_table[slot, : -(-end // PAGE)] = pages[slot, : -(-end // PAGE)].to(torch.int32)
        for position in range(end):
            kv_layer[0, pages[slot, position // PAGE], :, position % PAGE] = keys[-1][position]
            kv_layer[1, pages[slot, position // PAGE], :, position % PAGE] = values[-1][position]
    q = torch.randn((int(counts.sum()), heads, HEAD_DIM), generator=generator)
    positions = [torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    unused = torch.empty(0, dtype=torch.int64)
    meta = BatchMeta(num_decode_rows, starts, counts, slots, torch.cat(positions), unused, page_table)
    actual = reference.paged_attention(q, kv_layer, meta, scale=0.3, window=window)
    expected = [
        naive_attention(part, key, value, 0.3, window)
        for part, key, value in zip(q.split(counts.tolist()), keys, values, strict=True)
    ]
    torch.testing.assert_close(actual.double(), torch.cat(expected), rtol=1e-5, atol=1e-6)


def test_padding_tokens_after_the_last_row_are_harmless() -> None:
    kv_layer = torch.randn(2, 2, 1, PAGE, HEAD_DIM)
    empty = torch.empty(0, dtype=torch.int64)
    page_table = torch.tensor([[1]], dtype=torch.int32)
    one = np.ones(1, dtype=np.int32)
    meta = BatchMeta(1, one, one, torch.tensor([0]), torch.tensor([1]), empty, page_table)
    q = torch.randn(4, 1, HEAD_DIM)
    padded = reference.paged_attention(q, kv_layer, meta, scale=1.0)
    assert torch.equal(padded[:1], reference.paged_attention(q[:1], kv_layer, meta, scale=1.0))
    assert padded[1:].isfinite().all()


def test_rotation_of_queries_and_keys_equals_transformers_and_lands_in_the_pages() -> None:
    heads, kv_heads, positions = 4, 2, torch.tensor([0, 3, 15, 16, 4000])
    config = LlamaConfig(hidden_size=heads * HEAD_DIM, num_attention_heads=heads, max_position_embeddings=8192)
    rotary = LlamaRotaryEmbedding(config)
    qkv = torch.randn(len(positions), (heads + 2 * kv_heads) * HEAD_DIM)
    q, k, v = (part.unflatten(1, (-1, HEAD_DIM)) for part in qkv.split([32, 16, 16], dim=1))
    cos, sin = rotary(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)

    kv_layer = torch.full((2, 6, kv_heads, PAGE, HEAD_DIM), torch.nan)
    kv_index = torch.tensor([5 * PAGE + 1, 2 * PAGE, 2 * PAGE + 15, 3 * PAGE + 7, 0])
    cos_sin = reference.rope_cos_sin(positions, rotary.inv_freq)
    rotated = reference.qk_norm_rope_write(
        qkv, cos_sin, kv_layer, kv_index, num_heads=heads, q_norm=None, k_norm=None, eps=1e-6
    )
    torch.testing.assert_close(rotated, expected_q[0].transpose(0, 1))
    written = kv_layer[:, kv_index // PAGE, :, kv_index % PAGE]
    torch.testing.assert_close(written[:, 0], expected_k[0].transpose(0, 1))
    assert torch.equal(written[:, 1], v)
    assert int(kv_layer.isfinite().sum()) == written.numel()


def test_query_and_key_heads_are_normed_before_they_are_rotated() -> None:
    q_norm, k_norm = Qwen3RMSNorm(HEAD_DIM, eps=1e-5), Qwen3RMSNorm(HEAD_DIM, eps=1e-5)
    q_norm.weight.data.uniform_(0.5, 2.0)
    k_norm.weight.data.uniform_(0.5, 2.0)
    qkv = torch.randn(3, 4 * HEAD_DIM)
    cos_sin = reference.rope_cos_sin(torch.tensor([1, 2, 3]), torch.rand(HEAD_DIM // 2))
    kv_index = torch.tensor([16, 17, 18])
    heads = qkv.unflatten(1, (4, HEAD_DIM))
    with torch.no_grad():
        normed = torch.cat((q_norm(heads[:, :2]), k_norm(heads[:, 2:3]), heads[:, 3:]), dim=1).flatten(1)
    results = []
    for source, q_weight, k_weight in ((qkv, q_norm.weight.data, k_norm.weight.data), (normed, None, None)):
        kv_layer = torch.zeros(2, 2, 1, PAGE, HEAD_DIM)
        q = reference.qk_norm_rope_write(
            source, cos_sin, kv_layer, kv_index, num_heads=2, q_norm=q_weight, k_norm=k_weight, eps=1e-5
        )
        results.append((q, kv_layer))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x, weight = torch.randn(3, 16), torch.rand(16)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)


def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    gate_up = torch.tensor([[0.0, 2.0, 3.0, -1.0]])
    expected = torch.tensor([[0.0, 2.0 / (1.0 + math.exp(-2.0)) * -1.0]])
    torch.testing.assert_close(reference.silu_mul(gate_up), expected)
