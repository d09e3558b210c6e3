"""How many GPUs a trace needs: replicas behind a router that knows prefixes, each a simulated engine.

    python scripts/plan_capacity.py TRACE [--good-share 0.99] [--background 0.5] [--scale-traffic 100]
        [--replicas N] [--scaling reactive] [--json out.json] [--png out.png]

Without --replicas the fewest are searched that meet the targets; with `--scaling reactive` that is the most there may
be at a time. The router sends every request of the trace to a replica, by an estimate of what each has to do; on a
sample of the replicas the real scheduler then runs with exactly what they were sent, and TTFT, TPOT, gaps and the hit
rate are the sample's. `docs/capacity.md` says what that leaves out and how far off it is.

TRACE and the step model are as of `simulate.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulation.fleet import Played, Scaling
from simulation.options import add_engine_options, check_engine_options, count, replica_config
from simulation.planner import Planner
from simulation.records import Target
from simulation.search import fewest
from simulation.step_model import StepModel, read_step_model
from simulation.terms import with_terms
from simulation.traces import load_trace
from simulation.traffic import superposed

from asyncengine.config import EngineConfig

MODELS = Path(__file__).parent / "step_models"
COLD_START_S = 29.0
"""README.md, Figures: process start to the first step of the 8B on an H200 where its kernels have not been compiled, as
on a machine that is new."""
QUANTILES = ("ttft_p99_ms", "tpot_p99_ms", "gap_p99_ms")


def meets(sampled: dict[str, Any], args: argparse.Namespace) -> bool:
    """Whether a sample's figures are within all targets that were asked for."""
    for name in QUANTILES:
        target, values = getattr(args, name), sampled[name.replace("_p99", "")]
        if target is not None and (values is None or values["p99"] > target):
            return False
    if (sampled["background_done_s"] or 0.0) > args.background_done_s:
        return False
    return args.good_share is None or sampled["good_share"] >= args.good_share


def line(figures: dict[str, Any]) -> str:
    sampled = figures["sample"]
    cells = [f"{figures['most']}", f"{figures['replicas_mean']:.1f}", f"{figures['gpu_hours']:.1f}"]
    for name in ("ttft_ms", "tpot_ms", "gap_ms"):
        values = sampled[name] or {}
        cells += [f"{values[part]:.1f}" if values else "-" for part in ("p50", "p99")]
    cells += [f"{100 * sampled['good_share']:.2f}", f"{figures['goodput_per_s']:.2f}"]
    cells += [f"{100 * sampled[name]:.1f}" for name in ("hit_rate", "device_busy")]
    done = sampled["background_done_s"]
    cells += [f"{100 * figures['utilisation']:.1f}", "-" if done is None else f"{done:.1f}"]
    cells += [f"{sampled['requests']}", f"{figures['cpu_s']:.0f}"]
    return "".join(f"{cell:>10}" for cell in cells) + ("   met" if figures["met"] else "")


COLUMNS = (
    *("replicas", "mean", "GPU h", "TTFT p50", "p99", "TPOT p50", "p99", "gap p50", "p99", "good %", "good/s", "hit %"),
    *("busy %", "work %", "done s", "sampled", "cpu s"),
)


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return share


def _part(text: str) -> float:
    share = float(text)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError("must be at least 0 and below 1")
    return share


def _positive(text: str) -> float:
    number = float(text)
    if number <= 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    defaults = EngineConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--model", type=Path, default=MODELS / "h200-llama-3.1-8b.json")
    targets = parser.add_argument_group(
        "targets, of interactive requests but for the last (default: --good-share 0.99)"
    )
    for name in QUANTILES:
        targets.add_argument(f"--{name.replace('_', '-')}", type=_positive)
    targets.add_argument("--good-share", type=_share, help="of the requests are good")
    targets.add_argument("--ttft-ms", type=_positive, default=defaults.interactive_ttft_ms, help="of a good request")
    targets.add_argument("--tpot-ms", type=_positive, default=defaults.interactive_gap_ms, help="of a good request")
    targets.add_argument(
        "--background-done-s", type=_positive, default=60.0, help="from the last arrival to the last background answer"
    )
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--background", type=_part, default=0.0, help="share of requests of that class")
    traffic.add_argument("--requests", type=count, help="only the first so many of the trace")
    traffic.add_argument(
        "--length-scale", type=_positive, default=1.0, help="prompts and answers so many times as long"
    )
    traffic.add_argument("--scale-traffic", type=count, default=1, help="so many copies of the trace at once")
    traffic.add_argument("--shift-seconds", type=float, help="a copy begins up to so much later (default: anywhere)")
    traffic.add_argument("--shared-prefixes", action="store_true", help="prompts of different copies begin alike, too")
    traffic.add_argument("--seed", type=int, default=0, help="draws classes, the copies' shifts and the sample")
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--replicas", type=count, help="so many (reactive: at most), instead of a search")
    fleet.add_argument("--scaling", choices=("fixed", "reactive"), default="fixed")
    fleet.add_argument("--least", type=count, default=1, help="reactive: replicas that are always there")
    fleet.add_argument("--utilisation", type=_share, default=0.8, help="reactive: work wanted per time of a replica")
    fleet.add_argument("--window-s", type=_positive, default=30.0, help="reactive: one decision in each")
    fleet.add_argument("--hold-s", type=_positive, default=300.0, help="reactive: fewer only if they did for so long")
    fleet.add_argument("--cold-start-s", type=float, default=COLD_START_S, help="from order to first request")
    fleet.add_argument(
        "--bound", type=float, default=2.0, help="worth of a prefix: so many times the work that it saves"
    )
    fleet.add_argument("--sample", type=count, default=8, help="replicas on which the real scheduler runs")
    add_engine_options(parser)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--png", type=Path, help="draw replicas and load over time here")
    args = parser.parse_args(argv)
    check_engine_options(parser, args)
    if min(args.cold_start_s, args.bound, args.shift_seconds or 0) < 0:
        parser.error("--cold-start-s, --bound and --shift-seconds must not be negative")
    if all(getattr(args, name) is None for name in (*QUANTILES, "good_share")):
        args.good_share = 0.99
    try:
        args.file = read_step_model(args.model)
        trace = load_trace(args.trace, limit=args.requests, length_scale=args.length_scale)
    except (OSError, ValueError, KeyError) as error:
        parser.error(str(error))
    if trace[-1].at_ns == 0:
        parser.error("planning needs a trace with times")
    args.trace_requests = with_terms(trace, background=args.background, seed=args.seed)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """1 if no fleet meets the targets."""
    args = parse(argv)
    traffic = superposed(
        args.trace_requests,
        args.scale_traffic,
        seed=args.seed,
        shift_s=args.shift_seconds,
        share=args.shared_prefixes,
    )
    planner = Planner(
        traffic,
        replica_config(args, args.file),
        StepModel(args.file.coefficients),
        scaling=Scaling(
            most=args.replicas or 1,
            is_reactive=args.scaling == "reactive",
            least=args.least,
            utilisation=args.utilisation,
            window_ns=round(1e9 * args.window_s),
            hold_ns=round(1e9 * args.hold_s),
            cold_start_ns=round(1e9 * args.cold_start_s),
        ),
        bound=args.bound,
        good=Target(args.ttft_ms, args.tpot_ms),
        sample=args.sample,
        seed=args.seed,
    )
    print(
        f"{len(traffic)} requests in {traffic.at_ns[-1] / 1e9:.0f} s; {args.file.model} on {args.file.gpu}; times in ms"
    )
    print("".join(f"{name:>10}" for name in COLUMNS))
    tried: dict[int, dict[str, Any]] = {}
    plays: dict[int, Played] = {}

    def is_enough(replicas: int) -> bool:
        figures, plays[replicas] = planner.figures(replicas)
        figures["met"] = meets(figures["sample"], args)
        tried[replicas] = figures
        print(line(figures), flush=True)
        return bool(figures["met"])

    if args.replicas:
        is_enough(args.replicas)
        found: int | None = args.replicas
    else:
        found = fewest(is_enough, *planner.bounds())
    shown = found or max(tried)
    if found is None:
        print(f"{shown} replicas do not meet the targets")
    elif not args.replicas:
        print(f"{found} replicas meet the targets: {tried[found]['gpu_hours']:.1f} GPU hours")
    if args.json:
        content = {
            "trace": args.trace,
            "background": args.background,
            "copies": args.scale_traffic,
            "found": found,
            "tried": list(tried.values()),
        }
        content["moments"] = [moment._asdict() for moment in plays[shown].moments]
        args.json.write_text(json.dumps(content, indent=2) + "\n")
    if args.png:
        from simulation.fleet_plot import plot_fleet

        title = f"{Path(args.trace).name} x {args.scale_traffic}, {args.scaling} scaling, at most {shown} replicas"
        plot_fleet(plays[shown].moments, args.png, window_s=args.window_s, title=title)
    return 0 if tried[shown]["met"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
