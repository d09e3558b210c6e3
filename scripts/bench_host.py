"""What one step costs the host, without a model: scheduler plan + commit, in microseconds, by batch size.

    python scripts/bench_host.py [--steps 2000] [--json out.json]

Every row decodes: the steady state, where the cost should hardly depend on the batch. Pages are taken from the pool as
rows grow, one page per row and 16 steps. Results are made up (no row ends), two steps in flight as in the real loop.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

import numpy as np

from asyncengine.config import PAGE_SIZE
from asyncengine.sampling import SamplingParams
from gpu_runner.schedule.plan import StepPlan, StepResult
from gpu_runner.schedule.scheduler import Scheduler

BATCHES = (1, 64, 256, 512, 1024)
PROMPT_TOKENS = 64
MAX_NUM_BATCHED_TOKENS = 8192


def measure(batch: int, steps: int) -> dict[str, float]:
    """Median and 99th percentile of plan, commit and their sum over `steps` decode steps at `batch` rows."""
    # rows start over several prefill steps, so the first has decoded for a while before the last joins
    length = PROMPT_TOKENS + steps + 2 * batch * PROMPT_TOKENS // MAX_NUM_BATCHED_TOKENS + 16
    scheduler = Scheduler(
        num_pages=1 + batch * -(-length // PAGE_SIZE),
        max_model_len=length,
        max_num_seqs=batch,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=length - PROMPT_TOKENS, ignore_eos=True)
    for rid in range(batch):
        prompt = rng.integers(0, 50_000, PROMPT_TOKENS, dtype=np.int32)
        scheduler.add(rid=rid, prompt=prompt, params=params, max_tokens=length - PROMPT_TOKENS)
    plan_us: list[float] = []
    commit_us: list[float] = []
    previous: StepPlan | None = None
    gc.collect()
    gc.disable()
    while len(plan_us) < steps:
        begin = time.perf_counter()
        plan = scheduler.plan()
        assert plan is not None
        planned = time.perf_counter()
        if previous is not None:
            tokens = rng.integers(0, 50_000, previous.num_rows, dtype=np.int32)
            result = StepResult(previous.step, tokens, np.zeros(previous.num_rows, np.uint8))
            collected = time.perf_counter()
            scheduler.commit(previous, result)
            committed = time.perf_counter()
            if plan is not None and plan.num_decode_rows == batch:
                plan_us.append((planned - begin) * 1e6)
                commit_us.append((committed - collected) * 1e6)
        previous = plan
    gc.enable()
    both = np.array(plan_us) + np.array(commit_us)
    return {
        "batch": batch,
        "plan_us": float(np.median(plan_us)),
        "commit_us": float(np.median(commit_us)),
        "step_us": float(np.median(both)),
        "step_us_p99": float(np.percentile(both, 99)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="decode steps measured per batch size")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    rows = [measure(batch, args.steps) for batch in BATCHES]
    print(f"{'batch':>6} {'plan us':>9} {'commit us':>10} {'step us':>9} {'p99 us':>9}")
    for row in rows:
        print(
            f"{row['batch']:>6} {row['plan_us']:>9.1f} {row['commit_us']:>10.1f} {row['step_us']:>9.1f}"
            f" {row['step_us_p99']:>9.1f}"
        )
    by_batch = {row["batch"]: row["step_us"] for row in rows}
    print(f"1024 rows cost {by_batch[1024] / by_batch[64]:.2f} times 64 rows")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
