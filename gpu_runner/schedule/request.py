"""A request on its way through the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncengine.sampling import INT32_MAX, SamplingParams
from asyncengine.terms import DEFAULT_TERMS, Terms

AGED_PRIORITY = -INT32_MAX - 1
"""Before every priority that a request may ask for."""
MAX_PREEMPTIONS = 8
"""So often a request may lose its pages to others."""
Family = tuple[int, str, bytes]
"""Priority, namespace and first tokens: what prompts that begin alike have in common."""


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one request.

    tokens: its prompt and, where it goes on after a loss, the output that it has; shown: as in `Resume`. arrival: order
    of arrival, unique. slot: -1 until the request has run; a retracted request keeps its slot, its tokens so far and
    its place in the detokenizer. queued_ns, started_ns: when it came and when it was first planned, by the scheduler's
    clock; 0 = not yet. ticket: tells its stays in the queue apart. aged: it was overtaken as often as may be, so that
    its turn came before the policy's. account: its tenant's, in `Tenants`; -1 = none yet. overtaken: requests that
    started before the rest of its prompt since it had a chunk. family: what it waits with, if its prompt is long
    enough. session_tokens, session_common: as in `Open`, from when it started.
    """

    rid: int
    tokens: NDArray[np.int32]  # [prompt_len + output it has]
    prompt_len: int
    params: SamplingParams
    seed: int
    limit: int  # total tokens, prompt included, at which it ends with LENGTH
    detok: bytes
    namespace: str
    arrival: int
    terms: Terms = DEFAULT_TERMS
    shown: int = 0
    slot: int = -1
    preemptions: int = 0
    queued_ns: int = 0
    started_ns: int = 0
    ticket: int = 0
    aged: bool = False
    account: int = -1
    overtaken: int = 0
    family: Family | None = None
    session_tokens: int = -1
    session_common: int = 0

    @property
    def priority(self) -> int:
        """An aged one is not sent back for a more important one: it would never end."""
        return AGED_PRIORITY if self.aged else self.params.priority

    @property
    def background(self) -> bool:
        return self.terms.service_class == "background"

    @property
    def keeps_place(self) -> bool:
        """No other request takes its row or pages to start."""
        return self.aged or self.keeps_pages

    @property
    def keeps_pages(self) -> bool:
        """Nor do rows that grow."""
        return self.preemptions >= MAX_PREEMPTIONS

    @property
    def fresh(self) -> bool:
        """It has not run, neither here nor in a process that was lost."""
        return self.slot < 0 and len(self.tokens) == self.prompt_len

    @property
    def prompt(self) -> NDArray[np.int32]:
        return self.tokens[: self.prompt_len]

    @property
    def resumed(self) -> NDArray[np.int32]:
        """The output that it came with."""
        return self.tokens[self.prompt_len :]

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are wanted; what has output has reported them."""
        return self.params.prompt_logprobs is not None and len(self.tokens) == self.prompt_len
