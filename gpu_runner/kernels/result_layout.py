"""Where in the one vector that comes back from a device each result of a step lies.

    int32 words   0 .. 1       2 .. 3     4 .. 4 + S - 1   4 + S .. 4 + 2 S - 1        S = slots of the device's state
                  begin time   end time   tokens           finish values
                  as int64, nanoseconds   by row of the step, not by slot

Behind them, and copied to the host only where some row of the step asks: S log-probabilities of the rows' tokens
(float32), S numbers of most likely tokens, S x MAX_TOP_LOGPROBS of their ids and as many of their log-probabilities
(float32). Rows that do not ask, or got no token, have there whatever earlier steps left.

Behind all that lie the scores of prompts' tokens, `Scores`, by their order in the step's plan; copied to the host only
by steps that have some.

A GPU's times are its `globaltimer`: begin is read by the first program of `step_meta` once it may run, end by the
first of `post_update` as the last it does. A CPU's are CLOCK_MONOTONIC. 0: this device tells no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncengine.config import MAX_TOP_LOGPROBS

TIME_WORDS = 4
TOKEN_COLUMNS = 2
COLUMNS = TOKEN_COLUMNS + 2 + 2 * MAX_TOP_LOGPROBS
"""Words per slot."""
SCORE_COLUMNS = 3 + 2 * MAX_TOP_LOGPROBS


def result_words(num_slots: int) -> int:
    """Length of the vector."""
    return TIME_WORDS + COLUMNS * num_slots


def token_words(num_slots: int) -> int:
    """Length of its beginning without log-probabilities."""
    return TIME_WORDS + TOKEN_COLUMNS * num_slots


def score_words(num_slots: int) -> int:
    """Length of the scores of a step, at most one for each slot."""
    return SCORE_COLUMNS * num_slots


@dataclass(frozen=True, slots=True)
class Results:
    """Views of the parts of one results vector."""

    times: Tensor  # [2] int64, ns: begin, end
    tokens: Tensor  # [num_slots] int32
    finish: Tensor  # [num_slots] int32
    logprobs: Tensor  # [num_slots] float32
    num_tops: Tensor  # [num_slots] int32
    top_ids: Tensor  # [num_slots, MAX_TOP_LOGPROBS] int32
    top_logprobs: Tensor  # [num_slots, MAX_TOP_LOGPROBS] float32

    @classmethod
    def of(cls, vector: Tensor) -> Results:
        """vector: [result_words(num_slots)] int32, on any device."""
        columns = vector[TIME_WORDS:].view(COLUMNS, -1)
        tokens, finish, logprobs, num_tops = columns[: TOKEN_COLUMNS + 2]
        top_ids, top_logprobs = columns[TOKEN_COLUMNS + 2 :].view(2, -1, MAX_TOP_LOGPROBS)
        return cls(
            times=vector[:TIME_WORDS].view(torch.int64),
            tokens=tokens,
            finish=finish,
            logprobs=logprobs.view(torch.float32),
            num_tops=num_tops,
            top_ids=top_ids,
            top_logprobs=top_logprobs.view(torch.float32),
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """Views of the parts of one vector of scores. ranks: 1 for the most likely token; the others as in `Results`."""

    logprobs: Tensor  # [num_slots] float32
    ranks: Tensor  # [num_slots] int32
    num_tops: Tensor  # [num_slots] int32
    top_ids: Tensor  # [num_slots, MAX_TOP_LOGPROBS] int32
    top_logprobs: Tensor  # [num_slots, MAX_TOP_LOGPROBS] float32

    @classmethod
    def of(cls, vector: Tensor) -> Scores:
        """vector: [score_words(num_slots)] int32, on any device."""
        columns = vector.view(SCORE_COLUMNS, -1)
        logprobs, ranks, num_tops = columns[:3]
        top_ids, top_logprobs = columns[3:].view(2, -1, MAX_TOP_LOGPROBS)
        return cls(
            logprobs=logprobs.view(torch.float32),
            ranks=ranks,
            num_tops=num_tops,
            top_ids=top_ids,
            top_logprobs=top_logprobs.view(torch.float32),
        )
