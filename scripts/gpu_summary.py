"""What a run of `gpu_check.sh` found, as Markdown: its parts, then the headline numbers.

    python scripts/gpu_summary.py FOLDER

Reads FOLDER/parts.tsv (name, how it ended, seconds) and the JSON files of the benchmarks, whichever are there; prints
the tables and writes them to FOLDER/summary.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import bench_gap
import check_recovery


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Empty without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(header)} |", "|" + " --- |" * len(header), *lines]) + "\n"


def parts(folder: Path) -> str:
    path = folder / "parts.tsv"
    lines = path.read_text().splitlines() if path.exists() else []
    return table(("part", "", "seconds"), (line.split("\t") for line in lines))


def read(folder: Path, kind: str) -> list[tuple[str, Any]]:
    """Names, without the kind, and contents of the files of a kind."""
    paths = sorted(folder.glob(f"{kind}-*.json"))
    return [(path.stem.removeprefix(f"{kind}-"), json.loads(path.read_text())) for path in paths]


def decode(folder: Path) -> str:
    rows = [
        (
            *(model["model"], str(row["batch"]), f"{row['ms']:.3f}", f"{row['floor_ms']:.3f}"),
            *(f"{row['ms'] / row['floor_ms']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['host_us']:.0f}"),
        )
        for _, models in read(folder, "step")
        for model in models
        for row in model["decode"]
    ]
    return table(("decode", "batch", "ms/step", "floor", "x floor", "tok/s", "host us"), rows)


def prefill(folder: Path) -> str:
    rows = [
        (model["model"], f"{row['count']} x {row['length']}", f"{row['tokens_per_s']:,.0f}", f"{row['first_ms']:.2f}")
        for _, models in read(folder, "step")
        for model in models
        for row in model["prefill"]
    ]
    return table(("prefill", "prompts", "tok/s", "first token ms"), rows)


def busy(folder: Path) -> str:
    rows = [
        (
            *(row["model"], str(row["batch"]), f"{100 * row['busy_us'] / row['plain_step_us']:.1f} %"),
            *(f"{100 * row['busy_share']:.1f} %", f"{row['idle_us']['p50']:.1f}", f"{row['kernels_per_step']:.0f}"),
        )
        for _, results in read(folder, "gaps")
        for row in results
    ]
    return table(("busy", "batch", "of a step", "under the profiler", "idle gap p50 us", "kernels a step"), rows)


def copies(folder: Path) -> str:
    rows = []
    for _, results in read(folder, "copies"):
        for result in results:
            alone = {row["way"]: row["gb_per_s"] for row in result["copies"]}  # of the largest batch, which is last
            for row in result["beside"]:
                if row["way"] in alone:
                    rows.append(
                        (
                            *(result["model"], str(result["programs"]), row["way"], f"{alone[row['way']]:.1f}"),
                            *(str(row["rows"]), f"{100 * row['slower']:.1f} %", f"{row['gb_per_s']:.1f}"),
                        )
                    )
    return table(("copies", "programs", "way", "GB/s", "beside rows", "slower", "GB/s then"), rows)


def serving(folder: Path) -> str:
    rows = []
    for name, run in sorted(read(folder, "serve"), key=lambda item: (item[0].rpartition("-")[0], streams(item[0]))):
        latencies = (run.get(key, {}).get("p50", float("nan")) for key in ("ttft_ms", "tpot_ms"))
        rows.append(
            (
                *(name.rpartition("-")[0], str(streams(name)), f"{run['ok']} of {run['requests']}"),
                *(f"{run['output_tokens_per_s']:,.0f}", *(f"{value:.2f}" for value in latencies)),
            )
        )
    return table(("HTTP", "streams", "ok", "out tok/s", "TTFT p50 ms", "TPOT p50 ms"), rows)


def classes(folder: Path) -> str:
    """Real runs, and the errors in % of their simulations; of shares within target the difference in points."""
    rows, columns = [], ()
    for model, found in read(folder, "compare"):
        for run in found["runs"]:
            name = run["run"].removeprefix(f"{model}-")
            for row in run["rows"]:
                columns = row["columns"]
                cells = zip(row["real"], row["error"], strict=True)
                rows.append((name, f"{row['class']} {row['requests']}", *(with_error(*cell) for cell in cells)))
    return table(("real (error of simulated)", "class", *columns), rows)


def with_error(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    return (f"{value:,.0f}" if value >= 100 else f"{value:.1f}") + ("" if error is None else f" ({error:+.0f})")


def step_times(folder: Path) -> str:
    rows = [
        (name, *(f"{100 * run[mark]:.1f} %" for mark in ("mean", "max", "last")))
        for name, run in read(folder, "steptime")
    ]
    return table(("predicted step times off", "mean", "max", "last"), rows)


def beside(folder: Path) -> str:
    rows = []
    for model, runs in read(folder, "beside"):
        for run in runs:
            number, *cells = bench_gap.cells(run)
            rows.append((model, f"{run['class']} {number}", f"{run['streams']} beside {run['prompt']}", *cells))
    return table(("gaps", "class, run", "streams", "p50 ms", *bench_gap.COLUMNS[2:]), rows)


def recovery(folder: Path) -> str:
    rows = [
        (model, row["killed"], *check_recovery.cells(row), "ok" if row["ok"] else "FAILED")
        for model, rows in read(folder, "recovery")
        for row in rows
    ]
    return table(("recovery", "killed", *check_recovery.COLUMNS, ""), rows)


def streams(name: str) -> int:
    return int(name.rpartition("-")[2])


def summary(folder: Path) -> str:
    tables = (make(folder) for make in TABLES)
    return "\n".join(text for text in tables if text)


TABLES = (parts, decode, prefill, busy, copies, serving, classes, step_times, beside, recovery)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    text = summary(folder)
    (folder / "summary.md").write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
