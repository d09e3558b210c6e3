"""Log-probabilities of prompts on their way out: gathered while rows prefill, sent with their first tokens."""

from __future__ import annotations

import numpy as np

from asyncengine.wire.frames import PromptLogprobs
from gpu_runner.schedule.plan import StepPlan, StepScores
from gpu_runner.schedule.slots import Slots


class PromptScores:
    """By slot, of rows that have ended none. A row's parts come in the order of its tokens, each once: what a retracted
    row has scored is not computed again, or not scored again, and its steps are done before it resumes."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._parts: dict[int, list[StepScores]] = {}

    def add(self, plan: StepPlan, scores: StepScores) -> None:
        """Take in what came back of the plan's scored tokens, but for rows that have ended."""
        rows, begins = np.unique(plan.score_row, return_index=True)
        ends = [*begins[1:].tolist(), len(scores)]
        for row, begin, end in zip(rows.tolist(), begins.tolist(), ends, strict=True):
            slot = int(plan.row_slot[row])
            if self._slots.gen[slot] == plan.row_gen[row]:
                self._parts.setdefault(slot, []).append(scores.part(begin, end))

    def take(self, slot: int) -> PromptLogprobs | None:
        """All of the row's prompt, which has been computed; None where that is not wanted."""
        slots, request = self._slots, self._slots.request[slot]
        assert request is not None
        if not request.scores_prompt:
            return None
        parts = self._parts.pop(slot, [])
        assert sum(map(len, parts)) == slots.score_end[slot]
        counts = [np.diff(part.top_ends, prepend=np.int32(0)) + np.int32(1) for part in parts]
        item_ends = np.cumsum(np.concatenate([np.ones(1, np.int32), *counts]), dtype=np.int32)
        ids = np.empty(item_ends[-1], np.int32)
        logprobs = np.empty(item_ends[-1], np.float32)
        own = np.zeros(len(ids), np.bool_)
        own[0] = own[item_ends[:-1]] = True
        ids[own], logprobs[0] = request.prompt, np.nan
        if parts:
            logprobs[item_ends[:-1]] = np.concatenate([part.logprobs for part in parts])
            ids[~own] = np.concatenate([part.top_ids for part in parts])
            logprobs[~own] = np.concatenate([part.top_logprobs for part in parts])
        ranks = np.concatenate([np.zeros(1, np.int32), *[part.ranks for part in parts]])
        return PromptLogprobs(item_ends.tobytes(), ids.tobytes(), logprobs.tobytes(), ranks.tobytes())

    def forget(self, slot: int) -> None:
        """The row has ended."""
        self._parts.pop(slot, None)
