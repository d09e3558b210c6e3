"""The decision of one step as data: what `Scheduler.plan()` returns and an executor acts on.

Columnar and self-contained: given the device state that earlier plans left, a plan's arrays say everything a device
needs, so another process could execute the step from a copy of its bytes. What each step makes is a tuple: a frozen
dataclass takes five times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
UInt8 = NDArray[np.uint8]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StartRows:
    """Slots that begin (or resume) in a step; their device state is set before the step runs. S rows.

    limit: total tokens (prompt + output) at which the row ends with LENGTH. min_tokens_until: while a sampled token's
    index in the sequence is below this, `stop_ids` cannot be sampled. stop_ids: -1 pads. prompt_len: tokens that are no
    output, also where a row resumes with some. logprobs: how many most likely tokens to report beside the chosen one.
    constrained: 1 where a mask that is there before any step in which the row samples says which tokens it may get.
    bias_ids, bias_values: of row 0, then of row 1, ...; `num_bias` of each.
    """

    slot: Int32  # [S]
    temperature: NDArray[np.float32]  # [S], 0 = greedy
    top_k: Int32  # [S], 0 = off
    top_p: NDArray[np.float32]  # [S], 1 = off
    min_p: NDArray[np.float32]  # [S], 0 = off
    seed: NDArray[np.int64]  # [S]
    limit: Int32  # [S]
    min_tokens_until: Int32  # [S]
    stop_ids: Int32  # [S, MAX_STOP_IDS]
    prompt_len: Int32  # [S]
    presence_penalty: NDArray[np.float32]  # [S], 0 = off
    frequency_penalty: NDArray[np.float32]  # [S], 0 = off
    repetition_penalty: NDArray[np.float32]  # [S], 1 = off
    logprobs: Int32  # [S], -1 = report none at all
    constrained: Int32  # [S]
    num_bias: Int32  # [S]
    bias_ids: Int32  # [sum of num_bias]
    bias_values: NDArray[np.float32]  # [sum of num_bias]

    def __len__(self) -> int:
        return len(self.slot)


NO_SCORES: Int32 = np.empty((0, 3), np.int32)
NO_SCORES.flags.writeable = False
NO_SCORE_ROWS: Int32 = np.empty(0, np.int32)
NO_SCORE_ROWS.flags.writeable = False


class StepPlan(NamedTuple):
    """One step over R rows: `num_decode_rows` decode rows first, then the prefill rows.

    A decode row's one input token is the slot's last sampled token, which only the device knows yet. A prefill row's
    `row_len` input tokens are its share of `prefill_tokens`, rows concatenated. Row i's tokens take the positions
    `row_start[i] .. row_start[i] + row_len[i] - 1`; where `row_samples`, a token is sampled after the last of them and
    becomes token number `row_start + row_len` (from 0) of the sequence. Page-table writes apply before the step.

    scores: N tokens of prefill rows, ascending, for each its index among the step's tokens, the token that follows it
    in its prompt, of which the log-probability is asked for, and how many most likely ones to report beside that.
    score_row: the row of each.

    The arrays never change; plans one after the other that hold the same decode rows, and nothing else, share some.
    """

    step: int
    bucket: int  # token count the step is run at, >= num_tokens
    num_decode_rows: int
    row_slot: Int32  # [R]
    row_gen: Int32  # [R], the slot's generation; results of an older one are dropped
    row_start: Int32  # [R]
    row_len: Int32  # [R]
    row_samples: Bool  # [R]
    prefill_tokens: Int32  # [sum of prefill rows' row_len]
    page_slot: Int32  # [U], page_table[page_slot, page_index] = page_id
    page_index: Int32  # [U]
    page_id: Int32  # [U]
    start: StartRows
    scores: Int32 = NO_SCORES  # [N, 3]
    score_row: Int32 = NO_SCORE_ROWS  # [N]

    @property
    def num_rows(self) -> int:
        return len(self.row_slot)

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + len(self.prefill_tokens)


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log-probabilities of a step's rows that ask for them and got a token: L rows.

    rows: which of the rows they are, ascending. logprobs: of the row's token. top_ends: where each row's most likely
    tokens end in the last two: falling log-probability, smaller id first among equals.
    """

    rows: Int32  # [L]
    logprobs: NDArray[np.float32]  # [L]
    top_ends: Int32  # [L]
    top_ids: Int32  # [top_ends[-1]]
    top_logprobs: NDArray[np.float32]  # [top_ends[-1]]

    def of(self, kept: Bool) -> StepLogprobs | None:
        """What is left, counted anew, when only the `kept` of all rows are; None if nothing. kept: [R]."""
        here = kept[self.rows]
        if not here.any():
            return None
        counts = np.diff(self.top_ends, prepend=np.int32(0))
        tops = np.repeat(here, counts)
        return StepLogprobs(
            rows=(np.cumsum(kept, dtype=np.int32) - np.int32(1))[self.rows[here]],
            logprobs=self.logprobs[here],
            top_ends=np.cumsum(counts[here], dtype=np.int32),
            top_ids=self.top_ids[tops],
            top_logprobs=self.top_logprobs[tops],
        )


@dataclass(frozen=True, slots=True)
class StepScores:
    """Log-probabilities of tokens that follow others in a prompt: of N tokens in order. ranks: 1 is the most likely
    token. top_ends, top_ids, top_logprobs: as of `StepLogprobs`."""

    logprobs: NDArray[np.float32]  # [N]
    ranks: Int32  # [N]
    top_ends: Int32  # [N]
    top_ids: Int32  # [top_ends[-1]]
    top_logprobs: NDArray[np.float32]  # [top_ends[-1]]

    def __len__(self) -> int:
        return len(self.logprobs)

    def part(self, begin: int, end: int) -> StepScores:
        """Of tokens `begin` to `end` alone."""
        top_begin = int(self.top_ends[begin - 1]) if begin else 0
        tops = slice(top_begin, int(self.top_ends[end - 1]) if end else 0)
        return StepScores(
            logprobs=self.logprobs[begin:end],
            ranks=self.ranks[begin:end],
            top_ends=self.top_ends[begin:end] - np.int32(top_begin),
            top_ids=self.top_ids[tops],
            top_logprobs=self.top_logprobs[tops],
        )


class StepResult(NamedTuple):
    """What came back of one step, row for row of its plan.

    tokens: the sampled token; -1 where the row sampled none, or had already ended on the device (an overshoot row).
    finish: a `Finish` (NONE, STOP or LENGTH) decided on the device.
    device_begin_ns, device_end_ns: when the device ran the step, by its own clock; 0 where it has none. logprobs: None
    where no row asks. scores: of the plan's scored tokens; None where it has none.
    """

    step: int
    tokens: Int32  # [R]
    finish: UInt8  # [R]
    device_begin_ns: int = 0
    device_end_ns: int = 0
    logprobs: StepLogprobs | None = None
    scores: StepScores | None = None
