"""What a caller receives, piece by piece."""

from __future__ import annotations

import msgspec

from asyncengine.logprobs import PromptLogprob, TokenLogprob
from asyncengine.timeline import Timeline
from asyncengine.wire.base import Finish

FINISH_REASONS = {
    Finish.STOP: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.ABORT: "abort",
}


class ToolCallDelta(msgspec.Struct, frozen=True):
    """News of one tool call. index: which of the choice's calls. id, name: with the first news of it. arguments: what
    is new of their text, which is as the model wrote it: whoever acts on it parses it first."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """News of one choice of a request. `text` and `token_ids` hold only what is new; the counts are totals.

    finish_reason: None while the choice runs, then exactly once "stop", "length" or, when the request was cancelled,
    "abort".
    reasoning, tool_calls: the parts of a chat's answer that are not its text, and then the finish reason may also be
    "tool_calls". Who tells them apart is the HTTP server: an engine's own deltas have everything in `text`.
    stop_reason: the stop token id or stop string that ended it, None for any other end.
    logprobs: when asked, of the choice's tokens in order, each with the delta that shows its first character. All
    deltas together have one for every token but those whose text is not shown because the choice ended: the
    end-of-sequence or stop token, and tokens that begin at or after a stop string that was cut.
    prompt_logprobs: when asked, of all tokens of the prompt, with the choice's first delta.
    timeline: of the choice, with its last delta.
    session_tokens: what the request's session had before it; None where no such session was known.
    first_differing_token: where the prompt ceases to be what its session had, if it does before the session's end: the
    index of a token, or the number of the prompt's if it only is shorter.
    """

    index: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[PromptLogprob] | None = None
    timeline: Timeline | None = None
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
    session_tokens: int | None = None
    first_differing_token: int | None = None
