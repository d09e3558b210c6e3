"""All processes of an engine on each device: a small model answers in float32 as it does on the CPU, over HTTP and
across the loss of gpu_runner, and no process is left. Neither pytest-asyncio nor a client's package is needed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import check_recovery
import pytest
from recovery.greedy_proof import ServerModel
from support.python_path import PYTHON_PATH
from support.random_checkpoint import write_checkpoint
from support.random_model import VOCAB_SIZE

from asyncengine import AsyncEngine, EngineConfig, SamplingParams
from asyncengine.client import AsyncClient
from asyncengine.config import Device

pytestmark = pytest.mark.timeout(300)

STREAMS, PROMPT_TOKENS, SEED = 4, 30, 3
TOKENS: dict[Device, int] = {"cpu": 150, "cuda": 900}
"""Of each answer: so many that a process can be killed meanwhile."""
IDS = (256, VOCAB_SIZE)
PROMPTS = check_recovery.random_prompts(STREAMS, PROMPT_TOKENS, IDS, SEED)
MARGIN = 1e-4
"""Between the log-probabilities of the best token and the next, at least, everywhere in these answers: the seed is one
for which it holds. No order of float32's additions changes as much, so the best token is the best on any device."""
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "kv_cache_tokens": 16384,
}
PATIENCE_SECONDS = 60


class Answer(NamedTuple):
    ids: list[int]
    text: str


async def answer(
    engine: AsyncEngine | AsyncClient, prompt: list[int], tokens: int, **asked: Any
) -> tuple[Answer, list[float]]:
    """And by how much each token was better than the next, if two log-probabilities are asked for."""
    ids: list[int] = []
    text, margins = "", []
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **asked)
    async for delta in engine.generate(prompt, params):
        ids += delta.token_ids
        text += delta.text
        margins += [entry.top[0].logprob - entry.top[1].logprob for entry in delta.logprobs]
    return Answer(ids, text), margins


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=6, max_position_embeddings=1024)


@cache
def answers_within(model: str, device: Device, tokens: int) -> list[Answer]:
    """Of an engine in this program, which leaves nothing."""

    async def answers() -> list[tuple[Answer, list[float]]]:
        async with AsyncEngine.start(EngineConfig(model=model, device=device, **ENGINE)) as engine:
            assert (engine.info.device == "cpu") == (device == "cpu")
            return await asyncio.gather(*(answer(engine, prompt, tokens, logprobs=2) for prompt in PROMPTS))

    with own_temporary_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", PYTHON_PATH)
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        found = asyncio.run(answers())
        assert [*folder.glob("asyncengine-*")] == []
    assert min(margin for _, margins in found for margin in margins) > MARGIN
    return [each for each, _ in found]


@contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """With a short name, as sockets' names need. Behind it no process is left of those that were started with it as
    TMPDIR, whosever child it has become."""
    with tempfile.TemporaryDirectory(prefix="d-") as path:
        yield Path(path)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (left := processes_in(path)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []


def processes_in(folder: str) -> list[str]:
    """Command lines of the processes that have this TMPDIR and have not ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={folder}\0".encode() in process.joinpath("environ").read_bytes():
                found.append(process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended, or is another user's
            continue
    return found


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str, device: Device) -> None:
        self.process = process
        self.url = url
        self.device = device

    def read(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_SECONDS) as response:
            text: str = response.read().decode()
            return text


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def server(request: pytest.FixtureRequest, model: str) -> Iterator[Server]:
    """The command, with two processes that serve HTTP."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (ENGINE | {"device": request.param}).items()]
    command = [sys.executable, "-m", "asyncengine.cli", "serve", model, "--port", "0", "--api-workers", "2", *flags]
    with own_temporary_folder() as folder:
        environ = os.environ | {"PYTHONPATH": PYTHON_PATH, "TMPDIR": str(folder)}
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                ready = next((line for line in process.stdout if line.startswith("Ready: ")), "")
                assert ready, "it did not become ready"
                yield Server(process, ready.split(" at ")[1].strip(), request.param)
            finally:
                process.kill()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_engine_answers_as_on_the_cpu_and_leaves_no_process(model: str, device: Device) -> None:
    answers = answers_within(model, device, TOKENS[device])
    assert answers == answers_within(model, "cpu", TOKENS[device])
    assert [len(each.ids) for each in answers] == [TOKENS[device]] * STREAMS
    assert len({each.text for each in answers}) == STREAMS


def test_two_processes_that_serve_http_stream_the_same_answers_and_count_them(server: Server, model: str) -> None:
    tokens = TOKENS[server.device]

    async def answers() -> list[Answer]:
        async with AsyncClient(server.url) as client:
            asked = (answer(client, prompt, tokens) for prompt in PROMPTS)
            return [each for each, _ in await asyncio.gather(*asked)]

    children = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in check_recovery.descendants(server.process.pid)]
    assert sum(b"asyncengine.api.worker" in command for command in children) == 2
    assert asyncio.run(answers()) == answers_within(model, "cpu", tokens)
    # the process that is asked hears of the other's a little later
    deadline = time.monotonic() + PATIENCE_SECONDS
    while generated_tokens(metrics := server.read("/metrics")) != STREAMS * tokens:
        assert time.monotonic() < deadline, metrics
        time.sleep(0.05)
    assert json.loads(server.read("/health")) == {"status": "ok"}


def generated_tokens(metrics: str) -> float:
    (line,) = [line for line in metrics.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    return float(line.split()[-1])


def test_a_token_that_is_dropped_doubled_or_of_another_stream_is_found(server: Server, model: str) -> None:
    one, other = (each.ids for each in answers_within(model, "cpu", TOKENS[server.device])[:2])
    at = len(one) // 2
    assert one[at - 1] != one[at] != one[at + 1]
    wrong = (
        one[:at] + one[at + 1 :],
        one[:at] + one[at : at + 1] + one[at:],
        one[:at] + other[at : at + 1] + one[at + 1 :],
        one[:at] + other[at:],
    )

    async def gaps() -> tuple[list[float], list[list[float]]]:
        async with aiohttp.ClientSession() as http:
            model = ServerModel(http, server.url)
            return await model.gaps(PROMPTS[0], one), [await model.gaps(PROMPTS[0], ids) for ids in wrong]

    right, found = asyncio.run(gaps())
    assert max(right) <= MARGIN
    assert [max(each[:at]) <= MARGIN for each in found] == [True] * len(wrong)
    assert [max(each[at:]) > 0.1 for each in found] == [True] * len(wrong)


def test_streams_go_on_with_the_same_ids_when_gpu_runner_is_killed_and_nothing_survives_the_server(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    # other tests may use the same GPU, and others the same cores
    monkeypatch.setattr(check_recovery, "gpu_mib", lambda: None)
    monkeypatch.setattr(check_recovery, "GONE_SECONDS", 1e6)
    args: list[object] = ["--url", server.url, "--pid", server.process.pid]
    args += (
        "--streams",
        STREAMS,
        "--prompt",
        PROMPT_TOKENS,
        "--tokens",
        TOKENS[server.device],
        "--vocab",
        f"{IDS[0]}:{IDS[1]}",
        "--seed",
        SEED,
    )
    args += ("--require-equal", "--tolerance", MARGIN, "--json", out)
    monkeypatch.setattr(sys, "argv", ["check_recovery.py", *map(str, args)])
    assert check_recovery.main() == 0, capsys.readouterr().out
    runner, whole = json.loads(out.read_text())
    assert (runner["killed"], runner["equal"], runner["equal_in_peace"]) == ("gpu_runner", STREAMS, STREAMS)
    assert runner["back_s"][0] > 0.5, "every stream waited for the new process, which has torch to import"
    assert max(runner["gap"]) <= MARGIN
    assert runner["control"]["of"] == STREAMS
    assert (whole["killed"], whole["ok"]) == ("server", True)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["killed", "gpu_runner", "server"]
