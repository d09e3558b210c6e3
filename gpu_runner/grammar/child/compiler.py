"""From what a request asks of its text to a matcher that says, token by token, which may come next."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from asyncengine.errors import EngineError
from asyncengine.sampling import Structured
from asyncengine.schema_formats import enforceable

MAX_JSON_DEPTH = 64
MAX_REASON_CHARS = 300
CACHED_GRAMMARS = 64
WHITE_SPACE = r" |\n[ \t]{0,24}"
"""Between two tokens of JSON: a blank, or a new line and its indentation. It has an end, and a near one: a model that
likes it would otherwise fill its answer with nothing else."""
LIMITS = LLParserLimits(verbose_errors=False)
"""Bounds the work for one token to some tens of milliseconds."""
_NO_TEXT = "no text can match it"
_REASONS = {
    "NoExtensionBias": _NO_TEXT,
    "ParserTooComplex": "it is too ambiguous to be followed",
    "LexerTooComplex": "its patterns are too complex to be followed",
}
"""What the library's names for failures mean."""


class GrammarError(EngineError):
    """There is no matcher for it; the message is for whoever asked."""


class Compiler:
    """Compiles for one tokenizer; what was compiled lately is only copied."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[Structured, LLMatcher] = OrderedDict()

    def matcher(self, structured: Structured) -> LLMatcher:
        """A matcher at the text's beginning. Raises `GrammarError`."""
        compiled = self._compiled.get(structured)
        if compiled is None:
            compiled = self._compile(structured)
            self._compiled[structured] = compiled
            if len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structured)
        return compiled.deep_copy()

    def _compile(self, structured: Structured) -> LLMatcher:
        try:
            grammar = _GRAMMARS[structured.kind](structured.text)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the {structured.kind} cannot be used: {_reason(str(error))}") from error
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        check(matcher, structured)
        return matcher


def check(matcher: LLMatcher, structured: Structured) -> None:
    """Raise `GrammarError` if the matcher has failed, or has come to where nothing may follow, not even the end."""
    failed = matcher.is_error()
    if failed or (matcher.is_stopped() and not matcher.is_accepting()):
        reason = _reason(matcher.get_error()) if failed else _NO_TEXT
        raise GrammarError(f"the {structured.kind} cannot be used: {_REASONS.get(reason, reason)}")


def _json_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"it is not valid JSON: {error}") from None
    _check_depth(schema)
    if schema is True:
        text = "{}"
    elif not isinstance(schema, dict):
        raise ValueError("the schema must be an object, or true")
    elif (kept := enforceable(schema)) != schema:
        text = json.dumps(kept)
    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITE_SPACE})


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("it must be a list of at least one text")
    texts = [json.dumps(choice) for choice in choices if choice]
    if not texts:
        return LLMatcher.grammar_from_lark('start: ""')
    # One terminal, which the lexer knows as an automaton; as rules, thousands are more than the parser takes.
    start = "start: CHOICE?" if "" in choices else "start: CHOICE"
    return LLMatcher.grammar_from_lark(f"{start}\nCHOICE: {' | '.join(texts)}")


def _regex(pattern: str) -> str:
    if re.search(r"(?<!\\)(\\\\)*\\\Z", pattern):
        raise ValueError("incomplete escape sequence at its end")
    return LLMatcher.grammar_from_regex(pattern)


_GRAMMARS: dict[str, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "json_object": lambda text: _json_schema('{"type": "object"}'),
    "regex": _regex,
    "choice": _choice,
    "grammar": lambda text: grammar_from("grammar", text),
}


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        children = [list(v.values()) if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [child for part in children for child in part]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MAX_JSON_DEPTH} levels")


def _reason(error: str) -> str:
    """The library's report without its drawing of the place."""
    named = re.search(r"^error: (.*)$", error, re.MULTILINE)
    reason = named[1] if named else error.strip().partition("\n")[0].removesuffix("<non-verbose/>")
    return reason if len(reason) <= MAX_REASON_CHARS else f"{reason[:MAX_REASON_CHARS]}..."
