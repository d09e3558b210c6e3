"""The real scheduler on some of a fleet's replicas, each with the requests that the router sent it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from simulation.fleet import Played
from simulation.records import Records
from simulation.replica import Replica, ReplicaConfig
from simulation.step_model import StepModel
from simulation.traces import OUTPUT_IDS, TraceRequest
from simulation.traffic import Traffic


class Sample(NamedTuple):
    """records: of all the sample's requests, replica after replica. done_ns: of each replica. busy_ns, preemptions: of
    all of them."""

    replicas: list[int]
    records: Records
    done_ns: list[int]
    busy_ns: int
    preemptions: int


def run_sample(
    traffic: Traffic, played: Played, config: ReplicaConfig, model: StepModel, *, count: int, seed: int
) -> Sample:
    """`count` of the replicas that were sent requests, or all if there are fewer: of as many equal parts of them, from
    those with the fewest requests to those with the most, one each, drawn from `seed`."""
    sizes = np.bincount(played.replica, minlength=len(played.lives))
    by_size = np.argsort(sizes, kind="stable")
    used = by_size[sizes[by_size] > 0]
    rng = np.random.default_rng((seed, 4))
    replicas = sorted(int(rng.choice(part)) for part in np.array_split(used, min(count, len(used))))
    own = [np.flatnonzero(played.replica == replica) for replica in replicas]
    requests: list[list[TraceRequest]] = []
    for places in own:
        requests.append(_requests(traffic, places.tolist(), sum(map(len, requests))))
    records = Records([request for each in requests for request in each])
    done_ns: list[int] = []
    busy_ns = preemptions = 0
    for each in requests:
        replica = Replica(config, model, records)
        replica.play(each)
        done_ns.append(replica.now_ns)
        busy_ns += replica.busy_ns
        preemptions += replica.scheduler.counters.preemptions
    return Sample(replicas, records, done_ns, busy_ns, preemptions)


def _requests(traffic: Traffic, places: Sequence[int], first_index: int) -> list[TraceRequest]:
    """Those at `places` of the traffic as one replica's, with token ids of their own."""
    names: dict[int, int] = {}  # block -> its name on this replica
    result = []
    next_id = 0
    for index, place in enumerate(places, first_index):
        source, copy = int(traffic.source[place]), int(traffic.copy[place])
        request = traffic.requests[source]
        most = OUTPUT_IDS // request.block_tokens
        blocks = tuple([names.setdefault(block, len(names)) % most for block in traffic.blocks(source, copy)])
        if next_id + request.prompt_tokens > OUTPUT_IDS:
            next_id = 0  # after a billion tokens, of which nothing is cached any more
        result.append(replace(request, index=index, at_ns=int(traffic.at_ns[place]), first_id=next_id, blocks=blocks))
        next_id += request.prompt_tokens
    return result
