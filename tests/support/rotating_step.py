"""A decode step for the kernels that rotate, write and attend, and what the references of these parts make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from support.attention_step import PAGE, exact_attention, make_step
from torch import Tensor

from gpu_runner.kernels import reference
from gpu_runner.kernels.attention_decode import DecodeTiling
from gpu_runner.kernels.attention_fused import FusedTiling, fused_decode_attention
from gpu_runner.kernels.work_list import WorkList, allocate_work_list, build_work_list

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# The interpreter does not know bf16 products.
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 1e-2 if ON_GPU else 1e-5
POISON = -7.0
BORDERS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100]
EPS = 1e-6
Tiling = FusedTiling | DecodeTiling | None


class RotatingStep:
    """A pure decode step whose newest keys and values are in `qkv` only: NaN in the pages. attend: the kernel."""

    def __init__(
        self, lens: list[int], *, heads: int, kv_heads: int, head_dim: int, max_rows: int, padding: int = 0,
        normed: bool = True, window: int | None = None, target_programs: int = 64, dtype: torch.dtype = DTYPE,
        done: tuple[int, ...] = (), attend: Callable[..., None] = fused_decode_attention,
    ) -> None:  # fmt: skip
        step = make_step(
            decode_lens=lens, chunks=[], heads=heads, kv_heads=kv_heads, head_dim=head_dim, max_rows=max_rows,
            padding=padding, dtype=dtype, device=DEVICE,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(len(lens) + heads)
        rows, tokens = len(lens), len(step.q)
        qkv = torch.randn((tokens, (heads + 2 * kv_heads) * head_dim), generator=generator)
        qkv[rows:] = torch.nan
        self.qkv = qkv.to(dtype).to(DEVICE)
        norms = [1 + 0.3 * torch.randn(head_dim, generator=generator) for _ in range(2)]
        self.norms = [norm.to(dtype).to(DEVICE) if normed else None for norm in norms]
        inv_freq = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
        self.rotation = reference.rope_cos_sin(torch.arange(max(lens) + 1), inv_freq).to(DEVICE)
        self.attend = attend
        self.inv_freq = inv_freq.to(DEVICE)
        self.scale = head_dim**-0.5
        last = torch.tensor(lens, device=DEVICE) - 1
        page = step.page_table[step.row_slot[:rows].long(), last // PAGE].long()
        page[list(done)] = 0
        self.kv_index = (page * PAGE + last % PAGE).to(torch.int32)
        self.positions = last.to(torch.int32)
        step.kv_layer[:, page, :, last % PAGE] = torch.nan
        self.step = step
        self.work = self._work(max_rows, window, target_programs)
        self.expected_kv = step.kv_layer.clone()
        self.expected = self._exact(rows)

    def _work(self, max_rows: int, window: int | None, target_programs: int) -> WorkList:
        step = self.step
        heads, head_dim = step.q.shape[1:]
        work = allocate_work_list(
            max_rows=max_rows, max_tokens=max(max_rows, len(step.q)), num_heads=heads,
            num_kv_heads=step.kv_layer.shape[2], head_dim=head_dim, window=window, device=torch.device(DEVICE),
            target_programs=target_programs, split_step=64,
        )  # fmt: skip
        work.partial_out.fill_(torch.nan)
        work.partial_lse.fill_(torch.nan)
        self.build(work)
        return work

    def build(self, work: WorkList) -> None:
        step = self.step
        build_work_list(
            work, counts=step.counts, row_slot=step.row_slot, row_start=step.row_start, row_len=step.row_len,
            row_token=step.row_token, page_table=step.page_table, prefill=False,
        )  # fmt: skip

    def _exact(self, rows: int) -> Tensor:
        """Writes the newest keys and values into `expected_kv` too."""
        step = self.step

        def rotate_and_write(kv_layer: Tensor, kv_index: Tensor) -> Tensor:
            return reference.qk_norm_rope_write(
                self.qkv[:rows], self.rotation[self.positions.long()], kv_layer, kv_index.long(),
                num_heads=step.q.shape[1], q_norm=self.norms[0], k_norm=self.norms[1], eps=EPS,
            )  # fmt: skip

        rotate_and_write(self.expected_kv, self.kv_index)
        # Rows that have ended share a place of the dummy page: here each row has a page of its own.
        own = self.expected_kv.new_zeros((2, rows, *self.expected_kv.shape[2:]))
        q = rotate_and_write(own, torch.arange(rows, device=DEVICE) * PAGE)
        newest = own[:, :, :, 0].to("cpu", torch.float64)  # [2, rows, kv_heads, head_dim]
        keys = [torch.cat([old[:-1], newest[0, row : row + 1]]) for row, old in enumerate(step.keys)]
        values = [torch.cat([old[:-1], newest[1, row : row + 1]]) for row, old in enumerate(step.values)]
        rotated = replace(step, q=torch.cat([q, step.q[rows:]]), keys=keys, values=values)
        return exact_attention(rotated, scale=self.scale, window=self.work.window)

    def launch(self, out: Tensor, tiling: Tiling = None, **options: Any) -> None:
        self.attend(
            self.qkv, self.step.kv_layer, out, self.work, positions=self.positions, kv_index=self.kv_index,
            counts=self.step.counts, page_table=self.step.page_table, rotation=self.rotation, q_norm=self.norms[0],
            k_norm=self.norms[1], eps=EPS, scale=self.scale, tiling=tiling, **options,
        )  # fmt: skip

    def run(self, tiling: Tiling = None) -> Tensor:
        out = torch.full_like(self.step.q, POISON)
        self.launch(out, tiling)
        return out

    def check(self, tiling: Tiling = None, tolerance: float = TOLERANCE) -> None:
        """Every element of the output and of the pages, and that the kernel left no arrival behind."""
        out = self.run(tiling).cpu().to(torch.float64)
        rows = self.step.num_decode_rows
        assert float((out[:rows] - self.expected).norm() / self.expected.norm()) < tolerance
        assert float((out[:rows] - self.expected).abs().max()) < 5 * tolerance
        assert bool((out[rows:] == 0).all())
        torch.testing.assert_close(
            self.step.kv_layer[:, 1:], self.expected_kv[:, 1:], rtol=tolerance, atol=tolerance, equal_nan=True
        )
        assert not bool(self.work.arrived.any())
