"""The engine over the real tokenizer and detokenizer, with the scripted runner in place of a model."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from support.eventually import eventually
from support.python_path import PYTHON_PATH

from asyncengine import AsyncEngine, ChatPrompt, Delta, EngineConfig, Health, SamplingParams
from asyncengine.config import Role
from asyncengine.errors import EngineDeadError, EngineError, InvalidRequestError, OverloadedError, StartupError
from asyncengine.prompt_messages import pack_ids
from asyncengine.wire.answers import Deltas, Encoded, Failed
from asyncengine.wire.pipes import Sender

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODULES: dict[Role, str] = {"gpu_runner": "support.scripted_runner"}
TEXT = "Grüße, 世界! 👨‍👩‍👧 in 3 tokens?\r\n"
ENDLESS = SamplingParams(max_tokens=1900, ignore_eos=True)


def start(config: EngineConfig | None = None, **script: object) -> AsyncEngine:
    os.environ["ASYNCENGINE_SCRIPT"] = msgspec.json.encode({"endless_from": 1900} | script).decode()
    return AsyncEngine.start(config or EngineConfig(), modules=MODULES)


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("ASYNCENGINE_SCRIPT", "{}")
        yield


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    """One engine for the tests that leave it as it was; refuses prompts above 1000 tokens."""
    config = EngineConfig(max_model_len=2048, tokenizer_workers=2, detokenizer_workers=2)
    async with start(config, refuse_longer_than=1000) as engine:
        yield engine


async def collect(deltas: AsyncIterator[Delta]) -> list[Delta]:
    return [delta async for delta in deltas]


def text_of(deltas: list[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def ids_of(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def run_dirs() -> list[Path]:
    return sorted(Path(tempfile.gettempdir()).glob("asyncengine-*"))


def is_idle(engine: AsyncEngine) -> bool:
    gauges = engine.gauges()
    return gauges["running"] == gauges["waiting"] == 0 and gauges["free_pages"] == gauges["total_pages"]


async def test_the_info_tells_what_is_served(engine: AsyncEngine) -> None:
    assert engine.info.model == "SmolLM2-135M-Instruct"
    assert engine.info.architecture == "scripted"
    assert (engine.info.vocab_size, engine.info.max_model_len) == (49152, 2048)
    assert engine.info.has_chat_template
    assert engine.health.state == "ready"


async def test_a_prompt_of_text_comes_back_as_its_text(engine: AsyncEngine) -> None:
    deltas = await collect(engine.generate(TEXT, SamplingParams(max_tokens=200)))
    assert text_of(deltas) == TEXT
    last = deltas[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", None)
    assert last.completion_tokens == len(ids_of(deltas)) == last.prompt_tokens + 1
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


async def test_a_prompt_of_ids_comes_back_as_these_ids(engine: AsyncEngine) -> None:
    *ids, _ = ids_of(await collect(engine.generate(TEXT)))
    deltas = await collect(engine.generate(ids, SamplingParams(max_tokens=len(ids))))
    assert ids_of(deltas) == ids
    assert text_of(deltas) == TEXT
    assert deltas[-1].finish_reason == "length"


async def test_a_conversation_goes_through_the_chat_template(engine: AsyncEngine) -> None:
    prompt = ChatPrompt(messages=[{"role": "user", "content": "Grüße!"}])
    deltas = await collect(engine.generate(prompt, SamplingParams(skip_special_tokens=False)))
    assert "<|im_start|>user\nGrüße!<|im_end|>\n<|im_start|>assistant\n" in text_of(deltas)


async def test_every_choice_has_its_own_text_and_its_own_end(engine: AsyncEngine) -> None:
    deltas = await collect(engine.generate("one two three", SamplingParams(n=3)))
    assert [text_of(deltas, index) for index in range(3)] == ["one two three"] * 3
    assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2]


async def test_a_stop_string_ends_the_answer_and_is_named(engine: AsyncEngine) -> None:
    deltas = await collect(engine.generate("one two three", SamplingParams(stop=("zzz", " thr"))))
    assert text_of(deltas) == "one two"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", " thr")
    await until(lambda: is_idle(engine))


async def test_a_caller_that_sleeps_gets_the_rest_as_one_delta(engine: AsyncEngine) -> None:
    async def sleep_after_the_first() -> tuple[Delta, list[Delta]]:
        async with aclosing(engine.generate([40, 41], SamplingParams(max_tokens=50, ignore_eos=True))) as deltas:
            first = await anext(deltas)
            (request,) = engine._requests
            await until(lambda: not request.stream.unfinished)
            return first, await collect(deltas)

    first, rest = await sleep_after_the_first()
    while not rest:  # on a busy machine everything may have come before the caller's first turn
        first, rest = await sleep_after_the_first()
    assert len(rest) == 1
    assert first.token_ids + rest[0].token_ids == [40, 41] * 25
    assert rest[0].completion_tokens == 50
    assert rest[0].finish_reason == "length"


async def test_leaving_early_aborts_the_request_wherever_it_is(engine: AsyncEngine) -> None:
    async for _ in engine.generate([50, 51], ENDLESS):
        break
    async with aclosing(engine.generate([60, 61], msgspec.structs.replace(ENDLESS, n=2))) as deltas:
        await anext(deltas)
        await until(lambda: engine.gauges()["running"] == 2)
    waiting = [asyncio.create_task(collect(engine.generate("a b c", ENDLESS))) for _ in range(20)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    assert all(isinstance(it, asyncio.CancelledError) for it in await asyncio.gather(*waiting, return_exceptions=True))
    await until(lambda: engine.gauges()["open_streams"] == 0 and is_idle(engine))
    await asyncio.sleep(0.3)  # one more heartbeat: nothing comes back to life, where it would run for ever
    await until(lambda: is_idle(engine))
    assert engine._requests.count == 0
    assert [worker.unacked_bytes for worker in engine._tokenizers] == [0, 0]


async def test_a_generator_that_was_never_iterated_submits_nothing(engine: AsyncEngine) -> None:
    deltas = engine.generate("never")
    assert engine.gauges()["open_streams"] == 0
    await deltas.aclose()


async def test_prompts_spread_over_the_tokenizers_by_their_bytes(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: dict[int, list[int]] = {id(worker.sender): [] for worker in engine._tokenizers}
    original = Sender.try_send

    def try_send(self: Sender, message: msgspec.Struct) -> bool:
        taken[id(self)].append(len(getattr(message, "text", "")))
        return original(self, message)

    monkeypatch.setattr(Sender, "try_send", try_send)
    requests = [
        engine._submit("x" * size, SamplingParams(max_tokens=1), "", "", {}) for size in (400, 100, 100, 100, 300)
    ]
    assert sorted(taken.values()) == [[100, 100, 100, 300], [400]]
    for request in requests:
        assert await request.stream.next() is not None
        engine._forget(request)
    assert [worker.unacked_bytes for worker in engine._tokenizers] == [0, 0]


async def test_requests_get_their_own_rids_and_seeds(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    original = Sender.try_send

    def try_send(self: Sender, message: msgspec.Struct) -> bool:
        sent.append(message)
        return original(self, message)

    monkeypatch.setattr(Sender, "try_send", try_send)
    for params in (SamplingParams(n=3), SamplingParams(), SamplingParams(seed=-5)):
        await collect(engine.generate("a", params))
    rids = [getattr(message, "rid", 0) for message in sent]
    assert [rid - rids[0] for rid in rids] == [0, 3, 4]
    seeds = [getattr(message, "params", SamplingParams()).seed for message in sent]
    assert None not in seeds
    assert len({*seeds}) == 3
    assert seeds[2] == -5


async def test_a_refused_prompt_raises_what_refused_it(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError, match="1001 tokens do not fit into 1000") as from_runner:
        await collect(engine.generate([5] * 1001, SamplingParams(n=2)))
    assert (from_runner.value.code, from_runner.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(InvalidRequestError) as from_tokenizer:
        await collect(engine.generate([5] * 2049))
    assert "2049" in from_tokenizer.value.message
    assert "2048" in from_tokenizer.value.message
    assert text_of(await collect(engine.generate("still here"))) == "still here"
    assert engine._requests.count == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, -1], r"prompt\[1\] is -1; a token id must be an integer from 0 to 49151"),
        ([49152], r"prompt\[0\] is 49152"),
        ([1, 2, 4294967296], r"prompt\[2\] is 4294967296"),
        ([5, True], r"prompt\[1\] is True"),
        ([1.5], r"prompt\[0\] is 1\.5"),
        (["a"], r"prompt\[0\] is 'a'"),
        ([], "must have at least one token"),
    ],
)
async def test_ids_outside_the_vocabulary_are_refused_at_the_edge(ids: list[int], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        pack_ids(ids, 49152)


async def test_text_that_is_no_unicode_is_refused(engine: AsyncEngine) -> None:
    chat = ChatPrompt(messages=[{"role": "user", "content": "x\ud800"}])
    for prompt, params in (("xy\ud800", None), (chat, None), ("x", SamplingParams(stop=("\udfff",)))):
        with pytest.raises(InvalidRequestError, match="half a surrogate pair"):
            await collect(engine.generate(prompt, params))
    with pytest.raises(InvalidRequestError, match="cannot be written as JSON"):
        await collect(engine.generate(ChatPrompt(messages=[{"role": "user", "content": object()}])))


@pytest.mark.parametrize(
    "prompt", [None, 5, b"abc", {"prompt": "abc"}, iter([1]), np.array([1.5]), np.array([[1]]), ["a"], [[1]]]
)
async def test_what_is_no_prompt_is_refused_at_the_edge(engine: AsyncEngine, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await collect(engine.generate(prompt))
    assert refused.value.param == "prompt"
    with pytest.raises(InvalidRequestError) as refused:
        await engine.tokenize(prompt)
    assert refused.value.param == "prompt"
    with pytest.raises(InvalidRequestError) as refused:
        await engine.detokenize(prompt)
    assert refused.value.param == "tokens"


async def test_texts_of_numpy_are_texts(engine: AsyncEngine) -> None:
    assert text_of(await collect(engine.generate(np.array([TEXT])[0]))) == TEXT


async def test_arrays_of_ids_are_ids(engine: AsyncEngine) -> None:
    ids = (await engine.tokenize(TEXT)).ids
    for kind in (np.int64, np.uint16):
        given: Any = np.array(ids, kind)
        assert text_of(await collect(engine.generate(given))) == TEXT
        assert await engine.detokenize(given) == TEXT
    empty: Any = np.array([], np.int32)
    assert await engine.detokenize(empty) == ""


async def test_what_no_reader_would_understand_is_refused_before_it_is_sent(engine: AsyncEngine) -> None:
    unsure: Any = ChatPrompt(messages=[{"role": "user", "content": "x"}], add_generation_prompt="yes")  # type: ignore[arg-type]
    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((unsure,), {}, "add_generation_prompt must be True or False"),
        (("x", {"n": 1}), {}, "params must be SamplingParams"),
        (("x", {}), {}, "params must be SamplingParams"),
        (("x",), {"namespace": 5}, "namespace must be a text"),
        (("x",), {"session": "s", "session_ttl_seconds": True}, "session_ttl_seconds must be"),
    ]
    for arguments, terms, message in calls:
        with pytest.raises(InvalidRequestError, match=message):
            await collect(engine.generate(*arguments, **terms))
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        await collect(engine.generate("x", temperature=0.0))  # type: ignore[call-arg]
    assert engine.gauges()["open_streams"] == 0


async def test_another_event_loop_is_told_that_the_engine_is_not_its_own(engine: AsyncEngine) -> None:
    def other() -> None:
        for call in (collect(engine.generate("x")), engine.tokenize("x"), engine.cancel("x")):
            with pytest.raises(EngineError, match="in the event loop that it was started in"):
                asyncio.run(call)

    await asyncio.to_thread(other)


async def test_a_stream_that_nobody_refers_to_any_longer_is_aborted(engine: AsyncEngine) -> None:
    stream = engine.generate([45, 46], ENDLESS)
    await anext(stream)
    assert engine.gauges()["open_streams"] == 1
    del stream
    gc.collect()
    await eventually(lambda: engine.gauges()["open_streams"] == 0)


async def test_a_prompt_larger_than_a_frame_is_refused(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncengine.prompt_messages.MAX_PROMPT_BYTES", 100)
    with pytest.raises(InvalidRequestError, match="the prompt is 101 bytes long; at most 100 are accepted"):
        await collect(engine.generate("x" * 101))


async def test_a_full_pipe_is_overload(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sender, "try_send", lambda self, message: False)
    with pytest.raises(OverloadedError):
        await collect(engine.generate("x"))
    assert engine.gauges()["open_streams"] == 0


async def test_an_abort_that_finds_the_pipes_full_goes_out_later(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = engine.generate([45, 46], ENDLESS)
    await anext(stream)
    await until(lambda: engine.gauges()["running"] == 1)
    with monkeypatch.context() as patch:
        patch.setattr(Sender, "_offer", lambda self, data: False)
        await stream.aclose()
        assert engine._retry is not None
    await until(lambda: is_idle(engine))
    assert engine._retry is None


async def test_frames_that_make_no_sense_are_dropped(engine: AsyncEngine) -> None:
    intruder = engine._supervisor.pipes.sender("engine.0")
    intruder.socket.send(b"\x80\x04\x95pickled?")
    for size in (3, 8):  # which no sender of ours could make
        columns = [bytes(size), b"", bytes(3), b"", b"", b"", b"", b"", b""]
        intruder.socket.send(msgspec.msgpack.encode([Deltas.__struct_config__.tag, *columns]))
    intruder.socket.send(msgspec.msgpack.encode([Encoded.__struct_config__.tag, bytes(5)]))
    intruder.send(Failed(2**55, 400, "nobody's", "", None))
    assert engine._receiver is not None
    receiver = engine._receiver
    await until(lambda: receiver.malformed == 4)
    assert text_of(await collect(engine.generate("still here"))) == "still here"


async def test_health_names_a_frozen_process_until_it_goes_on(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncengine.watchdog.STALL_SECONDS", 1.0)
    pid = engine._supervisor.pids()["detokenizer_proc 1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: engine.health == Health(state="stalled", detail="no sign of life from detokenizer_proc 1"))
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: engine.health == Health(state="ready"))


async def test_many_streams_at_once_keep_their_texts_apart(engine: AsyncEngine) -> None:
    prompts = [f"{i} ü {i * i} 😀" * (i % 3 + 1) for i in range(64)]
    answers = await asyncio.gather(*(collect(engine.generate(prompt)) for prompt in prompts))
    assert [text_of(deltas) for deltas in answers] == prompts


async def test_a_process_lost_for_good_ends_every_stream_by_name() -> None:
    async with start(EngineConfig(max_crashes=1)) as engine:
        streams = [engine.generate([70, 71], ENDLESS) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        os.kill(engine._supervisor.pids()["detokenizer_proc"], signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="detokenizer_proc was killed by SIGKILL"):
                await collect(stream)
        assert (engine.health.state, engine.health.detail) == ("failed", "detokenizer_proc was killed by SIGKILL")
        with pytest.raises(EngineDeadError, match="detokenizer_proc was killed by SIGKILL"):
            await collect(engine.generate("x"))
    assert engine.health.state == "closed"


async def test_closing_ends_open_streams_and_leaves_nothing() -> None:
    before = run_dirs()
    engine = await start()
    stream = engine.generate([80, 81], ENDLESS)
    await anext(stream)
    await engine.close()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        await collect(stream)
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        await collect(engine.generate("x"))
    await engine.close()
    with pytest.raises(EngineError, match="started once"):
        await engine
    assert run_dirs() == before


async def test_a_start_that_fails_leaves_nothing() -> None:
    before = run_dirs()
    for config, script in (
        (EngineConfig(model="/nowhere"), {}),
        (EngineConfig(), {"refuse_start": "too little memory"}),
    ):
        with pytest.raises(StartupError, match=r"no model file or folder at /nowhere|too little memory"):
            await start(config, **script)
    assert run_dirs() == before
