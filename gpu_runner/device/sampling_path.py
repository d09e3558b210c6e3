"""The cheapest way to sample a step's tokens, chosen on the host from parameters alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu_runner.kernels.reference_sampling import GREEDY_BELOW
from gpu_runner.schedule.plan import Bool, Int32, StartRows, StepPlan


@dataclass(frozen=True, slots=True)
class SamplingPath:
    """greedy: every row that samples is, so that an argmax does. filtered: some row has a top-k, top-p or min-p.
    bans_stop_ids: some row is below its min_tokens. adjusts: some row has a penalty or a logit bias. logprobs: some row
    reports log-probabilities. masks: some row may only get tokens of its mask."""

    greedy: bool
    filtered: bool
    bans_stop_ids: bool
    adjusts: bool = False
    logprobs: bool = False
    masks: bool = False

    @property
    def full(self) -> bool:
        """Whether there is more to do than to choose tokens."""
        return self.adjusts or self.logprobs or self.masks


# What a row wants, as bits of one number, so that a step looks them all up at once. `_FILTERED` is without greedy rows.
_NOT_GREEDY, _FILTERED, _MIN_TOKENS, _ADJUSTS, _LOGPROBS, _CONSTRAINED = (1 << bit for bit in range(6))


class SamplingPaths:
    """The host's copy, by slot, of what the choice needs; it follows plans in launch order."""

    def __init__(self, num_slots: int) -> None:
        self._wants = np.zeros(num_slots, dtype=np.uint8)
        self._min_tokens_until = np.zeros(num_slots, dtype=np.int32)
        # The last answer, for plans of the same rows. `Scheduler` gives those the same arrays, which nobody changes.
        self._row_slot: Int32 | None = None
        self._row_samples: Bool | None = None
        self._path = SamplingPath(greedy=True, filtered=False, bans_stop_ids=False)
        self.logprob_rows: Int32 | None = None
        """Of the last plan: which of its rows report log-probabilities if they get a token; None if none does."""

    def choose(self, plan: StepPlan) -> SamplingPath:
        """Take over the rows that start in `plan`, then choose for those that sample in it."""
        if len(plan.start.slot):
            self._start(plan.start)
        elif plan.row_slot is self._row_slot and plan.row_samples is self._row_samples and not self._path.bans_stop_ids:
            return self._path  # rows only grow longer, so none falls below its min_tokens again
        sampling = plan.row_samples
        index = plan.row_slot.astype(np.intp)  # which numpy looks up three times as fast
        row_wants = self._wants[index]
        wants = int(np.bitwise_or.reduce(row_wants[sampling]))
        bans_stop_ids = False
        if wants & _MIN_TOKENS:
            below = plan.row_start + plan.row_len < self._min_tokens_until[index]
            bans_stop_ids = bool((below & sampling).any())
        self.logprob_rows = None
        if wants & _LOGPROBS:
            self.logprob_rows = np.flatnonzero((row_wants & _LOGPROBS > 0) & sampling).astype(np.int32)
        self._row_slot, self._row_samples = plan.row_slot, plan.row_samples
        self._path = SamplingPath(
            greedy=not wants & _NOT_GREEDY,
            filtered=wants & _FILTERED > 0,
            bans_stop_ids=bans_stop_ids,
            adjusts=wants & _ADJUSTS > 0,
            logprobs=wants & _LOGPROBS > 0,
            masks=wants & _CONSTRAINED > 0,
        )
        return self._path

    def _start(self, start: StartRows) -> None:
        not_greedy = start.temperature >= GREEDY_BELOW
        penalised = (start.presence_penalty != 0.0) | (start.frequency_penalty != 0.0)
        wants = np.array(
            [
                not_greedy,
                not_greedy & ((start.top_k > 0) | (start.top_p < 1.0) | (start.min_p > 0.0)),
                start.min_tokens_until > start.prompt_len,
                penalised | (start.repetition_penalty != 1.0) | (start.num_bias > 0),
                start.logprobs >= 0,
                start.constrained != 0,
            ]
        )
        self._wants[start.slot] = np.packbits(wants, axis=0, bitorder="little")[0]
        self._min_tokens_until[start.slot] = start.min_tokens_until
