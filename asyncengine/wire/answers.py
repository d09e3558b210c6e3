"""What an engine's process hears: of its requests from the ring, and of the engine from its supervisor."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncengine.wire.base import Wire
from asyncengine.wire.frames import PromptLogprobs


class LogprobColumns(Wire, frozen=True, tag=33):
    """Log-probabilities of E tokens of the K requests of a `Deltas`; a token's I items are the chosen one and then the
    most likely ones at its position, falling.

    ends: int32 [K], end offset of each request's tokens. text_offsets: int32 [E], characters of the request's text
    before the token. item_ends: int32 [E], end offset of each token's items, at least one. ids: int32 [I]. logprobs:
    float32 [I]. token_bytes: blob of the items' bytes, `token_ends`: int32 [I], end offset of each.
    """

    ends: bytes
    text_offsets: bytes
    item_ends: bytes
    ids: bytes
    logprobs: bytes
    token_bytes: bytes
    token_ends: bytes


class PromptColumns(Wire, frozen=True, tag=24):
    """The prompt of a request of a `Deltas`, `row` being its place in it. token_bytes: blob of the items' bytes,
    token_ends: int32 [I], end offset of each."""

    row: int
    logprobs: PromptLogprobs
    token_bytes: bytes
    token_ends: bytes


class Openings(Wire, frozen=True, tag=35):
    """Requests of a `Deltas` that appear for the first time. rows: int32 [O], their places in it. stamps: int64 [O, 3],
    `queued_ns`, `started_ns` and `first_token_ns` of each one's `Open`. sessions: int32 [O, 2], its `session_tokens`
    and `session_common`; empty where none of them had a session that was known."""

    rows: bytes
    stamps: bytes
    sessions: bytes = b""


class Marks(Wire, frozen=True, tag=26):
    """`RowMarks` of requests of a `Deltas`. rows: int32 [O], their places in it. marks: int64 [M, 2], all requests';
    ends: int32 [O], end offset of each one's."""

    rows: bytes
    ends: bytes
    marks: bytes


class Deltas(Wire, frozen=True, tag=30):
    """New text of K requests of one API worker. A request appears at most once; its deltas arrive in order.

    rids: uint64 [K]. text: UTF-8 blob, `text_ends`: int32 [K], end offset of each request's bytes in it.
    ids: int32 blob of new token ids (all requests'), `ids_ends`: int32 [K], end offset of each in tokens.
    finish: uint8 [K]. stop_reason: int32 [K]; with STOP the token id, with STOP_STRING the index in `stop`, with ERROR
    the id that the vocabulary does not have (not among `ids`), else -1.
    prompt_tokens, cached_tokens: int32 [K].
    logprobs: None unless a request asked. A request's entries belong to its first tokens in order and come with the
    text those tokens began, so they may come later than the token's id, and not at all (see
    `detokenizer_proc.logprob_gate`).
    prompts: of the requests that asked for their prompt's log-probabilities and appear for the first time.
    shard: index of the detokenizer that sends it, which has these rows to their end.
    marks: of the requests for which gpu_runner did more than to decode.
    """

    rids: bytes
    text: bytes
    text_ends: bytes
    ids: bytes
    ids_ends: bytes
    finish: bytes
    stop_reason: bytes
    prompt_tokens: bytes
    cached_tokens: bytes
    logprobs: LogprobColumns | None = None
    openings: Openings | None = None
    prompts: tuple[PromptColumns, ...] = ()
    shard: int = 0
    marks: Marks | None = None


class Encoded(Wire, frozen=True, tag=31):
    """A batch of prompts left the tokenizer for gpu_runner. rids: uint64 [K]. at_ns: when, by CLOCK_MONOTONIC; 0 = not
    told."""

    rids: bytes
    at_ns: int = 0


class Failed(Wire, frozen=True, tag=32):
    """`rid` will produce no text: it was refused before it ran. `status` is 400 for a fault of the request."""

    rid: int
    status: int
    message: str
    code: str
    param: str | None


class Tokenized(Wire, frozen=True, tag=36):
    """ids: int32 array. texts: one for each where asked, as the vocabulary writes them; else none."""

    rid: int
    ids: bytes
    texts: tuple[str, ...]


class Detokenized(Wire, frozen=True, tag=37):
    rid: int
    text: str


class Cancel(Wire, frozen=True, tag=38):
    """API worker `worker`, which has no such request, asks another one to cancel `request_id`, of `tenant`, if
    that has it; answered with `Cancelled`. call: the asker's number for this."""

    call: int
    worker: int
    request_id: str
    tenant: str = ""


class Cancelled(Wire, frozen=True, tag=39):
    call: int
    found: bool


class Crash(Wire, frozen=True, tag=27):
    """gpu_runner crashed, by a fault of its own, and number `life` takes its place. rids: int64 array, requests that
    had rows, and some whose rows had ended. convicts: rids of the one request that crashed it, found by a trial."""

    life: int
    rids: bytes
    convicts: tuple[int, ...] = ()


class EngineStatus(Wire, frozen=True, tag=34):
    """How the engine is, for an API worker, which does not watch the sidecars itself; sent again and again.

    state, detail: as in `engine_info.Health`; "failed" and "closed" end the worker. info: the fields of `EngineInfo`,
    none in these.
    gauges: gpu_runner's latest. lives: of every process that has been replaced and is ready, by "role.index". crash:
    the latest one.
    """

    state: str
    detail: str
    info: dict[str, Any]
    gauges: dict[str, int]
    lives: dict[str, int] = msgspec.field(default_factory=dict)
    crash: Crash | None = None


ToEngine = Deltas | Encoded | Failed | Tokenized | Detokenized | Cancel | Cancelled | EngineStatus
