"""Whose a GPU's memory is while other processes take and free theirs, on a driver of made-up numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from gpu_runner.device.gpu_memory import GpuMemory, estimate_graph_bytes

GIB, MIB = 1 << 30, 1 << 20
DEVICE = torch.device("cuda")


class Driver:
    """A GPU of 100 GiB: what its driver and torch would tell a process that has a CUDA context."""

    context = 500 * MIB
    kernels = graphs = torch = others = 0

    def in_use(self) -> int:
        return self.own() + self.others

    def own(self) -> int:
        return self.context + self.kernels + self.graphs + self.torch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (100 * GIB - driver.in_use(), 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: driver.torch)
    return driver


def start(driver: Driver) -> GpuMemory:
    return GpuMemory(DEVICE, utilization=0.9)


def test_alone_everything_in_use_is_the_process_s_own(driver: Driver) -> None:
    memory = start(driver)
    assert (memory.total, memory.limit, memory.own) == (100 * GIB, 90 * GIB, driver.own())
    for kernels, graphs, torch_holds in ((300, 0, 2000), (350, 700, 2000), (350, 690, 60_000)):
        driver.kernels, driver.graphs, driver.torch = kernels * MIB, graphs * MIB, torch_holds * MIB
        memory.settle()
        assert memory.own == driver.own() == memory.total - memory.free


def test_what_torch_holds_counts_at_once_whatever_others_do(driver: Driver) -> None:
    memory = start(driver)
    driver.torch, driver.others = 16 * GIB, 30 * GIB
    assert memory.own == driver.own()
    driver.torch, driver.others = 1 * GIB, 2 * GIB
    assert memory.own == driver.own()


@pytest.mark.parametrize(("before", "after"), [(8, 0), (0, 8), (8, 16), (50, 40)])
def test_a_neighbour_that_moves_costs_a_gib_at_most_and_never_the_limit(
    driver: Driver, caplog: pytest.LogCaptureFixture, before: int, after: int
) -> None:
    driver.others = before * GIB
    memory = start(driver)
    begun = memory.own - driver.own()
    driver.others, driver.kernels = after * GIB, 400 * MIB
    with caplog.at_level(logging.WARNING):
        memory.settle()
    assert driver.own() <= memory.own <= driver.own() + begun + GIB
    assert f"other processes {'took' if after > before else 'freed'} about" in caplog.text
    counted = memory.own - driver.own()
    driver.graphs = 200 * MIB
    memory.settle()
    assert memory.own - driver.own() == counted, "the next look is exact again"


def test_of_what_is_in_use_at_the_start_a_gib_may_be_the_context(driver: Driver) -> None:
    driver.others = 8 * GIB
    assert start(driver).own == GIB


# ------------------------------------------------------------------------------------------------------------- graphs


@pytest.fixture
def graphs(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Forty works whose capture takes 3 MiB of the driver's memory each until it is dropped."""

    class Graph:
        def __init__(self) -> None:
            driver.graphs += 3 * MIB

        def __del__(self) -> None:
            driver.graphs -= 3 * MIB

    class Capture:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    class Queue:
        def synchronize(self) -> None: ...

    for name, fake in {
        "CUDAGraph": Graph,
        "graph": Capture,
        "current_stream": Queue,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return [lambda: None] * 40


def test_graphs_are_estimated_from_one_in_four(driver: Driver, graphs: list[Callable[[], None]]) -> None:
    memory = start(driver)
    assert estimate_graph_bytes([graphs, graphs[:8]], memory) == 48 * 3 * MIB
    assert memory.own == driver.own()


@pytest.mark.parametrize("moved", [-8 * GIB, 8 * GIB])
def test_a_neighbour_that_moves_while_graphs_are_measured_leaves_out_one_kind_of_them(
    driver: Driver, graphs: list[Callable[[], None]], moved: int
) -> None:
    driver.others = 20 * GIB
    memory = start(driver)
    captured = iter(range(100))

    def work() -> None:
        if next(captured) == 17:  # each of the twelve sampled runs once before; of their captures this is the sixth
            driver.others += moved

    assert estimate_graph_bytes([[work] * 40, [work] * 8], memory) == 8 * 3 * MIB
    assert driver.own() <= memory.own <= driver.own() + 2 * GIB
