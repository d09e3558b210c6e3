"""Copies of KV pages between a device and host memory: how pages lie on both sides, and the copies on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncengine.config import PAGE_SIZE

HEADER_WORDS = 4


@dataclass(frozen=True, slots=True)
class PageMemory:
    """Both places of KV pages, as int32 words: a page's keys, and its values, of one layer are a plane's run of words,
    and in host memory a page's planes lie one behind the other. With them go the ids of its tokens, which penalties
    look up. Runs begin at multiples of 16 bytes."""

    kv: Tensor  # [planes, num_pages, words], device
    token_ids: Tensor  # [num_pages, PAGE_SIZE], device
    host_kv: Tensor  # [host_pages, planes, words], host
    host_token_ids: Tensor  # [host_pages, PAGE_SIZE], host

    @classmethod
    def of(cls, kv_cache: Tensor, token_ids: Tensor, host: Tensor) -> PageMemory:
        """kv_cache: as `ops` documents it. token_ids: [num_pages, PAGE_SIZE] int32. host: [host_pages *
        `host_page_words`] int32."""
        layers, two, num_pages = kv_cache.shape[:3]
        kv = kv_cache.view(layers * two, num_pages, -1).view(torch.int32)
        planes, _, words = kv.shape
        host_pages = len(host) // host_page_words(kv_cache)
        split = host_pages * planes * words
        return cls(
            kv=kv,
            token_ids=token_ids,
            host_kv=host[:split].view(host_pages, planes, words),
            host_token_ids=host[split:].view(host_pages, PAGE_SIZE),
        )

    @property
    def num_pages(self) -> int:
        return self.kv.shape[1]

    @property
    def host_pages(self) -> int:
        return len(self.host_kv)

    @property
    def page_bytes(self) -> int:
        return self.host_kv[0].nbytes + self.host_token_ids[0].nbytes


def host_page_words(kv_cache: Tensor) -> int:
    """int32 words that a page takes in host memory."""
    return kv_cache[:, :, 0].nbytes // 4 + PAGE_SIZE


@dataclass(frozen=True, slots=True)
class PageIds:
    """One launch's pages in an int32 buffer, which goes to a device in one piece. No page is in it twice, and ids are
    in bounds."""

    buffer: Tensor  # [words], of the four below
    counts: Tensor  # [2] pages to store, and to load
    pages: Tensor  # [2, 2, most]: of stores and loads, the page on the device and the one in host memory

    @classmethod
    def of(cls, buffer: Tensor) -> PageIds:
        """buffer: [words_for(most)] int32."""
        return cls(buffer, buffer[:2], buffer[HEADER_WORDS:].view(2, 2, -1))


def words_for(most: int) -> int:
    """int32 words of a `PageIds` of at most so many stores and as many loads."""
    return HEADER_WORDS + 4 * most


def copy_pages(memory: PageMemory, ids: PageIds) -> None:
    """Store pages in host memory, and load others from there. All on a CPU, by numpy, which takes one thread: beside it
    a step computes with all cores, and threads that wait for one another would wait for that."""
    kv, token_ids = memory.kv.numpy(), memory.token_ids.numpy()
    host_kv, host_token_ids = memory.host_kv.numpy(), memory.host_token_ids.numpy()
    stores, loads = ids.counts.tolist()
    page, host_page = ids.pages[0, :, :stores].numpy()
    host_kv[host_page] = kv[:, page].swapaxes(0, 1)
    host_token_ids[host_page] = token_ids[page]
    page, host_page = ids.pages[1, :, :loads].numpy()
    kv[:, page] = host_kv[host_page].swapaxes(0, 1)
    token_ids[page] = host_token_ids[host_page]
