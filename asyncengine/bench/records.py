"""What the load's processes tell each other: tasks on the way out, records of requests on the way back."""

from __future__ import annotations

import msgspec

from asyncengine.config import ServiceClass


class Job(msgspec.Struct, frozen=True, array_like=True):
    """at_s: when it is due, in seconds after the start; of no meaning in a closed loop. service_class: None where the
    request names none."""

    index: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    service_class: ServiceClass | None = None


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """concurrency: requests under way at any time (closed loop), or None to send each when due (open loop).

    vocab: prompts are random ids from the first to below the second.
    """

    host: str
    port: int
    path: str
    headers: dict[str, str]
    model: str
    jobs: list[Job]
    concurrency: int | None
    vocab: tuple[int, int]
    seed: int
    timeout_s: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Every request is prepared."""


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How one request went; times in seconds after the start.

    status: "ok", else what went wrong. detail: the beginning of what the server said about that.
    first_s, last_s: arrival of the first and last event with output, None where there was none.
    gaps_us: times between the arrivals of output; several events that arrive at once are one arrival.
    prompt_tokens, output_tokens: as the server counts them. cached_tokens: of the prompt's, those that it says it had.
    """

    status: str
    detail: str
    due_s: float | None
    sent_s: float
    end_s: float
    first_s: float | None
    last_s: float | None
    prompt_tokens: int
    output_tokens: int
    gaps_us: list[int]
    service_class: ServiceClass | None = None
    cached_tokens: int = 0


class Done(msgspec.Struct, frozen=True, tag=True):
    """cpu_share: processor time of this process from start to end over the time between."""

    cpu_share: float


Line = Ready | Record | Done
