"""Copies of KV pages: the kernel against the torch reference, the reference against loops over the pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncengine.config import PAGE_SIZE
from gpu_runner.kernels import page_copy, reference_page_copy
from gpu_runner.kernels.reference_page_copy import PageIds, PageMemory, host_page_words, words_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MOST = 24
NUM_PAGES, HOST_PAGES = 61, 53
NAMES = ("kv", "token_ids", "host_kv", "host_token_ids")


def random_memory(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, pinned: bool = False) -> PageMemory:
    """Every word on both sides is another number."""
    kv_cache = torch.empty((layers, 2, NUM_PAGES, kv_heads, PAGE_SIZE, head_dim), dtype=dtype, device=DEVICE)
    host = torch.empty(HOST_PAGES * host_page_words(kv_cache), dtype=torch.int32, pin_memory=pinned)
    token_ids = torch.empty((NUM_PAGES, PAGE_SIZE), dtype=torch.int32, device=DEVICE)
    memory = PageMemory.of(kv_cache, token_ids, host)
    first = 1
    for tensor in (memory.kv, memory.token_ids, memory.host_kv, memory.host_token_ids):
        tensor.copy_(torch.arange(first, first + tensor.numel(), dtype=torch.int32).view(tensor.shape))
        first += tensor.numel()
    return memory


def on_cpu(memory: PageMemory) -> PageMemory:
    """A copy, for the reference."""
    return PageMemory(*(getattr(memory, name).to("cpu", copy=True) for name in NAMES))


def page_ids(stores: int, loads: int, seed: int = 0) -> PageIds:
    """Distinct pages; behind those that count, ids that are out of bounds."""
    generator = np.random.default_rng(seed)
    here, there = generator.permutation(NUM_PAGES), generator.permutation(HOST_PAGES)
    ids = PageIds.of(torch.full((words_for(MOST),), 2**30, dtype=torch.int32))
    ids.counts[:] = torch.tensor([stores, loads])
    for way, first, count in ((0, 0, stores), (1, stores, loads)):
        for side, pages in enumerate((here, there)):
            ids.pages[way, side, :count] = torch.from_numpy(pages[first : first + count].astype(np.int32))
    return PageIds.of(ids.buffer.to(DEVICE))


def same(one: PageMemory, other: PageMemory) -> bool:
    return all(torch.equal(getattr(one, name).cpu(), getattr(other, name)) for name in NAMES)


@pytest.mark.parametrize(("stores", "loads"), [(0, 0), (1, 0), (0, 1), (5, 3), (MOST, MOST)])
def test_the_reference_moves_whole_pages_with_their_token_ids_and_nothing_else(stores: int, loads: int) -> None:
    memory = on_cpu(random_memory(2, 2, 16, torch.float32))
    expected, ids = on_cpu(memory), PageIds.of(page_ids(stores, loads).buffer.cpu())
    reference_page_copy.copy_pages(memory, ids)
    for page, host_page in zip(*ids.pages[0, :, :stores].tolist(), strict=True):
        for plane in range(4):
            expected.host_kv[host_page, plane] = expected.kv[plane, page]
        expected.host_token_ids[host_page] = expected.token_ids[page]
    for page, host_page in zip(*ids.pages[1, :, :loads].tolist(), strict=True):
        for plane in range(4):
            expected.kv[plane, page] = expected.host_kv[host_page, plane]
        expected.token_ids[page] = expected.host_token_ids[host_page]
    assert same(memory, expected)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "dtype"),
    [
        (1, 1, 16, torch.bfloat16),  # a run of 128 words
        (3, 3, 64, torch.bfloat16),  # 1536, no power of two
        (2, 5, 128, torch.float32),  # 10240: two blocks and a half
    ],
)
@pytest.mark.parametrize(("stores", "loads"), [(0, 0), (1, 0), (0, 1), (3, 7)])
def test_the_kernel_moves_what_the_reference_does(
    layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, stores: int, loads: int
) -> None:
    memory = random_memory(layers, kv_heads, head_dim, dtype, pinned=DEVICE.type == "cuda")
    expected, ids = on_cpu(memory), page_ids(stores, loads, seed=stores)
    page_copy.copy_pages(memory, ids, programs=5)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    reference_page_copy.copy_pages(expected, PageIds.of(ids.buffer.cpu()))
    assert same(memory, expected)


def test_a_full_launch_and_more_programs_than_runs_are_right_too() -> None:
    for stores, loads, programs in ((MOST, MOST, 3), (1, 1, 16)):
        memory = random_memory(1, 1, 16, torch.float16, pinned=DEVICE.type == "cuda")
        expected, ids = on_cpu(memory), page_ids(stores, loads)
        page_copy.copy_pages(memory, ids, programs=programs)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        reference_page_copy.copy_pages(expected, PageIds.of(ids.buffer.cpu()))
        assert same(memory, expected)


def test_a_page_in_host_memory_is_its_keys_and_values_and_its_token_ids() -> None:
    memory = random_memory(2, 2, 16, torch.bfloat16)
    assert memory.page_bytes == 2 * 2 * 2 * PAGE_SIZE * 16 * 2 + 4 * PAGE_SIZE
    assert (memory.num_pages, memory.host_pages) == (NUM_PAGES, HOST_PAGES)


@pytest.mark.gpu
def test_copies_run_beside_another_stream_and_are_whole() -> None:
    memory = random_memory(8, 8, 128, torch.bfloat16, pinned=True)
    expected, ids = on_cpu(memory), page_ids(MOST, MOST)
    copying = torch.cuda.Stream()
    torch.cuda.synchronize()
    square = torch.randn(2048, 2048, device=DEVICE)
    exact = square @ square
    torch.cuda.synchronize()
    products = []
    for _ in range(20):
        products.append(square @ square)
        with torch.cuda.stream(copying):
            page_copy.copy_pages(memory, ids)
    torch.cuda.synchronize()
    reference_page_copy.copy_pages(expected, PageIds.of(ids.buffer.cpu()))
    assert same(memory, expected)
    assert all(torch.equal(product, exact) for product in products)
