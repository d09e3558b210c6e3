"""Whole traces on one simulated engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from simulation.fairness import fairness
from simulation.records import Records, Targets
from simulation.replica import Replica, ReplicaConfig
from simulation.step_model import StepModel
from simulation.terms import with_terms
from simulation.traces import TraceRequest, scaled


class Run(NamedTuple):
    """cpu_s: what the simulation itself took of one core."""

    records: Records
    replica: Replica
    cpu_s: float

    def figures(self, targets: Targets) -> dict[str, Any]:
        replica, counters = self.replica, self.replica.scheduler.counters
        figures = self.records.figures(targets)
        if not figures["ended"]:
            return figures | {"cpu_s": self.cpu_s}
        return figures | {
            "fairness": fairness(self.records),
            "steps": replica.steps,
            "device_busy": replica.busy_ns / 1e9 / figures["seconds"],
            "preemptions": counters.preemptions,
            "prefilled_tokens": counters.prefill_tokens,
            "cpu_s": self.cpu_s,
        }


def simulate(requests: Sequence[TraceRequest], config: ReplicaConfig, model: StepModel) -> Run:
    """Each request comes at its time. requests: in order of time, `index` their places."""
    began = time.process_time()
    records = Records(requests)
    replica = Replica(config, model, records)
    replica.play(requests)
    return Run(records, replica, time.process_time() - began)


def simulate_closed_loop(
    requests: Sequence[TraceRequest], config: ReplicaConfig, model: StepModel, *, concurrency: int
) -> Run:
    """`concurrency` requests are under way at any time: the next comes when one has ended."""
    began = time.process_time()
    records = Records(requests)
    replica = Replica(config, model, records)
    rest = iter(requests)

    def submit(count: int) -> None:
        for request in rest:
            if replica.submit(request, replica.now_ns):
                count -= 1
            if count == 0:
                return

    submit(concurrency)
    while replica.busy:
        ended = len(replica.turn())
        if ended:
            submit(ended)
    return Run(records, replica, time.process_time() - began)


def capacity_ns(requests: Sequence[TraceRequest], config: ReplicaConfig, model: StepModel) -> int:
    """What the engine takes for all of the requests if all are there from the begin, first come, first served: the time
    over which they must come for a load of 1. No one waits for tokens then, so all are of class background."""
    run = simulate(with_terms(scaled(requests, 0.0), background=1.0), config._replace(policy="fcfs"), model)
    return int(run.records.end.max())
