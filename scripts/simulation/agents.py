"""A made-up trace of agents: turns with a tool's run between them, beside requests that share nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from simulation.traces import OUTPUT_IDS, TraceRequest

from asyncengine.config import PAGE_SIZE
from asyncengine.terms import Terms


@dataclass(frozen=True, slots=True)
class AgentTrace:
    """agents begin evenly over `seconds`, and each has `turns` turns. Its first prompt has `first_tokens`; each further
    one is the one before and `grown_tokens` more, the answer and what the tool said, and comes a pause later, which is
    exponentially distributed around `pause_seconds`. others_per_second: requests that come by chance (Poisson), until
    the last turn, with prompts of `other_tokens` on average (lognormal). ttl_seconds: as of `Terms`; after its last
    turn an agent has nothing kept.
    """

    seconds: float = 300.0
    agents: int = 20
    turns: int = 8
    first_tokens: int = 4000
    grown_tokens: int = 700
    answer_tokens: int = 150
    pause_seconds: float = 60.0
    others_per_second: float = 10.0
    other_tokens: int = 1200
    other_answer_tokens: int = 150
    ttl_seconds: float = 300.0
    tenant: str = "agents"

    def requests(self, seed: int) -> list[TraceRequest]:
        """In order of time, `index` their places."""
        rng = np.random.default_rng(seed)
        requests = self._turns(rng)
        next_id = self.agents * self._longest
        last_ns = max(request.at_ns for request in requests)
        at = 0.0
        while 1e9 * (at := at + rng.exponential(1 / self.others_per_second)) < last_ns:
            prompt, answer = (
                max(1, int(rng.lognormal(np.log(mean) - 0.5, 1.0)))
                for mean in (self.other_tokens, self.other_answer_tokens)
            )
            requests.append(TraceRequest(0, round(1e9 * at), prompt, answer, next_id))
            next_id += prompt
        if next_id > OUTPUT_IDS:
            raise ValueError(f"the trace has {next_id} different tokens, and {OUTPUT_IDS} may be told apart")
        requests.sort(key=lambda request: request.at_ns)
        return [replace(request, index=index) for index, request in enumerate(requests)]

    @property
    def _longest(self) -> int:
        return self.first_tokens + (self.turns - 1) * self.grown_tokens

    def _turns(self, rng: np.random.Generator) -> list[TraceRequest]:
        requests = []
        for agent in range(self.agents):
            at = agent * self.seconds / self.agents
            for turn in range(self.turns):
                ttl = self.ttl_seconds if turn + 1 < self.turns else 0.0
                terms = Terms(tenant=self.tenant, session=str(agent), session_ttl_seconds=ttl)
                prompt = self.first_tokens + turn * self.grown_tokens
                first_id = agent * self._longest
                requests.append(TraceRequest(0, round(1e9 * at), prompt, self.answer_tokens, first_id, terms=terms))
                at += rng.exponential(self.pause_seconds)
        return requests


def later_turns(requests: Sequence[TraceRequest]) -> tuple[NDArray[np.int64], int]:
    """Indices of agents' turns that are not their first, and how many of their tokens, in whole pages, an earlier turn
    had."""
    before: dict[str, int] = {}
    found: list[int] = []
    known = 0
    for request in requests:
        session = request.terms.session
        if session in before:
            found.append(request.index)
            known += before[session] // PAGE_SIZE * PAGE_SIZE
        if session:
            before[session] = request.prompt_tokens
    return np.array(found, np.int64), known
