"""`make chaos`: a long run, or several, and their figures. Exit code 1 when anything was not as it should be."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from dataclasses import replace

from chaos.report import failure_report, report
from chaos.run import Outcome, Plan, model_plan, run_chaos, scripted_plan


def main() -> int:
    args = _parser().parse_args()
    outcome = asyncio.run(_run(_plan(args)))
    print(report(outcome), flush=True)
    if outcome.problems:
        print(failure_report(outcome), file=sys.stderr)
    return 1 if outcome.problems else 0


async def _run(plan: Plan) -> Outcome:
    """A run that SIGTERM ends as Ctrl-C does, so that its server is not left behind."""
    running = asyncio.ensure_future(run_chaos(plan))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    return await running


def _plan(args: argparse.Namespace) -> Plan:
    make = model_plan if args.runner == "model" else scripted_plan
    given = {"cases": args.cases, "rate": args.rate, "limit": args.limit}
    plan = make(
        seed=args.seed,
        seconds=args.seconds,
        api_workers=args.api_workers,
        kills_per_second=args.kills,
        stops_per_second=args.stops,
        **{name: value for name, value in given.items() if value is not None},
    )
    return replace(plan, setup=replace(plan.setup, args=(*plan.setup.args, *shlex.split(args.serve))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make chaos", description="Load a server, kill its processes, compare every answer."
    )
    parser.add_argument("--seed", type=int, default=1, help="of cases, clients and faults (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="of load and faults (default: %(default)s)")
    parser.add_argument("--runner", choices=("scripted", "model"), default="scripted", help="(default: %(default)s)")
    parser.add_argument("--api-workers", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--kills", type=float, default=0.5, help="a second, in the mean (default: %(default)s)")
    parser.add_argument("--stops", type=float, default=0.3, help="likewise (default: %(default)s)")
    parser.add_argument("--cases", type=int, help="different requests")
    parser.add_argument("--rate", type=float, help="requests a second, besides bursts and in the mean")
    parser.add_argument("--limit", type=float, help="seconds after which a request counts as hanging")
    parser.add_argument("--serve", default="", metavar="ARGS", help="more flags for the server, as one text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
