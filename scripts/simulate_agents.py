"""What sessions are worth to agents, and what they cost everybody else: simulated, as `scripts/simulate.py` does it.

    python scripts/simulate_agents.py [--model FILE] [--kv-cache-tokens N] [--kv-host-tokens N]
        [--shares 0,0.25] [--agents 20] [--pause 60] [--others 10] [--seed 0]

Agents ask, run a tool, and ask again with a longer prompt (`simulation/agents.py`), while requests that share nothing
with anybody push what is cached out. A line for each `session_pin_share`; with 0 nothing is pinned, and an agent's
prefix is kept for as long as those used less recently suffice.

    hit %     of the prompt tokens of agents' second and later turns, those that were cached; endless: all that could be
    pages     most that were pinned on the device at a time
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from simulation.agents import AgentTrace, later_turns
from simulation.options import page_copy_ns
from simulation.records import Records
from simulation.replica import Replica, ReplicaConfig
from simulation.step_model import StepModel, read_step_model
from simulation.traces import TraceRequest

MODEL = Path(__file__).parent / "step_models" / "h200-llama-3.1-8b.json"


def simulate(requests: Sequence[TraceRequest], config: ReplicaConfig, model: StepModel) -> tuple[Records, Replica, int]:
    """Also the most pages that were pinned when a request came."""
    records = Records(requests)
    replica = Replica(config, model, records)
    most = 0
    for request in requests:
        replica.run_until(request.at_ns)
        replica.submit(request, request.at_ns)
        most = max(most, replica.scheduler.gauges()["pinned_pages"])
    while replica.busy:
        replica.turn()
    return records, replica, most


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--kv-cache-tokens", type=int, help="(default: what the GPU has room for)")
    parser.add_argument("--kv-host-tokens", type=int, default=0, help="of a tier in host memory (default: no tier)")
    parser.add_argument("--shares", default="0,0.25")
    parser.add_argument("--agents", type=int, default=20, help="who begin within five minutes")
    parser.add_argument("--pause", type=float, default=60.0, help="mean seconds between an agent's turns")
    parser.add_argument("--others", type=float, default=10.0, help="requests of others a second")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    file = read_step_model(args.model)
    kv_cache_tokens = args.kv_cache_tokens or file.kv_cache.tokens
    requests = AgentTrace(agents=args.agents, pause_seconds=args.pause, others_per_second=args.others).requests(
        args.seed
    )
    later, known = later_turns(requests)
    others = np.array([not request.terms.session for request in requests])
    prompts = sum(requests[index].prompt_tokens for index in later)
    print(
        f"{len(requests)} requests, {len(later)} of them agents' later turns; {file.model} on {file.gpu}, KV cache of "
        f"{kv_cache_tokens} tokens, {args.kv_host_tokens} more in host memory; endless cache: "
        f"{100 * known / prompts:.1f} %; times in ms"
    )
    names = ("hit %", "TTFT p50", "p99", "others' p50", "p99", "pages", "busy %")
    print(f"{'share':<8}" + "".join(f"{name:>13}" for name in names))
    for share in map(float, args.shares.split(",")):
        config = ReplicaConfig(
            kv_cache_tokens,
            file.max_model_len,
            session_pin_share=share,
            kv_host_tokens=args.kv_host_tokens,
            page_copy_ns=page_copy_ns(file),
        )
        records, replica, most = simulate(requests, config, StepModel(file.coefficients))
        ttft = (records.first - records.arrival) / 1e6
        cells = (
            *(f"{100 * records.cached[later].sum() / prompts:.1f}",),
            *(f"{np.percentile(ttft[rows], q):.1f}" for rows in (later, others) for q in (50, 99)),
            *(f"{most}", f"{100 * replica.busy_ns / replica.now_ns:.1f}"),
        )
        print(f"{share:<8g}" + "".join(f"{cell:>13}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
