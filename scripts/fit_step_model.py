"""Fits the coefficients of step models to the figures that their files hold, and writes both back.

    python scripts/fit_step_model.py scripts/step_models/h200-qwen3-0.6b.json ... [--bench-step out.json]

--bench-step: what `bench_step.py --json` wrote; its decode steps, prefill, host times and size of the KV cache take the
place of those in the files of its models. A file that is not there yet is made of it alone, if it is of one model.

Each coefficient comes of figures that show it alone: decode steps of one batch at two contexts, or decode attention of
a layer (the slope over the tokens it reads), head and choice of tokens (the slope over rows), prefill of long and short
prompts in steps of one size (the pairs). The base at each measured batch is what is left of the step, so the model
meets those points by construction; what it is worth between them is told by leaving each out. `errors` has all of it,
measured beside modelled. Nothing is fitted to what `bench_step.py` measured while it served: see `compare_serving.py`.

Where a file has figures of steps while it served (`served`: means over steps of a kind, and how many of them had which
bucket), the bases and what decode rows and chunks cost together are those nearest to these and to the other figures;
those of full steps without decode rows count most, the benchmark's decode steps least.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from simulation.step_model import Coefficients, StepModel, along

SURE, UNSURE, MOST_STEPS = 30.0, 4.0, 400
"""What a figure counts beside the square root of the steps that one of serving is the mean of, at most so many."""


def fit(figures: dict[str, Any]) -> Coefficients:
    """figures: as in the files, all times in us or ms as their names say."""
    context_us = _context_us(figures)
    row_us = _slope([(row["rows"], row["us"]) for row in figures["head"]["us"]])
    decode = figures["decode"]
    batches = [row["batch"] for row in decode["ms"]]
    base = [1e3 * row["ms"] - row["batch"] * (row_us + context_us * row["context"]) for row in decode["ms"]]
    # total time of each prefill run = steps x base(step size) + rows that sample + pairs
    step_tokens = figures["prefill"]["step_tokens"]
    runs = [_prefill_run(row, step_tokens) for row in figures["prefill"]["runs"]]
    known = np.array([us - row_us * count for us, count, _, _ in runs])
    unknown = np.array([[steps, pairs] for _, _, steps, pairs in runs])
    weights = 1 / known  # relative errors count
    (prefill_base, pair_us), *_ = np.linalg.lstsq(unknown * weights[:, None], known * weights, rcond=None)
    tokens, all_us, mixed_us = [*batches, step_tokens], [*base, float(prefill_base)], 0.0
    if served := figures.get("served"):
        costs = (row_us, context_us, float(pair_us))
        tokens, all_us, mixed_us = _served(served, tokens, all_us, costs)
    return Coefficients(
        base_tokens=tuple(tokens),
        base_us=tuple(round(us, 2) for us in all_us),
        mixed_us=round(mixed_us, 2),
        sampled_row_us=round(row_us, 4),
        decode_context_us=round(context_us, 6),
        prefill_pair_us=round(float(pair_us), 8),
        host_rows=tuple(row["rows"] for row in figures["host"]["us"]),
        host_us=tuple(row["us"] for row in figures["host"]["us"]),
    )


def _served(
    served: dict[str, Any], tokens: list[int], base_us: list[float], costs: tuple[float, float, float]
) -> tuple[list[int], list[float], float]:
    """Places of the bases, those, and what decode rows and chunks cost together, nearest to what the file's other
    figures say (`base_us` at `tokens`) and to those of serving. costs: of a row, a token of context, a pair."""
    places = sorted({*tokens, *served["base_tokens"]})

    def base_at(buckets: list[int], steps: list[int]) -> list[float]:
        """How much of each place's base such steps have on average."""
        return [float(np.average(np.interp(buckets, places, unit), weights=steps)) for unit in np.eye(len(places))]

    sure = (tokens[0], tokens[1], tokens[-1])  # small steps, and those of prompts alone, are not among those of serving
    unknown, known, weights = [], [], []
    for at, us in zip(tokens, base_us, strict=True):
        rows = at if at < tokens[-1] else 0
        unknown.append([*base_at([at], [1]), 0.0])
        known.append(us)
        weights.append((SURE if at in sure else UNSURE) / (us + rows * (costs[0] + 256 * costs[1])))
    for row in served["ms"]:
        rest = np.dot(costs, [row["sampled"], row["context_tokens"], row["pairs"]])
        unknown.append([*base_at(row["buckets"], row["steps"]), float(row["pairs"] > 0)])
        known.append(1e3 * row["ms"] - float(rest))
        weights.append(min(sum(row["steps"]), MOST_STEPS) ** 0.5 / (1e3 * row["ms"]))
    scale = np.array(weights)
    found, *_ = np.linalg.lstsq(np.array(unknown) * scale[:, None], np.array(known) * scale, rcond=None)
    return places, found[:-1].tolist(), float(found[-1])


def errors(figures: dict[str, Any], coefficients: Coefficients) -> list[dict[str, Any]]:
    """Measured and modelled, in ms, of every point: those fitted, each decode point between two others when its base
    is left out, and those that the fit did not see."""
    model = StepModel(coefficients)
    c = coefficients
    served = figures.get("served")
    rows = []
    for row in served["ms"] if served else []:
        own = {"sampled": row["sampled"], "context": row["context_tokens"], "pairs": row["pairs"]}
        times = [model.time_ns(tokens=bucket, **own, mixed=row["pairs"] > 0) for bucket in row["buckets"]]
        ns = float(np.average(times, weights=row["steps"]))
        kind = f"and {row['prompt_tokens']} of prompts" if row["pairs"] else "that decode"
        rows.append(_error(f"{row['streams']} streams, {row['rows']} rows {kind}", "fitted", row["ms"], ns / 1e6))
    for place, row in enumerate(figures["decode"]["ms"]):
        batch, context = row["batch"], row["batch"] * row["context"]
        ns = model.time_ns(tokens=batch, sampled=batch, context=context, pairs=0)
        how = "near" if served else "fitted"
        rows.append(_error(f"decode, batch {batch}, context {row['context']:.0f}", how, row["ms"], ns / 1e6))
        if not served and 0 < place < len(c.base_tokens) - 1:
            others = [i for i in range(len(c.base_tokens)) if i != place]
            base = along(batch, [c.base_tokens[i] for i in others], [c.base_us[i] for i in others])
            us = base + batch * (c.sampled_row_us + c.decode_context_us * row["context"])
            rows.append(_error(f"decode, batch {batch}, context {row['context']:.0f}", "left out", row["ms"], us / 1e3))
    step_tokens = figures["prefill"]["step_tokens"]
    for row in figures["prefill"]["runs"]:
        measured, count, steps, pairs = _prefill_run(row, step_tokens)
        us = steps * c.base_us[-1] + count * c.sampled_row_us + pairs * c.prefill_pair_us
        rows.append(_error(f"prefill, {count} x {row['length']}", "fitted", measured / 1e3, us / 1e3))
    rows += _context_errors(figures, model)
    if mixed := figures.get("mixed"):
        us = 1e-3 * model.time_ns(
            tokens=step_tokens,
            sampled=mixed["batch"],
            context=mixed["context_tokens"],
            pairs=mixed["pairs"],
            mixed=True,
        )
        rows.append(_error(f"{mixed['batch']} rows beside a chunk", mixed["point"], mixed["ms"], us / 1e3))
    for row in figures["first_token"]["ms"]:
        length = row["prompt"]
        pairs = length * (length + 1) // 2
        ns = model.time_ns(tokens=step_tokens, sampled=1, context=0, pairs=pairs) + model.host_ns(1)
        rows.append(_error(f"one prompt of {length} to its first token", "not seen", row["ms"], ns / 1e6))
    return rows


def _context_us(figures: dict[str, Any]) -> float:
    """What a token costs that a decode row attends to."""
    if longer := figures.get("longer"):
        batch = longer["batch"]
        short = next(row for row in figures["decode"]["ms"] if row["batch"] == batch)
        return _slope([(batch * row["context"], 1e3 * row["ms"]) for row in (short, longer)])
    points = [(row["context_tokens"], row["us"]) for row in figures["attention"]["us_per_layer"]]
    return float(figures["layers"]) * _slope(points)


def _context_errors(figures: dict[str, Any], model: StepModel) -> list[dict[str, Any]]:
    """Of what `_context_us` is fitted to."""
    if longer := figures.get("longer"):
        batch = longer["batch"]
        ns = model.time_ns(tokens=batch, sampled=batch, context=batch * longer["context"], pairs=0)
        return [_error(f"decode, batch {batch}, context {longer['context']:.0f}", "fitted", longer["ms"], ns / 1e6)]
    attention = figures["attention"]["us_per_layer"]
    per_layer = _context_us(figures) / figures["layers"]
    constant = float(np.mean([row["us"] - per_layer * row["context_tokens"] for row in attention]))
    return [
        _error(
            f"decode attention, one layer, batch {row['batch']}",
            "fitted",
            row["us"] / 1e3,
            (constant + per_layer * row["context_tokens"]) / 1e3,
        )
        for row in attention
    ]


def with_bench_step(figures: dict[str, Any], result: dict[str, Any], source: str) -> dict[str, Any]:
    """The figures, with those that a run of `bench_step.py` measured for the model in their place; of steps with both
    rows and a chunk those that were there, if it left them out. Raises SystemExit if it left out the longer context."""
    _refuse_without(result, ["longer", "serving"], source)
    runs = [row for row in result["prefill"] if row["count"] > 1]
    single = [row for row in result["prefill"] if row["count"] == 1]
    decode, longer = [_timed(row) for row in result["decode"]], _timed(result["longer"])
    host = [{"rows": row["batch"], "us": row["host_us"]} for row in result["decode"]]
    prefill = [{key: row[key] for key in ("count", "length", "tokens_per_s")} for row in runs]
    measured: dict[str, Any] = {
        "decode": {"source": source, "ms": decode},
        "longer": {"source": source} | longer,
        "prefill": {"source": source, "step_tokens": result["step_tokens"], "runs": prefill},
        "first_token": {"source": source, "ms": [{"prompt": row["length"], "ms": row["first_ms"]} for row in single]},
        "host": {"source": source, "us": host},
        "serving": {"source": source, "ms": result["serving"]},
    }
    if result["mixed"] is not None:
        measured["mixed"] = {"source": source, "point": "not seen"} | result["mixed"]
    return {name: own for name, own in figures.items() if name not in ("layers", "attention")} | measured


def _refuse_without(result: dict[str, Any], wanted: list[str], source: str) -> None:
    if left_out := [name for name in wanted if result.get(name) is None]:
        raise SystemExit(
            f"{source}: no model can be made of {result['model']}, for which it left out {' and '.join(left_out)}; run "
            "bench_step.py with a shorter --context, a longer --max-model-len or more --kv-cache-tokens"
        )


def new_file(result: dict[str, Any], source: str) -> dict[str, Any]:
    """All that a file has before the fit, from `bench_step.py` alone. What a row costs that samples is told by steps
    that have both rows and a prompt's chunk. Raises SystemExit if the run left those out, or the longer context."""
    _refuse_without(result, ["longer", "mixed"], source)
    nothing, mixed_rows = {"rows": 0, "us": 0.0}, result["mixed"]["batch"]
    head = {"source": source, "us": [nothing, {"rows": mixed_rows, "us": 0.0}]}
    figures = with_bench_step({"head": head}, result, source)
    mixed = figures["mixed"] | {"point": "fitted"}
    without = StepModel(fit(figures)).time_ns(
        tokens=result["step_tokens"], sampled=0, context=mixed["context_tokens"], pairs=mixed["pairs"]
    )
    figures["head"]["us"][1]["us"] = max(0.0, 1e3 * mixed["ms"] - 1e-3 * without)
    return {
        "gpu": result["device"],
        "model": result["model"],
        "max_model_len": result["max_model_len"],
        "kv_cache": _kv_cache(result, source),
        "figures": figures | {"mixed": mixed},
    }


def _source(result: dict[str, Any], path: Path) -> str:
    return f"bench_step.py on {result['device']}, {path.name}"


def _kv_cache(result: dict[str, Any], source: str) -> dict[str, Any]:
    return {
        "tokens": result["kv_cache_tokens"],
        "bytes_per_token": result["kv_bytes_per_token"],
        "source": source,
    }


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    return {key: row[key] for key in ("batch", "context", "ms")}


def _prefill_run(row: dict[str, Any], step_tokens: int) -> tuple[float, int, int, int]:
    """us in all, prompts, steps, pairs."""
    count, length = row["count"], row["length"]
    tokens = count * length
    return 1e6 * tokens / row["tokens_per_s"], count, -(-tokens // step_tokens), count * length * (length + 1) // 2


def _slope(points: list[tuple[float, float]]) -> float:
    xs, ys = zip(*points, strict=True)
    return float(np.polyfit(xs, ys, 1)[0])


def _error(what: str, how: str, measured_ms: float, modelled_ms: float) -> dict[str, Any]:
    percent = round(100 * (modelled_ms / measured_ms - 1), 1)
    return {
        "what": what,
        "point": how,
        "measured_ms": round(measured_ms, 4),
        "modelled_ms": round(modelled_ms, 4),
        "error_percent": percent + 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--bench-step", type=Path, help="JSON that bench_step.py wrote")
    args = parser.parse_args()
    benched = json.loads(args.bench_step.read_text()) if args.bench_step else []
    for path in args.files:
        if path.exists():
            content = json.loads(path.read_text())
            for result in benched:
                if result["model"] == content["model"]:
                    source = _source(result, args.bench_step)
                    content["kv_cache"] = _kv_cache(result, source)
                    content["figures"] = with_bench_step(content["figures"], result, source)
        elif len(benched) == 1:
            content = new_file(benched[0], _source(benched[0], args.bench_step))
        else:
            raise SystemExit(f"{path} is not there, and can be made only of --bench-step of one model")
        coefficients = fit(content["figures"])
        content["coefficients"] = {name: getattr(coefficients, name) for name in coefficients.__struct_fields__}
        content["errors"] = errors(content["figures"], coefficients)
        path.write_text(dump(content))
        print(f"{path.name}:")
        for row in content["errors"]:
            print(
                f"  {row['what']:<44} {row['point']:<9} {row['measured_ms']:>9.3f} ms measured"
                f" {row['modelled_ms']:>9.3f} modelled {row['error_percent']:>+6.1f} %"
            )


def dump(content: dict[str, Any]) -> str:
    """JSON in which the entries of the lists have a line each."""
    text = json.dumps(content, indent=2)
    return re.sub(r"(?<=\n)( {4,}(?:\"\w+\": )?)([{\[])\s*([^{}\[\]]*?)\s*([}\]])", _on_one_line, text) + "\n"


def _on_one_line(found: re.Match[str]) -> str:
    indent, opening, inside, closing = found.groups()
    return indent + opening + re.sub(r"\s*\n\s*", " ", inside) + closing


if __name__ == "__main__":
    main()
