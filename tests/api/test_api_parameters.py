"""No parameter is accepted and ignored: each one changes what the engine is asked, or what the client is answered."""

from __future__ import annotations

import re
from array import array
from typing import Any

import msgspec
import pytest
from api_server import CHAT, COMPLETIONS, Server
from fake_backend import FakeBackend
from parameter_table import BASE, BOTH, OWN, TOOLS

from asyncengine.api.request_messages import Message
from asyncengine.api.schema import ChatRequest, CompletionRequest, StreamOptions
from asyncengine.api.structured import StructuredOutputs
from asyncengine.api.timings import PARTS, PreemptionJson, PrefillChunkJson, timings
from asyncengine.timeline import Timeline
from asyncengine.wire.frames import MARK_RETRACTED, MARK_TOKEN

MS = 1_000_000
MARKS = array(
    "q", [16 * MS, 512, 26 * MS, 100, 46 * MS, MARK_TOKEN, 60 * MS, MARK_RETRACTED, 75 * MS, 620, 90 * MS, -1]
)
TIMELINE = Timeline(
    arrived=2 * MS,
    encoded=5 * MS,
    queued=6 * MS,
    started=16 * MS,
    computed=46 * MS,
    seen=47 * MS,
    finished=147 * MS,
    marks=MARKS.tobytes(),
)
WITHOUT_EFFECT = {"user"}
"""It tells a provider of the API who abuses it, by OpenAI's definition; nothing here could be done with it."""
NEEDED: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "session_ttl_seconds": {"session": "agent 7/ü"},
    "top_logprobs": {"logprobs": True},
    "tool_choice": TOOLS,
    "parallel_tool_calls": TOOLS,
}
"""What a parameter cannot do without, and must therefore differ from."""


def cases() -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, name, extra) for path in BASE for name, extra in (BOTH | OWN[path]).items()]


async def outcome(server: Server, backend: FakeBackend, path: str, body: dict[str, Any]) -> tuple[Any, ...]:
    """What the engine was asked, and the answer without what differs each time."""
    backend.calls.clear()
    backend.names.clear()
    backend.terms.clear()
    async with server.session.post(server.url + path, json=BASE[path] | body) as response:
        text = await response.text()
        ids = [name for _, name in backend.names]
        for drawn in ids if "request_id" not in body else ():
            text = text.replace(drawn, "ID")
        text = re.sub(r'"created":\d+', "", text)
        asked = (list(backend.calls), [namespace for namespace, _ in backend.names], list(backend.terms))
        return response.status, text, *asked, "x-ignored-fields" in response.headers


@pytest.mark.parametrize(("path", "name", "extra"), cases())
async def test_every_parameter_makes_a_difference(
    server: Server, backend: FakeBackend, path: str, name: str, extra: dict[str, Any]
) -> None:
    backend.timeline = TIMELINE
    without = await outcome(server, backend, path, NEEDED.get(name, {}))
    assert await outcome(server, backend, path, NEEDED.get(name, {})) == without
    with_it = await outcome(server, backend, path, extra)
    assert with_it[0] == (404 if name == "model" else 200), with_it[1]
    assert with_it[-1] is False
    assert with_it != without


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "extra",
    [
        *({"temperature": value} for value in (0, 1e-5, 1e-30, 5e-324, 2)),
        *({"top_p": value} for value in (0, 1e-6, 1)),
        *({"top_k": value} for value in (-1, 0, 1_000_000)),
        {"top_k": 1, "top_p": 0.8},
        {"min_p": 1},
        {"top_p": 1, "min_p": 0},
    ],
)
async def test_the_edges_of_sampling_are_taken_as_they_are(
    server: Server, backend: FakeBackend, path: str, extra: dict[str, Any]
) -> None:
    status, answer = await server.post(path, BASE[path] | extra)
    assert status == 200, answer
    params = backend.calls[0][1]
    assert {name: getattr(params, name) for name in extra} == extra


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, CompletionRequest), (CHAT, ChatRequest)])
def test_the_list_is_complete(path: str, body: type) -> None:
    assert set(BOTH) | set(OWN[path]) | WITHOUT_EFFECT == set(body.__struct_fields__)  # type: ignore[attr-defined]


MESSAGE_FIELDS: dict[str, Any] = {
    "role": "system",
    "content": [{"type": "text", "text": "other"}],
    "name": "me",
    "reasoning_content": "so",
    "reasoning": "so",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    "tool_call_id": "1",
}
WITHOUT_NEWS = {"refusal", "audio", "function_call", "annotations"} | {
    *("cache_control", "id", "metadata", "parsed", "provider_specific_fields")
}
"""See `test_nested_fields.py`."""


@pytest.mark.parametrize("name", MESSAGE_FIELDS)
async def test_every_field_of_a_message_reaches_the_template(server: Server, backend: FakeBackend, name: str) -> None:
    assert set(MESSAGE_FIELDS) | WITHOUT_NEWS == set(Message.__struct_fields__)
    plain = {"role": "assistant", "content": "abc"}
    without = await outcome(server, backend, CHAT, {"messages": [plain]})
    with_it = await outcome(server, backend, CHAT, {"messages": [plain | {name: MESSAGE_FIELDS[name]}]})
    assert with_it[0] == without[0] == 200
    assert with_it != without


STRUCTURES: dict[str, dict[str, Any]] = {
    "json": {"json": {"type": "integer"}},
    "json_object": {"json_object": True},
    "regex": {"regex": "a+"},
    "choice": {"choice": ["a"]},
    "grammar": {"grammar": 'start: "a"'},
}
VLLMS_UNSET = {"structural_tag", "whitespace_pattern", "disable_fallback", "disable_any_whitespace"} | {
    *("disable_additional_properties", "_backend", "_backend_was_auto")
}
"""See `test_api_structured.py`."""


async def test_every_kind_of_structure_is_another_one(server: Server, backend: FakeBackend) -> None:
    assert set(STRUCTURES) == set(StructuredOutputs.__struct_fields__) - VLLMS_UNSET
    asked = [
        await outcome(server, backend, COMPLETIONS, {"structured_outputs": structure})
        for structure in STRUCTURES.values()
    ]
    assert [status for status, *_ in asked] == [200] * len(STRUCTURES)
    structures = [calls[0][1].structured for _, _, calls, *_ in asked]
    assert all(structures)
    assert len(set(map(repr, structures))) == len(STRUCTURES)


async def test_each_option_of_a_stream_makes_a_difference(server: Server, backend: FakeBackend) -> None:
    names = set(StreamOptions.__struct_fields__) - {"include_obfuscation"}  # which may only be false
    bodies: list[dict[str, Any]] = [
        {"stream": True},
        *({"stream": True, "stream_options": {name: True}} for name in names),
    ]
    answers = [await outcome(server, backend, COMPLETIONS, body) for body in bodies]
    assert len({text for _, text, *_ in answers}) == 1 + len(names)


@pytest.mark.parametrize("path", BASE)
async def test_a_user_is_accepted_and_changes_nothing(server: Server, backend: FakeBackend, path: str) -> None:
    assert await outcome(server, backend, path, {"user": "me"}) == await outcome(server, backend, path, {})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_salt_keeps_prefixes_apart(server: Server, backend: FakeBackend, stream: bool) -> None:
    async with server.session.post(
        server.url + COMPLETIONS, json={"prompt": ["a", "b"], "cache_salt": "tenant-1", "stream": stream}
    ) as response:
        await response.read()
    assert [namespace for namespace, _ in backend.names] == ["tenant-1", "tenant-1"]


# ------------------------------------------------------------------------------------------------------------ timings


def test_the_parts_of_a_timeline_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic_ns", lambda: 150 * MS)
    spent = timings(TIMELINE, 1 * MS)
    assert (spent.accept_ms, spent.tokenize_ms, spent.queue_ms, spent.prefill_ms) == (1, 3, 11, 30)
    assert (spent.detokenize_ms, spent.decode_ms, spent.write_ms) == (1, 100 - 15, 3)
    assert (spent.preempted_ms, spent.first_token_ms, spent.total_ms) == (15, 46, 149)


def test_chunks_and_preemptions_lie_within_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic_ns", lambda: 150 * MS)
    spent = timings(TIMELINE, 1 * MS)
    assert spent.prefill_chunks == [
        PrefillChunkJson(at_ms=15, ms=10, tokens=512),
        PrefillChunkJson(at_ms=25, ms=20, tokens=100),
        PrefillChunkJson(at_ms=74, ms=15, tokens=620),
    ]
    assert spent.preemptions == [PreemptionJson(at_ms=59, ms=15)]


def test_a_preemption_before_the_first_token_is_no_part_of_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic_ns", lambda: 150 * MS)
    marks = array("q", [16 * MS, 512, 20 * MS, MARK_RETRACTED, 40 * MS, 612, 46 * MS, MARK_TOKEN])
    spent = timings(msgspec.structs.replace(TIMELINE, marks=marks.tobytes()), 1 * MS)
    assert (spent.prefill_ms, spent.decode_ms, spent.preempted_ms) == (10, 100, 20)
    assert [chunk.ms for chunk in spent.prefill_chunks] == [4, 6]


def test_what_did_not_happen_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic_ns", lambda: 150 * MS)
    cancelled_in_queue = Timeline(
        arrived=2 * MS, encoded=5 * MS, queued=0, started=0, computed=0, seen=0, finished=147 * MS
    )
    spent = timings(cancelled_in_queue, 1 * MS)
    assert (spent.tokenize_ms, spent.queue_ms, spent.prefill_ms, spent.decode_ms) == (3, 142, 0, 0)
    assert spent.total_ms == 149
    nothing_told = Timeline(arrived=2 * MS, encoded=0, queued=0, started=0, computed=0, seen=40 * MS, finished=140 * MS)
    spent = timings(nothing_told, 1 * MS)
    assert (spent.tokenize_ms, spent.queue_ms, spent.decode_ms, spent.total_ms) == (38, 0, 100, 149)


def test_stamps_that_cross_by_a_moment_give_no_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic_ns", lambda: 150 * MS)
    crossed = Timeline(
        arrived=2 * MS,
        encoded=17 * MS,
        queued=6 * MS,
        started=16 * MS,
        computed=46 * MS,
        seen=47 * MS,
        finished=147 * MS,
    )
    spent = timings(crossed, 1 * MS)
    assert (spent.tokenize_ms, spent.queue_ms, spent.total_ms) == (14, 0, 149)


@pytest.mark.parametrize("path", BASE)
async def test_each_choice_has_its_timings_at_its_end_only(server: Server, backend: FakeBackend, path: str) -> None:
    backend.timeline = TIMELINE
    _, whole = await server.post(path, BASE[path] | {"timings": True, "n": 2})
    *chunks, _ = await server.events(path, BASE[path] | {"timings": True, "n": 2})
    choices = [chunk["choices"][0] for chunk in chunks]
    names = {f"{part}_ms" for part in (*PARTS, "preempted", "first_token", "total")} | {"prefill_chunks", "preemptions"}
    assert [set(choice["timings"]) for choice in whole["choices"]] == [names] * 2
    assert all(("timings" in choice) == (choice["finish_reason"] is not None) for choice in choices)
    assert sum("timings" in choice for choice in choices) == 2
    *chunks, _ = await server.events(path, BASE[path] | {"timings": False})
    assert all("timings" not in chunk["choices"][0] for chunk in chunks)
