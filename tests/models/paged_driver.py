"""Runs a decoder over chosen rows, with scattered pages and every value that no token wrote set to NaN."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.models.decoder import Decoder


class PagedDriver:
    def __init__(self, decoder: Decoder, *, num_slots: int, max_tokens: int) -> None:
        config = decoder.config
        pages_per_seq = -(-max_tokens // PAGE_SIZE)
        num_pages = num_slots * pages_per_seq
        shuffled = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7)) + 1
        self._decoder = decoder
        self._all_pages = shuffled.view(num_slots, pages_per_seq).to(torch.int32)
        self._page_table = torch.zeros_like(self._all_pages)
        shape = (config.num_layers, 2, num_pages + 1, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        self._kv_cache = torch.full(shape, torch.nan)
        self._lengths = [0] * num_slots

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[int, Sequence[int]]], *, num_decode_rows: int) -> list[Tensor]:
        """Compute each row's (slot, new tokens); returns the logits of each row's tokens, [row_len, vocab]."""
        starts = [self._lengths[slot] for slot, _ in rows]
        counts = [len(tokens) for _, tokens in rows]
        positions, kv_index = [], []
        for (slot, _), start, count in zip(rows, starts, counts, strict=True):
            for position in range(start, start + count):
                page = int(self._all_pages[slot, position // PAGE_SIZE])
                self._page_table[slot, position // PAGE_SIZE] = page
                positions.append(position)
                kv_index.append(page * PAGE_SIZE + position % PAGE_SIZE)
            self._lengths[slot] = start + count
        meta = BatchMeta(
            num_decode_rows=num_decode_rows,
            row_start=np.array(starts, dtype=np.int32),
            row_len=np.array(counts, dtype=np.int32),
            row_slot=torch.tensor([slot for slot, _ in rows]),
            positions=torch.tensor(positions),
            kv_index=torch.tensor(kv_index),
            page_table=self._page_table,
        )
        token_ids = torch.tensor([token for _, tokens in rows for token in tokens])
        logits = self._decoder.logits(self._decoder.forward(token_ids, meta, self._kv_cache))
        return list(torch.split(logits, counts))

    def prefill(self, slot: int, tokens: Sequence[int], *, chunk: int) -> Tensor:
        """Logits of all of the row's tokens, computed `chunk` at a time."""
        parts = [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]
        return torch.cat([self.step([(slot, part)], num_decode_rows=0)[0] for part in parts])

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Greedy continuations of all prompts in one batch, slot i for prompt i."""
        last = self.step(list(enumerate(prompts)), num_decode_rows=0)
        tokens = [[int(row[-1].argmax())] for row in last]
        for _ in range(num_tokens - 1):
            last = self.step([(slot, row[-1:]) for slot, row in enumerate(tokens)], num_decode_rows=len(tokens))
            for row, logits in zip(tokens, last, strict=True):
                row.append(int(logits[-1].argmax()))
        return tokens
