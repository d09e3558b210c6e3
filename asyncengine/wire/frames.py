"""What gpu_runner sends to the detokenizers: the tokens of each step."""

from __future__ import annotations

from asyncengine.wire.base import Wire
from asyncengine.wire.requests import Relink


class DetokenizeOptions(Wire, frozen=True, tag=20):
    """How one row's tokens become text. `prompt_tail`: int32 array, the prompt's last ids (context for decoders that
    need some). `logprobs`: the row's tokens come with log-probabilities. `shown_tokens`: as in `Markup`. `prefix`: the
    text begins with it, though no token wrote it. no_output: the row's one token is dropped, as if it had ended with
    LENGTH before it."""

    stop: tuple[str, ...]
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    prompt_tail: bytes
    logprobs: bool = False
    shown_tokens: tuple[str, ...] = ()
    prefix: str = ""
    no_output: bool = False


class PromptLogprobs(Wire, frozen=True, tag=23):
    """A prompt's tokens with their log-probabilities: E tokens, each with one item for itself and then those of the
    most likely tokens at its position, falling; I items.

    item_ends: int32 [E], end offset of each token's items. ids: int32 [I]. logprobs: float32 [I], NaN for the prompt's
    first token, which follows nothing and has no other item. ranks: int32 [E], 1 = the most likely token; 0 for the
    first.
    """

    item_ends: bytes
    ids: bytes
    logprobs: bytes
    ranks: bytes


class Open(Wire, frozen=True, tag=21):
    """A row's first appearance, in the same frame as its first token (or as its end, if it ends without one).

    queued_ns, started_ns, first_token_ns: when gpu_runner took it in, first planned it and had its first token; by
    CLOCK_MONOTONIC, 0 = not told. prompt: where the request asks for its log-probabilities. resumed: int32 array,
    output tokens that come before those of the frames and are not sent again; nor are the first `shown` bytes of the
    row's text (see `Resume`).
    session_tokens: what the request's session had before it, of which the prompt begins with `session_common`; -1 = no
    such session was known.
    """

    slot: int
    gen: int
    rid: int
    detok: bytes
    prompt_tokens: int
    cached_tokens: int
    queued_ns: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    prompt: PromptLogprobs | None = None
    resumed: bytes = b""
    shown: int = 0
    session_tokens: int = -1
    session_common: int = 0


MARK_RETRACTED, MARK_TOKEN = 0, -1


class RowMarks(Wire, frozen=True, tag=25):
    """What gpu_runner did for the row in `slot` up to its token in this frame, where it was more than to decode.

    marks: int64 [M, 2], in order: when, by CLOCK_MONOTONIC in ns; and how many tokens of it a step that was planned
    then prefills, or MARK_RETRACTED: it lost its pages, or MARK_TOKEN: it has its token.
    """

    slot: int
    marks: bytes


class StepFrame(Wire, frozen=True, tag=22):
    """What one step produced for one detokenizer shard: R rows, a row at most once.

    slots, gens, tokens: int32 [R]; token -1 where the row ends without a new token (abort).
    finish: uint8 [R], a `Finish`; with STOP the row's token is the stop id itself.
    Log-probabilities, all b"" in a step that none was asked of. logprob_rows: int32 [L], the rows that have them,
    ascending indices below R, each with a token; logprobs: float32 [L], of the row's token. top_ends: int32 [L], end
    offset of each row's most likely tokens in top_ids (int32) and top_logprobs (float32): falling log-probability,
    smaller id first among equals.
    life: of the gpu_runner that sends it. The first frame of each, which may be empty, ends all rows of the one before.
    marks: of rows that have a token.
    """

    step: int
    slots: bytes
    gens: bytes
    tokens: bytes
    finish: bytes
    opens: tuple[Open, ...] = ()
    logprob_rows: bytes = b""
    logprobs: bytes = b""
    top_ends: bytes = b""
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    life: int = 0
    marks: tuple[RowMarks, ...] = ()


ToDetokenizer = StepFrame | Relink
