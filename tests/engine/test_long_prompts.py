"""While long prompts are tokenized, streams go on and whoever asks for the server's health is answered."""

from __future__ import annotations

import json
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from support.command_line import Command, running

PROMPTS, WORDS = 8, 80_000
ENDLESS = {"prompt": [40, 41], "max_tokens": 1900, "ignore_eos": True, "stream": True}
SCRIPT: dict[str, Any] = {"step_ms": 1, "endless_from": 1900, "num_pages": PROMPTS * WORDS}


@pytest.fixture
def command() -> Iterator[Command]:
    with (
        tempfile.TemporaryDirectory(prefix="l-") as path,
        running(Path(path), "serve", "--port", "0", "--max-model-len", "131072", **SCRIPT) as command,
    ):
        yield command


def post(url: str, body: dict[str, object]) -> urllib.request.Request:
    return urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def test_streams_go_on_and_health_is_answered_while_long_prompts_are_tokenized(command: Command) -> None:
    url = command.read_until(r"Ready: \S+ at (\S+)")[1]
    answers: list[int] = []

    def ask() -> None:
        with urllib.request.urlopen(post(url, {"prompt": "word " * WORDS, "max_tokens": 1}), timeout=120) as answer:
            answers.append(json.load(answer)["usage"]["prompt_tokens"])

    asking = [Thread(target=ask) for _ in range(PROMPTS)]
    healthy = events = 0
    with urllib.request.urlopen(post(url, ENDLESS), timeout=60) as stream:
        assert stream.readline().startswith(b"data: {")
        for thread in asking:
            thread.start()
        while any(thread.is_alive() for thread in asking):
            with urllib.request.urlopen(f"{url}/health", timeout=60) as health:
                healthy += health.status == 200
            assert stream.readline() == b"\n"
            events += stream.readline().startswith(b"data: {")
    assert answers == [WORDS + 1] * PROMPTS
    assert healthy == events >= 3
    command.process.terminate()
    code, _, err = command.finish()
    assert code == 0
    assert "Traceback" not in err
