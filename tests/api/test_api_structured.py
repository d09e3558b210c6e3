"""Structured output in a body: what reaches the engine, and what is refused before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from api_server import CHAT, COMPLETIONS, Server
from fake_backend import FakeBackend

from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import MAX_STRUCTURED_BYTES, SamplingParams, Structured

BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}
VLLMS_OWN: dict[str, Any] = {
    "json": None,
    "regex": None,
    "choice": None,
    "grammar": None,
    "json_object": None,
    "disable_fallback": False,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
    "structural_tag": None,
    "_backend": None,
    "_backend_was_auto": False,
}
"""vLLM's parameters of structured output as it writes them when none is set."""
PATHS = pytest.mark.parametrize("path", BODIES)
SCHEMA = Structured("json_schema", '{"type": "integer"}')


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, **more}}}


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


@PATHS
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        (outputs(), None),
        (outputs(json=None, regex=None, json_object=False), None),
        (outputs(**VLLMS_OWN), None),
        (outputs(**dict.fromkeys(VLLMS_OWN)), None),
        (outputs(**VLLMS_OWN | {"json": {"type": "integer"}}), SCHEMA),
        ({"response_format": {"type": "json_object"}}, Structured("json_object")),
        (schema_format({"type": "integer"}), SCHEMA),
        (schema_format({"type": "integer"}, name="n", strict=True, description="d"), SCHEMA),
        (outputs(json={"type": "integer"}), SCHEMA),
        (outputs(json='{"type": "integer"}'), SCHEMA),
        (outputs(json_object=True), Structured("json_object")),
        (outputs(regex="a+"), Structured("regex", "a+")),
        (outputs(choice=["a", "\u00e9"]), Structured("choice", '["a","\u00e9"]')),
        (outputs(grammar='start: "a"'), Structured("grammar", 'start: "a"')),
        (outputs(regex="a", choice=None) | {"response_format": {"type": "text"}}, Structured("regex", "a")),
    ],
)
async def test_a_structure_reaches_the_engine(
    server: Server, backend: FakeBackend, path: str, asked: dict[str, Any], expected: Structured | None
) -> None:
    status, answer = await server.post(path, BODIES[path] | asked | {"max_tokens": 3})
    assert status == 200, answer
    # a schema's text is what the client sent
    assert backend.calls[0][1] == SamplingParams(max_tokens=3, structured=expected)


@PATHS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"response_format": {"type": "nope"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        (schema_format({"enum": ["x" * MAX_STRUCTURED_BYTES]}), "response_format.json_schema.schema"),
        (outputs(json={"enum": ["x" * MAX_STRUCTURED_BYTES]}), "structured_outputs.json"),
        (outputs(json="x" * (MAX_STRUCTURED_BYTES + 1)), "structured_outputs.json"),
        (outputs(json=""), "structured_outputs.json"),
        (outputs(regex=""), "structured_outputs.regex"),
        (outputs(regex=5), "structured_outputs.regex"),
        (outputs(regex="x" * (MAX_STRUCTURED_BYTES + 1)), "structured_outputs.regex"),
        (outputs(regex="\u20ac" * (MAX_STRUCTURED_BYTES // 2)), "structured_outputs.regex"),
        (outputs(choice=[]), "structured_outputs.choice"),
        (outputs(choice=[1]), "structured_outputs.choice[0]"),
        (outputs(choice="a"), "structured_outputs.choice"),
        (outputs(choice=["a"] * 5000), "structured_outputs.choice"),
        (outputs(choice=["x" * 1000] * 100), "structured_outputs.choice"),
        (outputs(grammar=""), "structured_outputs.grammar"),
        (outputs(structural_tag="x"), "structured_outputs.structural_tag"),
        (outputs(whitespace_pattern=" "), "structured_outputs.whitespace_pattern"),
        (outputs(disable_fallback=True), "structured_outputs.disable_fallback"),
        (outputs(regex="a", disable_any_whitespace=True), "structured_outputs.disable_any_whitespace"),
        (outputs(regex="a", disable_additional_properties=True), "structured_outputs.disable_additional_properties"),
        (outputs(regex="a", _backend="xgrammar"), "structured_outputs._backend"),
        (outputs(regex="a", _backend_was_auto=True), "structured_outputs._backend_was_auto"),
        (outputs(regex="a", no_such=None), "structured_outputs.no_such"),
        (outputs(regex="a", choice=["a"]), "structured_outputs"),
        (outputs(regex="a") | {"response_format": {"type": "json_object"}}, "structured_outputs"),
        (outputs(regex="a") | {"ignore_eos": True}, "ignore_eos"),
        (outputs(regex="a") | {"min_tokens": 2}, "min_tokens"),
        ({"guided_json": {}}, "guided_json"),
    ],
)
async def test_a_malformed_structure_is_named_and_reaches_nobody(
    server: Server, backend: FakeBackend, path: str, stream: bool, asked: dict[str, Any], param: str
) -> None:
    status, answer = await server.post(path, BODIES[path] | asked | {"stream": stream})
    assert (status, answer["error"]["param"]) == (400, param)
    assert len(answer["error"]["message"]) < 300
    assert backend.calls == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize("asked", [schema_format({"not": {}}), outputs(json={"not": {}})])
async def test_what_cannot_be_compiled_is_put_down_to_the_field_that_asked_for_it(
    server: Server, backend: FakeBackend, path: str, reasoning: bool, asked: dict[str, Any]
) -> None:
    backend.info = msgspec.structs.replace(backend.info, reasoning=reasoning)
    backend.refusal = InvalidRequestError("the grammar cannot be used", code="c", param="structured_outputs")
    status, answer = await server.post(path, BODIES[path] | asked)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, next(iter(asked)), "c")
