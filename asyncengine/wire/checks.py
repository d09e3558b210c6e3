"""That the columns of a message agree, checked where it is read: whoever writes one pays nothing for that.

Lengths are compared, which costs the same at any batch size; offsets into a blob are looked at one by one, within one
built-in call. No numpy: not every process that reads messages has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncengine.wire.answers import Deltas, Encoded, EngineStatus, LogprobColumns, Marks, Openings, PromptColumns
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import DetokenizeOptions, Open, PromptLogprobs, StepFrame
from asyncengine.wire.requests import Generate

MAX_RID = 2**63
_FINISHES = bytes(Finish)


def check(message: Any) -> None:
    """Raises ValueError for a message whose columns contradict each other, itself or in those that it holds: it is to
    be dropped as if it had not been sent, so that nobody takes in half of it."""
    if (check_columns := _CHECKS.get(type(message))) is not None:
        check_columns(message)


def _require(consistent: bool) -> None:
    if not consistent:
        raise ValueError("a message whose columns contradict each other")


def _int32(column: bytes) -> list[int]:
    _require(len(column) % 4 == 0)
    values: list[int] = memoryview(column).cast("i").tolist()
    return values


def _last_end(column: bytes, *, distinct: bool = False) -> int:
    """The last of an int32 column of end offsets, which ascend from 0 on; 0 for none. distinct: nothing is empty."""
    ends = _int32(column)
    if not ends:
        return 0
    _require(ends[0] >= distinct and sorted(ends) == ends)  # which is one pass over what is sorted already
    _require(not distinct or len(set(ends)) == len(ends))
    return ends[-1]


def _require_rows(column: bytes, rows: int) -> None:
    """An int32 column of indices below `rows`."""
    if column:
        indices = _int32(column)
        _require(min(indices) >= 0 and max(indices) < rows)


def _generate(message: Generate) -> None:
    _require(0 <= message.rid < MAX_RID and 1 <= message.max_tokens < 2**31)
    _require(len(message.ids) > 0 and len(message.ids) % 4 == 0)
    for resume in message.resume:
        _require(len(resume.ids) % 4 == 0 and resume.shown >= 0)


def _detokenize_options(message: DetokenizeOptions) -> None:
    _require(len(message.prompt_tail) % 4 == 0)


def _prompt_logprobs(message: PromptLogprobs) -> None:
    _require(len(message.item_ends) == len(message.ranks) and len(message.ids) == len(message.logprobs))
    _require(len(message.ids) == 4 * _last_end(message.item_ends, distinct=True))


def _open(message: Open) -> None:
    _require(0 <= message.rid < MAX_RID and 0 <= message.prompt_tokens < 2**31 and 0 <= message.cached_tokens < 2**31)
    _require(all(0 <= stamp < 2**63 for stamp in (message.queued_ns, message.started_ns, message.first_token_ns)))
    _require(len(message.resumed) % 4 == 0 and message.shown >= 0)
    _require(-1 <= message.session_tokens < 2**31 and 0 <= message.session_common < 2**31)
    if message.prompt is not None:
        _prompt_logprobs(message.prompt)


def _step_frame(message: StepFrame) -> None:
    rows = len(message.finish)
    _require(len(message.slots) == len(message.gens) == len(message.tokens) == 4 * rows)
    _require(not message.finish.translate(None, _FINISHES))
    for opened in message.opens:
        _open(opened)
    for marked in message.marks:
        _require(len(marked.marks) % 16 == 0)
    if message.logprob_rows or message.logprobs or message.top_ends or message.top_ids or message.top_logprobs:
        _require(len(message.logprob_rows) == len(message.logprobs) == len(message.top_ends))
        _require_rows(message.logprob_rows, rows)
        _require(len(message.top_ids) == len(message.top_logprobs) == 4 * _last_end(message.top_ends))


def _logprob_columns(message: LogprobColumns) -> None:
    _require(len(message.item_ends) == len(message.text_offsets) == 4 * _last_end(message.ends))
    items = _last_end(message.item_ends, distinct=True)
    _require(len(message.ids) == len(message.logprobs) == len(message.token_ends) == 4 * items)
    _require(len(message.token_bytes) == _last_end(message.token_ends))


def _prompt_columns(message: PromptColumns) -> None:
    _prompt_logprobs(message.logprobs)
    _require(len(message.token_ends) == len(message.logprobs.ids))
    _require(len(message.token_bytes) == _last_end(message.token_ends))


def _openings(message: Openings) -> None:
    _require(len(message.stamps) == 6 * len(message.rows))
    _require(len(message.sessions) in (0, 2 * len(message.rows)))


def _marks(message: Marks) -> None:
    _require(len(message.rows) == len(message.ends))
    _require(len(message.marks) == 16 * _last_end(message.ends))


def _deltas(message: Deltas) -> None:
    rows = len(message.finish)
    _require(len(message.rids) == 8 * rows)
    _require(
        len(message.text_ends)
        == len(message.ids_ends)
        == len(message.stop_reason)
        == len(message.prompt_tokens)
        == len(message.cached_tokens)
        == 4 * rows
    )
    _require(not message.finish.translate(None, _FINISHES))
    _require(len(message.text) == _last_end(message.text_ends))
    _require(len(message.ids) == 4 * _last_end(message.ids_ends))
    if message.logprobs is not None:
        _logprob_columns(message.logprobs)
        _require(len(message.logprobs.ends) == 4 * rows)
    if message.openings is not None:
        _openings(message.openings)
        _require_rows(message.openings.rows, rows)
    if message.marks is not None:
        _marks(message.marks)
        _require_rows(message.marks.rows, rows)
    for prompt in message.prompts:
        _prompt_columns(prompt)
        _require(0 <= prompt.row < rows)


def _encoded(message: Encoded) -> None:
    _require(len(message.rids) % 8 == 0)


def _engine_status(message: EngineStatus) -> None:
    _require(message.crash is None or len(message.crash.rids) % 8 == 0)


_CHECKS: Mapping[type, Callable[[Any], None]] = {
    Generate: _generate,
    DetokenizeOptions: _detokenize_options,
    StepFrame: _step_frame,
    Deltas: _deltas,
    Encoded: _encoded,
    EngineStatus: _engine_status,
}
