"""Batches of page copies in order, through a few slots, and a model whose pages move about."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.device_engine import DeviceEngine, device_engine, random_prompts
from support.eventually import eventually
from support.random_model import VOCAB_SIZE, write_config

from asyncengine.config import PAGE_SIZE, Device, EngineConfig
from asyncengine.errors import StartupError
from asyncengine.sampling import SamplingParams
from gpu_runner.device import host_memory
from gpu_runner.device.buffers import pages_for
from gpu_runner.device.build import build_executor
from gpu_runner.device.executor import Executor
from gpu_runner.device.host_memory import HostMemory, size_host_memory
from gpu_runner.device.page_copies import NO_TICKET, NUM_SLOTS, PageCopies
from gpu_runner.device.stream import InlineStream, Stream, WorkerStream
from gpu_runner.kernels import reference_page_copy
from gpu_runner.kernels.reference_page_copy import PageIds, PageMemory
from gpu_runner.models.registry import read_model_config
from gpu_runner.schedule.plan import StepPlan, StepResult
from gpu_runner.schedule.transfers import Transfers

NUM_PAGES, HOST_PAGES, MOST = 40, 30, 4
PAGE_BYTES = 2 * PAGE_SIZE * 4 * 4 + 4 * PAGE_SIZE
"""Of a model of one layer, a head of 4 dimensions, float32."""
NONE = np.empty(0, np.int32)


class Held:
    """The reference copy, each launch of which waits for leave."""

    def __init__(self) -> None:
        self.leave = threading.Semaphore(0)
        self.sizes: list[tuple[int, int]] = []

    def copy(self, memory: PageMemory, ids: PageIds) -> None:
        assert self.leave.acquire(timeout=60)
        stores, loads = ids.counts.tolist()
        self.sizes.append((stores, loads))
        reference_page_copy.copy_pages(memory, ids)


class Pages:
    def __init__(self, stream: Stream, copy: Any) -> None:
        self.kv = torch.arange(NUM_PAGES).repeat_interleave(PAGE_SIZE * 4).repeat(2).to(torch.float32)
        self.kv = self.kv.view(1, 2, NUM_PAGES, 1, PAGE_SIZE, 4)
        host = HostMemory(HOST_PAGES * PAGE_BYTES, pinned=False, progress=lambda done, total: None)
        token_ids = torch.zeros(NUM_PAGES, PAGE_SIZE, dtype=torch.int32)
        self.memory = PageMemory.of(self.kv, token_ids, host.words)
        self.copies = PageCopies(memory=self.memory, host=host, stream=stream, copy=copy, pages_per_launch=MOST)

    def on_device(self) -> list[int]:
        """Of which page each has the keys."""
        return self.kv[0, 0, :, 0, 0, 0].to(torch.int64).tolist()


@pytest.fixture
def held() -> Iterator[tuple[Pages, Held]]:
    held = Held()
    pages = Pages(WorkerStream(prepare=lambda: None), held.copy)
    yield pages, held
    held.leave.release(100)
    pages.copies.close()


def wait_for(copies: PageCopies | Executor, ticket: int) -> None:
    asyncio.run(eventually(lambda: copies.transferred() == ticket))


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def store(ticket: int, count: int) -> Transfers:
    return Transfers(ticket, np.arange(1, 1 + count, dtype=np.int32), np.arange(count, dtype=np.int32), NONE, NONE)


def test_a_batch_is_done_when_all_of_it_is_and_batches_are_in_order(held: tuple[Pages, Held]) -> None:
    pages, copying = held
    copies = pages.copies
    assert copies.host_pages == HOST_PAGES
    copies.transfer(store(7, 2 * MOST + 1))
    copies.transfer(Transfers(8, NONE, NONE, ids(8), ids(30)))  # what the last part of the one before stored
    for _ in range(3):
        assert copies.transferred() == NO_TICKET
        copying.leave.release()
    wait_for(copies, 7)
    assert pages.on_device()[30] == 30
    copying.leave.release()
    wait_for(copies, 8)
    assert pages.on_device()[30] == 9
    assert copying.sizes == [(MOST, 0), (MOST, 0), (1, 0), (0, 1)]


def test_what_finds_no_slot_waits_on_the_host_and_nobody_for_it(held: tuple[Pages, Held]) -> None:
    pages, copying = held
    for ticket in range(3 * NUM_SLOTS):
        pages.copies.transfer(Transfers(ticket, ids(1 + ticket), ids(ticket), ids(), ids()))
    assert pages.copies.transferred() == NO_TICKET
    copying.leave.release(3 * NUM_SLOTS)
    wait_for(pages.copies, 3 * NUM_SLOTS - 1)
    assert pages.memory.host_kv[: 3 * NUM_SLOTS, 0, 0].view(torch.float32).tolist() == list(range(1, 13))


def test_both_ways_go_in_the_same_launches_and_a_batch_may_be_empty(held: tuple[Pages, Held]) -> None:
    pages, copying = held
    copying.leave.release(10)
    pages.copies.transfer(store(0, 6))
    pages.copies.transfer(Transfers(1, ids(7), ids(6), ids(0, 1, 2, 3, 4, 5), ids(30, 31, 32, 33, 34, 35)))
    pages.copies.transfer(Transfers(2, NONE, NONE, NONE, NONE))
    wait_for(pages.copies, 2)
    assert copying.sizes == [(4, 0), (2, 0), (1, 4), (0, 2), (0, 0)]
    assert pages.on_device()[30:36] == [1, 2, 3, 4, 5, 6]


def test_what_copying_raises_comes_out_where_one_asks() -> None:
    def fail(memory: PageMemory, ids: PageIds) -> None:
        raise ValueError("the bus broke")

    stream = WorkerStream(prepare=lambda: None)
    copies = Pages(stream, fail).copies
    copies.transfer(store(0, 1))
    with pytest.raises(ValueError, match="the bus broke"):
        wait_for(copies, 0)
    copies.close()


def test_copies_done_within_the_call_are_done_at_once_and_can_be_measured() -> None:
    pages = Pages(InlineStream(), reference_page_copy.copy_pages)
    assert pages.copies.measure() > 0
    assert pages.on_device()[1 : 2 + MOST] == [0] * MOST + [1 + MOST]
    assert pages.copies.transferred() == NO_TICKET
    for ticket in range(2 * NUM_SLOTS):
        pages.copies.transfer(store(ticket, MOST + 1))
        assert pages.copies.transferred() == ticket


# ------------------------------------------------------------------------------------------------- how much there is


def test_host_memory_is_whole_pages_and_no_more_than_there_is(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = read_model_config(write_config(tmp_path_factory.mktemp("model")))
    page = 3 * 2 * 2 * PAGE_SIZE * 64 * 2 + 4 * PAGE_SIZE

    def pages(gib: float, available: int = 2**40) -> int:
        config = EngineConfig(kv_host_memory_gib=gib)
        return size_host_memory(config, model, torch.bfloat16, available_bytes=available)

    assert pages(0) == pages(0, available=0) == 0
    assert pages(1) == 2**30 // page
    assert pages(9, available=10 * 2**30) == 9 * 2**30 // page
    with pytest.raises(StartupError, match=r"12 is more than .* 10\.00 GiB .* available, of which 90% .*; 8\.99 would"):
        pages(12, available=10 * 2**30)
    with pytest.raises(StartupError, match=f"1e-05 is less than one page of KV cache, which takes {page:,} bytes"):
        pages(0.00001)


def test_host_memory_is_pinned_piece_by_piece_and_where_it_cannot_be_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pinned: list[tuple[int, int]] = []

    def register(owner: object, address: int, size: int) -> bool:
        pinned.append((address, size))
        return len(pinned) < 5

    monkeypatch.setattr(host_memory, "register", register)
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 8192)
    reports: list[tuple[int, int]] = []
    host = HostMemory(20_000, pinned=True, progress=lambda done, total: reports.append((done, total)))
    begin = host.words.data_ptr()
    assert pinned == [(begin, 8192), (begin + 8192, 8192), (begin + 16384, 20_000 - 16384)]
    assert reports == [(done, 20_000) for done in (0, 8192, 16384, 20_000)]
    assert len(host.words) == 5000
    assert not host.words.any()
    host.words[-1] = 7
    with pytest.raises(StartupError, match=r"cannot be pinned for the GPU, only 0\.00 GiB could"):
        HostMemory(20_000, pinned=True, progress=lambda done, total: None)
    HostMemory(20_000, pinned=False, progress=lambda done, total: None)
    assert len(pinned) == 5


def test_more_host_memory_than_the_machine_has_is_refused_before_weights_are_read(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = write_config(tmp_path_factory.mktemp("model"))
    config = EngineConfig(model=model, device="cpu", load_format="dummy", kv_host_memory_gib=2**20)
    phases: list[str] = []
    with pytest.raises(StartupError, match="kv_host_memory_gib 1048576 is more than this machine can give"):
        build_executor(config, model, lambda phase, done, total: phases.append(phase), num_slots=4)
    assert phases == []


# ------------------------------------------------------------------------------------------ a model whose pages move


class PageMover:
    """Stands before an executor, one step in flight. Between steps every page that requests may have goes to host
    memory, is overwritten on the device, and comes back as another page."""

    def __init__(self, executor: Executor, *, num_pages: int) -> None:
        self.num_pages, self.max_model_len = num_pages, executor.max_model_len
        self.max_step_tokens, self.model_config = executor.max_step_tokens, executor.model_config
        self.moves = 0
        self._executor = executor
        self._random = np.random.default_rng(0)
        self._page = np.arange(num_pages, dtype=np.int32)  # of the executor, for each that the scheduler knows
        self._table = np.zeros((executor.num_slots, pages_for(executor.max_model_len)), np.int32)  # of pages it knows
        assert executor._copies is not None
        memory = executor._copies._memory
        memory.host_kv[num_pages:].view(torch.float32).fill_(torch.nan)
        memory.host_token_ids[num_pages:].fill_(-7)

    def launch(self, plan: StepPlan) -> None:
        self._table[plan.page_slot, plan.page_index] = plan.page_id
        self._move()
        slot, index = np.stack(np.nonzero(self._table)).astype(np.int32)
        pages = self._page[self._table[slot, index]]
        self._executor.launch(plan._replace(page_slot=slot, page_index=index, page_id=pages))

    def collect(self) -> StepResult:
        return self._executor.collect()

    def _move(self) -> None:
        executor, old = self._executor, self._page[1:].copy()
        spare = np.setdiff1d(np.arange(1, executor.num_pages, dtype=np.int32), old)
        new = self._random.permutation(spare)[: len(old)]
        host = self._random.permutation(self.num_pages)[: len(old)].astype(np.int32)
        poison = np.arange(self.num_pages, self.num_pages + len(old), dtype=np.int32)
        ticket = 3 * self.moves
        executor.transfer(Transfers(ticket, old, host, NONE, NONE))
        executor.transfer(Transfers(ticket + 1, NONE, NONE, poison, old))
        executor.transfer(Transfers(ticket + 2, NONE, NONE, host, new))
        wait_for(executor, ticket + 2)
        self._page[1:] = new
        self.moves += 1


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceEngine]:
    device: Device = request.param
    model = write_config(tmp_path_factory.mktemp("model"), num_hidden_layers=2)
    with device_engine(
        model, device=device, dtype="float32", load_format="dummy", max_num_seqs=4, kv_host_memory_gib=0.01
    ) as engine:
        yield engine


@pytest.mark.timeout(400)
def test_rows_whose_pages_went_to_host_memory_and_came_back_elsewhere_compute_the_same(engine: DeviceEngine) -> None:
    executor = engine.executor
    page = 2 * 2 * 2 * PAGE_SIZE * 64 * 4 + 4 * PAGE_SIZE
    assert executor.host_pages == executor.info.num_host_pages == int(0.01 * 2**30) // page
    assert executor.info.memory.host_kv_bytes == executor.host_pages * page
    assert executor.page_load_ns > 0
    prompts = random_prompts([5, 40, 17, 33], VOCAB_SIZE)
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=4, repetition_penalty=1.3, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0.0, presence_penalty=1.5, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, top_p=0.9, max_tokens=20, ignore_eos=True),
    ]
    expected = engine.run_with_logits(prompts, params)
    mover: Any = PageMover(executor, num_pages=80)
    moved = replace(engine, executor=mover).run_with_logits(prompts, params)
    assert mover.moves > 20
    for (tokens, logits), (same_tokens, same_logits) in zip(moved, expected, strict=True):
        assert tokens == same_tokens
        assert torch.equal(logits, same_logits)


def test_without_host_memory_there_is_nothing_to_copy_to(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = write_config(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    with device_engine(model, device="cpu", load_format="dummy") as engine:
        assert (engine.executor.host_pages, engine.executor.page_load_ns) == (0, 0)
        with pytest.raises(RuntimeError, match="no host memory"):
            engine.executor.transfer(store(0, 1))
