"""The texts that are answers with calls, in the format in which the model was taught to write them, as a grammar.

In Lark's notation, as the grammar compiler takes it: a tag that is one token of the model stands bare, one that is text
like any other in quotes. Arguments are JSON schemas of their own inside of it, so that a schema's references stay
within that schema.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec

from asyncengine.api.reasoning import THINK, THINK_END
from asyncengine.api.tool_calls import HermesParser
from asyncengine.config import ToolCallFormat
from asyncengine.schema_formats import enforceable

WHITE_SPACE = r" |\n[ \t]{0,24}"
"""Between two tokens of the arguments. It has an end, so that a model that likes it comes to one too."""
ANY_TEXT = r"TEXT: /(.|\n)*/"

Thinking = Literal["none", "may", "must"]
"""Whether reasoning comes first; with "must" the text begins in the middle of it."""


class Function(msgspec.Struct, frozen=True):
    """schema: of its arguments, a JSON schema of an object."""

    name: str
    schema: dict[str, Any]


class AnswerGrammar:
    """Of answers that may begin with reasoning. format: of calls, None where there are none. tokens: tags that are
    tokens of the model."""

    def __init__(self, format: ToolCallFormat | None, *, tokens: Collection[str]) -> None:
        self._hermes = format == "hermes"
        self._tokens = tokens

    def of_json(self, schema: dict[str, Any], *, think: Thinking) -> str:
        """JSON of that schema."""
        return self._grammar(["answer", f"answer: {_json(schema)}"], [], think=think, text=False)

    def of_calls(
        self,
        functions: Sequence[Function],
        *,
        free: bool,
        several: bool,
        think: Thinking,
        schema: dict[str, Any] | None = None,
    ) -> str:
        """Calls of the functions. free: whether to call is the model's choice. several: more than one call. schema: of
        the JSON that is the alternative to calls where there is a choice, None for any text with calls in it."""
        if free and schema is not None:
            start = self._called(several=several)
            start = [f"answer | {start[0]}", *start[1:], f"answer: {_json(schema)}"]
        else:
            start = self._free(several=several) if free else self._called(several=several)
        names = [f"f{number}" for number in range(len(functions))]
        rules = [f"function: {' | '.join(names)}"]
        rules += [f"{name}: {self._function(function)}" for name, function in zip(names, functions, strict=True)]
        return self._grammar(start, rules, think=think, text=free and schema is None and self._hermes)

    def _grammar(self, start: list[str], rules: list[str], *, think: Thinking, text: bool) -> str:
        """start: what the answer is, and the rules it needs. text: whether they name any text."""
        if think != "none":
            start = [f"think? ({start[0]})" if think == "may" else f"think ({start[0]})", *start[1:]]
            opening = f"{self._tag(THINK)} " if think == "may" else ""
            rules += [rf"think: {opening}thought /[ \n]{{0,4}}/", self._text_up_to("thought", THINK_END)]
        if think != "none" or text:
            rules.append(ANY_TEXT)
        return "\n".join([f"start: {start[0]}", *start[1:], *rules, ""])

    def _called(self, *, several: bool) -> list[str]:
        """One or more calls and nothing else: the start, and the rules it needs."""
        if self._hermes:
            more = r' ("\n" call)*' if several else ""
            return ["call" + more, f"call: {self._tag(HermesParser.OPEN)} function"]
        return ['function ("; " function)*' if several else "function"]

    def _free(self, *, several: bool) -> list[str]:
        """Any text with calls in it, or none; in Llama's format text or calls."""
        if self._hermes:
            head = self._text_up_to("head", HermesParser.OPEN)
            return ["(head function)* TEXT" if several else "head function | TEXT", head]
        return [f"ANSWER | {self._called(several=several)[0]}", r"ANSWER: /([^{ \t\r\n](.|\n)*)?/"]

    def _function(self, function: Function) -> str:
        """A call behind its tag."""
        arguments = _json(function.schema)
        if self._hermes:
            head, tail = f'\n{{"name": "{function.name}", "arguments": ', rf'"}}\n" {self._tag(HermesParser.CLOSE)}'
        else:
            head, tail = f'{{"name": "{function.name}", "parameters": ', '"}"'
        return f"{json.dumps(head)} {arguments} {tail}"

    def _text_up_to(self, rule: str, tag: str) -> str:
        """Text that ends with its first `tag`."""
        return f"{rule}{'' if tag in self._tokens else '[lazy]'}: TEXT {self._tag(tag)}"

    def _tag(self, tag: str) -> str:
        return tag if tag in self._tokens else json.dumps(tag)


def _json(schema: dict[str, Any]) -> str:
    bounded = {**enforceable(schema), "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"%json {json.dumps(bounded, ensure_ascii=False)}"
