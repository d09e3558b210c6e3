"""Plays a request trace to a simulated engine: real scheduler, queue, pages and prefix tree on a computed clock.

    python scripts/simulate.py TRACE [--model scripts/step_models/h200-llama-3.1-8b.json ...] [--policies all]
        [--load 0.5,0.7,0.9 | --time-scale 1 | --concurrency 64] [--json out.json] [--png out.png]

TRACE: Azure's CSV, Mooncake's JSON lines (equal `hash_ids` are equal prompts), or what else `asyncengine bench --trace`
reads, plain or .gz; "sharegpt" for the lengths of ShareGPT conversations. Hours of trace take seconds to minutes of one
core. `docs/simulation.md` says what is simulated, what is not, and how far off it is.

    TTFT, TPOT, gap   from a request's arrival to its first token; mean time between a request's tokens; time between
                      two tokens, over all tokens. Of gpu_runner alone: HTTP and text are not in them
    good              requests of which TTFT and TPOT are within the targets; goodput: those per second
    hit rate          prompt tokens that the prefix cache had; endless: what a cache without end would have had
    busy              share of the time in which the device had a step
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from simulation.replica import ReplicaConfig
from simulation.run import Run, capacity_ns, simulate, simulate_closed_loop
from simulation.step_model import StepModel, StepModelFile, read_step_model
from simulation.traces import TraceRequest, endless_cache_hits, load_trace, scaled, with_urgent

from asyncengine.config import PAGE_SIZE, SchedulingPolicy

MODELS = Path(__file__).parent / "step_models"
POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
COPY_BYTES_PER_NS = 50
"""Between device and host memory, each way: a PCIe 5 link of 16 lanes."""
COLUMNS = (
    *("TTFT p50", "p99", "urgent p99", "TPOT p50", "p99", "gap p50", "p99", "good %", "good/s", "out tok/s"),
    *("hit %", "preempt", "busy %"),
)


def rows_of(
    trace: Sequence[TraceRequest], file: StepModelFile, args: argparse.Namespace, policies: Sequence[SchedulingPolicy]
) -> list[dict[str, Any]]:
    """Figures of each load and policy."""
    model = StepModel(file.coefficients)
    config = ReplicaConfig(
        kv_cache_tokens=args.kv_cache_tokens or file.kv_cache.tokens,
        max_model_len=args.max_model_len or file.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        prefix_caching=not args.no_prefix_caching,
        kv_host_tokens=args.kv_host_tokens,
        page_copy_ns=round(file.kv_cache.bytes_per_token * PAGE_SIZE / COPY_BYTES_PER_NS),
    )
    duration = trace[-1].at_ns
    if args.load:
        capacity = capacity_ns(trace, config, model)
        scales = [(f"load {load:g}", capacity / load / duration) for load in args.load]
    else:
        scales = [(f"x {args.time_scale:g}", args.time_scale)]
    rows = []
    for label, scale in scales:
        for policy in policies:
            here = config._replace(policy=policy)
            if args.concurrency:
                label = f"{args.concurrency} at once"
                run = simulate_closed_loop(trace, here, model, concurrency=args.concurrency)
            else:
                run = simulate(scaled(trace, scale), here, model)
            rows.append({"model": file.model, "gpu": file.gpu, "load": label, "policy": policy} | figures(run, args))
            print(line(rows[-1]), flush=True)
    return rows


def figures(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    return run.figures(ttft_target_ms=args.ttft_ms, tpot_target_ms=args.tpot_ms)


def line(row: dict[str, Any]) -> str:
    """A line of the table."""
    begin = f"{row['load']:<12} {row['policy']:<9}"
    if not row["ended"]:
        return f"{begin} none of {row['requests']} requests can run here: they are too long"
    ttft, tpot, gap, urgent = (row[name] or {} for name in ("ttft_ms", "tpot_ms", "gap_ms", "urgent_ttft_ms"))
    cells = (
        *(_number(ttft.get("p50")), _number(ttft.get("p99")), _number(urgent.get("p99"))),
        *(_number(tpot.get("p50")), _number(tpot.get("p99")), _number(gap.get("p50")), _number(gap.get("p99"))),
        f"{100 * row['good_share']:.1f}",
        f"{row['goodput_per_s']:.2f}",
        f"{row['output_tokens_per_s']:.0f}",
        f"{100 * row['hit_rate']:.1f}",
        f"{row['preemptions']}",
        f"{100 * row['device_busy']:.1f}",
    )
    return begin + "".join(f"{cell:>11}" for cell in cells)


def _number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"


def _loads(text: str) -> list[float]:
    loads = [float(part) for part in text.split(",")]
    if min(loads) <= 0:
        raise argparse.ArgumentTypeError("a load must be above 0")
    return loads


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return count


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--model", type=Path, nargs="+", default=[MODELS / "h200-llama-3.1-8b.json"])
    parser.add_argument("--policies", default="all", help=f"of {', '.join(POLICIES)}, with commas between; or all")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--load", type=_loads, help="shares of what the engine can take, with commas between: 0.5,0.9")
    how.add_argument("--time-scale", type=float, default=1.0, help="the trace takes so many times its time")
    how.add_argument("--concurrency", type=_count, help="so many requests are under way at any time; no trace times")
    parser.add_argument("--requests", type=_count, help="only the first so many of the trace")
    parser.add_argument("--length-scale", type=float, default=1.0, help="prompts and answers are so many times as long")
    parser.add_argument("--urgent", type=float, default=0.25, help="share of requests of priority 0, others have 1")
    parser.add_argument("--seed", type=int, default=0, help="which requests are urgent")
    parser.add_argument("--ttft-ms", type=float, default=1000.0, help="target of the good")
    parser.add_argument("--tpot-ms", type=float, default=50.0, help="target of the good")
    parser.add_argument("--max-num-seqs", type=_count, default=256)
    parser.add_argument("--max-num-batched-tokens", type=_count, default=2048)
    parser.add_argument("--max-model-len", type=_count, help="(default: the model's)")
    parser.add_argument("--kv-cache-tokens", type=_count, help="(default: what the GPU has room for)")
    parser.add_argument("--kv-host-tokens", type=_count, default=0, help="of a tier in host memory (default: no tier)")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--png", type=Path, help="draw them here")
    args = parser.parse_args(argv)
    args.policies = list(POLICIES) if args.policies == "all" else args.policies.split(",")
    if wrong := set(args.policies) - set(POLICIES):
        parser.error(f"there is no policy {', '.join(sorted(wrong))}; there are {', '.join(POLICIES)}")
    if args.time_scale < 0 or args.length_scale <= 0 or not 0 <= args.urgent <= 1:
        parser.error("--time-scale must not be negative, --length-scale must be above 0, --urgent from 0 to 1")
    if args.max_num_batched_tokens < args.max_num_seqs:
        parser.error("--max-num-batched-tokens must be at least --max-num-seqs")
    try:
        args.files = [read_step_model(path) for path in args.model]
        trace = load_trace(args.trace, limit=args.requests, length_scale=args.length_scale)
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    if args.load and trace[-1].at_ns == 0:
        parser.error("--load needs a trace with times")
    args.requests = with_urgent(trace, args.urgent, args.seed)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    trace: list[TraceRequest] = args.requests
    prompts = sum(request.prompt_tokens for request in trace)
    outputs = sum(request.output_tokens for request in trace)
    endless = endless_cache_hits(trace) / prompts
    print(
        f"{len(trace)} requests in {trace[-1].at_ns / 1e9:.0f} s, {prompts} prompt and {outputs} output tokens; "
        f"hit rate of an endless cache {100 * endless:.1f} %; times in ms"
    )
    rows = []
    for file in args.files:
        print(f"\n{file.model} on {file.gpu}\n{'':<22}" + "".join(f"{name:>11}" for name in COLUMNS))
        rows += rows_of(trace, file, args, args.policies)
    print(f"\n{sum(row['cpu_s'] for row in rows):.1f} s of one core")
    if args.json:
        content = {"trace": args.trace, "endless_hit_rate": endless, "rows": rows}
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    if args.png:
        from simulation.plot import plot

        plot(rows, args.png, title=f"{Path(args.trace).name}, {len(trace)} requests")


if __name__ == "__main__":
    main()
