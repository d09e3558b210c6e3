"""Which part of a prompt is computed in which step."""

from __future__ import annotations

from collections.abc import Callable

from gpu_runner.schedule.charges import Charges
from gpu_runner.schedule.counters import Counters
from gpu_runner.schedule.masked_rows import MaskedRows
from gpu_runner.schedule.plan_builder import PlanDraft
from gpu_runner.schedule.prefill_marks import PrefillMarks
from gpu_runner.schedule.rows import Rows
from gpu_runner.schedule.running import Running
from gpu_runner.schedule.step_room import StepRooms


class Prefill:
    """Cuts prompts where a step's token budget ends, where it would take too long for the rows that decode in it, and
    where it would score more tokens than it has room for."""

    def __init__(
        self,
        rows: Rows,
        running: Running,
        masked_rows: MaskedRows,
        *,
        rooms: StepRooms,
        charges: Charges,
        marks: PrefillMarks,
        counters: Counters,
        max_scores: int,
        clock: Callable[[], int],
    ) -> None:
        """max_scores: prompt tokens whose log-probabilities a step may compute. clock: as in `Scheduler`."""
        self._rows = rows
        self._slots = rows.slots
        self._running = running
        self._masked_rows = masked_rows
        self._rooms = rooms
        self._charges = charges
        self._marks = marks
        self._counters = counters
        self._max_scores = max_scores
        self._clock = clock

    def go_on(self, budget: int, draft: PlanDraft) -> int:
        """Place chunks of the rows that prefill, in their order; returns what is left of `budget` tokens."""
        for slot in self._running.prefill:
            if budget == 0:
                break
            budget = self.place(slot, budget, draft)
        return budget

    def left(self, slots: list[int]) -> int:
        """Tokens of these rows that are yet to be computed."""
        return int((self._slots.known[slots] - self._slots.computed[slots]).sum()) if slots else 0

    def place(self, slot: int, budget: int, draft: PlanDraft) -> int:
        """Compute the row's next tokens in this step and make their full pages shareable at once. A plan tells the
        device of a row with its first tokens. Returns what is left of `budget`: nothing once a longer step would keep
        the decoding rows waiting."""
        slots = self._slots
        computed, known, score_end = slots.computed.item(slot), slots.known.item(slot), slots.score_end.item(slot)
        length = min(known - computed, budget)
        if score_end:
            length = min(length, self._scorable(slot, draft))
        if computed + length == known and self._masked_rows.lacks_mask(slot):
            length -= 1  # after the last one it would sample
        if not length:
            return budget
        if draft.room is None:
            draft.room = self._rooms.beside(draft.decode)
        wanted, length = length, draft.room.take(computed, length)
        budget = 0 if length < wanted else budget - length
        if not length:
            return budget
        if not slots.announced[slot]:
            slots.announced[slot] = True
            draft.started.append(slot)
        draft.prefill.append((slot, length))
        self._marks.chunk(slot, length, self._clock())
        request = slots.request[slot]
        assert request is not None
        request.overtaken = 0
        slots.computed[slot] = computed = computed + length
        self._charges.prefill(slot, computed)
        self._counters.prefill_tokens += length
        if score_end:  # what that row computes may be in the tree already, which it would hold as well
            self._score(slot, min(computed, score_end), draft)
        else:
            self._rows.share(slot)
        return budget

    def _score(self, slot: int, end: int, draft: PlanDraft) -> None:
        """Have the row's chunk, which was placed last, score its tokens up to `end`."""
        scored = self._slots.scored.item(slot)
        if end > scored:
            draft.scores.append((len(draft.prefill) - 1, scored, end - scored))
            self._slots.scored[slot] = end

    def _scorable(self, slot: int, draft: PlanDraft) -> int:
        """How far the chunk of a row that scores its prompt may reach for the step to score `max_scores` tokens."""
        slots = self._slots
        room = self._max_scores - draft.num_scores
        if slots.score_end[slot] - slots.scored[slot] <= room:
            return slots.max_model_len
        return int(slots.scored[slot] + room - slots.computed[slot])
