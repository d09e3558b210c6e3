"""Has the masks of all constrained rows computed, in a process beside the loop.

    gpu_runner        commit N | ask | plan N + 2 ...          | hear | plan: the row runs
    grammar process            | take token, write mask | answer

The process follows each row's text. Should it be lost, rows that it owed a mask are lost with it; all others have their
mask and are opened again, with what they have of their text, when they want their next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from asyncengine.sampling import Structured
from asyncengine.wire.grammar_messages import AdvanceMatches, FromGrammar, MasksReady, MatchFailed, OpenMatch
from gpu_runner.grammar.process import START_SECONDS, GrammarProcess
from gpu_runner.schedule.mask_work import MaskWork
from gpu_runner.schedule.plan import Int32

ANSWER_SECONDS = 10.0
"""Without any answer for so long the process is taken for lost. What was checked needs a hundredth."""
ALIVE_SECONDS = 0.05
"""How often to look whether the process lives, while it owes answers."""
_NOBODY = -1


class ConstrainedRows(Protocol):
    """What is asked of the scheduler."""

    def ready(self, rows: Int32, gens: Int32) -> None: ...

    def output_of(self, slot: int, gen: int) -> tuple[Structured, Int32] | None: ...


class Matches:
    """`ask` for masks; `hear` and `poll` bring them. `take_failed` are the rows that will get none."""

    def __init__(
        self,
        rows: ConstrainedRows,
        start: Callable[[], GrammarProcess],
        *,
        num_slots: int,
        answer_seconds: float = ANSWER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """start: makes a process for matches; called when there is something to match and no process."""
        self._rows = rows
        self._start = start
        self._answer_seconds = answer_seconds
        self._clock = clock
        self._process: GrammarProcess | None = None
        self._owed: Int32 = np.full(num_slots, _NOBODY, np.int32)  # generation whose mask the slot waits for
        self._open: Int32 = np.full(num_slots, _NOBODY, np.int32)  # generation that the process follows
        self._num_owed = 0
        self._heard = 0.0  # when it last was known to live
        self._deadline = 0.0
        self._failed: list[tuple[int, int, str]] = []

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do."""
        return self._num_owed > 0

    def prepare(self) -> None:
        """Start the process, if there is none, before it is asked for anything."""
        if self._process is None:
            self._process = self._start()
            self._deadline = self._clock() + START_SECONDS

    def ask(self, work: MaskWork) -> None:
        """Have the masks of these rows' next tokens computed."""
        self.prepare()
        assert self._process is not None
        if not self._num_owed and self._process.ready:
            self._deadline = self._clock() + self._answer_seconds
        for row in work.opened:
            self._send_open(row.slot, row.gen, row.structured, row.tokens)
        if not len(work.slots):
            return
        followed = self._open[work.slots] == work.gens
        slots, gens, tokens = work.slots, work.gens, work.tokens
        if not followed.all():
            for slot, gen in zip(slots[~followed].tolist(), gens[~followed].tolist(), strict=True):
                known = self._rows.output_of(slot, gen)
                if known is not None:
                    self._send_open(slot, gen, *known)
            slots, gens, tokens = slots[followed], gens[followed], tokens[followed]
        if len(slots):
            self._owe(slots, gens)
            self._process.send(AdvanceMatches(slots.tobytes(), gens.tobytes(), tokens.tobytes()))

    def hear(self, message: FromGrammar) -> None:
        if self._process is None or not self._process.hear(message):
            return
        self._deadline = self._clock() + self._answer_seconds
        if isinstance(message, MasksReady):
            slots, gens = (np.frombuffer(column, np.int32) for column in (message.slots, message.gens))
            owed = self._owed[slots] == gens
            if not owed.all():
                slots, gens = slots[owed], gens[owed]
            self._owed[slots] = _NOBODY
            self._num_owed -= len(slots)
            self._rows.ready(slots, gens)
        elif isinstance(message, MatchFailed) and self._owed[message.slot] == message.gen:
            self._owed[message.slot] = self._open[message.slot] = _NOBODY
            self._num_owed -= 1
            self._failed.append((message.slot, message.gen, message.error))

    def poll(self) -> None:
        """Keep time. Call it often while `busy`."""
        if not self._num_owed:
            return
        now = self._clock()
        if self._process is not None and now < self._deadline:
            self._process.flush()
            if now < self._heard + ALIVE_SECONDS:
                return
            self._heard = now
            if self._process.alive:
                return
        self._lost()

    def take_failed(self) -> list[tuple[int, int, str]]:
        """Rows that failed since the last call: slot, generation and why."""
        failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _send_open(self, slot: int, gen: int, structured: Structured, tokens: Int32) -> None:
        assert self._process is not None
        row = np.array([slot], np.int32)
        self._owe(row, np.array([gen], np.int32))
        self._open[slot] = gen
        self._process.send(OpenMatch(slot, gen, structured, tokens.tobytes()))

    def _owe(self, slots: Int32, gens: Int32) -> None:
        self._num_owed += int(np.count_nonzero(self._owed[slots] == _NOBODY))
        self._owed[slots] = gens

    def _lost(self) -> None:
        self.close()
        for slot in np.flatnonzero(self._owed != _NOBODY).tolist():
            self._failed.append((slot, int(self._owed[slot]), "the process that follows structured output was lost"))
        self._owed.fill(_NOBODY)
        self._open.fill(_NOBODY)
        self._num_owed = 0
