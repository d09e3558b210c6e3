"""What a request's structure lets through, on a tokenizer whose tokens are the bytes and a few words."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.byte_tokenizer import EOS, byte_tokenizer

from asyncengine.sampling import Structured, StructuredKind
from asyncengine.schema_formats import ENFORCED_FORMATS
from gpu_runner.grammar.child.compiler import Compiler, GrammarError


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(byte_tokenizer().to_str(), n_vocab=320, eos_token=[EOS])


@pytest.fixture(scope="module")
def compiler(tokenizer: LLTokenizer) -> Compiler:
    return Compiler(tokenizer)


def allowed(matcher: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def accepts(compiler: Compiler, structured: Structured, text: str) -> bool:
    """Whether the bytes of the text may come one by one, and then the end."""
    matcher = compiler.matcher(structured)
    for byte in text.encode():
        if byte not in allowed(matcher):
            return False
        assert matcher.consume_token(byte)
    return EOS in allowed(matcher)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("regex", r"a+/b|\d{2}", ["a/b", "aaa/b", "12"], ["", "a", "123", "a/b "]),
        ("regex", "[é😀]x\\n", ["éx\n", "😀x\n"], ["ex\n", "éx"]),
        ("choice", '["a\\"b", "", "\\u00e9\\ud83d\\ude00", "a\\\\b\\n"]', ['a"b', "", "é😀", "a\\b\n"], ["a", " "]),
        ("choice", '["a", "ab", "abc", "b"]', ["a", "ab", "abc", "b"], ["", "abcd", "c"]),
        ("choice", '["", "a"]', ["", "a"], ["aa"]),
        ("choice", '[""]', [""], ["a"]),
        ("choice", json.dumps([f"option {i}" for i in range(4096)]), ["option 0", "option 4095"], ["option 4096"]),
        ("grammar", 'start: "x" start | "y"', ["y", "xxy"], ["x", "yx"]),
        ("grammar", 'root ::= "x" root | "y"', ["y", "xxy"], ["x", "yx"]),
        ("json_object", "", ['{"a": [1, "b", null]}', "{}", '{\n  "a":1.5e3\n}'], ["[]", "1", "{", '{"a"}', " {}"]),
        ("json_schema", "true", ["1", "[]", '"a"'], ["", "a"]),
        ("json_schema", '{"type": "integer", "minimum": 5}', ["5", "123"], ["4", "5.5", '"5"']),
        ("json_schema", '{"enum": ["a", 1, null]}', ['"a"', "1", "null"], ["a", "2"]),
    ],
)
def test_texts_of_the_structure_and_no_others(
    compiler: Compiler, kind: StructuredKind, text: str, good: list[str], bad: list[str]
) -> None:
    structured = Structured(kind, text)
    assert [accepts(compiler, structured, each) for each in good] == [True] * len(good)
    assert [accepts(compiler, structured, each) for each in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("date", "2024-02-29"),
        ("date-time", "2024-02-29T10:00:00Z"),
        ("duration", "P1D"),
        ("email", "a@b.c"),
        ("hostname", "a.b"),
        ("ipv4", "10.0.0.1"),
        ("ipv6", "::1:2"),
        ("time", "10:00:00Z"),
        ("uri", "a:b"),
        ("uuid", "00000000-0000-4000-8000-000000000000"),
    ],
)
def test_a_text_keeps_to_the_format_of_its_schema(compiler: Compiler, name: str, text: str) -> None:
    structured = Structured("json_schema", json.dumps({"type": "string", "format": name}))
    assert accepts(compiler, structured, json.dumps(text))
    assert not accepts(compiler, structured, '"-"')
    assert name in ENFORCED_FORMATS


def test_only_the_formats_that_are_enforced_are_known_to_the_library(tokenizer: LLTokenizer) -> None:
    others = ["idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"]
    others += ["relative-json-pointer", "regex", "path", "password", "binary", "byte", "int32"]
    for name in others:
        grammar = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
        assert LLMatcher(tokenizer, grammar, log_level=0).get_error() == f"Unknown format: {name}"
    assert not ENFORCED_FORMATS & set(others)


def test_a_format_that_no_grammar_knows_is_an_annotation(compiler: Compiler) -> None:
    path = {"type": "string", "format": "path"}
    named = dict.fromkeys(("a", "format", "enum", "default", "properties"), path)
    schema = {
        "type": "object",
        "properties": {**named, "b": {"anyOf": [{"type": "array", "prefixItems": [path]}, {"$ref": "#/$defs/format"}]}},
        "required": [*named, "b"],
        "additionalProperties": False,
        "$defs": {"format": {"$ref": "#/shared/x"}},
        "shared": {"x": {"type": "integer", "format": "int32"}},
    }
    structured = Structured("json_schema", json.dumps(schema))
    texts = dict.fromkeys(named, "~x")
    assert accepts(compiler, structured, json.dumps(texts | {"b": 1}))
    assert not accepts(compiler, structured, json.dumps(texts | {"b": "1"}))
    assert not accepts(compiler, structured, json.dumps(texts | {"a": 1, "b": 1}))


def test_an_object_that_is_a_value_keeps_what_is_named_format(compiler: Compiler) -> None:
    value = {"format": "path"}
    schema = {"properties": {"a": {"const": value}, "b": {"enum": [value]}}, "required": ["a", "b"], "format": "path"}
    structured = Structured("json_schema", json.dumps({"type": "object", **schema, "default": value}))
    assert accepts(compiler, structured, json.dumps({"a": value, "b": value}))
    assert not accepts(compiler, structured, json.dumps({"a": {}, "b": {}}))


def test_once_the_text_is_complete_only_the_end_is_left(compiler: Compiler) -> None:
    matcher = compiler.matcher(Structured("choice", '["ab"]'))
    assert matcher.consume_tokens(list(b"ab"))
    assert allowed(matcher) == [EOS]


@pytest.mark.parametrize("blank", [b" ", b"\n", b"\t"])
@pytest.mark.parametrize("schema", ["{}", '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}'])
def test_a_model_that_prefers_white_space_comes_to_an_end(compiler: Compiler, schema: str, blank: bytes) -> None:
    matcher = compiler.matcher(Structured("json_schema", schema))
    text = b""
    while (tokens := allowed(matcher)) != [EOS]:
        assert len(text) < 400
        # else what ends the value soonest
        wanted = [*blank, EOS, *b'}{"1:na']
        token = next(token for token in wanted if token in tokens)
        if token == EOS:
            break
        matcher.consume_token(token)
        text += bytes([token])
    json.loads(text)


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "[", "unclosed character class"),
        ("regex", "a\\", "incomplete escape sequence"),
        ("regex", "a\\\\\\", "incomplete escape sequence"),
        ("regex", "(" * 50_000, "unclosed group"),
        ("regex", r"(a)\1", "backreferences"),
        ("json_schema", nested(64), "deeper than 64 levels"),
        ("json_schema", "[" * 60_000, "deeper than 64 levels"),
        ("json_schema", "5", "must be an object"),
        ("json_schema", '{"type": "object"', "not valid JSON"),
        ("json_schema", '{"$ref": "#/nowhere"}', "nowhere"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "etc/passwd"),
        ("choice", "[]", "at least one text"),
        ("choice", "[1]", "at least one text"),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "cannot be used"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_one_sentence(
    compiler: Compiler, kind: StructuredKind, text: str, words: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.matcher(Structured(kind, text))
    assert words in caught.value.message
    assert re.fullmatch(rf"the {kind} cannot be used: .+", caught.value.message)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("depth", [63, 20])
def test_a_schema_may_be_nested(compiler: Compiler, depth: int) -> None:
    compiler.matcher(Structured("json_schema", nested(depth)))


def test_the_same_structure_is_compiled_once_and_its_matchers_are_strangers(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(tokenizer)
    compiled: list[Any] = []
    compile_one = compiler._compile

    def counted(structured: Structured) -> LLMatcher:
        compiled.append(structured)
        return compile_one(structured)

    monkeypatch.setattr(compiler, "_compile", counted)
    first, second = (compiler.matcher(Structured("regex", "ab")) for _ in range(2))
    assert first.consume_token(ord("a"))
    assert allowed(second) == [ord("a")]
    assert len(compiled) == 1
