"""When a client asks again."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import msgspec

from asyncengine.errors import InvalidRequestError

MAX_ATTEMPTS = 100


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What to do when the server has no room (HTTP 429 or 503) or refuses connections. Nothing is sent again once a
    byte of an answer has come. Construction raises `InvalidRequestError`.

    attempts: in all; 1 never asks again. first_wait: seconds before the second attempt; each further wait is twice the
    one before, at most `longest_wait`; of each, a random half is left out so that clients do not come back together.
    A server that says when to come again (Retry-After) is asked not earlier, and not at all if that is later than
    `longest_wait`.
    """

    attempts: int = 3
    first_wait: float = 0.5
    longest_wait: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= MAX_ATTEMPTS:
            raise InvalidRequestError(f"attempts must be from 1 to {MAX_ATTEMPTS}, got {self.attempts}")
        if not 0.0 <= self.first_wait <= self.longest_wait < float("inf"):
            raise InvalidRequestError(
                f"first_wait and longest_wait must be 0 <= {self.first_wait:g} <= {self.longest_wait:g} seconds"
            )

    def wait(self, attempt: int, *, retry_after: float | None, chance: float) -> float | None:
        """Seconds from the failure of attempt number `attempt`, from 1, to the next; None when there is to be none.

        retry_after: seconds that the server asks for. chance: a random number from 0 to below 1.
        """
        if attempt >= self.attempts:
            return None
        if retry_after is None:
            return min(self.longest_wait, self.first_wait * 2.0 ** (attempt - 1)) * (1.0 - 0.5 * chance)
        return None if retry_after > self.longest_wait else retry_after + self.first_wait * chance


def seconds_of(retry_after: str | None, now: datetime) -> float | None:
    """Of a Retry-After header, which holds seconds or a date; None for anything else."""
    if retry_after is None:
        return None
    if retry_after.isascii() and retry_after.isdecimal():
        return float(retry_after)
    try:
        moment = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    if moment.tzinfo is None:  # the header's dates are all of GMT
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - now).total_seconds())
