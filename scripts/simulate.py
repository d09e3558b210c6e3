"""Plays a request trace to a simulated engine: real scheduler, queue, pages and prefix tree on a computed clock.

    python scripts/simulate.py TRACE [--model scripts/step_models/h200-llama-3.1-8b.json ...] [--policies all]
        [--load 0.5,0.7,0.9 | --time-scale 1 | --concurrency 64] [--json out.json] [--png out.png]

TRACE: Azure's CSV, Mooncake's JSON lines (equal `hash_ids` are equal prompts), or what else `asyncengine bench --trace`
reads, plain or .gz; "sharegpt" for the lengths of ShareGPT conversations; "tenants" for one with 200 long prompts at
once and one with one a second. Hours of trace take seconds to minutes of one core. `docs/simulation.md` says
what is simulated, what is not, and how far off it is.

    TTFT, TPOT, gap   from a request's arrival to its first token; mean time between a request's tokens; time between
                      two tokens, over all tokens. Of gpu_runner alone: HTTP and text are not in them
    good              requests of which TTFT and TPOT are within the targets of their class; goodput: those per second
    hit rate          prompt tokens that the prefix cache had; endless: what a cache without end would have had
    busy              share of the time in which the device had a step
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from simulation.options import add_engine_options, check_engine_options, count, replica_config
from simulation.records import Target, Targets
from simulation.replica import ReplicaConfig
from simulation.run import capacity_ns, simulate, simulate_closed_loop
from simulation.step_model import StepModel, StepModelFile, read_step_model
from simulation.table import heading, lines
from simulation.terms import of_tenant, with_terms
from simulation.traces import TraceRequest, endless_cache_hits, load_trace, scaled, with_urgent

from asyncengine.config import EngineConfig, SchedulingPolicy

MODELS = Path(__file__).parent / "step_models"
POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)


def rows_of(
    trace: Sequence[TraceRequest], file: StepModelFile, args: argparse.Namespace, policies: Sequence[SchedulingPolicy]
) -> list[dict[str, Any]]:
    """Figures of each load and policy."""
    model = StepModel(file.coefficients)
    config = replica_config(args, file)._replace(
        interactive_gap_ms=args.interactive_gap_ms, background_gap_ms=args.background_gap_ms
    )
    duration = trace[-1].at_ns
    if args.load:
        capacity = capacity_ns(trace, config, model)
        scales = [(f"load {load:g}", capacity / load / duration) for load in args.load]
    else:
        scales = [(f"x {args.time_scale:g}", args.time_scale)]
    rows = []
    for label, scale in scales:
        for share in args.background:
            requests = with_terms(scaled(trace, scale), background=share, tenants=args.tenants, seed=args.seed)
            for policy in policies:
                row = played(requests, config._replace(policy=policy), model, args)
                load = f"{args.concurrency} at once" if args.concurrency else label
                load += f" b{share:g}" if len(args.background) > 1 else ""
                rows.append(
                    {"model": file.model, "gpu": file.gpu, "load": load, "policy": policy, "background": share} | row
                )
                print("\n".join(lines(rows[-1])), flush=True)
    return rows


def played(
    requests: Sequence[TraceRequest], config: ReplicaConfig, model: StepModel, args: argparse.Namespace
) -> dict[str, Any]:
    """Figures of one run; with `--alone` also of runs of each tenant's requests alone."""
    targets = targets_of(args)
    if args.concurrency:
        return simulate_closed_loop(requests, config, model, concurrency=args.concurrency).figures(targets)
    figures = simulate(requests, config, model).figures(targets)
    if args.alone:
        for name, own in figures.get("tenants", {}).items():
            own["alone"] = simulate(of_tenant(requests, name), config, model).figures(targets)
    return figures


def targets_of(args: argparse.Namespace) -> Targets:
    return {
        "interactive": Target(args.interactive_ttft_ms, args.interactive_gap_ms),
        "background": Target(args.background_ttft_ms, args.background_gap_ms),
    }


def _loads(text: str) -> list[float]:
    loads = [float(part) for part in text.split(",")]
    if min(loads) <= 0:
        raise argparse.ArgumentTypeError("a load must be above 0")
    return loads


def _shares(text: str) -> list[float]:
    shares = [float(part) for part in text.split(",")]
    if not all(0 <= share <= 1 for share in shares):
        raise argparse.ArgumentTypeError("a share must be from 0 to 1")
    return shares


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = EngineConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--model", type=Path, nargs="+", default=[MODELS / "h200-llama-3.1-8b.json"])
    parser.add_argument("--policies", default="all", help=f"of {', '.join(POLICIES)}, with commas between; or all")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--load", type=_loads, help="shares of what the engine can take, with commas between: 0.5,0.9")
    how.add_argument("--time-scale", type=float, default=1.0, help="the trace takes so many times its time")
    how.add_argument("--concurrency", type=count, help="so many requests are under way at any time; no trace times")
    parser.add_argument("--requests", type=count, help="only the first so many of the trace")
    parser.add_argument("--length-scale", type=float, default=1.0, help="prompts and answers are so many times as long")
    parser.add_argument("--urgent", type=float, default=0.25, help="share of requests of priority 0, others have 1")
    parser.add_argument("--seed", type=int, default=0, help="draws urgency, class and tenant")
    parser.add_argument(
        "--background",
        type=_shares,
        default=[0.0],
        help="share of requests of that service class, others are interactive; with commas between: one run of each",
    )
    parser.add_argument("--tenants", type=int, default=0, help="requests are dealt to so many, the i-th 1/i as many")
    parser.add_argument("--alone", action="store_true", help="play each tenant's requests without the others', too")
    for name in ("interactive_ttft_ms", "interactive_gap_ms", "background_ttft_ms", "background_gap_ms"):
        default = getattr(defaults, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default, help="target of the good")
    add_engine_options(parser)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--png", type=Path, help="draw them here")
    args = parser.parse_args(argv)
    args.policies = list(POLICIES) if args.policies == "all" else args.policies.split(",")
    if wrong := set(args.policies) - set(POLICIES):
        parser.error(f"there is no policy {', '.join(sorted(wrong))}; there are {', '.join(POLICIES)}")
    if args.time_scale < 0 or args.length_scale <= 0 or not 0 <= args.urgent <= 1:
        parser.error("--time-scale must not be negative, --length-scale must be above 0, --urgent from 0 to 1")
    if args.tenants < 0:
        parser.error("--tenants must not be negative")
    if args.alone and args.concurrency:
        parser.error("--alone needs a trace with times, not --concurrency")
    check_engine_options(parser, args)
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
        print(f"\n{file.model} on {file.gpu}\n{heading()}")
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
