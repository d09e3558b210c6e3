"""Where the GPU idles in steady decode, and what the host was doing then.

    python scripts/profile_gaps.py [MODEL_FOLDER ...] [--batches 1,8,64,256] [--steps 100] [--json out.json]
                                   [--serving 110+276]

MODEL_FOLDER needs a config.json only (default: the shapes in scripts/data); weights are random. Scheduler and executor
run in the loop's order, two steps in flight, under torch.profiler, whose kernel intervals come from CUPTI. A step
begins with the kernel that fetches its plan, or with the one that reads it if that does both.

    busy        time in which some kernel ran / all time; copies count as idle
    idle gap    between the last kernel of a step and the first of the next
    without     median time of a step with the profiler off. Tracing every kernel slows a graph's replay, so gaps under
                the profiler are an upper bound; kernel time over this is what the GPU was busy for when nobody looked
    host        what the loop's thread did in a gap: plan, launch, wait (for the device), commit, other

--serving: of a closed loop instead, in which each request has a prompt and an answer of so many tokens, and is followed
by another one when it ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_step import measure_decode, measure_serving, request_sizes
from lanes.gaps import Interval, Report, analyse
from step_engine import DATA, WARM_STEPS, ClosedLoop, Engine, end_rows, start_rows
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from asyncengine.config import EngineConfig

DISCARDED_STEPS = 5
"""At both ends of what was profiled: the pipeline fills after the clocks were compared, and drains."""
FETCH_KERNEL, FIRST_KERNEL = "_fetch_kernel", "step_meta_kernel"
"""A step begins with the second, unless the first comes right before it."""
NO_KERNELS = ("Memcpy", "Memset", "Context Sync", "Stream Sync", "Stream Wait Event", "Event Sync")
"""How the names of the profiler's other events on the GPU begin."""
SYNCHRONIZE = "cudaDeviceSynchronize"
TOP_KERNELS = 12


# ------------------------------------------------------------------------------------------------------------ measuring


def mark_phases(engine: Engine) -> list[Interval]:
    """From now on the phases of the engine's turns are appended to the result, in us of `time.perf_counter`."""
    phases: list[Interval] = []

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args)
            phases.append(Interval(1e6 * begin, 1e6 * time.perf_counter(), name))
            return result

        return wrapped

    scheduler, executor = engine.scheduler, engine.executor
    for owner, method, name in (
        (scheduler, "plan", "plan"),
        (executor, "launch", "launch"),
        (executor, "collect", "wait"),
        (scheduler, "commit", "commit"),
    ):
        setattr(owner, method, timed(name, getattr(owner, method)))
    return phases


def profile_decode(engine: Engine, batch: int, context: int, steps: int) -> tuple[Report, bool]:
    """As `profile_turns`, of steps in which all rows decode."""
    start_rows(engine, batch, context, steps)
    for _ in range(WARM_STEPS):
        engine.turn()
    result = profile_turns(engine, engine.turn, steps)
    end_rows(engine, batch)
    return result


def profile_serving(engine: Engine, streams: int, request: tuple[int, int], steps: int) -> tuple[Report, bool]:
    """As `profile_turns`, of a closed loop."""
    loop = ClosedLoop(engine, streams, *request)
    loop.warm_up()
    result = profile_turns(engine, loop.turn, steps)
    loop.end()
    return result


def profile_turns(engine: Engine, turn: Callable[[], object], steps: int) -> tuple[Report, bool]:
    """The report, and whether the host's clock could be compared with the GPU's."""
    gc.collect()
    gc.disable()  # as in the loop
    phases = mark_phases(engine)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        asked = time.perf_counter()
        torch.cuda.synchronize()
        answered = time.perf_counter()
        for _ in range(steps + 2 * DISCARDED_STEPS):
            turn()
        torch.cuda.synchronize()
    gc.enable()
    for method in ("launch", "collect"):
        delattr(engine.executor, method)  # the class's own again

    kernels, begins, synchronized = read_events(profiler)
    if len(begins) <= 2 * DISCARDED_STEPS + 1:
        raise SystemExit("the profiler recorded no kernels: is another profiler attached, or CUPTI missing?")
    first_kernel = min(kernel.begin for kernel in kernels)
    compared = [event for event in synchronized if event.end <= first_kernel]
    if compared:
        # nothing ran, so both clocks saw the same short call
        shift = (compared[-1].begin + compared[-1].end - 1e6 * (asked + answered)) / 2
        phases = [Interval(begin + shift, end + shift, name) for begin, end, name in phases]
    report = analyse(kernels, begins[DISCARDED_STEPS:-DISCARDED_STEPS], phases if compared else [])
    return report, bool(compared)


def read_events(profiler: profile) -> tuple[list[Interval], list[float], list[Interval]]:
    """Kernels, the beginnings of steps, and the host's calls that waited for the device; all in us, in order."""
    kernels, synchronized = [], []
    for event in profiler.events() or ():
        interval = Interval(event.time_range.start, event.time_range.end, event.name)
        if event.device_type == DeviceType.CUDA:
            if not event.name.startswith(NO_KERNELS) and not event.is_user_annotation:
                kernels.append(interval)
        elif event.name == SYNCHRONIZE:
            synchronized.append(interval)
    kernels.sort()
    begins: list[float] = []
    fetch: Interval | None = None
    for kernel in kernels:
        if kernel.name == FIRST_KERNEL:
            begins.append((fetch or kernel).begin)
        fetch = kernel if kernel.name == FETCH_KERNEL else None
    return kernels, begins, sorted(synchronized)


# --------------------------------------------------------------------------------------------------------------- report


def print_report(batch: int, report: Report, plain_us: float, clocks_compared: bool) -> None:
    print(
        f"\nbatch {batch}: GPU busy {100 * report.busy_share:.1f} % under the profiler ({report.busy_us:.1f} of "
        f"{report.step_us:.1f} us a step), {100 * report.busy_us / plain_us:.1f} % of {plain_us:.1f} us without; "
        f"{report.kernels_per_step:.1f} kernels a step, {report.steps} steps"
    )
    idle = report.idle
    print(f"  idle gap between steps, us: p50 {idle['p50']:.1f}, p99 {idle['p99']:.1f}, max {idle['max']:.1f}")
    print(f"  {'us/step':>9} {'share':>6} {'a step':>7}  kernel")
    for name, us, count in report.kernels[:TOP_KERNELS]:
        print(f"  {us:>9.2f} {100 * us / report.step_us:>5.1f}% {count:>7.1f}  {name[:90]}")
    for gap, host in report.longest:
        doing = ", ".join(f"{name} {us:.1f}" for name, us in sorted(host.items(), key=lambda item: -item[1]))
        print(f"  gap of {gap.length:.1f} us after step {gap.step}: {doing if clocks_compared else 'host unknown'}")
    if not clocks_compared:
        print(f"  what the host did is unknown: the profiler recorded no {SYNCHRONIZE} to compare clocks by")


def profile_model(model: Path, batches: Sequence[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"\n{model.name}, {torch.cuda.get_device_name()}", flush=True)
    config = EngineConfig(load_format="dummy", device="cuda", max_num_seqs=max(batches), max_model_len=8192)
    engine = Engine(model, config)
    # all of them before the profiler runs for the first time: CUPTI stays in the process and may slow it
    if args.serving:
        plain = {batch: 1e3 * measure_serving(engine, batch, *args.serving)["ms"] for batch in batches}
    else:
        plain = {batch: 1e3 * measure_decode(engine, batch, args.context, args.steps)["ms"] for batch in batches}
    results = []
    for batch in batches:
        if args.serving:
            report, compared = profile_serving(engine, batch, args.serving, args.steps)
        else:
            report, compared = profile_decode(engine, batch, args.context, args.steps)
        print_report(batch, report, plain[batch], compared)
        results.append(
            {
                "model": model.name,
                "batch": batch,
                "busy_share": report.busy_share,
                "busy_us": report.busy_us,
                "step_us": report.step_us,
                "plain_step_us": plain[batch],
                "kernels_per_step": report.kernels_per_step,
                "idle_us": report.idle,
                "kernels": report.kernels[:TOP_KERNELS],
                "longest_gaps_us": [{"gap": gap.length, "host": host} for gap, host in report.longest],
            }
        )
    engine.executor.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=[DATA / "qwen3-0.6b", DATA / "llama-3.1-8b"])
    parser.add_argument("--batches", default="1,8,64,256")
    parser.add_argument("--context", type=int, default=256, help="prompt tokens of a decoding row")
    parser.add_argument("--serving", type=request_sizes, metavar="PROMPT+ANSWER")
    parser.add_argument("--steps", type=int, default=100, help="steps profiled per batch size")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("profile_gaps.py needs an NVIDIA GPU: it reads the kernels' times from CUPTI", file=sys.stderr)
        return 1
    batches = [int(batch) for batch in args.batches.split(",")]
    results: list[dict[str, Any]] = []
    for model in args.models:
        results += profile_model(model, batches, args)
        gc.collect()  # the next model needs this one's memory
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
