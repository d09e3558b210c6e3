"""Whatever a client makes of a valid body: 200 or a 4xx in words of our own, and the server lives on."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote_from_bytes, unquote

from api_server import CHAT, COMPLETIONS, serving
from fake_backend import FakeBackend
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import counted, mutate, slice_of
from yarl import URL

from asyncengine.api.chat_turn import chat_turn
from asyncengine.api.prompts import completion_prompts
from asyncengine.api.schema import ChatRequest, CompletionRequest, parse_chat, parse_completion
from asyncengine.engine_info import EngineInfo
from asyncengine.errors import InvalidRequestError
from asyncengine.request_terms import resolve_terms

LIBRARIES = re.compile(
    r"msgspec|aiohttp|tokenizers|jinja|torch|llguidance|pydantic|uvloop|numpy|zmq|Traceback|Struct|\.py\b|0x[0-9a-f]{6}"
)
INFO = EngineInfo(
    model="m",
    model_path="/nowhere",
    architecture="llama",
    device="cpu",
    dtype="float32",
    vocab_size=1000,
    max_model_len=4096,
    num_pages=1,
    weight_bytes=1,
    kv_cache_bytes=1,
    has_chat_template=True,
    tool_call_format="hermes",
)
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "prompt": ["a", "b"],
        "max_tokens": 3,
        "n": 2,
        "logprobs": 2,
        "echo": True,
        "stop": ["x", "y"],
        "stop_token_ids": [1],
        "logit_bias": {"5": -1.5},
        "stream": True,
        "stream_options": {"include_usage": True},
        "structured_outputs": {"choice": ["a"]},
        "service_class": "background",
    },
    CHAT: {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "chat_template_kwargs": {"enable_thinking": True},
        "temperature": 0.5,
        "seed": 7,
        "service_class": "interactive",
        "session": "s",
        "session_ttl_seconds": 0.5,
    },
}
ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308]),
    st.text(max_size=8),
    st.sampled_from([[], {}, [[]], [None], {"": None}, "\0", "a" * 600, [1] * 600, {"type": "text"}]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(body) if isinstance(body, dict) else list(body)
    copy[path[0]] = changed(body[path[0]], path[1:], value)
    return copy


def take_in(path: str, raw: bytes) -> None:
    """What the routes and the engine do with a body before anything is queued."""
    asked: CompletionRequest | ChatRequest
    if path == COMPLETIONS:
        asked = parse_completion(raw).request
        completion_prompts(asked)
        asked.sampling_params()
    else:
        asked = parse_chat(raw).request
        chat_turn(asked, INFO)
    resolve_terms(
        {
            "service_class": asked.service_class,
            "session": asked.session,
            "session_ttl_seconds": asked.session_ttl_seconds,
        },
        default_class="interactive",
    )


def test_changed_bodies_are_taken_or_refused_in_words_of_our_own() -> None:
    for path, body in BODIES.items():
        take_in(path, json.dumps(body).encode())

    @slice_of(400)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from([COMPLETIONS, CHAT]))
        changing: Any = BODIES[path]
        for _ in range(data.draw(st.integers(0, 3))):
            changing = changed(changing, data.draw(st.sampled_from(places(changing))), data.draw(ODD))
        raw = json.dumps(changing).encode()
        if data.draw(st.booleans()):
            raw = mutate(raw, data.draw)
        tried.append(1)
        message = ""
        try:
            take_in(path, raw)
        except InvalidRequestError as error:
            message = error.message
        assert not LIBRARIES.search(message), message

    with counted("HTTP bodies") as tried:
        fuzz()


async def test_whatever_names_a_session_in_a_path_it_is_released_or_refused_in_words_of_our_own() -> None:
    backend = FakeBackend()

    @slice_of(80)
    @given(st.one_of(st.binary(max_size=140), st.text(max_size=140).map(str.encode)))
    def fuzz(name: bytes) -> None:
        names.append(quote_from_bytes(name, safe=b"%"[: len(name) % 2]))

    names: list[str] = []
    fuzz()
    async with serving(backend) as server:
        for name in names:
            url = URL(f"{server.url}/v1/sessions/{name}/release", encoded=True)
            async with server.session.post(url) as response:
                text = await response.text()
            assert response.status == 200 or 400 <= response.status < 500, (name, text)
            assert not LIBRARIES.search(text) or LIBRARIES.search(unquote(name)), text
            if response.status == 200:
                assert backend.released.pop() == ("", json.loads(text)["session"])
        assert not backend.released
        assert (await server.session.get(f"{server.url}/health")).status == 200
    with counted("names of sessions") as tried:
        tried.append(len(names))
