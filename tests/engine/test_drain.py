"""A server that is told to end lets the requests that it has end first, and takes no more."""

from __future__ import annotations

import json
import re
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from threading import Thread

import pytest
from support.command_line import Command, all_gone, ask, running

ENDLESS = {"prompt": [40, 41], "max_tokens": 1900, "ignore_eos": True, "stream": True}
SLOW: dict[str, object] = {"step_ms": 5, "endless_from": 1900}


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty directory whose name leaves room for the names of sockets; it must be left empty."""
    with tempfile.TemporaryDirectory(prefix="d-") as path:
        yield Path(path)


def post(url: str, body: dict[str, object], name: str = "some") -> HTTPResponse:
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    answer: HTTPResponse = urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60
    )
    return answer


def status(url: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def is_draining(url: str) -> bool:
    """Every one of the API processes, as well as 20 connections tell."""
    return all(status(f"{url}/ready")[1]["status"] == "draining" for _ in range(20))


def begin(command: Command) -> tuple[str, HTTPResponse]:
    """The server's address, and an endless stream whose first event has been read."""
    url = command.read_until(r"Ready: \S+ at (\S+)")[1]
    response = post(f"{url}/v1/completions", ENDLESS, "held")
    assert response.readline().startswith(b"data: {")
    return url, response


def last_events(response: HTTPResponse) -> list[str]:
    with response:
        return [event.removeprefix("data: ") for event in response.read().decode().strip().split("\n\n")][-2:]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_running_requests_end_by_themselves_and_new_ones_are_refused(short_path: Path, workers: str) -> None:
    options = ["--api-workers", workers, "--drain-timeout-seconds", "1000"]
    with running(short_path, "serve", "--port", "0", *options, **SLOW) as command:
        url, response = begin(command)
        children = command.children()
        command.process.terminate()
        deadline = time.monotonic() + 60
        while not is_draining(url) and time.monotonic() < deadline:
            time.sleep(0.01)
        answer = {"status": "draining", "reason": "the server is shutting down"}
        assert status(f"{url}/ready") == (503, answer)
        assert status(f"{url}/health") == (200, answer)
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(f"{url}/v1/completions", ENDLESS)
        with refused.value as error:
            assert (error.code, error.headers["Retry-After"]) == (503, "1")
            assert json.load(error)["error"]["code"] == "shutting_down"
        assert response.readline() == b"\n"
        assert response.readline().startswith(b"data: {")
        post(f"{url}/v1/requests/cmpl-held/cancel", {}).close()
        last, done = last_events(response)
        assert json.loads(last)["choices"][0]["finish_reason"] == "abort"
        assert done == "[DONE]"
        code, _, err = command.finish()
    assert code == 0
    assert "shutting down; requests have 1000 s to end, another signal ends them now" in err
    assert "Traceback" not in err
    assert all_gone(children)


@pytest.mark.parametrize(("seconds", "signals"), [("1000", 2), ("0.1", 1)])
def test_a_second_signal_or_the_time_out_ends_them(short_path: Path, seconds: str, signals: int) -> None:
    options = ["--drain-timeout-seconds", seconds]
    with running(short_path, "serve", "--port", "0", *options, **SLOW) as command:
        url, response = begin(command)
        command.process.terminate()
        if signals == 2:
            deadline = time.monotonic() + 60
            while not is_draining(url) and time.monotonic() < deadline:
                time.sleep(0.01)
            command.process.terminate()
        assert json.loads(last_events(response)[-1])["error"]["code"] == "engine_dead"
        code, _, err = command.finish()
    assert code == 0
    assert "Traceback" not in err


def test_requests_that_wait_for_a_row_are_let_run_and_answered_too(short_path: Path) -> None:
    options = ["--drain-timeout-seconds", "1000", "--max-num-seqs", "1"]
    with running(short_path, "serve", "--port", "0", *options, **SLOW) as command:
        url, held = begin(command)
        waiting = [Thread(target=lambda: answers.append(ask(url))) for _ in range(3)]
        answers: list[str] = []
        for thread in waiting:
            thread.start()
        deadline = time.monotonic() + 60
        while num_waiting(url) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert num_waiting(url) == 3
        command.process.terminate()
        while not is_draining(url) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert answers == []
        post(f"{url}/v1/requests/cmpl-held/cancel", {}).close()
        assert last_events(held)[-1] == "[DONE]"
        for thread in waiting:
            thread.join(60)
        code, _, err = command.finish()
    assert answers == ["one two three"] * 3
    assert code == 0
    assert "Traceback" not in err


def num_waiting(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    return int(float(re.findall(r"(?m)^vllm:num_requests_waiting\{.*\} (\S+)$", text)[0]))
