"""Between gpu_runner and the grammar process beside it, which says what may come next within a structure."""

from __future__ import annotations

from asyncengine.sampling import Structured
from asyncengine.wire.base import Wire


class CheckGrammar(Wire, frozen=True, tag=50):
    """Find out whether `structured` can be compiled, and whether any text matches it. `number` names the answer."""

    number: int
    structured: Structured


class OpenMatch(Wire, frozen=True, tag=51):
    """The row in `slot`, generation `gen`, begins a text of a structure that was checked; whatever was matched in the
    slot before is over. tokens: int32 array, what the row has of the text. Answered by the mask of the next token."""

    slot: int
    gen: int
    structured: Structured
    tokens: bytes


class AdvanceMatches(Wire, frozen=True, tag=52):
    """Each row got a token, none of which ended it: compute the masks of their next ones. int32 arrays [R]."""

    slots: bytes
    gens: bytes
    tokens: bytes


class GrammarReady(Wire, frozen=True, tag=53):
    """The grammar process of that incarnation has loaded the tokenizer and begins to read its pipe."""

    incarnation: int


class GrammarChecked(Wire, frozen=True, tag=54):
    """error: "" if the structure can be used, else one sentence for whoever asked for it."""

    incarnation: int
    number: int
    error: str


class MasksReady(Wire, frozen=True, tag=55):
    """The masks of the next tokens of these rows are in the shared memory. int32 arrays [R]."""

    incarnation: int
    slots: bytes
    gens: bytes


class MatchFailed(Wire, frozen=True, tag=56):
    """The row cannot be continued within its structure, or not within the limits on the work for a token."""

    incarnation: int
    slot: int
    gen: int
    error: str


ToGrammar = CheckGrammar | OpenMatch | AdvanceMatches
FromGrammar = GrammarReady | GrammarChecked | MasksReady | MatchFailed
