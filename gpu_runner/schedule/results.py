"""What a step that is done has brought its rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from asyncengine.wire.base import Finish
from asyncengine.wire.frames import Open, RowMarks
from gpu_runner.schedule.counters import Counters
from gpu_runner.schedule.departures import Departures
from gpu_runner.schedule.masked_rows import MaskedRows
from gpu_runner.schedule.plan import StepPlan, StepResult
from gpu_runner.schedule.prefill_marks import PrefillMarks
from gpu_runner.schedule.prompt_scores import PromptScores
from gpu_runner.schedule.rows import Rows
from gpu_runner.schedule.running import Running
from gpu_runner.schedule.step_output import StepOutput

RUNS = int(Finish.NONE)  # numpy takes microseconds to compare with a member of an enumeration


class Results:
    """Gives rows their tokens, opens those that have their first one and ends those that have their last."""

    def __init__(
        self,
        rows: Rows,
        running: Running,
        *,
        departures: Departures,
        masked_rows: MaskedRows,
        prompt_scores: PromptScores,
        marks: PrefillMarks,
        counters: Counters,
        clock: Callable[[], int],
    ) -> None:
        """clock: as in `Scheduler`."""
        self._rows = rows
        self._slots = rows.slots
        self._running = running
        self._departures = departures
        self._masked_rows = masked_rows
        self._prompt_scores = prompt_scores
        self._marks = marks
        self._counters = counters
        self._clock = clock

    def take(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Of the oldest step in flight; rows that left meanwhile are dropped by generation."""
        slots = self._slots
        rows, gens, tokens, finish = plan.row_slot, plan.row_gen, result.tokens, result.finish
        if result.scores is not None:
            self._prompt_scores.add(plan, result.scores)
        logprobs = result.logprobs
        opens: tuple[Open, ...] = ()
        marks: tuple[RowMarks, ...] = ()
        if (unchanged := self._running.unchanged(rows)) is not None:
            unchanged.sampled(tokens)  # each row got one, and not its first
        else:
            self._running.store()
            index = rows.astype(np.intp)
            valid = plan.row_samples & (tokens >= 0) & (slots.gen[index] == gens)
            if np.count_nonzero(valid) < len(valid):
                if logprobs is not None:
                    logprobs = logprobs.of(valid)
                rows, gens, tokens, finish, index = rows[valid], gens[valid], tokens[valid], finish[valid], index[valid]
            known = slots.known[index]
            slots.token_cells[index * slots.max_model_len + known] = tokens
            slots.known[index] = known + 1
            marked = self._marks.waiting[index]
            if np.count_nonzero(marked):
                now = self._clock()
                if self._rows.tier is not None:
                    self._rows.tier.decode(rows[marked])
                marks = self._marks.take(rows[marked], now)
                opens = tuple(self._open(slot, now) for slot in rows[marked & ~slots.opened[index]].tolist())
            if slots.num_constrained:
                continues = slots.constrained[index] & (finish == RUNS)
                self._masked_rows.sampled(rows[continues], gens[continues], tokens[continues])
        ended = finish.nonzero()[0]
        for slot in rows[ended].tolist() if len(ended) else ():
            self._departures.end(slot)
            self._counters.finished += 1
        return StepOutput(plan.step, rows, gens, tokens, finish, opens, logprobs, marks)

    def _open(self, slot: int, now: int) -> Open:
        slots = self._slots
        request = slots.request[slot]
        assert request is not None
        slots.opened[slot] = True
        return Open(
            slot,
            slots.gen.item(slot),
            request.rid,
            request.detok,
            slots.prompt_len.item(slot),
            slots.cached_tokens.item(slot),
            request.queued_ns,
            request.started_ns,
            now,
            self._prompt_scores.take(slot),
            request.resumed.tobytes(),
            request.shown,
            request.session_tokens,
            request.session_common,
        )
