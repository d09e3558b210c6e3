"""`AsyncClient` gives over HTTP what the engine gives in process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from api_server import Server, eventually
from fake_backend import MODEL, FakeBackend

from asyncengine.chat_prompt import ChatPrompt
from asyncengine.client import AsyncClient, RetryPolicy
from asyncengine.engine_info import Health
from asyncengine.errors import EngineDeadError, EngineError, InvalidRequestError, OverloadedError
from asyncengine.outputs import collect
from asyncengine.sampling import SamplingParams, Structured

PROMPTS = ["abc", [1, 2, 3], ChatPrompt(messages=[{"role": "user", "content": "hi"}])]
PARAMS = SamplingParams(
    n=2,
    max_tokens=4,
    min_tokens=1,
    temperature=0.5,
    top_k=3,
    top_p=0.9,
    min_p=0.05,
    presence_penalty=-1.5,
    frequency_penalty=0.25,
    repetition_penalty=1.25,
    logit_bias=((7, -100.0), (0, 2.5)),
    logprobs=2,
    seed=-7,
    stop=("x", "\n"),
    stop_token_ids=(5,),
    ignore_eos=True,
    skip_special_tokens=False,
    include_stop_str_in_output=True,
    priority=-2,
)
STRUCTURES = [
    Structured("json_schema", '{"type": "object"}'),
    Structured("json_object"),
    Structured("regex", r"\d+\n"),
    Structured("choice", '["a","b\\n"]'),
    Structured("grammar", 'start: "a"'),
]


ONCE = RetryPolicy(attempts=1)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, retry=ONCE) as client:
        yield client


async def test_the_models_are_those_of_the_server(client: AsyncClient) -> None:
    assert await client.models() == [MODEL]
    async with AsyncClient("http://127.0.0.1:9", retry=ONCE) as nobody:
        with pytest.raises(EngineError, match=r"^no answer from http://127\.0\.0\.1:9: "):
            await nobody.models()


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    "params",
    [None, PARAMS, SamplingParams(logprobs=0), *(SamplingParams(structured=structured) for structured in STRUCTURES)],
)
async def test_deltas_and_parameters_survive_the_trip(
    client: AsyncClient, backend: FakeBackend, prompt: str | list[int] | ChatPrompt, params: SamplingParams | None
) -> None:
    backend.finish = ("stop", "x")
    direct = [delta async for delta in backend.generate(prompt, params)]
    over_http = [delta async for delta in client.generate(prompt, params)]
    assert over_http == direct
    assert backend.calls[1] == (prompt, params or SamplingParams())


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    "error", [InvalidRequestError("no", code="c", param="p"), OverloadedError("full"), EngineDeadError("dead")]
)
async def test_refusals_keep_their_type(
    client: AsyncClient, backend: FakeBackend, prompt: str | list[int] | ChatPrompt, error: EngineError
) -> None:
    backend.refusal = error
    with pytest.raises(type(error)) as raised:
        await anext(client.generate(prompt))
    assert (raised.value.message, raised.value.code, raised.value.param) == (error.message, error.code, error.param)


async def test_health_is_what_the_server_says(client: AsyncClient, backend: FakeBackend) -> None:
    assert await client.health() == Health(state="ready")
    backend.health = Health(state="stalled", detail="no sign of life from gpu_runner")
    assert await client.health() == backend.health
    async with AsyncClient("http://127.0.0.1:9", retry=ONCE) as nobody:
        with pytest.raises(EngineError, match=r"^no answer from http://127\.0\.0\.1:9: "):
            await nobody.health()


async def test_a_request_is_cancelled_by_the_name_it_was_given(client: AsyncClient, backend: FakeBackend) -> None:
    chat = ChatPrompt(messages=[{"role": "user", "content": "hi"}])
    for answer in (client.generate("a", request_id="mine"), client.generate(chat, request_id="mine")):
        assert [delta async for delta in answer]
    assert [name for _, name in backend.names] == ["cmpl-mine", "chatcmpl-mine"]
    assert await client.cancel("mine")
    assert backend.cancelled == [("", "cmpl-mine"), ("", "chatcmpl-mine")]


async def test_deltas_are_collected_into_one_answer(client: AsyncClient) -> None:
    answer = await collect(client.generate("abc", SamplingParams(n=2)), prompt="abc")
    deltas = [delta async for delta in client.generate("abc", SamplingParams(n=2))]
    assert [output.index for output in answer.outputs] == [0, 1]
    for output in answer.outputs:
        mine = [delta for delta in deltas if delta.index == output.index]
        assert output.text == "".join(delta.text for delta in mine)
        assert output.token_ids == [token for delta in mine for token in delta.token_ids]
        assert output.finish_reason == "stop"
    assert (answer.prompt, answer.prompt_token_ids, answer.metrics) == ("abc", None, None)
    assert answer.num_cached_tokens == deltas[-1].cached_tokens


async def test_an_overloaded_server_says_when_to_come_back(server: Server, backend: FakeBackend) -> None:
    backend.refusal, waits = OverloadedError("full"), []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        backend.refusal = None

    async with AsyncClient(server.url, sleep=sleep, chance=lambda: 0.0) as client:
        assert [delta async for delta in client.generate("a")]
    assert waits == [1.0]


async def test_a_death_in_mid_stream_raises_after_the_deltas(client: AsyncClient, backend: FakeBackend) -> None:
    backend.failure, backend.fail_after = EngineDeadError("gpu_runner died"), 2
    texts = []
    with pytest.raises(EngineDeadError, match="gpu_runner died"):  # noqa: PT012 - the loop is what raises
        async for delta in client.generate("a"):
            texts.append(delta.text)
    assert texts == ["0:Hel", ""]


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_leaving_early_aborts_the_request(
    client: AsyncClient, backend: FakeBackend, prompt: str | list[int] | ChatPrompt
) -> None:
    backend.hold_after = 1
    async with aclosing(client.generate(prompt)) as deltas:
        assert (await anext(deltas)).text == "0:Hel"
    await eventually(lambda: backend.left_early == 1)
    backend.hold_after = None
    assert len([delta async for delta in client.generate(prompt)]) == 5


async def test_a_very_long_delta_arrives_whole(client: AsyncClient, backend: FakeBackend) -> None:
    backend.pieces = ("é\n" * 500_000,)
    assert [delta.text async for delta in client.generate("a")] == ["0:" + "é\n" * 500_000]


@pytest.mark.parametrize(
    "prompt",
    ["x\ud800", b"abc", None, 5, np.array([0.5]), ChatPrompt(messages=[{"role": "user", "content": object()}])],
)
async def test_what_no_body_can_hold_is_refused_as_such(client: AsyncClient, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError):
        await collect(client.generate(prompt))


async def test_an_array_of_ids_is_a_prompt(client: AsyncClient, backend: FakeBackend) -> None:
    given: Any = np.array([1, 2])
    await collect(client.generate(given))
    assert backend.calls[0][0] == [1, 2]


async def test_arguments_that_are_none_are_refused_before_anything_is_sent(
    client: AsyncClient, backend: FakeBackend
) -> None:
    anything: Any = client.generate
    for name in ("a\nb", "ü", "a/b", "a" * 129):
        with pytest.raises(InvalidRequestError, match="request_id must match"):
            await collect(client.generate("x", request_id=name))
    with pytest.raises(InvalidRequestError, match="params must be SamplingParams"):
        await collect(anything("x", {"n": 1}))
    for name in ("temperature", "tenant"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            await collect(anything("x", **{name: 0}))
    for url in ("127.0.0.1:8000", "", "ftp://x"):
        with pytest.raises(InvalidRequestError, match="base_url must begin with"):
            AsyncClient(url)
    for key in ("a\nb", "ключ"):
        with pytest.raises(InvalidRequestError, match=r"^an API key must be printable ASCII$"):
            AsyncClient("http://127.0.0.1:8000", api_key=key)
    assert backend.calls == []


async def test_another_models_name_is_refused(server: Server) -> None:
    async with AsyncClient(server.url + "/v1/", model="other") as client:
        with pytest.raises(InvalidRequestError) as error:
            await anext(client.generate("a"))
    assert error.value.code == "model_not_found"


async def test_an_absent_server_is_told_with_its_address() -> None:
    async with AsyncClient("http://127.0.0.1:9", retry=ONCE) as client:
        with pytest.raises(EngineError, match=r"^no answer from http://127\.0\.0\.1:9: ") as error:
            await anext(client.generate("a"))
    assert error.value.code == "connection_error"


async def test_a_client_must_be_opened() -> None:
    with pytest.raises(EngineError, match="is not open"):
        await anext(AsyncClient("http://127.0.0.1:9").generate("a"))
