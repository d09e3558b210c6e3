"""Rows within a structure (`SamplingParams.structured`): whose masks are wanted, and which rows wait for theirs."""

from __future__ import annotations

import numpy as np

from asyncengine.sampling import Structured
from gpu_runner.schedule.mask_work import MaskWork, OpenedRow
from gpu_runner.schedule.plan import Int32
from gpu_runner.schedule.running import Running
from gpu_runner.schedule.slots import Slots, State


class MaskedRows:
    """The scheduler says what its constrained rows do; who computes masks takes the work and says what is ready."""

    def __init__(self, slots: Slots, running: Running) -> None:
        self._slots = slots
        self._running = running
        self._work: list[MaskWork] = []  # since it was last taken

    @property
    def num_held(self) -> int:
        """Rows that decode, but wait for a mask."""
        return self._running.num_held

    @property
    def waiting(self) -> bool:
        """Whether a row could run if its mask were there, or soon will be that one."""
        slots = self._slots
        return bool(self.num_held or (slots.constrained & ~slots.mask_ready & (slots.state == State.PREFILL)).any())

    def lacks_mask(self, slot: int) -> bool:
        """Whether the row may not sample yet."""
        return self._slots.constrained.item(slot) and not self._slots.mask_ready.item(slot)

    def opened(self, slot: int, structured: Structured, tokens: Int32) -> None:
        """A row begins, with these tokens of its text. Once for each request: a retracted row goes on where it was."""
        row = OpenedRow(slot, int(self._slots.gen[slot]), structured, tokens)
        self._work.append(MaskWork(opened=(row,)))

    def sampled(self, rows: Int32, gens: Int32, tokens: Int32) -> None:
        """Constrained rows that got a token and go on, [R] each."""
        if len(rows):
            self._work.append(MaskWork(slots=rows, gens=gens, tokens=tokens))

    def take_work(self) -> MaskWork | None:
        """Whose masks are wanted since the last call; None if nobody's."""
        if not self._work:
            return None
        parts, self._work = self._work, []
        if len(parts) == 1:
            return parts[0]
        return MaskWork(
            opened=tuple(row for part in parts for row in part.opened),
            slots=np.concatenate([part.slots for part in parts]),
            gens=np.concatenate([part.gens for part in parts]),
            tokens=np.concatenate([part.tokens for part in parts]),
        )

    def ready(self, rows: Int32, gens: Int32) -> None:
        """The masks of these slots' next tokens are there; those of rows that have ended are ignored."""
        slots = self._slots
        rows = rows[(slots.gen[rows] == gens) & slots.constrained[rows] & (slots.state[rows] != State.FREE)]
        slots.mask_ready[rows] = True
        held = rows[slots.state[rows] == State.HELD]
        if len(held):
            self._running.release(held)

    def output_of(self, slot: int, gen: int) -> tuple[Structured, Int32] | None:
        """The structure of a constrained row and what is known of its text; None if the row has ended."""
        slots = self._slots
        request = slots.request[slot]
        if request is None or slots.gen[slot] != gen or request.params.structured is None:
            return None
        return request.params.structured, slots.tokens[slot, slots.prompt_len[slot] : slots.known[slot]]
