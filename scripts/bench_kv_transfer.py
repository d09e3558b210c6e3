"""Times copies of KV pages to and from host memory: alone, and beside decode steps, which they slow down.

    python scripts/bench_kv_transfer.py [MODEL_FOLDER] [--programs 4,8,16] [--pages 1,8,64,512] [--json out.json]

MODEL_FOLDER needs a config.json only (default: the 0.6B shape in scripts/data); weights are random.

    GB/s      bytes of a batch by the time from `Executor.transfer` to the first `transferred` that says so, the median;
              "both" stores as many pages as it loads, and counts all
    floor     what a PCIe 5 x16 bus carries each way in practice, 55 GB/s
    host us   what `Executor.transfer` takes
    slower    a decode step's median time while copies run without a break, against one without any
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench_step import measure_decode
from step_engine import DATA, Engine

from asyncengine.config import EngineConfig
from gpu_runner.device.executor import Executor
from gpu_runner.schedule.plan import StepPlan
from gpu_runner.schedule.transfers import Transfers

BUS_BYTES_PER_S = 55e9
WAYS = ("store", "load", "both")
OUTSTANDING = 2
"""Batches under way while a step is timed, so that the bus is never idle."""


class Spare(NamedTuple):
    """Pages that no request has: `pages` to store and as many to load, from `first` on."""

    first: int
    pages: int

    def batch(self, way: str, count: int) -> Transfers:
        device = np.arange(self.first, self.first + 2 * self.pages, dtype=np.int32)
        host = np.arange(2 * self.pages, dtype=np.int32)
        stores, loads = count * (way != "load"), count * (way != "store")
        load = slice(self.pages, self.pages + loads)
        return Transfers(0, device[:stores], host[:stores], host[load], device[load])


class CopyingEngine(Engine):
    """Copies without a break while it runs steps, if told to."""

    def __init__(self, model: Path, config: EngineConfig, most_pages: int) -> None:
        super().__init__(model, config)
        executor = self.executor
        if executor.host_pages < 2 * most_pages or executor.num_pages <= 4 * most_pages:
            raise SystemExit(
                f"{most_pages} pages each way are more than {executor.host_pages} pages of host memory and "
                f"{executor.num_pages} of the device allow"
            )
        executor.num_pages -= 2 * most_pages
        self.spare = Spare(executor.num_pages, most_pages)
        self.page_bytes = executor.info.memory.host_kv_bytes // executor.host_pages
        self.batch: Transfers | None = None
        self.ticket = -1
        self.done_pages = 0

    def turn(self) -> StepPlan | None:
        if self.batch is not None:
            done = self.executor.transferred()
            while self.ticket < done + OUTSTANDING:
                self.transfer(self.batch)
                self.done_pages += len(self.batch.store_from) + len(self.batch.load_from)
        return super().turn()

    def transfer(self, batch: Transfers) -> None:
        self.ticket += 1
        self.executor.transfer(batch._replace(ticket=self.ticket))

    def wait(self) -> None:
        while self.executor.transferred() < self.ticket:
            pass


def measure_copies(engine: CopyingEngine, way: str, count: int, repeats: int) -> dict[str, Any]:
    batch = engine.spare.batch(way, count)
    times, host = [], []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        engine.transfer(batch)
        host.append(time.perf_counter() - begin)
        engine.wait()
        times.append(time.perf_counter() - begin)
    seconds = float(np.median(times[1:]))
    moved = engine.page_bytes * (len(batch.store_from) + len(batch.load_from))
    floor = engine.page_bytes * count / BUS_BYTES_PER_S
    return {
        "way": way,
        "pages": count,
        "us": 1e6 * seconds,
        "floor_us": 1e6 * floor,
        "gb_per_s": moved / seconds / 1e9,
        "host_us": 1e6 * float(np.median(host[1:])),
    }


def measure_beside(engine: CopyingEngine, rows: int, context: int, steps: int) -> list[dict[str, Any]]:
    """Of decode steps with copies each way, without any first."""
    found: list[dict[str, Any]] = []
    for way in (None, *WAYS):
        engine.batch = None if way is None else engine.spare.batch(way, engine.spare.pages)
        engine.done_pages, begin = 0, time.perf_counter()
        step = measure_decode(engine, rows, context, steps)
        engine.wait()
        seconds = time.perf_counter() - begin
        engine.batch = None
        alone = found[0]["ms"] if found else step["ms"]
        found.append(
            {
                "rows": rows,
                "way": way or "none",
                "ms": step["ms"],
                "p99_ms": step["p99_ms"],
                "slower": step["ms"] / alone - 1,
                "gb_per_s": engine.done_pages * engine.page_bytes / seconds / 1e9,
            }
        )
    return found


def choose_programs(executor: Executor, programs: int) -> None:
    """Of the kernel; a CPU has none."""
    if executor.info.device != "cpu":
        from gpu_runner.kernels.page_copy import copy_pages

        copies = executor._copies
        assert copies is not None
        copies._copy = partial(copy_pages, programs=programs)
        copies._slots = [copies._make_slot(len(copies._ids.buffer), pinned=True) for _ in copies._slots]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=DATA / "qwen3-0.6b")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--host-gib", type=float, default=4.0)
    parser.add_argument("--kv-cache-tokens", type=int, help="default: what memory leaves room for")
    parser.add_argument("--programs", default="4,8,16", help="of the kernel, each way")
    parser.add_argument("--pages", default="1,8,64,512", help="of a batch, each way")
    parser.add_argument("--batches", default="1,64,256", help="rows that decode beside the copies")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    counts, rows = ([int(number) for number in text.split(",")] for text in (args.pages, args.batches))
    config = EngineConfig(
        load_format="dummy",
        device=args.device,
        max_num_seqs=max(rows),
        kv_cache_tokens=args.kv_cache_tokens,
        kv_host_memory_gib=args.host_gib,
    )
    engine = CopyingEngine(args.model, config, max(counts))
    executor = engine.executor
    print(f"\n{args.model.name} on {executor.info.device}: a page is {engine.page_bytes:,} bytes and loads in", end=" ")
    print(f"{executor.page_load_ns / 1e3:.1f} us by the executor's own measure", flush=True)
    gc.collect()
    gc.freeze()
    gc.disable()
    results = []
    for programs in [int(number) for number in args.programs.split(",")] if executor.info.device != "cpu" else [0]:
        choose_programs(executor, programs)
        print(
            f"\n{programs} programs each way\n{'way':>6} {'pages':>6} {'us':>9} {'floor':>9} {'GB/s':>7} {'host us':>8}"
        )
        copies = [measure_copies(engine, way, count, args.repeats) for way in WAYS for count in counts]
        for row in copies:
            print(f"{row['way']:>6} {row['pages']:>6} {row['us']:>9.1f} {row['floor_us']:>9.1f}", end=" ")
            print(f"{row['gb_per_s']:>7.1f} {row['host_us']:>8.1f}", flush=True)
        print(f"{'rows':>6} {'copies':>6} {'ms/step':>9} {'p99':>9} {'slower':>7} {'GB/s':>8}")
        beside = [row for count in rows for row in measure_beside(engine, count, args.context, args.steps)]
        for row in beside:
            print(f"{row['rows']:>6} {row['way']:>6} {row['ms']:>9.3f} {row['p99_ms']:>9.3f}", end=" ")
            print(f"{row['slower']:>7.1%} {row['gb_per_s']:>8.1f}", flush=True)
        results.append({"model": args.model.name, "programs": programs, "copies": copies, "beside": beside})
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    executor.close()


if __name__ == "__main__":
    main()
