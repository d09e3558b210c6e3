"""Terms of requests: from the call to what the ring is told, and over the ring and back."""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from front_end_ring import INFO, PROMPT, deltas, front_end_ring, int32
from support.python_path import PYTHON_PATH

from asyncengine import LLM, AsyncEngine, EngineConfig, InvalidRequestError, RequestOutput, SamplingParams, collect
from asyncengine.api.app import bound_port, run_app
from asyncengine.api_keys import digest_of
from asyncengine.client import AsyncClient
from asyncengine.config import ApiKey, HttpOptions, Role
from asyncengine.front_end import FrontEnd
from asyncengine.request_terms import cache_namespace, resolve_terms
from asyncengine.tenant_table import TenantTokens
from asyncengine.terms import Terms
from asyncengine.wire.answers import Openings
from asyncengine.wire.base import Finish
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.requests import EncodeIds, ReleaseSession

PARAMS = SamplingParams(seed=7)
MODULES: dict[Role, str] = {"gpu_runner": "support.scripted_runner"}


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-") as path:
        yield Path(path)


def background(pipes: Pipes, run_dir: Path) -> FrontEnd:
    front = FrontEnd(EngineConfig(default_service_class="background"), worker=0)
    front._open(pipes, run_dir)
    front._serve(INFO, tokenizer_workers=1)
    return front


def submit(front: FrontEnd, **asked: Any) -> Any:
    return front.subscribe(PROMPT, PARAMS, listener=lambda: None, **asked)


# ------------------------------------------------------------------------------------------- from the call to the ring


async def test_what_a_request_does_not_say_is_as_the_engine_has_it(short_path: Path) -> None:
    async with front_end_ring(short_path, make=background) as ring:
        streams = [
            submit(ring.front, **asked)
            for asked in (
                {},
                {"service_class": None, "session": None, "tenant": ""},
                {"service_class": "interactive", "tenant": "a"},
                {"session": "s", "namespace": "salt", "tenant": "a"},
            )
        ]
        sent = await ring.sent("tokenizer.0")
        assert [message.terms for message in sent if isinstance(message, EncodeIds)] == [
            Terms("", "background"),
            Terms("", "background"),
            Terms("a", "interactive"),
            Terms("a", "background", "s", 300.0),
        ]
        namespaces = [message.namespace for message in sent if isinstance(message, EncodeIds)]
        assert namespaces == ["", "", "1:a", "1:asalt"]
        for stream in streams:
            stream.close()
        ring.check_empty()


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"service_class": "batch"}, "service_class"),
        ({"tenant": "x" * 129}, "tenant"),
        ({"session": ""}, "session"),
        ({"session": 5}, "session"),
        ({"session": "\ud800"}, "session"),
        ({"session_ttl_seconds": 5}, "session_ttl_seconds"),
        *(
            ({"session": "s", "session_ttl_seconds": seconds}, "session_ttl_seconds")
            for seconds in (0, -1, 3601, float("nan"), "5")
        ),
    ],
)
async def test_terms_that_are_none_are_refused_before_anything_is_sent(
    short_path: Path, asked: dict[str, Any], param: str
) -> None:
    async with front_end_ring(short_path) as ring:
        with pytest.raises(InvalidRequestError) as caught:
            submit(ring.front, **asked)
        assert caught.value.param == param
        assert await ring.sent("tokenizer.0") == []
        ring.check_empty()


def test_no_two_tenants_and_salts_share_a_namespace() -> None:
    parts = ["", "1", "1:", "a", ":a", "1:a", "0:", "11:a"]
    pairs = [(tenant, salt) for tenant in parts for salt in parts]
    assert len({cache_namespace(*pair) for pair in pairs}) == len(pairs)
    assert cache_namespace("", "") == ""


@pytest.mark.parametrize("role", ["tokenizer_proc", "gpu_runner", "detokenizer_proc"])
async def test_a_request_that_is_sent_again_has_the_terms_it_had(short_path: Path, role: Role) -> None:
    async with front_end_ring(short_path) as ring:
        stream = submit(ring.front, tenant="a", service_class="background", session="s", session_ttl_seconds=9)
        (first,) = await ring.sent("tokenizer.0")
        ring.lose(role, 0, 1)
        again = (await ring.sent("tokenizer.0"))[-1]
        assert isinstance(first, EncodeIds)
        assert isinstance(again, EncodeIds)
        assert (first.rid, again.rid) == (0, 1)
        assert (again.terms, again.namespace) == (first.terms, "1:a")
        assert again.terms == Terms("a", "background", "s", 9.0)
        stream.close()
        ring.check_empty()


async def test_a_session_is_released_on_the_control_pipe(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        await ring.front.release_session("s", tenant="a")
        await ring.front.release_session("s")
        with pytest.raises(InvalidRequestError):
            await ring.front.release_session("")
        assert await ring.sent("runner.control") == [ReleaseSession("a", "s"), ReleaseSession("", "s")]


async def test_only_its_own_tenant_cancels_a_request(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        streams = {tenant: submit(ring.front, tenant=tenant, request_id="x") for tenant in ("a", "b")}
        assert not await ring.front.cancel("x")
        assert not await ring.front.cancel("x", tenant="c")
        assert await ring.front.cancel("x", tenant="a")
        assert not await ring.front.cancel("x", tenant="a")
        assert [streams[tenant].ended for tenant in ("a", "b")] == [True, False]
        for stream in streams.values():
            stream.close()
        ring.check_empty()


async def test_what_the_session_had_is_told_with_every_delta(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        stream = ring.front.subscribe(PROMPT, SamplingParams(seed=7, n=2), listener=lambda: None)
        opened = msgspec.structs.replace(
            deltas(0, "a", [1]),
            rids=array("Q", [0, 1]).tobytes(),
            text_ends=int32(1, 1),
            ids_ends=int32(1, 1),
            finish=bytes(2),
            stop_reason=int32(-1, -1),
            prompt_tokens=int32(3, 3),
            cached_tokens=int32(2, 0),
            openings=Openings(int32(0, 1), array("q", range(1, 7)).tobytes(), int32(9, 2, 9, 9)),
        )
        await ring.say(opened)
        ring.lose("gpu_runner", 0, 1)  # the one that knew the session: its successor does not
        await ring.say(deltas(2, "b", [2], shard=0, finish=Finish.STOP))
        news = [(delta.index, delta.session_tokens, delta.first_differing_token) for delta in stream.take()]
        assert sorted(news) == [(0, 9, 2), (1, 9, None)]
        stream.close()


def test_the_class_is_the_engines_unless_it_is_said() -> None:
    assert resolve_terms({}, default_class="background") == Terms("", "background")
    assert resolve_terms({"service_class": "interactive"}, default_class="background") == Terms()


# ------------------------------------------------------------------------------------------------- over the real ring


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", json.dumps({"sessions": True}))
        yield


@asynccontextmanager
async def started() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.start(EngineConfig(max_num_seqs=4), modules=MODULES) as engine:
        yield engine


async def told(engine: AsyncEngine, prompt: list[int], **asked: Any) -> tuple[int | None, int | None]:
    answer = await collect(engine.generate(prompt, **asked))
    return answer.session_tokens, answer.first_differing_token


async def test_a_session_is_known_to_its_tenant_until_it_is_released() -> None:
    async with started() as engine:
        mine: dict[str, Any] = {"session": "s", "tenant": "a"}
        assert await told(engine, [5, 6, 7], **mine) == (None, None)
        assert await told(engine, [5, 6, 7, 8], **mine) == (3, None)
        assert await told(engine, [5, 9, 7, 8], **mine) == (4, 1)
        assert await told(engine, [5, 9], **mine) == (4, 2)
        assert await told(engine, [5, 9], session="s", tenant="b") == (None, None)
        assert await told(engine, [5, 9], session="other", tenant="a") == (None, None)
        assert await told(engine, [5, 9], tenant="a") == (None, None)
        for _ in range(200):  # releases and requests have pipes of their own: one may overtake the other
            await engine.release_session("s", tenant="b")
            if await told(engine, [5, 9], session="s", tenant="b") == (None, None):
                break
        else:
            pytest.fail("the session is still known")
        assert await told(engine, [5, 9, 1], **mine) == (2, None)
        totals = engine.totals()
        assert totals.tenants["a"].prompt == 3 + 4 + 4 + 2 + 2 + 2 + 3
        assert totals.tenants["a"].output == totals.tenants["a"].prompt + 7  # each prompt comes back, and the end
        assert totals.counters["measured_interactive"] >= 8
        assert totals.counters["measured_background"] == 0


async def test_over_http_a_session_is_known_to_the_key_that_it_began_with() -> None:
    keys = {"a": "first-key-of-two", "b": "second-key-of-two"}
    api_keys = tuple(ApiKey(digest=digest_of(key), tenant=tenant) for tenant, key in keys.items())
    async with started() as engine:
        runner = await run_app(engine, "127.0.0.1", 0, HttpOptions(api_keys=api_keys))
        url = f"http://127.0.0.1:{bound_port(runner)}"
        async with AsyncClient(url, api_key=keys["a"]) as a, AsyncClient(url, api_key=keys["b"]) as b:
            for client, known in ((a, None), (b, None), (a, 2), (b, 2)):
                answer = await collect(client.generate([5, 6], session="s"))
                assert answer.session_tokens == known
        await runner.cleanup()
        assert engine.totals().tenants == {tenant: TenantTokens(4, 6) for tenant in keys}


def test_a_batch_asks_for_terms_too() -> None:
    with LLM(max_num_seqs=4, modules=MODULES, default_service_class="background") as llm:

        def generate(prompts: Any, **asked: Any) -> list[RequestOutput]:
            return llm.generate(prompts, use_tqdm=False, **asked)

        generate([[5, 6], [7]])
        generate([[5, 6], [7]], service_class="interactive")
        generate([5, 6, 7], session="s")
        (answer,) = generate([5, 6, 8, 9], session="s", service_class="interactive")
        assert (answer.session_tokens, answer.first_differing_token) == (3, 2)
        llm.release_session("s")
        for asked in ({"session": "s"}, {"service_class": "batch"}):
            with pytest.raises(InvalidRequestError):
                generate([[5, 6], [7]], **asked)
        counters = llm._engine.totals().counters
        assert (counters["measured_background"], counters["measured_interactive"]) == (3, 3)
