"""The tokenizer process over its real pipes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.tokenizers_cache import default_model_file, tokenizer_folder

from asyncengine.config import API_WORKER_SHIFT, EngineConfig, SidecarConfig
from asyncengine.sampling import SamplingParams
from asyncengine.wire.accounting import RingReader, RingWriter, TurnRecord
from asyncengine.wire.answers import Detokenized, Encoded, Failed, ToEngine, Tokenized
from asyncengine.wire.base import Wire
from asyncengine.wire.pipes import Pipes, Receiver, make_run_dir
from asyncengine.wire.reports import Fatal, Heartbeat, Ready, TokenizerInfo, ToSupervisor
from asyncengine.wire.requests import (
    Abort,
    Detokenize,
    EncodeChat,
    EncodeIds,
    EncodeText,
    Generate,
    TokenizeChat,
    TokenizeText,
    ToRunner,
)
from asyncengine.wire.sidecar import write_config
from tokenizer_proc.prompt_encoder import PromptEncoder
from tokenizer_proc.token_service import TokenService
from tokenizer_proc.worker import TURN_BYTES, Worker, one_turn

PARAMS = SamplingParams(max_tokens=4)
OTHER = 3 << API_WORKER_SHIFT
"""Base of the rids that API worker 3 mints."""
PATIENCE_SECONDS = 60


class Ends:
    """The far ends of a tokenizer worker's pipes, as gpu_runner, two API workers and the supervisor hold them."""

    def __init__(self) -> None:
        self.run_dir = make_run_dir()
        self.pipes = Pipes(self.run_dir)
        self.runner = self.pipes.receiver("runner.requests", ToRunner)
        self.engine = self.pipes.receiver("engine.0", ToEngine)
        self.other_engine = self.pipes.receiver("engine.3", ToEngine)
        self.supervisor = self.pipes.receiver("supervisor", ToSupervisor)

    def close(self) -> None:
        self.pipes.close()
        for path in self.run_dir.iterdir():
            path.unlink()
        self.run_dir.rmdir()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def receive(receiver: Receiver, count: int) -> list[Any]:
    """The next `count` messages, in order."""
    messages: list[Any] = []
    limit = time.monotonic() + PATIENCE_SECONDS
    while len(messages) < count:
        assert time.monotonic() < limit, f"only {messages} arrived"
        receiver.wait(100)
        messages.extend(receiver.drain(count - len(messages)))
    return messages


def receive_one(receiver: Receiver, kind: type[Wire]) -> Any:
    """The next message of type `kind`; others are passed over."""
    while True:
        (message,) = receive(receiver, 1)
        assert isinstance(message, kind) or not isinstance(message, Fatal), message
        if isinstance(message, kind):
            return message


def rids_of(message: Encoded) -> list[int]:
    return np.frombuffer(message.rids, dtype=np.uint64).tolist()


def text(rid: int, prompt: str = "Hello", n: int = 1) -> EncodeText:
    return EncodeText(rid, prompt, SamplingParams(max_tokens=4, n=n), "")


# ------------------------------------------------------------------------------------------------------------ one turn


def make_account(run_dir: Path, index: int) -> RingWriter[TurnRecord]:
    return RingWriter(run_dir, "tokenizer_proc", index, TurnRecord)


@pytest.fixture
def worker(loaded: Callable[[str], Any], ends: Ends) -> Iterator[Worker]:
    model = loaded("smollm2")
    encoder = PromptEncoder(vocabulary=model.vocabulary, template=model.template, max_model_len=64)
    pipes = Pipes(ends.run_dir)
    service = TokenService(model.vocabulary, encoder)
    yield Worker(encoder=encoder, service=service, pipes=pipes, ring=make_account(ends.run_dir, 2))
    pipes.close(linger_ms=100)


def test_a_batch_goes_on_in_order_of_arrival_and_each_api_worker_is_told_once(worker: Worker, ends: Ends) -> None:
    ids = EncodeIds(4, np.array([5, 6], dtype=np.int32).tobytes(), PARAMS, "")
    chat = EncodeChat(OTHER + 3, b'[{"role": "user", "content": "hi"}]', PARAMS, "")
    worker.turn([text(1), text(OTHER + 2, "Hello 12"), chat, ids, text(5, ""), text(6)])
    arrived = receive(ends.runner, 5)
    assert [message.rid for message in arrived] == [1, OTHER + 2, OTHER + 3, 4, 6]
    failed, told = receive(ends.engine, 2)
    assert isinstance(failed, Failed)
    assert (failed.rid, failed.code) == (5, "empty_prompt")
    assert rids_of(told) == [1, 4, 6]
    (told,) = receive(ends.other_engine, 1)
    assert rids_of(told) == [OTHER + 2, OTHER + 3]
    assert worker.gauges()["requests"] == 5
    assert worker.gauges()["prompt_tokens"] == 8 + len(arrived[2].ids) // 4
    assert worker.gauges()["failed"] == 1


def test_an_abort_in_the_same_turn_drops_the_request_and_is_passed_on(worker: Worker, ends: Ends) -> None:
    worker.turn([text(1), text(2), Abort(1), text(3), Abort(9)])
    assert [(type(message), message.rid) for message in receive(ends.runner, 4)] == [
        (Generate, 2),
        (Abort, 1),
        (Generate, 3),
        (Abort, 9),
    ]
    (told,) = receive(ends.engine, 1)
    assert rids_of(told) == [2, 3]
    assert worker.gauges()["dropped"] == 1


def test_a_request_with_several_choices_is_dropped_only_when_all_are_aborted(worker: Worker, ends: Ends) -> None:
    worker.turn([text(10, n=2), Abort(11), text(20, n=2), Abort(21), Abort(20)])
    assert [(type(message), message.rid) for message in receive(ends.runner, 4)] == [
        (Generate, 10),
        (Abort, 11),
        (Abort, 21),
        (Abort, 20),
    ]


def test_every_turn_is_recorded(worker: Worker, ends: Ends) -> None:
    before = time.monotonic_ns()
    worker.turn([text(1), text(2, "Hello 12"), Abort(9)])
    worker.turn([Abort(10)])
    after = time.monotonic_ns()
    first, second = RingReader(ends.run_dir / "tokenizer_proc.2.ring", TurnRecord).snapshot()
    assert (first.messages, first.items, first.waiting) == (3, 5, 0)
    assert (second.messages, second.items) == (1, 0)
    times = [before, first.begin, first.middle, first.end, second.begin, second.middle, second.end, after]
    assert times == sorted(times)


def test_a_turn_of_nothing_but_aborts_sends_them_on(worker: Worker, ends: Ends) -> None:
    worker.turn([Abort(1), Abort(2)])
    assert [message.rid for message in receive(ends.runner, 2)] == [1, 2]
    assert not ends.engine.wait(0)


def test_nothing_new_is_taken_while_gpu_runner_does_not_read(worker: Worker, ends: Ends) -> None:
    sent = 0
    while worker.flush():  # what gpu_runner's socket and the kernel hold for it varies
        worker.turn([Abort(sent + place) for place in range(5000)])
        sent += 5000
        assert sent < 1_000_000
    assert worker.gauges()["backlog"] > 0
    arrived: list[int] = []
    limit = time.monotonic() + PATIENCE_SECONDS
    while len(arrived) < sent and time.monotonic() < limit:
        worker.flush()
        ends.runner.wait(10)
        arrived.extend(message.rid for message in ends.runner.drain())
    assert arrived == list(range(sent))
    assert worker.flush()


def test_questions_are_answered_behind_the_prompts_of_their_turn_and_run_nothing(worker: Worker, ends: Ends) -> None:
    messages = json.dumps([{"role": "user", "content": "Hello"}]).encode()
    worker.turn(
        [
            TokenizeText(1, "Hello", False, True),
            TokenizeChat(OTHER + 2, messages, False, b"", False),
            text(3),
            Detokenize(4, np.array([19556, 1], dtype=np.int32).tobytes()),
            Detokenize(5, np.array([1, 49152], dtype=np.int32).tobytes()),
            Detokenize(6, b"abc"),
            TokenizeChat(7, b"[]", True, b"", False),
            TokenizeText(8, "x" * 10_000, True, False),
        ]
    )
    assert receive_one(ends.runner, Generate).rid == 3
    encoded, hello, pair, outside, torn, empty, long = receive(ends.engine, 7)
    assert isinstance(encoded, Encoded)
    assert hello == Tokenized(1, np.array([19556], dtype=np.int32).tobytes(), ("Hello",))
    assert pair == Detokenized(4, "Hello<|im_start|>")
    assert [(failed.rid, failed.code) for failed in (outside, torn, empty)] == [
        (5, "invalid_token_id"),
        (6, "invalid_value"),
        (7, empty.code),
    ]
    assert all(isinstance(failed, Failed) and failed.status == 400 for failed in (outside, torn, empty, long))
    assert long.code == "context_length_exceeded"
    chat = receive_one(ends.other_engine, Tokenized)
    assert chat.rid == OTHER + 2
    assert 19556 in np.frombuffer(chat.ids, dtype=np.int32)
    assert chat.texts == ()
    assert not ends.runner.wait(0)
    assert worker.gauges()["questions"] == 7


def test_a_turn_ends_early_when_it_has_a_lot_of_text() -> None:
    long = text(1, "x" * (TURN_BYTES // 2))
    messages: Iterator[Any] = iter([long, long, text(2), Abort(3)])
    assert list(one_turn(messages)) == [long, long]
    assert list(one_turn(messages)) == [text(2), Abort(3)]


# ------------------------------------------------------------------------------------------------------- whole process


@contextmanager
def process(ends: Ends, model_path: Path, **engine: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m tokenizer_proc`, configured over its stdin; ended by closing it."""
    config = SidecarConfig(
        engine=EngineConfig(**engine),
        role="tokenizer_proc",
        index=0,
        model_path=str(model_path),
        run_dir=str(ends.run_dir),
    )
    child = subprocess.Popen([sys.executable, "-m", "tokenizer_proc"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    try:
        write_config(child.stdin, config)
        child.stdin.flush()
        yield child
    finally:
        child.stdin.close()
        child.wait(PATIENCE_SECONDS)


def test_the_process_serves_text_ids_and_chats_until_it_is_told_to_end(ends: Ends) -> None:
    with process(ends, default_model_file()) as child:
        ready = receive_one(ends.supervisor, Ready)
        assert (ready.role, ready.index) == ("tokenizer_proc", 0)
        info = msgspec.convert(ready.info, TokenizerInfo)
        assert info == TokenizerInfo(has_chat_template=True)
        requests = ends.pipes.sender("tokenizer.0")
        requests.socket.send(b"\x80\x04K\x01.")  # no frame of ours: dropped and counted
        messages = json.dumps([{"role": "user", "content": "What is the capital of France?"}]).encode()
        requests.send(EncodeChat(1, messages, PARAMS, ""))
        requests.send(EncodeIds(2, np.array([7, 49152], dtype=np.int32).tobytes(), PARAMS, ""))
        requests.send(EncodeText(3, "x " * 9000, PARAMS, ""))
        requests.send(EncodeText(4, "Hello", SamplingParams(), ""))
        chat, hello = receive(ends.runner, 2)
        assert len(chat.ids) // 4 == 37
        assert (hello.rid, hello.max_tokens) == (4, 8191)
        failures: dict[int, Failed] = {}
        while len(failures) < 2:
            (message,) = receive(ends.engine, 1)
            if isinstance(message, Failed):
                failures[message.rid] = message
        assert failures[2].code == "invalid_token_id"
        assert failures[3].code == "context_length_exceeded"
        assert "9001" in failures[3].message
        assert "8192" in failures[3].message
        gauges = receive_one(ends.supervisor, Heartbeat).gauges
        while gauges["requests"] < 2:
            gauges = receive_one(ends.supervisor, Heartbeat).gauges
        assert (gauges["malformed"], gauges["failed"], gauges["backlog"]) == (1, 2, 0)
        child.terminate()
        assert child.wait(PATIENCE_SECONDS) == 0


def test_the_operators_template_and_context_length_replace_the_models_own(ends: Ends, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with process(ends, default_model_file(), chat_template=str(template), max_model_len=9):
        receive_one(ends.supervisor, Ready)
        ends.pipes.sender("tokenizer.0").send(
            EncodeChat(1, b'[{"role": "user", "content": "Hello"}]', SamplingParams(), "")
        )
        (generate,) = receive(ends.runner, 1)
        assert np.frombuffer(generate.ids, dtype=np.int32).tolist() == [19556]
        assert generate.max_tokens == 8


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        ("missing.gguf", {}, "there is no model at"),
        ("damaged.gguf", {}, "is not a GGUF file of version 2 or 3, or is damaged"),
        ("qwen3", {}, "does not say the model's context length: set max_model_len"),
        ("qwen3", {"max_model_len": 64, "chat_template": "/nowhere"}, "cannot read the chat template /nowhere"),
    ],
)
def test_a_start_that_cannot_succeed_is_reported_in_one_sentence(
    ends: Ends, tmp_path: Path, model: str, engine: dict[str, Any], message: str
) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(100))
    path = tokenizer_folder(model) if model == "qwen3" else tmp_path / model
    with process(ends, path, **engine) as child:
        assert child.wait(PATIENCE_SECONDS) == 1
        reports = [report for report in receive(ends.supervisor, 2) if isinstance(report, Fatal)]
        assert len(reports) == 1
        assert message in reports[0].message


def test_the_process_imports_no_model_library() -> None:
    code = "import sys, tokenizer_proc.worker; print(*sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "tokenizer_proc.worker" in modules
    assert not {"torch", "transformers", "gguf", "aiohttp", "gpu_runner", "detokenizer_proc"} & set(modules)
