"""Random arrivals, aborts and stop hits over a real executor whose KV pool is nearly always full."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from support.engine_core import EngineCore

from asyncengine.sampling import SamplingParams
from asyncengine.wire.base import Finish

MOST_OPEN = 12
SHARED_PREFIXES = 3
DRAIN_TURNS = 20_000


class RandomLoad:
    """Drives a core by a seed, and keeps what was asked of it.

    lengths: prompts are of 1 token to all but one of the context, short and long ones alike; outputs fill the rest or
    end early by a limit, a stop id, an abort or a stop hit.
    """

    def __init__(self, core: EngineCore, *, context: int, seed: int) -> None:
        self.core = core
        self.requests: dict[int, tuple[np.ndarray, SamplingParams]] = {}
        self.aborted: set[int] = set()
        self._context = context
        self._rng = np.random.default_rng(seed)
        self._prefixes = [self._tokens(context // 2) for _ in range(SHARED_PREFIXES)]
        self._next_rid = 0

    def run(self, goes_on: Callable[[int], bool], *, check_every: int) -> None:
        """Turns while `goes_on(turn)`, then no more arrivals until nothing is left; raises if that takes too long."""
        turn = 0
        while goes_on(turn):
            self._disturb()
            self.core.turn()
            turn += 1
            if turn % check_every == 0:
                self.core.scheduler.check_integrity()
                self.core.plans.clear()
        self.core.run(DRAIN_TURNS)
        self.core.scheduler.check_integrity()

    def completed(self) -> list[int]:
        """rids that ended as they were asked to."""
        return [rid for rid in self.requests if self.core.finish.get(rid) in (Finish.STOP, Finish.LENGTH)]

    def assert_all_ended(self) -> None:
        """Every request ended once, in a way that its parameters allow, and nothing is held."""
        core = self.core
        for rid, (prompt, params) in self.requests.items():
            finish, output = core.finish.get(rid), core.outputs.get(rid, [])
            stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(core.eos_ids))
            if finish == Finish.LENGTH:
                assert len(output) == params.max_tokens, f"request {rid}"
            elif finish == Finish.STOP:
                assert output[-1] in stops, f"request {rid}"
            else:
                assert finish == Finish.STOP_STRING or rid in self.aborted, f"request {rid} never ended"
                assert params.max_tokens is not None
                assert len(output) <= params.max_tokens, f"request {rid}"
            assert not stops & set(output[params.min_tokens : -1]), f"request {rid} went on behind a stop id"
            assert len(prompt) + len(output) <= self._context, f"request {rid}"
        core.assert_nothing_held()

    def _disturb(self) -> None:
        """What happens between two turns: mostly nothing."""
        rng, core = self._rng, self.core
        open_rids = [rid for rid in self.requests if rid not in core.finish and rid not in self.aborted]
        if len(open_rids) < MOST_OPEN and rng.random() < 0.3:
            for _ in range(rng.integers(1, 5)):
                self._arrive()
        if open_rids and rng.random() < 0.02:
            rid = int(rng.choice(open_rids))
            self.aborted.add(rid)
            core.abort(rid)
        if core.row_of and rng.random() < 0.01:
            rows = list(core.row_of)[-MOST_OPEN:]
            row = rows[rng.integers(len(rows))]  # runs, waits retracted, or ended long ago
            if core.row_of[row] not in self.aborted:  # whose end may be on its way
                core.stop(*row)

    def _arrive(self) -> None:
        rng, context = self._rng, self._context
        length = int(rng.integers(1, context)) if rng.random() < 0.5 else int(rng.integers(1, 24))
        prompt = self._tokens(length)
        if rng.random() < 0.4:
            prompt = np.concatenate((self._prefixes[rng.integers(SHARED_PREFIXES)], prompt))[: context - 1]
        room = context - len(prompt)
        max_tokens = room if rng.random() < 0.3 else int(rng.integers(1, room + 1))
        sampled = rng.random() < 0.4
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.1 else 0,
            temperature=float(rng.choice([0.7, 1.0])) if sampled else 0.0,
            top_p=0.9 if rng.random() < 0.3 else 1.0,
            top_k=40 if rng.random() < 0.2 else 0,
            seed=int(rng.integers(2**31)),
            stop_token_ids=tuple(self._tokens(8).tolist()) if rng.random() < 0.2 else (),
            ignore_eos=rng.random() < 0.5,
        )
        self.requests[self._next_rid] = prompt, params
        self.core.add_request(self._next_rid, prompt, params)
        self._next_rid += 1

    def _tokens(self, length: int) -> np.ndarray:
        return self._rng.integers(3, self.core.vocab_size, length, dtype=np.int32)
