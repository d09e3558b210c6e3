"""Simulates the load of real runs and prints both beside each other, with the simulation's errors.

    python scripts/compare_with_simulation.py RUN.json ... --model STEP_MODEL.json [--kv-cache-tokens N ...]
        [--json out.json] [--png out.png]

RUN.json: what `asyncengine bench --json` wrote. It names the load: trace or lengths, arrivals, seed and share of
background; the same requests, of the same classes, are sent to the simulated engine. The options say what the engine
was like, as of `simulate.py`.

    TTFT, TPOT, gap   of the run as its clients saw them; of the simulation without HTTP and text
    within            requests within the targets of their class, TTFT and TPOT
    error             of the simulated figure, relative to the real one; of `within` the difference in points
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from simulation.options import add_engine_options, check_engine_options, replica_config
from simulation.records import Target
from simulation.replica import ReplicaConfig
from simulation.run import simulate, simulate_closed_loop
from simulation.step_model import StepModel, read_step_model
from simulation.traces import from_jobs

from asyncengine.bench.report import CACHED_SHARE_TOLD, class_targets
from asyncengine.bench.workload import Load

SPREADS = {"TTFT": ("ttft_ms", "ttft_ms"), "TPOT": ("tpot_ms", "tpot_ms"), "gap": ("itl_ms", "gap_ms")}
"""By name: the key in a run's figures, and in the simulation's."""
COLUMNS = (*(f"{name} {mark}" for name in SPREADS for mark in ("p50", "p99")), "within %", "out tok/s")
WITHIN = COLUMNS.index("within %")

Cells = list[float | None]


def simulated(load: Load, config: ReplicaConfig, model: StepModel) -> dict[str, Any]:
    """Figures of the load on the simulated engine."""
    requests = from_jobs(load.jobs())
    if load.concurrency:
        run = simulate_closed_loop(requests, config, model, concurrency=load.concurrency)
    else:
        run = simulate(requests, config, model)
    return run.figures({name: Target(*target) for name, target in class_targets().items()})


def cells(figures: dict[str, Any], place: int) -> Cells:
    """As `COLUMNS`; place: 0 for a run's, 1 for the simulation's. None where there is no such figure."""
    result: Cells = []
    for keys in SPREADS.values():
        spread = figures.get(keys[place]) or {}
        result += [spread.get(mark) for mark in ("p50", "p99")]
    if place:
        result.append(100 * figures["good_share"])
    else:
        result.append(100 * figures["within"]["met"] / figures["requests"] if "within" in figures else None)
    return [*result, figures.get("output_tokens_per_s")]


def compared(run: dict[str, Any], figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Of all requests and of each class: both, and the errors."""
    groups = {"all": (run, figures)}
    for name, own in run.get("classes", {}).items():
        groups[name] = (own, figures["classes"][name] if "classes" in figures else figures)
    rows = []
    for name, (real, model) in groups.items():
        pair = cells(real, 0), cells(model, 1)
        rows.append(
            {
                "class": name,
                "requests": real["requests"],
                "columns": COLUMNS,
                "real": pair[0],
                "simulated": pair[1],
                "error": [_error(place, *values) for place, values in enumerate(zip(*pair, strict=True))],
            }
        )
    return rows


def _error(place: int, real: float | None, model: float | None) -> float | None:
    if real is None or model is None:
        return None
    if place == WITHIN:
        return model - real
    return 100 * (model / real - 1) if real else None


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        for kind in ("real", "simulated", "error"):
            begin = f"{row['class']} {row['requests']}" if kind == "real" else ""
            print(f"  {begin:<17}{kind:<10}" + "".join(f"{_text(value, kind):>10}" for value in row[kind]))


def _text(value: float | None, kind: str) -> str:
    if value is None:
        return "-"
    if kind == "error":
        return f"{value:+.0f}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="a step model, as in scripts/step_models")
    add_engine_options(parser)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--png", type=Path, help="draw them here")
    args = parser.parse_args()
    check_engine_options(parser, args)
    file = read_step_model(args.model)
    results = []
    print(f"{file.model} on {file.gpu}; times in ms, errors in %\n{'':<29}" + "".join(f"{c:>10}" for c in COLUMNS))
    for path in args.runs:
        run = json.loads(path.read_text())
        load = msgspec.convert(run["load"], Load)
        figures = simulated(load, replica_config(args, file), StepModel(file.coefficients))
        rows = compared(run, figures)
        print(f"{path.stem}: {run['ok']} of {run['requests']} ok in {run['seconds']:.1f} s, {described(load)}")
        if (share := run.get("cached_prompt_share", 0.0)) >= CACHED_SHARE_TOLD:
            print(f"  no comparison: the server had {100 * share:.0f} % of its prompt tokens from before")
        print_rows(rows)
        results.append({"run": path.stem, "load": run["load"], "rows": rows, "device_busy": figures["device_busy"]})
    if args.json:
        args.json.write_text(json.dumps({"model": file.model, "gpu": file.gpu, "runs": results}, indent=2) + "\n")
    if args.png:
        try:
            from simulation.comparison_plot import plot
        except ModuleNotFoundError as error:
            print(f"no picture: {error}")
            return
        plot(results, args.png, title=f"{file.model} on {file.gpu}, real and simulated")


def described(load: Load) -> str:
    if load.trace:
        arrivals = f"{Path(load.trace).name} at {load.speed:g} x its speed"
    else:
        arrivals = f"{load.concurrency} at once" if load.concurrency else f"{load.rate:g} a second"
        arrivals += f", lengths {load.lengths}"
    return arrivals if load.background is None else f"{arrivals}, {100 * load.background:g} % background"


if __name__ == "__main__":
    main()
