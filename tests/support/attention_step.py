"""A random ragged step of paged attention, its exact result, and the buffers that the attention kernels take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_runner.kernels.work_list import WorkList, build_work_list

PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """Rows' keys lie in random pages; pages that no row owns, page 0 and unwritten places of a last page are NaN."""

    num_decode_rows: int
    num_tokens: int  # without padding
    q: Tensor  # [T, heads, head_dim], T with padding; NaN there
    kv_layer: Tensor  # [2, num_pages, kv_heads, PAGE, head_dim]
    page_table: Tensor  # [num_slots, pages_per_seq]
    counts: Tensor
    row_slot: Tensor
    row_start: Tensor
    row_len: Tensor
    row_token: Tensor
    keys: list[Tensor]  # of each row, [end, kv_heads, head_dim] float64, on the CPU
    values: list[Tensor]

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """First token, start and length of each row."""
        count = len(self.keys)
        columns = (self.row_token, self.row_start, self.row_len)
        tokens, starts, lengths = (column[:count].tolist() for column in columns)
        return list(zip(tokens, starts, lengths, strict=True))

    def list_work(self, work: WorkList, *, prefill: bool, page_table: Tensor | None = None) -> None:
        """Build the work list of the step. page_table: in place of its own."""
        build_work_list(
            work,
            counts=self.counts,
            row_slot=self.row_slot,
            row_start=self.row_start,
            row_len=self.row_len,
            row_token=self.row_token,
            page_table=self.page_table if page_table is None else page_table,
            prefill=prefill,
        )


def make_step(
    *,
    decode_lens: list[int],
    chunks: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_rows: int,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> AttentionStep:
    """decode_lens: keys that each decode row sees, its own included. chunks: start and length of each prefill row."""
    generator = torch.Generator().manual_seed(seed)
    starts = [length - 1 for length in decode_lens] + [start for start, _ in chunks]
    lengths = [1] * len(decode_lens) + [length for _, length in chunks]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    tokens = torch.tensor([0, *lengths]).cumsum(0)
    num_rows, num_tokens = len(starts), int(tokens[-1])
    pages_per_seq = -(-max(ends, default=1) // PAGE) + 1
    num_slots = max_rows + 2
    owned = sum(-(-end // PAGE) for end in ends)
    pages = (torch.randperm(owned + 3, generator=generator) + 1)[:owned]

    kv_layer = torch.full((2, owned + 4, kv_heads, PAGE, head_dim), torch.nan, dtype=torch.float64)
    page_table = torch.zeros((num_slots, pages_per_seq), dtype=torch.int32)
    slots = torch.randperm(num_slots, generator=generator)[:num_rows]
    keys, values, used = [], [], 0
    for slot, end in zip(slots.tolist(), ends, strict=True):
        own = pages[used : used + -(-end // PAGE)]
        used += len(own)
        page_table[slot, : len(own)] = own.to(torch.int32)
        # Rounded to the kernel's type, so that the reference starts from the same numbers.
        both = torch.randn((2, end, kv_heads, head_dim), generator=generator).to(dtype).to(torch.float64)
        position = torch.arange(end)
        kv_layer[:, own[position // PAGE], :, position % PAGE] = both.transpose(0, 1)
        keys.append(both[0])
        values.append(both[1])

    q = torch.randn((num_tokens + padding, heads, head_dim), generator=generator)
    q[num_tokens:] = torch.nan

    def column(rows: list[int]) -> Tensor:
        return torch.tensor(rows + [-7] * (max_rows - num_rows), dtype=torch.int32, device=device)

    return AttentionStep(
        num_decode_rows=len(decode_lens),
        num_tokens=num_tokens,
        q=q.to(dtype).to(device),
        kv_layer=kv_layer.to(dtype).to(device),
        page_table=page_table.to(device),
        counts=torch.tensor([len(decode_lens), num_rows, num_tokens, 0], dtype=torch.int32, device=device),
        row_slot=column(slots.tolist()),
        row_start=column(starts),
        row_len=column(lengths),
        row_token=column(tokens[:-1].tolist()),
        keys=keys,
        values=values,
    )


def exact_attention(step: AttentionStep, *, scale: float, window: int | None) -> Tensor:
    """[num_tokens, heads, head_dim] float64, on the CPU."""
    q = step.q[: step.num_tokens].to("cpu", torch.float64)
    out = torch.full_like(q, torch.nan)
    for (token, start, length), keys, values in zip(step.rows, step.keys, step.values, strict=True):
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
        position = torch.arange(start + length)
        own = position[start:, None]
        seen = position <= own
        if window is not None:
            seen &= position > own - window
        scores = torch.einsum("qhd,khd->hqk", q[token : token + length], keys) * scale
        share = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        out[token : token + length] = torch.einsum("hqk,khd->qhd", share, values)
    return out
