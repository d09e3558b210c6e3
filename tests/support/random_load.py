"""Random arrivals, aborts and stop hits over a real executor whose KV pool is nearly always full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from support.engine_core import EngineCore

from asyncengine.sampling import SamplingParams
from asyncengine.wire.base import Finish
from gpu_runner.schedule.plan import StepPlan

MOST_OPEN = 12
SHARED_PREFIXES = 3
DRAIN_TURNS = 20_000
TOLD = 3
"""Of the requests that ended wrongly, how many are told of in full."""


@dataclass
class Course:
    """How a row ran."""

    begins: list[tuple[int, int]] = field(default_factory=list)
    """(step, position) where it did not go on behind its step before: at its start, and after each retraction."""
    next_position: int = -1
    last_step: int = 0


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
        self._courses: dict[tuple[int, int], Course] = {}  # by (slot, gen)

    def run(self, goes_on: Callable[[int], bool], *, check_every: int) -> None:
        """Turns while `goes_on(turn)`, then no more arrivals until nothing is left; raises if that takes too long."""
        turn = 0
        while goes_on(turn):
            self._disturb()
            self._turn()
            turn += 1
            if turn % check_every == 0:
                self.core.scheduler.check_integrity()
        for _ in range(DRAIN_TURNS):
            if not self._turn():
                self.core.scheduler.check_integrity()
                return
        raise AssertionError(f"still busy after {DRAIN_TURNS} turns: {self.core.scheduler.gauges()}")

    def completed(self) -> list[int]:
        """rids that ended as they were asked to."""
        return [rid for rid in self.requests if self.core.finish.get(rid) in (Finish.STOP, Finish.LENGTH)]

    def assert_all_ended(self) -> None:
        """Every request ended once, in a way that its parameters allow, and nothing is held."""
        wrong = [(rid, why) for rid in self.requests if (why := self._wrong(rid))]
        told = "\n".join(f"{self._describe(rid)}: {why}" for rid, why in wrong[:TOLD])
        assert not wrong, f"{len(wrong)} of {len(self.requests)} requests, {[rid for rid, _ in wrong]}\n{told}"
        self.core.assert_nothing_held()

    def _wrong(self, rid: int) -> str:
        """What is wrong with how the request ended, nothing if all is right."""
        core, (prompt, params) = self.core, self.requests[rid]
        finish, output = core.finish.get(rid), core.outputs.get(rid, [])
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(core.eos_ids))
        assert params.max_tokens is not None
        if finish == Finish.LENGTH and len(output) != params.max_tokens:
            return "ended by another limit"
        if finish == Finish.STOP and not stops & set(output[-1:]):
            return f"ended with none of {stops}"
        if finish not in (Finish.LENGTH, Finish.STOP, Finish.STOP_STRING) and rid not in self.aborted:
            return "never ended"
        if len(output) > params.max_tokens or len(prompt) + len(output) > self._context:
            return "is too long"
        if stops & set(output[params.min_tokens : -1]):
            return f"went on behind one of {stops}"
        return "" if all(0 <= token < core.vocab_size for token in output) else "has tokens that are none"

    def _describe(self, rid: int) -> str:
        core, (prompt, params) = self.core, self.requests[rid]
        output = core.outputs.get(rid, [])
        rows = [row for row, own in core.row_of.items() if own == rid]
        return (
            f"request {rid}, a prompt of {len(prompt)} and {len(output)} of {params.max_tokens} tokens, "
            f"{output[:4]} .. {output[-4:]}, finish {core.finish.get(rid)}, aborted {rid in self.aborted}, {params}, "
            f"rows (slot, gen) {[(row, self._courses.get(row)) for row in rows]}, "
            f"{core.scheduler.gauges()['steps']} steps in all"
        )

    def _turn(self) -> bool:
        busy = self.core.turn()
        for plan in self.core.plans:
            self._note(plan)
        self.core.plans.clear()
        return busy

    def _note(self, plan: StepPlan) -> None:
        columns = (plan.row_slot, plan.row_gen, plan.row_start, plan.row_len)
        for slot, gen, start, length in zip(*(column.tolist() for column in columns), strict=True):
            course = self._courses.setdefault((slot, gen), Course())
            if start != course.next_position:
                course.begins.append((plan.step, start))
            course.next_position, course.last_step = start + length, plan.step

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
