"""One chaos run: a calm server tells what is right, then everything goes wrong at once, then it must be as before.

start | every case in peace | settled: baseline | load and faults ... seconds ... last client leaves | settled | stop
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.answers import WrongAnswerError
from chaos.arrivals import read_trace
from chaos.cases import KINDS, MODEL_KINDS, Kind, Lengths, make_cases
from chaos.checks import baseline_of, ended, settled
from chaos.exchange import Client
from chaos.faults import Kill, Saboteur, draw_faults
from chaos.load import Load, draw_arrivals, expectations
from chaos.processes import SIDECARS, family
from chaos.samples import Sampler
from chaos.server import Server, Setup, cpu_model, running, scripted

LOG_LINES = 40


@dataclass(frozen=True)
class Plan:
    """A run. rate: requests a second in the mean, besides bursts. tolerance: between log-probabilities, for a model
    computes a row's prompt in other pieces when it begins again. calm_at_once: cases asked at once in peace. limit:
    seconds after which a request counts as hanging."""

    seed: int
    seconds: float
    setup: Setup
    lengths: Lengths
    kinds: Sequence[Kind]
    cases: int
    rate: float
    kills_per_second: float
    stops_per_second: float
    limit: float
    tolerance: float = 0.0
    calm_at_once: int = 16


def scripted_plan(
    *,
    seed: int,
    seconds: float,
    api_workers: int,
    kills_per_second: float,
    stops_per_second: float = 0.3,
    cases: int = 42,
    rate: float = 8.0,
    limit: float = 120.0,
) -> Plan:
    return Plan(
        seed=seed,
        seconds=seconds,
        setup=scripted(api_workers),
        lengths=Lengths(prompt_divisor=16, output_divisor=3, max_prompt=150, max_output=120),
        kinds=KINDS,
        cases=cases,
        rate=rate,
        kills_per_second=kills_per_second,
        stops_per_second=stops_per_second,
        limit=limit,
    )


def model_plan(
    *,
    seed: int,
    seconds: float,
    api_workers: int,
    kills_per_second: float,
    stops_per_second: float = 0.1,
    cases: int = 16,
    rate: float = 0.8,
    limit: float = 600.0,
    model: str = "default",
) -> Plan:
    """A model, the embedded one unless another is named, on the CPU, which is slow, and slowest on a machine with other
    work: torch alone may take a minute to import."""
    return Plan(
        seed=seed,
        seconds=seconds,
        setup=cpu_model(api_workers, model),
        lengths=Lengths(prompt_divisor=30, output_divisor=12, max_prompt=60, max_output=16),
        kinds=MODEL_KINDS,
        cases=cases,
        rate=rate,
        kills_per_second=kills_per_second,
        stops_per_second=stops_per_second,
        limit=limit,
        tolerance=2e-3,
        calm_at_once=4,
    )


@dataclass
class Outcome:
    """problems: sentences; none for a good run. seconds: what it took, start and end included."""

    plan: Plan
    problems: list[str] = field(default_factory=list)
    tally: Counter[str] = field(default_factory=Counter)
    kills: list[Kill] = field(default_factory=list)
    stops: int = 0
    samples: Sampler | None = None
    log_end: str = ""
    seconds: float = 0.0


async def run_chaos(plan: Plan) -> Outcome:
    outcome, begin = Outcome(plan), time.monotonic()
    async with running(plan.setup) as server:
        try:
            await _run(plan, server, outcome)
        except WrongAnswerError as error:
            outcome.problems.append(f"in peace: {error}")
        if server.process.returncode is None:
            outcome.problems += await ended(server)
        if outcome.problems:
            outcome.log_end = "\n".join(server.log().splitlines()[-LOG_LINES:])
    outcome.seconds = time.monotonic() - begin
    return outcome


async def _run(plan: Plan, server: Server, outcome: Outcome) -> None:
    trace = read_trace()
    cases = make_cases(plan.seed, plan.cases, trace, plan.lengths, plan.kinds)
    roles = SIDECARS if plan.setup.api_workers == 1 else (*SIDECARS, "api_worker")
    saboteur = Saboteur(server.pid, port=server.port, roles=roles)
    client = Client(server.port, plan.limit, heard=saboteur.heard, cut=saboteur.cut)
    expected = await expectations(client, cases, at_once=plan.calm_at_once)
    outcome.problems += [f"in peace: {problem}" for problem in await settled(server, plan.setup, client)]
    baseline = baseline_of(family(server.pid))

    load = Load(client, cases, expected, tolerance=plan.tolerance)
    outcome.samples = Sampler(server.pid)
    arrivals = draw_arrivals(random.Random(f"load {plan.seed}"), trace, rate=plan.rate, cases=len(cases))
    faults = draw_faults(
        random.Random(f"faults {plan.seed}"),
        kills_per_second=plan.kills_per_second,
        stops_per_second=plan.stops_per_second,
    )
    sampling = asyncio.create_task(outcome.samples.run())
    sabotage = asyncio.create_task(saboteur.run(faults, plan.seconds))
    try:
        await load.run(arrivals, plan.seconds)
        if not load.failures:
            await sabotage
    finally:
        for task in (sampling, sabotage):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        saboteur.let_go()
    outcome.tally, outcome.kills, outcome.stops = load.tally, saboteur.kills, saboteur.stops
    outcome.problems += load.failures
    if server.process.returncode is not None:
        outcome.problems.append(f"the server ended with code {server.process.returncode}")
        return
    outcome.problems += await settled(server, plan.setup, client, baseline)
    outcome.problems += outcome.samples.growing()
