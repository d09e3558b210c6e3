"""Reasoning, content and tool calls told apart: the same for every way of cutting the text, and in linear time."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncengine.api import answer_parser, markup, tool_call_object
from asyncengine.api.answer_parser import AnswerParser
from asyncengine.config import ToolCallFormat
from asyncengine.delta import Delta, ToolCallDelta

Parts = tuple[str, str, list[tuple[str, str]], str | None]
"""Reasoning, content, (name, arguments) of each call, finish reason."""

F = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
CMD = r'{"cmd":"mk {a,b} \"}"}'
TAG = "<|python_tag|>"

HERMES: dict[str, tuple[str, list[tuple[str, str]], str]] = {
    "": ("", [], "stop"),
    "Plain text, no call.\n": ("Plain text, no call.\n", [], "stop"),
    '<tool_call>{"name":"f","arguments":{}}</tool_call>': ("", [("f", "{}")], "tool_calls"),
    F % CMD: ("", [("f", CMD)], "tool_calls"),
    "Let me look.\n" + F % "{}": ("Let me look.", [("f", "{}")], "tool_calls"),
    "\n\n" + F % "{}" + "\n": ("", [("f", "{}")], "tool_calls"),
    F % '{"a":1}' + "\n" + F % '{ "b" : [2, {"c": "]"}] }': (
        "",
        [("f", '{"a":1}'), ("f", '{ "b" : [2, {"c": "]"}] }')],
        "tool_calls",
    ),
    "A " + F % "{}" + " B " + F % "{}" + " C\n": ("A  B  C\n", [("f", "{}")] * 2, "tool_calls"),
    # the arguments come first, or last but one, or as a text, or not at all
    '<tool_call>{"arguments": {"x": -1.5e3}, "name": "g"}</tool_call>': ("", [("g", '{"x": -1.5e3}')], "tool_calls"),
    '<tool_call>{"id":7,"name":"g","arguments":{"x":null},"k":[true]}</tool_call>': (
        "",
        [("g", '{"x":null}')],
        "tool_calls",
    ),
    r'<tool_call>{"name":"g","arguments":"{\"a\": \"\u00e9\"}"}</tool_call>': ("", [("g", '{"a": "é"}')], "tool_calls"),
    '<tool_call>{"name":"g"}</tool_call>': ("", [("g", "{}")], "tool_calls"),
    '<tool_call>{"name":"g","arguments":null}</tool_call>': ("", [("g", "{}")], "tool_calls"),
    '<tool_call>{"name":"g","parameters":{"a":1}}</tool_call>': ("", [("g", '{"a":1}')], "tool_calls"),
    r'<tool_call>{"n\u0061me":"\u0067","arguments":{}}</tool_call>': ("", [("g", "{}")], "tool_calls"),
    # tags that are text
    '<tool_call>{"name":"g","arguments":{}}\n</tool_c': ("", [("g", "{}")], "tool_calls"),
    '<tool_call>{"name":"g","arguments":{}} x</tool_c': ("x</tool_c", [("g", "{}")], "tool_calls"),
    '<tool_call>{"name":"g","arguments":{}}\n<tool_c': ("<tool_c", [("g", "{}")], "tool_calls"),
    F % '{"a": "</tool_call><tool_call>"}': ("", [("f", '{"a": "</tool_call><tool_call>"}')], "tool_calls"),
    "a < b <tool <tool_cal </tool_call>": ("a < b <tool <tool_cal </tool_call>", [], "stop"),
    # no calls: content as it was written
    "<tool_call>not json</tool_call>": ("<tool_call>not json</tool_call>", [], "stop"),
    '<tool_call>[{"name":"f"}]</tool_call> x': ('<tool_call>[{"name":"f"}]</tool_call> x', [], "stop"),
    '<tool_call>{"name":5,"arguments":{}}</tool_call>': (
        '<tool_call>{"name":5,"arguments":{}}</tool_call>',
        [],
        "stop",
    ),
    '<tool_call>{"name":"","arguments":{}}': ('<tool_call>{"name":"","arguments":{}}', [], "stop"),
    r'<tool_call>{"name":"\ud800","arguments":{}}': (r'<tool_call>{"name":"\ud800","arguments":{}}', [], "stop"),
    '<tool_call>{"name":"f","arguments":[1]}': ('<tool_call>{"name":"f","arguments":[1]}', [], "stop"),
    '<tool_call>{"name":"f","arguments":"': ('<tool_call>{"name":"f","arguments":"', [], "stop"),
    "<tool_call>{}</tool_call>": ("<tool_call>{}</tool_call>", [], "stop"),
    "<tool_call>": ("<tool_call>", [], "stop"),
    "x\n<tool_ca": ("x\n<tool_ca", [], "stop"),
    "<tool_call>no" + F % "{}": ("<tool_call>no", [("f", "{}")], "tool_calls"),
    # calls that break off or go wrong behind the beginning of their arguments
    '<tool_call>{"name":"f","arguments":{"a": "b': ("", [("f", '{"a": "b')], "stop"),
    '<tool_call>{"name":"f","arguments":{"a": 1</tool_call>x': ("x", [("f", '{"a": 1')], "stop"),
    '<tool_call>{"name":"f","arguments":{"a": 1]}}</tool_call>': ("", [("f", '{"a": 1]}}')], "stop"),
    '<tool_call>{"name":"f","arguments":{"a": 1}</tool_call>': ("", [("f", '{"a": 1}')], "tool_calls"),
    '<tool_call>{"name":"f","arguments":{}}}</tool_call>': ("}", [("f", "{}")], "tool_calls"),
    '<tool_call>{"name":"f","arguments":{}}\n' + F % "{}": ("", [("f", "{}")] * 2, "tool_calls"),
    '<tool_call>{"name":"f","arguments":{}}': ("", [("f", "{}")], "tool_calls"),
}

LLAMA3: dict[str, tuple[str, list[tuple[str, str]], str]] = {
    "": ("", [], "stop"),
    "\n": ("\n", [], "stop"),
    "Plain text, no call: {}.": ("Plain text, no call: {}.", [], "stop"),
    '{"name": "f", "parameters": {}}': ("", [("f", "{}")], "tool_calls"),
    '\n\n{"name": "f", "parameters": ' + CMD + "}\n": ("", [("f", CMD)], "tool_calls"),
    '{"type": "function", "name": "f", "arguments": {"a": [1]}}': ("", [("f", '{"a": [1]}')], "tool_calls"),
    '{"name":"f","parameters":{}}; {"name":"g","parameters":{"a":1}}': (
        "",
        [("f", "{}"), ("g", '{"a":1}')],
        "tool_calls",
    ),
    TAG + '{"name": "f", "parameters": {}}': ("", [("f", "{}")], "tool_calls"),
    "Let me look. " + TAG + ' {"name": "f", "parameters": {}}': ("Let me look.", [("f", "{}")], "tool_calls"),
    '{"name":"f","parameters":{}}' + TAG + '{"name":"g","parameters":{}}': (
        "",
        [("f", "{}"), ("g", "{}")],
        "tool_calls",
    ),
    '{"name":"f","parameters":{}} and more': ("and more", [("f", "{}")], "tool_calls"),
    # answers in JSON, and calls that are none
    '{"city": "Paris", "of": 2}\n': ('{"city": "Paris", "of": 2}\n', [], "stop"),
    '{"name": "Paris", "size": {"a": 1}}': ('{"name": "Paris", "size": {"a": 1}}', [], "stop"),
    '{"name": "Paris"}': ('{"name": "Paris"}', [], "stop"),
    '{"name": "f", "para': ('{"name": "f", "para', [], "stop"),
    TAG + 'search.call(query="x")': (TAG + 'search.call(query="x")', [], "stop"),
    "x" + TAG: ("x" + TAG, [], "stop"),
    "<|python_ta": ("<|python_ta", [], "stop"),
    "{": ("{", [], "stop"),
    '{"name":"f","parameters":{"a":': ("", [("f", '{"a":')], "stop"),
    '{"name":"f","parameters":{"a":}}}}': ("}}", [("f", '{"a":}')], "tool_calls"),
    '{"name":"f","parameters":{"a":<}}': ("", [("f", '{"a":<}}')], "stop"),
}

THOUGHTS: dict[str, tuple[str, str]] = {
    "Hi<think>a<b</think>c<": ("a<b", "Hic<"),
    "<think>\nhm\n\nwell\n</think>\n\nYes.\n": ("hm\n\nwell", "Yes.\n"),
    "<think>\n\n</think>\n\nYes.": ("", "Yes."),
    "\n <think>a</think> b <think>c</think>": ("a", "b <think>c</think>"),
    "<think>never closed\n</thin": ("never closed\n</thin", ""),
    "<think>": ("", ""),
    "no tags, \n": ("", "no tags, \n"),
    "\n a </think> b <thin": ("", "\n a </think> b <thin"),
    "<think>a</think>": ("a", ""),
    "": ("", ""),
}

BOTH: dict[str, Parts] = {
    "<think>\nI <tool_call>\n</think>\n\n" + F % "{}": ("I <tool_call>", "", [("f", "{}")], "tool_calls"),
    "<think>a</think>Well.\n" + F % '{"t": "<think>"}': ("a", "Well.", [("f", '{"t": "<think>"}')], "tool_calls"),
    F % '{"t": "<think>x"}' + "<think>y": ("", "<think>y", [("f", '{"t": "<think>x"}')], "tool_calls"),
    "<tool_call><think>x</think>": ("", "<tool_call><think>x</think>", [], "stop"),
}


def parts_of(pieces: list[str], *, tools: ToolCallFormat | None, reasoning: bool, finish: str = "stop") -> Parts:
    numbers = count()
    parser = AnswerParser(tool_calls=tools, reasoning=reasoning, new_id=lambda: f"call_{next(numbers)}")
    thought = content = ""
    calls: list[tuple[str, str]] = []
    finish_reason = None
    for place, piece in enumerate(pieces):
        last = place == len(pieces) - 1
        delta = parser.parse(
            Delta(
                index=0,
                text=piece,
                token_ids=[],
                prompt_tokens=1,
                cached_tokens=0,
                completion_tokens=place,
                finish_reason=finish if last else None,
            )
        )
        thought += delta.reasoning
        content += delta.text
        assert len({call.index for call in delta.tool_calls}) == len(delta.tool_calls)
        for call in delta.tool_calls:
            add(calls, call)
        finish_reason = delta.finish_reason
    return thought, content, calls, finish_reason


def add(calls: list[tuple[str, str]], call: ToolCallDelta) -> None:
    if call.index == len(calls):
        assert call.id == f"call_{call.index}"
        assert call.name
        calls.append((call.name, call.arguments))
    else:
        assert call.index == len(calls) - 1
        assert call.id is call.name is None
        assert call.arguments
        calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)


CASES: list[tuple[str, Parts, ToolCallFormat | None, bool]] = [
    *((text, ("", *parts), "hermes", False) for text, parts in HERMES.items()),
    *((text, ("", *parts), "hermes", True) for text, parts in HERMES.items()),
    *((text, ("", *parts), "llama3", False) for text, parts in LLAMA3.items()),
    *((text, ("", *parts), "llama3", True) for text, parts in LLAMA3.items()),
    *((text, (*parts, [], "stop"), None, True) for text, parts in THOUGHTS.items()),
    *((text, (*parts, [], "stop"), "hermes", True) for text, parts in THOUGHTS.items()),
    *((text, (*parts, [], "stop"), "llama3", True) for text, parts in THOUGHTS.items()),
    *((text, parts, "hermes", True) for text, parts in BOTH.items()),
]


@pytest.mark.parametrize(("text", "expected", "tools", "reasoning"), CASES)
def test_an_answer_has_the_same_parts_wherever_it_is_cut(
    text: str, expected: Parts, tools: ToolCallFormat | None, reasoning: bool
) -> None:
    how: Any = {"tools": tools, "reasoning": reasoning}
    assert parts_of([text], **how) == expected
    assert parts_of([*text, ""], **how) == expected
    for cut in range(len(text) + 1):
        assert parts_of([text[:cut], text[cut:]], **how) == expected, cut


ALPHABET = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", TAG, "<", "</", "tool_call>", "think>"),
        *('{"name": "f", "arguments": ', '"name"', '"parameters":', '"g"', '{"a": "b"}', "}", "{", "]", "[", "}}"),
        *('"', "\\", ":", ",", ";", " ", "\n", "1", "null", "é", "\\u00e9", "\\ud800", "x"),
    ]
)


@given(st.lists(ALPHABET, max_size=24).map("".join), st.data(), st.sampled_from(["hermes", "llama3"]), st.booleans())
def test_any_text_cut_anywhere_has_the_parts_of_the_whole(
    text: str, data: st.DataObject, tools: ToolCallFormat, reasoning: bool
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parts_of([text], tools=tools, reasoning=reasoning)
    assert parts_of(pieces, tools=tools, reasoning=reasoning) == whole
    assert parts_of([*text, ""], tools=tools, reasoning=reasoning) == whole


@pytest.mark.parametrize("finish", ["length", "abort"])
def test_an_answer_that_was_cut_short_says_so_whatever_it_called(finish: str) -> None:
    for text in (F % "{}", '<tool_call>{"name":"f","arguments":{"a"', "<think>hm"):
        assert parts_of([text], tools="hermes", reasoning=True, finish=finish)[3] == finish


def test_text_arrives_as_it_is_written() -> None:
    """What is held back is white space, what may be a tag, and a call up to its arguments."""
    parser = AnswerParser(tool_calls="hermes", reasoning=True, new_id=lambda: "call_0")

    def shown(text: str) -> list[Any]:
        delta = parser.parse(
            Delta(index=0, text=text, token_ids=[], prompt_tokens=1, cached_tokens=0, completion_tokens=1)
        )
        return [each for each in (delta.reasoning, delta.text, *delta.tool_calls) if each]

    steps: list[tuple[str, list[Any]]] = [
        ("<think>", []),
        ("Hm", ["Hm"]),
        (" <", []),
        ("b", [" <b"]),
        ("</think>", []),
        ("\n\n", []),
        ("So", ["So"]),
        (":\n", [":"]),
        ("<tool_call>", []),
        ('\n{"name": "f", "argu', []),
        ('ments": {', [ToolCallDelta(0, "call_0", "f", "{")]),
        ('"a"', [ToolCallDelta(0, arguments='"a"')]),
        (': "\\', [ToolCallDelta(0, arguments=': "\\')]),
        ('"</tool_call>"}}\n</tool', [ToolCallDelta(0, arguments='"</tool_call>"}')]),
        ("_call>", []),
    ]
    assert [shown(text) for text, _ in steps] == [expected for _, expected in steps]


@pytest.mark.parametrize("tools", ["hermes", "llama3"])
@pytest.mark.parametrize(
    "unit",
    [
        *(
            "<tool_call>",
            "<tool_call>{",
            '<tool_call>{"name":"f","arguments":{}}',
            "\n",
            " <",
            "<think>",
            "{",
            TAG,
            "[",
        ),
        *('{"name":"f","parameters":{}};', TAG + '{"name":"f","parameters":{}}', TAG + "{", '{"a":'),
    ],
)
@pytest.mark.parametrize("head", ["", '<tool_call>{"name":"f","arguments":{"a":', '{"name":"f","parameters":{"a":"'])
def test_what_an_answer_costs_grows_with_its_length(
    tools: ToolCallFormat, unit: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in characters that are handed from one part to another, each of which is looked at a bounded number of
    times there."""
    monkeypatch.setattr(answer_parser, "PIECE_CHARS", 256)
    few, many = (handed_on(head + unit * repeats, tools, monkeypatch) for repeats in (100, 200))
    assert many < 2.2 * few + 2000


def handed_on(text: str, tools: ToolCallFormat, monkeypatch: pytest.MonkeyPatch) -> int:
    total = 0
    with monkeypatch.context() as patch:
        for owner, name in ((markup.TagSearch, "push"), (markup.Words, "add"), (tool_call_object.CallObject, "push")):
            original = getattr(owner, name)

            def counted(self: Any, text: str, *rest: Any, original: Any = original) -> Any:
                nonlocal total
                total += len(text)
                return original(self, text, *rest)

            patch.setattr(owner, name, counted)
        for size in (1, len(text)):
            parts_of([text[start : start + size] for start in range(0, len(text), size)], tools=tools, reasoning=True)
    return total
