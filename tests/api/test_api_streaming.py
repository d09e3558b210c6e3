"""What a stream looks like on the wire, and what happens when either end leaves."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest
from api_server import CHAT, COMPLETIONS, JSON, Server, eventually
from fake_backend import ANSWER, MODEL, FakeBackend

from asyncengine import __version__
from asyncengine.api import connections, prompt_ids
from asyncengine.errors import EngineDeadError, InvalidRequestError, OverloadedError

MESSAGES = [{"role": "user", "content": "hello"}]
BODIES = [(COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": MESSAGES})]
USAGE = {
    COMPLETIONS: {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    },
    CHAT: {
        "prompt_tokens": 1,
        "completion_tokens": 5,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
}


async def test_bytes_of_a_completion_stream(server: Server, backend: FakeBackend) -> None:
    backend.pieces, backend.finish = ("a", 'b\n"'), ("stop", 13)
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    async with server.session.post(server.url + COMPLETIONS, json=body) as response:
        text = await response.text()
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
    first = json.loads(text[6 : text.index("\n\n")])
    head = f'data: {{"id":"{first["id"]}","object":"text_completion","created":{first["created"]},"model":"{MODEL}",'
    head += f'"system_fingerprint":"asyncengine-{__version__}/float32/cpu/default",'
    assert text == (
        f'{head}"choices":[{{"index":0,"text":"0:a","logprobs":null,"finish_reason":null}}],"usage":null}}\n\n'
        f'{head}"choices":[{{"index":0,"text":"b\\n\\"","logprobs":null,"finish_reason":"stop","stop_reason":13}}]'
        ',"usage":null}\n\n'
        f'{head}"choices":[],"usage":{{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3,'
        '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        "data: [DONE]\n\n"
    )


async def test_chunks_of_a_chat_stream(server: Server, backend: FakeBackend) -> None:
    backend.pieces = ("a", "", "")
    *chunks, done = await server.events(CHAT, {"messages": MESSAGES})
    assert done == "[DONE]"
    assert [chunk["choices"] for chunk in chunks] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "0:a"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    ]
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_usage_is_not_streamed_unasked(server: Server, path: str, body: dict, options: dict | None) -> None:
    extra = {} if options is None else {"stream_options": options}
    *chunks, done = await server.events(path, {**body, **extra})
    assert done == "[DONE]"
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_asked_usage_is_one_chunk_after_the_last_choice(server: Server, path: str, body: dict) -> None:
    *chunks, usage, done = await server.events(path, {**body, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == USAGE[path]
    status, whole = await server.post(path, body)
    assert status == 200
    assert whole["usage"] == usage["usage"]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, None])
async def test_stream_options_need_a_stream(server: Server, path: str, body: dict, stream: bool | None) -> None:
    status, answer = await server.post(path, {**body, "stream": stream, "stream_options": {"include_usage": True}})
    assert (status, answer["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("prompt", [["a", "bc"], [[1, 2], [3]]])
@pytest.mark.parametrize("n", [1, 2])
async def test_choices_are_numbered_by_prompt_then_choice(server: Server, prompt: list, n: int) -> None:
    status, whole = await server.post(COMPLETIONS, {"prompt": prompt, "n": n})
    *chunks, usage, _ = await server.events(
        COMPLETIONS, {"prompt": prompt, "n": n, "stream_options": {"include_usage": True}}
    )
    assert status == 200
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * n))
    assert [choice["text"] for choice in whole["choices"]] == [f"{k}:{ANSWER}" for k in range(n)] * 2
    texts = [""] * (2 * n)
    ends: Counter[int] = Counter()
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert ends == Counter(dict.fromkeys(range(2 * n), 1))
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == 5 * 2 * n
    assert usage["usage"] == whole["usage"]


async def test_each_choice_of_a_chat_opens_with_its_role(server: Server) -> None:
    *chunks, _ = await server.events(CHAT, {"messages": MESSAGES, "n": 3})
    firsts = {chunk["choices"][0]["index"]: chunk["choices"][0]["delta"] for chunk in reversed(chunks)}
    assert firsts == {index: {"role": "assistant", "content": ""} for index in range(3)}


@pytest.mark.parametrize(
    ("pieces", "limit", "finish"), [(("",), 9, "stop"), (("a", "b", "c"), 9, "stop"), (("a", "b", "c"), 2, "length")]
)
async def test_a_choice_finishes_exactly_once(
    server: Server, backend: FakeBackend, pieces: tuple[str, ...], limit: int, finish: str
) -> None:
    backend.pieces = pieces
    *chunks, _ = await server.events(COMPLETIONS, {"prompt": "a", "max_tokens": limit})
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [finish]


async def test_deltas_without_text_make_no_event(server: Server) -> None:
    *chunks, _ = await server.events(COMPLETIONS, {"prompt": "a"})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["0:Hel", "lo ", "👩‍👧", '\n"x"\\']


async def test_token_ids_and_running_usage_come_when_asked(server: Server) -> None:
    options = {"return_token_ids": True, "stream_options": {"continuous_usage_stats": True}}
    *chunks, _ = await server.events(COMPLETIONS, {"prompt": [97, 98, 99], **options})
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[101], [102], [103], [104], [105]]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 5]
    assert chunks[-1]["usage"] == USAGE[COMPLETIONS]
    _, whole = await server.post(COMPLETIONS, {"prompt": "abc", "return_token_ids": True})
    assert whole["choices"][0]["token_ids"] == [101, 102, 103, 104, 105]


async def test_a_completions_choice_begins_with_the_ids_of_its_own_prompt(server: Server, backend: FakeBackend) -> None:
    told = {"return_prompt_token_ids": True, "n": 2}
    for prompts in (["ab", "c"], [[1, 97, 98], [1, 99]]):
        body = {"prompt": prompts, **told}
        _, whole = await server.post(COMPLETIONS, body)
        *chunks, _ = await server.events(COMPLETIONS, body)
        expected = [[1, 97, 98], [1, 97, 98], [1, 99], [1, 99]]
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == expected
        for index, ids in enumerate(expected):
            first, *rest = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert first["prompt_token_ids"] == ids
            assert not any("prompt_token_ids" in choice for choice in rest)
            assert not any("token_ids" in choice for choice in (first, *rest))
        assert [prompt for prompt, _ in backend.calls] == [[1, 97, 98], [1, 99]] * 2  # and is run as these
        backend.calls.clear()


async def test_choices_tell_a_bounded_number_of_ids_of_their_prompts(
    server: Server, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_ids, "MAX_IDS_AT_ONCE", 6)
    body = {"prompt": [[1, 97], [1]], "return_token_ids": True}
    assert (await server.post(COMPLETIONS, body | {"n": 2}))[0] == 200
    backend.calls.clear()
    status, answer = await server.post(COMPLETIONS, body | {"n": 3})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "too_many_token_ids", "return_prompt_token_ids")
    assert backend.calls == []
    assert (await server.post(COMPLETIONS, body | {"n": 3, "return_prompt_token_ids": False}))[0] == 200
    assert (await server.post(CHAT, {"messages": MESSAGES, "return_token_ids": True, "n": 16}))[0] == 200


async def test_a_chat_begins_with_the_ids_of_its_prompt(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], "return_token_ids": True, "n": 2}
    _, whole = await server.post(CHAT, body)
    first, *chunks, _ = await server.events(CHAT, body)
    assert whole["prompt_token_ids"] == first["prompt_token_ids"] == [1, 97, 98]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("prompt_token_ids" in chunk or "prompt_token_ids" in chunk["choices"][0] for chunk in chunks)
    _, without = await server.post(CHAT, body | {"return_prompt_token_ids": False})
    assert "prompt_token_ids" not in without
    assert "token_ids" in without["choices"][0]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_whose_ids_cannot_be_told_is_refused_as_it_would_be_without(
    server: Server, backend: FakeBackend, path: str, body: dict[str, object], stream: bool
) -> None:
    backend.refusal = InvalidRequestError("no", code="c", param="p")
    status, answer = await server.post(path, {**body, "stream": stream, "return_token_ids": True})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "c", "p")


async def test_a_running_usage_is_in_every_event_of_a_chat_that_of_the_role_too(server: Server) -> None:
    for options in ({"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": True}):
        role, *chunks, _ = await server.events(CHAT, {"messages": MESSAGES, "stream_options": options})
        assert role["choices"][0]["delta"]["role"] == "assistant"
        assert [chunk["usage"]["completion_tokens"] for chunk in (role, *chunks)][:4] == [1, 1, 2, 3]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("error", [InvalidRequestError("no", code="c", param="p"), OverloadedError("full")])
async def test_a_refusal_has_its_status_streaming_or_not(
    server: Server, backend: FakeBackend, path: str, body: dict, error: InvalidRequestError | OverloadedError
) -> None:
    backend.refusal = error
    for stream in (False, True):
        status, answer = await server.post(path, {**body, "stream": stream})
        assert status == error.status
        assert answer == {
            "error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
        }


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_death_in_mid_stream_is_the_last_event(
    server: Server, backend: FakeBackend, path: str, body: dict
) -> None:
    backend.failure, backend.fail_after = EngineDeadError("gpu_runner died"), 1
    events = await server.events(path, body)
    assert events[-1] == {"error": {"message": "gpu_runner died", "type": "server_error", "param": None, "code": None}}
    assert sum("error" in event for event in events) == 1
    assert "[DONE]" not in events
    assert (await server.post(path, body))[0] == 500


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_fault_of_ours_is_told_without_details(
    server: Server, backend: FakeBackend, path: str, body: dict
) -> None:
    backend.failure, backend.fail_after = RuntimeError("secret detail"), 1
    status, answer = await server.post(path, body)
    events = await server.events(path, body)
    assert status == 500
    assert answer["error"]["code"] == "internal_error"
    assert events[-1] == answer
    assert "secret" not in str(answer)


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": ["a", "b", "c"], "n": 2}])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_streams(
    server: Server, backend: FakeBackend, body: dict, stream: bool
) -> None:
    backend.hold_after = 1
    num_prompts = len(body["prompt"])
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({**body, "stream": stream}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
    if stream:
        await reader.readuntil(b"data: {")
    await eventually(lambda: len(backend.calls) == num_prompts)
    writer.transport.abort()
    await eventually(lambda: backend.left_early == num_prompts)
    assert backend.open == 0


async def test_a_client_that_stops_reading_is_dropped(
    server: Server, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SLOW_CLIENT_SECONDS", 0.02)
    backend.pieces = ("x" * 1_000_000,) * 50
    async with server.session.post(server.url + COMPLETIONS, json={"prompt": "a", "max_tokens": 50, "stream": True}):
        await eventually(lambda: backend.left_early == 1)
    assert backend.open == 0


async def test_one_refused_prompt_of_several_aborts_the_others(server: Server, backend: FakeBackend) -> None:
    backend.hold_after = 0
    status, answer = await server.post(COMPLETIONS, {"prompt": [[1], [5000], [2]]})
    assert (status, answer["error"]["message"]) == (400, "prompt[0] is 5000, the vocabulary has 1000")
    assert backend.open == 0


async def test_news_of_several_choices_goes_out_in_one_write(server: Server, backend: FakeBackend) -> None:
    backend.pieces = ("a", "b")
    reads = []
    body = json.dumps({"prompt": "x", "n": 4, "stream": True}).encode()
    async with server.session.post(server.url + COMPLETIONS, data=body, headers=JSON) as response:
        async for data, _ in response.content.iter_chunks():
            reads.append(data.count(b"data: {"))
    assert [count for count in reads if count] == [4, 4]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_stream_is_framed_as_its_version_of_http_asks(server: Server, version: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps({"prompt": "a", "stream": True}).encode()
    lines = (
        f"POST {COMPLETIONS} HTTP/{version}",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
    )
    writer.write("\r\n".join(lines).encode() + b"\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    answer, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    chunked = version == "1.1"
    assert (b"transfer-encoding: chunked" in answer.lower()) == chunked
    if chunked:
        sizes = []
        text = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            sizes.append(int(size, 16))
            text += body[: sizes[-1]]
            assert body[sizes[-1] :].startswith(b"\r\n")
            body = body[sizes[-1] + 2 :]
        assert sizes[-1] == 0
        assert len(sizes) > 3, "it came in pieces"
    else:
        text = body
    *events, done, end = text.split(b"\n\n")
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events) == f"0:{ANSWER}"
    assert (done, end) == (b"data: [DONE]", b"")
