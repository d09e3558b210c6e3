"""A tokenizer worker whose gpu_runner, detokenizers or API workers are lost and replaced."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tokenizers_cache import default_model_file

from asyncengine.config import EngineConfig, SidecarConfig
from asyncengine.sampling import SamplingParams
from asyncengine.wire.accounting import RingWriter, TurnRecord
from asyncengine.wire.answers import Encoded, ToEngine
from asyncengine.wire.engine_pipes import ApiProcess
from asyncengine.wire.pipes import Pipes, Receiver, make_run_dir, pipe_name
from asyncengine.wire.reports import Ready, ToSupervisor
from asyncengine.wire.requests import (
    Abort,
    Detokenize,
    EncodeChat,
    EncodeIds,
    EncodeText,
    Generate,
    Relink,
    Resume,
    ToRunner,
)
from asyncengine.wire.sidecar import write_config
from tokenizer_proc.prompt_encoder import PromptEncoder
from tokenizer_proc.token_service import TokenService
from tokenizer_proc.worker import BACKLOG_MESSAGES, Worker

PATIENCE_SECONDS = 60
LOST = 4000
"""Requests under way at a loss; more than the pipe, its reader's end and the backlog take together."""


class Place:
    """The run directory, and the far ends of a worker's pipes."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.pipes = Pipes(run_dir)

    def runner(self, life: int) -> Receiver:
        return self.pipes.receiver(pipe_name("runner.requests", life), ToRunner)


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place(make_run_dir())
    yield place
    place.pipes.close()
    for path in place.run_dir.iterdir():
        path.unlink()
    place.run_dir.rmdir()


@pytest.fixture
def make_worker(loaded: Callable[[str], Any], place: Place) -> Iterator[Callable[[int], Worker]]:
    """`make_worker(runner_life)`."""
    model, pipes = loaded("smollm2"), Pipes(place.run_dir)
    encoder = PromptEncoder(vocabulary=model.vocabulary, template=model.template, max_model_len=64)
    service = TokenService(model.vocabulary, encoder)
    ring = RingWriter(place.run_dir, "tokenizer_proc", 0, TurnRecord)
    yield lambda runner_life: Worker(encoder=encoder, service=service, pipes=pipes, ring=ring, runner_life=runner_life)
    pipes.close()


def receive(receiver: Receiver, count: int, between: Callable[[], object] = lambda: None) -> list[Any]:
    """The next `count` messages, in order."""
    messages: list[Any] = []
    limit = time.monotonic() + PATIENCE_SECONDS
    while len(messages) < count:
        assert time.monotonic() < limit, f"only {len(messages)} arrived"
        between()
        receiver.wait(20)
        messages.extend(receiver.drain(count - len(messages)))
    return messages


def text(rid: int, *resume: Resume, n: int = 1) -> EncodeText:
    return EncodeText(rid, "Hello", SamplingParams(max_tokens=4, n=n), "", resume)


def resumed(choice: int) -> Resume:
    return Resume(choice, np.array([7, 8], dtype=np.int32).tobytes(), 5)


def test_what_a_request_has_already_goes_on_with_its_prompt(make_worker: Callable[[int], Worker], place: Place) -> None:
    runner, params = place.runner(0), SamplingParams(max_tokens=4, n=3)
    resume = (resumed(2), resumed(0))
    make_worker(0).turn(
        [
            text(10, *resume, n=3),
            EncodeIds(20, np.array([5], dtype=np.int32).tobytes(), params, "", resume),
            EncodeChat(30, b'[{"role": "user", "content": "hi"}]', params, "", resume=resume),
            text(40, n=3),
        ]
    )
    arrived = receive(runner, 4)
    assert [message.resume for message in arrived] == [resume, resume, resume, ()]
    assert [message.max_tokens for message in arrived] == [4] * 4


def test_a_resumed_request_is_dropped_when_the_choices_it_has_are_aborted(
    make_worker: Callable[[int], Worker], place: Place
) -> None:
    runner = place.runner(0)
    make_worker(0).turn([text(10, resumed(2), n=3), Abort(10), text(20, resumed(0), resumed(1), n=3), Abort(20)])
    assert [(type(message), message.rid) for message in receive(runner, 3)] == [
        (Abort, 10),
        (Generate, 20),
        (Abort, 20),
    ]


def test_what_a_lost_api_worker_sent_is_dropped_once_that_is_known(
    make_worker: Callable[[int], Worker], place: Place
) -> None:
    runner, processes = place.runner(0), (ApiProcess(3), ApiProcess(3, 1))
    old, new = (place.pipes.receiver(process.pipe, ToEngine) for process in processes)
    (lost, successors), worker = (process.first_rid for process in processes), make_worker(0)
    relink = Relink("api_worker", 3, 1)
    worker.turn([text(lost), Detokenize(lost + 1, bytes(4)), relink])
    arrived = receive(runner, 2)
    assert (arrived[0].rid, arrived[1]) == (lost, relink)
    worker.turn(
        [text(lost + 2), text(successors), Detokenize(lost + 3, bytes(4)), Detokenize(successors + 1, bytes(4))]
    )
    assert [message.rid for message in receive(runner, 1)] == [successors]
    encoded, answer = receive(new, 2)
    assert (encoded.rids, answer.rid) == (np.array([successors], np.uint64).tobytes(), successors + 1)
    assert worker.gauges()["dropped"] == 2
    assert not runner.wait(20)
    assert not old.pending()


def test_requests_behind_the_news_go_to_the_new_gpu_runner_and_those_before_it_do_not(
    make_worker: Callable[[int], Worker], place: Place
) -> None:
    old, new, engine = place.runner(0), place.runner(2), place.pipes.receiver("engine.0", ToEngine)
    worker = make_worker(0)
    worker.turn([text(1)])
    assert receive(old, 1)[0].rid == 1
    worker.turn([text(2), Abort(1), Relink("gpu_runner", 0, 2), text(3), Relink("gpu_runner", 0, 2), Abort(2)])
    worker.turn([Relink("gpu_runner", 0, 1), text(4)])
    assert [(type(message), message.rid) for message in receive(new, 3)] == [(Generate, 3), (Abort, 2), (Generate, 4)]
    assert not new.wait(0)
    encoded = receive(engine, 3)
    assert all(isinstance(message, Encoded) for message in encoded)
    assert [np.frombuffer(message.rids, dtype=np.uint64).tolist() for message in encoded] == [[1], [3], [4]]


def test_news_of_a_detokenizer_is_passed_on_in_its_place_as_often_as_it_comes(
    make_worker: Callable[[int], Worker], place: Place
) -> None:
    old, new = place.runner(0), place.runner(1)
    worker, lost = make_worker(0), Relink("detokenizer_proc", 3, 1)
    worker.turn([text(1), lost, text(2)])
    first, *rest = receive(old, 3)
    assert (first.rid, rest[0], rest[1].rid) == (1, lost, 2)
    worker.turn([Relink("gpu_runner", 0, 1), lost, text(3), lost])
    first, middle, last = receive(new, 3)
    assert (first, middle.rid, last) == (lost, 3, lost)


def test_a_worker_that_is_told_of_a_later_gpu_runner_begins_with_it(
    make_worker: Callable[[int], Worker], place: Place
) -> None:
    runner = place.runner(4)
    make_worker(4).turn([Relink("gpu_runner", 0, 3), text(1)])
    assert receive(runner, 1)[0].rid == 1


@pytest.mark.parametrize("bound", [True, False])
def test_a_gpu_runner_that_is_gone_stops_nothing_and_what_waited_for_it_is_not_kept(
    make_worker: Callable[[int], Worker], place: Place, bound: bool
) -> None:
    if bound:
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(place.run_dir / "runner.requests.1"))
    worker = make_worker(1)
    for rid in range(0, 20_000, 500):
        worker.turn([Abort(rid + number) for number in range(500)])
        assert worker.flush()
        assert worker.gauges()["backlog"] <= BACKLOG_MESSAGES
    runner = place.runner(2)
    worker.turn([Relink("gpu_runner", 0, 2), text(1)])
    assert receive(runner, 1)[0].rid == 1
    assert not runner.wait(0)


@contextmanager
def process(place: Place, **config: Any) -> Iterator[Receiver]:
    """`python -m tokenizer_proc`; gives what it tells the supervisor."""
    supervisor = place.pipes.receiver("supervisor", ToSupervisor)
    child = subprocess.Popen([sys.executable, "-m", "tokenizer_proc"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    try:
        write_config(
            child.stdin,
            SidecarConfig(
                engine=EngineConfig(),
                role="tokenizer_proc",
                index=0,
                model_path=str(default_model_file()),
                run_dir=str(place.run_dir),
                **config,
            ),
        )
        child.stdin.flush()
        yield supervisor
    finally:
        child.stdin.close()
        child.wait(PATIENCE_SECONDS)


RUNNER = """
import sys
from asyncengine.wire.requests import ToRunner
from asyncengine.wire.pipes import Pipes
runner = Pipes(sys.argv[1]).receiver("runner.requests.1", ToRunner)
runner.wait(60_000)
print(next(iter(runner.drain(1))).rid, flush=True)
sys.stdin.read()
"""


def test_all_that_was_under_way_reaches_the_new_gpu_runner_when_the_old_one_died_with_its_pipe_full(
    place: Place,
) -> None:
    lost = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(place.run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        with process(place, life=3, lives={"gpu_runner.0": 1}) as supervisor:
            while not isinstance(receive(supervisor, 1)[0], Ready):
                pass
            requests = place.pipes.sender("tokenizer.0.3")
            for rid in range(LOST):
                requests.send(text(rid))
            assert lost.stdout is not None
            assert lost.stdout.readline() == "0\n"  # it reads no more than that
            lost.kill()
            lost.wait(PATIENCE_SECONDS)
            runner = place.runner(2)
            requests.send(Relink("gpu_runner", 0, 2))
            requests.send(Relink("detokenizer_proc", 0, 1))
            for rid in range(LOST):
                requests.send(Abort(rid))
                requests.send(text(LOST + rid, resumed(0)))
            news, *arrived = receive(runner, 1 + 2 * LOST, requests.flush)
            assert news == Relink("detokenizer_proc", 0, 1)
            assert [(type(message), message.rid) for message in arrived] == [
                pair for rid in range(LOST) for pair in ((Abort, rid), (Generate, LOST + rid))
            ]
    finally:
        lost.kill()
        lost.communicate()
