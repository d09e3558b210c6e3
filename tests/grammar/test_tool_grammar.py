"""The answers that a grammar of calls lets through, on tokenizers for which tags are text and for which they are
tokens."""

from __future__ import annotations

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.byte_tokenizer import EOS, byte_tokenizer
from tokenizers import AddedToken

from asyncengine.api.answer_grammar import AnswerGrammar, Function, Thinking
from asyncengine.config import ToolCallFormat
from asyncengine.sampling import Structured
from gpu_runner.grammar.child.compiler import Compiler

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/x"}},
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"x": {"type": "integer"}},
}
FUNCTIONS = [Function("f", SCHEMA), Function("g", {"type": "object"})]
F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
G = F.replace('"f"', '"g"')
THOUGHT = "<think>\nhm\n</think>\n\n"
F3 = '{"name": "f", "parameters": {"a": 1}}'


class Model:
    """A tokenizer of bytes and, perhaps, tags."""

    def __init__(self, tags: tuple[str, ...]) -> None:
        self.tags = tags
        self.tokenizer = byte_tokenizer()
        self.tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
        self.compiler = Compiler(LLTokenizer(self.tokenizer.to_str(), n_vocab=320, eos_token=[EOS]))

    def writes(self, grammar: str, text: str) -> bool:
        matcher = self.compiler.matcher(Structured("grammar", grammar))
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            if not allows(matcher, token):
                return False
            assert matcher.consume_token(token)
        return allows(matcher, EOS)


def allows(matcher: LLMatcher, token: int) -> bool:
    return bool(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[token])


@pytest.fixture(scope="module", params=[(), TAGS])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.mark.parametrize(
    ("format", "free", "several", "think", "good", "bad"),
    [
        ("hermes", False, True, "none", [F, G, F + "\n" + G], ["", "hi", THOUGHT + F, F.replace("1", '"1"'), F + F]),
        ("hermes", False, False, "none", [F, G], [F + "\n" + G, "hi " + F]),
        ("hermes", False, True, "may", [F, THOUGHT + F], ["hm</think>" + F, THOUGHT + "hi", THOUGHT]),
        ("hermes", False, True, "must", ["\nhm\n</think>\n\n" + F, "</think>" + F], ["hm", "</think>hi"]),
        ("hermes", True, True, "none", ["", "hi", "hi\n" + F + "\n" + G + " x"], ["hi " + F.replace("1", "[")]),
        ("hermes", True, False, "none", ["", "hi", "hi\n" + F], ["hi " + F + "\n", F + "\n" + G]),
        ("hermes", True, False, "may", ["hi", THOUGHT + "hi", THOUGHT + F], [THOUGHT + F + "\n" + F]),
        ("llama3", False, True, "none", [F3, F3 + "; " + F3], ["", "hi", F3 + ";", F3.replace("1", "{}")]),
        ("llama3", False, False, "none", [F3], [F3 + "; " + F3]),
        ("llama3", True, True, "none", ["", "hi {", F3, F3 + "; " + F3], ["{x", F3 + " x"]),
    ],
)
def test_answers_keep_to_the_calls_that_are_allowed(
    model: Model,
    format: ToolCallFormat,
    free: bool,
    several: bool,
    think: Thinking,
    good: list[str],
    bad: list[str],
) -> None:
    grammar = AnswerGrammar(format, tokens=model.tags).of_calls(FUNCTIONS, free=free, several=several, think=think)
    assert [text for text in good if not model.writes(grammar, text)] == []
    assert [text for text in bad if model.writes(grammar, text)] == []


def test_white_space_in_arguments_comes_to_an_end(model: Model) -> None:
    grammar = AnswerGrammar("llama3", tokens=()).of_calls(FUNCTIONS[1:], free=False, several=False, think="none")
    assert model.writes(grammar, '{"name": "g", "parameters": {\n    "a": 1}}')
    assert not model.writes(grammar, '{"name": "g", "parameters": {' + "\n" * 3 + '"a": 1}}')
    assert not model.writes(grammar, '{"name": "g", "parameters": {\n' + " " * 30 + '"a": 1}}')


def test_json_comes_in_place_of_calls_and_behind_reasoning(model: Model) -> None:
    grammars = AnswerGrammar("hermes", tokens=model.tags)
    either = grammars.of_calls(FUNCTIONS, free=True, several=False, think="may", schema=SCHEMA)
    assert [model.writes(either, text) for text in (F, '{"a": 1}', THOUGHT + '{"a": 1}')] == [True] * 3
    assert [model.writes(either, text) for text in ("hi", '{"b": 1}', THOUGHT)] == [False] * 3
    only = grammars.of_json(SCHEMA, think="must")
    assert model.writes(only, 'hm</think>\n{"a": 1}')
    assert not model.writes(only, '{"a": 1}')


def test_a_format_that_no_grammar_knows_is_an_annotation_in_arguments_too(model: Model) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "path"}}, "required": ["a"]}
    grammars = AnswerGrammar("hermes", tokens=model.tags)
    calls = grammars.of_calls([Function("f", schema)], free=False, several=False, think="none")
    assert model.writes(calls, F.replace("1", '"~"'))
    assert not model.writes(calls, F)
    assert model.writes(grammars.of_json(schema, think="none"), '{"a": "~"}')
