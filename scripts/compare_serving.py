"""The closed loop that `bench_step.py` measured beside its simulation with the step model, which is not fitted to it.

    python scripts/compare_serving.py scripts/step_models/h200-qwen3-0.6b.json ...

The files are those that `fit_step_model.py --bench-step` wrote. Times are of a step on average, whether it has prompts
or not; what prompts there are in it tells whether the scheduler made the same steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulation.serving import Served, serve
from simulation.step_model import StepModel, read_step_model


def compared(path: Path) -> list[dict[str, Any]]:
    """Of each number of streams that was measured, `step_ms` and `prompt_tokens_per_step` measured and simulated."""
    model = StepModel(read_step_model(path).coefficients)
    figures = json.loads(path.read_text())["figures"]
    if "serving" not in figures:
        raise SystemExit(f"{path}: no closed loop of bench_step.py is among its figures")
    rows = []
    for row in figures["serving"]["ms"]:
        simulated = serve(
            model,
            streams=row["streams"],
            prompt_tokens=row["prompt_tokens"],
            answer_tokens=row["answer_tokens"],
            max_num_batched_tokens=figures["prefill"]["step_tokens"],
        )
        rows.append(
            {
                "streams": row["streams"],
                "measured": Served(row["ms"], row["prompt_tokens_per_step"]),
                "simulated": simulated,
                "error_percent": 100 * (simulated.step_ms / row["ms"] - 1),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args(argv).files:
        print(f"{path.name}:")
        for row in compared(path):
            (measured, prompts), (simulated, simulated_prompts) = row["measured"], row["simulated"]
            print(
                f"  {row['streams']:>4} streams {measured:>8.3f} ms measured {simulated:>8.3f} simulated"
                f" {row['error_percent']:>+5.1f} %; prompt tokens a step {prompts:.1f}, {simulated_prompts:.1f}"
            )


if __name__ == "__main__":
    main()
