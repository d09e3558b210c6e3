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


class SamplingPaths:
    """The host's copy, by slot, of what the choice needs; it follows plans in launch order."""

    def __init__(self, num_slots: int) -> None:
        self._greedy = np.zeros(num_slots, dtype=np.bool_)
        self._filtered = np.zeros(num_slots, dtype=np.bool_)
        self._min_tokens_until = np.zeros(num_slots, dtype=np.int32)
        self._adjusts = np.zeros(num_slots, dtype=np.bool_)
        self._logprobs = np.zeros(num_slots, dtype=np.bool_)
        self._constrained = np.zeros(num_slots, dtype=np.bool_)
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
        slots = plan.row_slot[sampling]
        token_index = (plan.row_start + plan.row_len)[sampling]
        greedy = self._greedy[slots]
        logprobs = self._logprobs[plan.row_slot] & sampling
        self.logprob_rows = np.flatnonzero(logprobs).astype(np.int32) if logprobs.any() else None
        self._row_slot, self._row_samples = plan.row_slot, plan.row_samples
        self._path = SamplingPath(
            greedy=bool(greedy.all()),
            filtered=bool((self._filtered[slots] & ~greedy).any()),
            bans_stop_ids=bool((token_index < self._min_tokens_until[slots]).any()),
            adjusts=bool(self._adjusts[slots].any()),
            logprobs=self.logprob_rows is not None,
            masks=bool(self._constrained[slots].any()),
        )
        return self._path

    def _start(self, start: StartRows) -> None:
        self._greedy[start.slot] = start.temperature < GREEDY_BELOW
        self._filtered[start.slot] = (start.top_k > 0) | (start.top_p < 1.0) | (start.min_p > 0.0)
        self._min_tokens_until[start.slot] = start.min_tokens_until
        penalised = (start.presence_penalty != 0.0) | (start.frequency_penalty != 0.0)
        self._adjusts[start.slot] = penalised | (start.repetition_penalty != 1.0) | (start.num_bias > 0)
        self._logprobs[start.slot] = start.logprobs >= 0
        self._constrained[start.slot] = start.constrained != 0
