"""Fields that other servers know and this one does not act on: each is accepted, refused or reported, as `unsupported`
says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from api_server import CHAT, COMPLETIONS, Server
from fake_backend import FakeBackend
from refusals import USER, refused

from asyncengine.api.unsupported import (
    INSTEAD,
    NO_EFFECT_IN_CHAT,
    NO_EFFECT_IN_COMPLETIONS,
    NO_EFFECT_IN_TOKENIZE,
    NO_EFFECT_WITHOUT_REASONING,
)
from asyncengine.chat_prompt import ChatPrompt


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        (COMPLETIONS, {"best_of": 2}),
        (COMPLETIONS, {"suffix": "x"}),
        (COMPLETIONS, {"add_special_tokens": False}),
        (COMPLETIONS, {"spaces_between_special_tokens": False}),
        (COMPLETIONS, {"return_tokens_as_token_ids": True}),
        (COMPLETIONS, {"logits_processors": ["x"]}),
        (COMPLETIONS, {"vllm_xargs": {"a": 1}}),
        (CHAT, {"add_special_tokens": True}),
        (CHAT, {"echo": True}),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}),
        (COMPLETIONS, {"thinking_token_budget": 5}),
        (COMPLETIONS, {"logprob_token_ids": [5]}),
        (COMPLETIONS, {"regex": "a"}),
        (CHAT, {"reasoning": {"exclude": True}}),
        (CHAT, {"functions": [{}]}),
        (CHAT, {"modalities": ["text", "audio"]}),
    ],
)
async def test_known_fields_that_would_matter_are_refused_by_name(
    server: Server, backend: FakeBackend, path: str, extra: dict
) -> None:
    body: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": [USER]}
    error = await refused(server, path, {**body, **extra})
    assert (error["code"], error["param"]) == ("unsupported_parameter", next(iter(extra)))
    assert backend.calls == []


@pytest.mark.parametrize(
    ("path", "body", "table"),
    [
        (COMPLETIONS, {"prompt": "a"}, NO_EFFECT_IN_COMPLETIONS),
        (CHAT, {"messages": [USER]}, NO_EFFECT_IN_CHAT),
        (CHAT, {"messages": [USER]}, NO_EFFECT_WITHOUT_REASONING),
        ("/tokenize", {"messages": [USER]}, NO_EFFECT_IN_TOKENIZE),
    ],
)
async def test_every_known_field_is_accepted_with_what_changes_nothing_and_refused_with_anything_else(
    server: Server, backend: FakeBackend, path: str, body: dict[str, Any], table: Mapping[str, tuple[Any, ...]]
) -> None:
    backend.info = msgspec.structs.replace(backend.info, reasoning=table is NO_EFFECT_IN_CHAT)
    longest = max(map(len, table.values()))
    for place in range(longest + 1):
        same = {name: (None, *values)[min(place, len(values))] for name, values in table.items()}
        async with server.session.post(server.url + path, json=body | same) as response:
            assert response.status == 200, await response.text()
            assert "x-ignored-fields" not in response.headers
    assert backend.calls[1:] == backend.calls[:1] * (len(backend.calls) - 1)
    backend.calls.clear()
    for name in table:
        error = await refused(server, path, body | {name: {"x": 1}})
        assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert backend.calls == []
    assert set(INSTEAD) <= NO_EFFECT_IN_COMPLETIONS.keys() | NO_EFFECT_IN_CHAT.keys()


@pytest.mark.parametrize("name", ["include_reasoning", "separate_reasoning", "stream_reasoning"])
async def test_to_have_reasoning_another_way_is_refused_only_where_it_is_told_apart(
    server: Server, backend: FakeBackend, name: str
) -> None:
    body = {"messages": [USER], name: False}
    assert (await server.post(CHAT, body))[0] == 200
    backend.info = msgspec.structs.replace(backend.info, reasoning=True)
    error = await refused(server, CHAT, body)
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)


async def test_what_has_another_name_here_is_refused_with_that_name(server: Server) -> None:
    error = await refused(server, COMPLETIONS, {"prompt": "a", "guided_json": {"type": "object"}})
    assert error["message"] == 'guided_json is not supported by this server: structured_outputs has "json"'


async def test_known_fields_that_change_nothing_are_accepted(server: Server) -> None:
    both: dict[str, Any] = {"presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "user": "me"}
    completion = {**both, "logprobs": None, "best_of": 1, "echo": False, "suffix": ""}
    chat = {**both, "logprobs": False, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "modalities": ["text"]}
    chat |= {"response_format": {"type": "text"}, "store": False, "parallel_tool_calls": True}
    chat |= {"include_reasoning": True, "thinking_token_budget": -1, "watermarking": False}
    for path, body in ((COMPLETIONS, {"prompt": "a", **completion}), (CHAT, {"messages": [USER], **chat})):
        async with server.session.post(server.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert "x-ignored-fields" not in response.headers


DEFAULTS: dict[str, Any] = {
    "n": 1,
    "top_k": -1,
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p", "min_tokens", "priority"), 0),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), 1.0),
    "stop": [],
    "stop_token_ids": [],
    "bad_words": [],
    **dict.fromkeys(("stream", "use_beam_search", "include_stop_str_in_output", "ignore_eos", "no_stop_trim"), False),
    **dict.fromkeys(("echo", "return_token_ids", "return_prompt_token_ids", "return_hidden_states"), False),
    **dict.fromkeys(("return_routed_experts", "return_cached_tokens_details"), False),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), True),
    **dict.fromkeys(("lora_path", "stop_regex", "custom_logit_processor", "session_params", "extra_key", "seed")),
    **dict.fromkeys(("regex", "ebnf", "json_schema", "rid", "custom_params", "bootstrap_host", "data_parallel_rank")),
    **dict.fromkeys(("structured_outputs", "logits_processors", "kv_transfer_params", "vllm_xargs", "stream_options")),
    **dict.fromkeys(("prompt_logprobs", "allowed_token_ids", "truncate_prompt_tokens", "cache_salt", "logit_bias")),
}
DEFAULTS_IN_COMPLETIONS = DEFAULTS | {"max_tokens": 16} | dict.fromkeys(("suffix", "best_of", "logprobs"))
DEFAULTS_IN_CHAT: dict[str, Any] = {
    **DEFAULTS,
    "top_logprobs": 0,
    "tool_choice": "none",
    "reasoning": {},
    **dict.fromkeys(("parallel_tool_calls", "add_generation_prompt"), True),
    **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), True),
    **dict.fromkeys(("logprobs", "continue_final_message", "add_special_tokens", "return_prompt_text"), False),
    **dict.fromkeys(("tools", "documents", "chat_template", "chat_template_kwargs", "mm_processor_kwargs")),
    **dict.fromkeys(("reasoning_effort", "media_io_kwargs", "max_tokens", "max_completion_tokens", "input_ids")),
}
"""What clients of vLLM and SGLang send that send all that they know."""


@pytest.mark.parametrize("reasoning", [False, True])
async def test_clients_that_send_every_default_of_other_servers_are_served(
    server: Server, backend: FakeBackend, reasoning: bool
) -> None:
    backend.info = msgspec.structs.replace(backend.info, refuse_unknown_fields=True, reasoning=reasoning)
    bodies = {COMPLETIONS: {"prompt": "a"} | DEFAULTS_IN_COMPLETIONS, CHAT: {"messages": [USER]} | DEFAULTS_IN_CHAT}
    for path, body in bodies.items():
        status, answer = await server.post(path, body)
        assert status == 200, answer


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_accepted_and_reported(server: Server, stream: bool) -> None:
    body = {"prompt": "a", "temprature": 0, "metadata": {"a": [1]}, "né\r\nx, y": 1, "stream": stream}
    async with server.session.post(server.url + COMPLETIONS, json=body) as response:
        assert response.status == 200
        assert response.headers["x-ignored-fields"] == "metadata, n???x??y, temprature"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": [USER]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [97]}),
    ],
)
async def test_a_strict_server_refuses_unknown_fields_by_name(
    server: Server, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    backend.info = msgspec.structs.replace(backend.info, refuse_unknown_fields=True)
    assert (await server.post(path, body))[0] == 200
    error = await refused(server, path, body | {"temprature": 0, "zz": 1})
    assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
    assert error["message"] == "'temprature' is no field of this request"
    assert len(backend.calls) == (path in (COMPLETIONS, CHAT))


async def test_an_unknown_field_that_is_null_asks_for_nothing(server: Server, backend: FakeBackend) -> None:
    backend.info = msgspec.structs.replace(backend.info, refuse_unknown_fields=True)
    tool = {"type": "function", "zz": None, "function": {"name": "f", "zz": None}}
    bodies = {
        COMPLETIONS: {"prompt": "a", "service_tier": None},
        CHAT: {"messages": [USER | {"reasoning_details": None}], "tools": [tool], "metadata": None},
        "/tokenize": {"prompt": "a", "zz": None},
        "/detokenize": {"tokens": [97], "zz": None},
    }
    for path, body in bodies.items():
        async with server.session.post(server.url + path, json=body) as response:
            assert (response.status, "x-ignored-fields" in response.headers) == (200, False)
    error = await refused(server, COMPLETIONS, {"prompt": "a", "service_tier": 0})
    assert (error["param"], error["code"]) == ("service_tier", "unknown_parameter")


async def test_a_template_variable_that_is_null_is_none(server: Server, backend: FakeBackend) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": None, "thinking": True}}
    assert (await server.post(CHAT, body))[0] == 200
    assert isinstance(prompt := backend.calls[0][0], ChatPrompt)
    assert prompt.template_kwargs == {"thinking": True}


async def test_many_long_unknown_fields_keep_the_header_small(server: Server) -> None:
    body = {"prompt": "a", **{f"{i:04}" + "x" * 1000: i for i in range(500)}}
    async with server.session.post(server.url + COMPLETIONS, json=body) as response:
        assert response.status == 200
        assert len(response.headers["x-ignored-fields"]) == 32 * 64 + 31 * 2
