"""Which requests may wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from asyncengine.errors import QueueFullError

BACKGROUND_DIVISOR = 2
"""Background requests may be this part of what waits, which messages call half. Interactive ones start first, so that
the rest of the room holds those of a burst; who sends background work loses nothing by sending some of it later."""


class Backlog(NamedTuple):
    """Requests that wait, each of n choices counted, and the tokens of their prompts and of output they came with."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait. requests, tokens: see `EngineConfig.max_queued_requests` and `max_queued_tokens`.

    Background requests have half of each at most. What they have beyond that, because it was taken from its rows or
    taken up again after a loss, is not held against interactive ones: the other half is always theirs.
    """

    requests: int
    tokens: int

    def check(self, new: Backlog, *, is_background: bool, interactive: Backlog, background: Backlog, rows: int) -> None:
        """Whether a request may wait beside those that do, `rows` of which are about to start, interactive ones first.
        The first to wait may have any number of tokens, and so may the first interactive one; the first background one
        more than their half. Raises QueueFullError."""
        most = Backlog(self.requests // BACKGROUND_DIVISOR, self.tokens // BACKGROUND_DIVISOR)
        if is_background:
            _check_share(new, background, most, rows=max(0, rows - interactive.requests))
            alone = not interactive.requests + background.requests
        else:
            background = Backlog(min(background.requests, most.requests), min(background.tokens, most.tokens))
            alone = not interactive.requests
        if interactive.requests + background.requests + new.requests > self.requests + rows:
            raise QueueFullError(
                f"{interactive.requests} interactive and {background.requests} background requests wait already, and "
                f"--max-queued-requests is {self.requests}; this one has {new.requests}",
                code="queue_full",
            )
        if not alone and interactive.tokens + background.tokens + new.tokens > self.tokens:
            raise QueueFullError(
                f"the interactive requests that wait have {interactive.tokens} tokens and the background ones "
                f"{background.tokens} already, and --max-queued-tokens is {self.tokens}; this one has {new.tokens}",
                code="queue_full",
            )


def _check_share(new: Backlog, background: Backlog, most: Backlog, *, rows: int) -> None:
    if background.requests + new.requests > most.requests + rows:
        raise QueueFullError(
            f"{background.requests} background requests wait already, and {most.requests} may, half of "
            f"--max-queued-requests; this one has {new.requests}",
            code="queue_full",
        )
    if background.requests and background.tokens + new.tokens > most.tokens:
        raise QueueFullError(
            f"the background requests that wait have {background.tokens} tokens already, and {most.tokens} may wait, "
            f"half of --max-queued-tokens; this one has {new.tokens}",
            code="queue_full",
        )
