"""The arrivals that load an engine so much, and how many there are in a time: for `asyncengine bench --rate`.

    python scripts/rate_at_load.py STEP_MODEL.json [--load 0.9] [--seconds 60] [--lengths conversation]

Prints RATE and REQUESTS. At a load of 1 the simulated engine takes as long for all requests, if they are there from the
begin, as they take to come; engine options as of `simulate.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from simulation.options import add_engine_options, check_engine_options, replica_config
from simulation.run import capacity_ns
from simulation.step_model import StepModel, read_step_model
from simulation.traces import from_jobs

from asyncengine.bench.workload import make_jobs

SAMPLE = 2000
"""Requests of which the engine's capacity is computed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--lengths", default="conversation", help="as of `asyncengine bench`")
    add_engine_options(parser)
    args = parser.parse_args()
    check_engine_options(parser, args)
    file = read_step_model(args.model)
    requests = from_jobs(make_jobs(SAMPLE, lengths=args.lengths, rate=None, seed=0))
    seconds = capacity_ns(requests, replica_config(args, file), StepModel(file.coefficients)) / 1e9
    rate = args.load * SAMPLE / seconds
    print(f"{rate:.4g} {max(1, round(rate * args.seconds))}")


if __name__ == "__main__":
    main()
