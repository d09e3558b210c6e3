"""Several processes that serve HTTP on one port, with the real tokenizer and detokenizer and the scripted runner."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from front_end_ring import INFO
from support.command_line import Command, all_gone, running
from support.unused_port import unused_port

from asyncengine.cli import api_workers
from asyncengine.config import API_WORKER_SHIFT, EngineConfig
from asyncengine.errors import StartupError
from asyncengine.front_end import FrontEnd
from asyncengine.sampling import SamplingParams
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.requests import Abort, EncodeIds, ToRunnerControl, ToTokenizer

ENDLESS = {"prompt": [40, 41], "max_tokens": 1900, "ignore_eos": True, "stream": True}
SLOW: dict[str, object] = {"step_ms": 5, "endless_from": 1900}


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty directory whose name leaves room for the names of sockets; it must be left empty."""
    with tempfile.TemporaryDirectory(prefix="w-") as path:
        yield Path(path)


def serve(command: Command) -> tuple[str, dict[int, str]]:
    """Address and children (pid -> module) of a server that has just become ready."""
    url = command.read_until(r"Ready: SmolLM2-135M-Instruct at (\S+)")[1]
    return url, {pid: module_of(pid) for pid in command.children()}


def module_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2]


def workers_of(children: dict[int, str]) -> list[int]:
    return [pid for pid, module in children.items() if module == "asyncengine.api.worker"]


def established(pid: int, port: int) -> int:
    """Connections to `port` that process `pid` has accepted."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except FileNotFoundError:
            continue
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        int(line[1].split(":")[1], 16) == port and line[3] == "01" and f"socket:[{line[9]}]" in inodes for line in lines
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def open_in_every_worker(
    session: aiohttp.ClientSession, url: str, workers: list[int]
) -> list[aiohttp.ClientResponse]:
    """Endless streams, opened until each worker has one, whose first event has been read."""
    port = int(url.rsplit(":", 1)[1])
    responses: list[aiohttp.ClientResponse] = []
    while not all(established(pid, port) for pid in workers):
        assert len(responses) < 200
        response = await session.post(f"{url}/v1/completions", json=ENDLESS)
        assert (await response.content.readline()).startswith(b"data: {")
        responses.append(response)
    return responses


async def last_event(response: aiohttp.ClientResponse) -> dict:
    *_, last = (await response.read()).decode().strip().split("\n\n")
    event: dict = json.loads(last.removeprefix("data: "))
    return event


def all_connections() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def test_streams_through_two_workers_are_byte_exact_and_a_signal_leaves_nothing(short_path: Path) -> None:
    options = ["--api-workers", "2", "--no-console", "--drain-timeout-seconds", "0"]
    with running(short_path, "serve", "--port", "0", *options, **SLOW) as command:
        url, children = serve(command)
        workers = workers_of(children)
        assert len(workers) == 2
        assert len(children) == 5

        async def ask(session: aiohttp.ClientSession, text: str) -> str:
            body = {"prompt": text, "max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                *chunks, usage, done = (await response.read()).decode().strip().split("\n\n")
            assert done == "data: [DONE]"
            assert json.loads(usage[6:])["usage"]["completion_tokens"] > 0
            return "".join(json.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks)

        async with all_connections() as session:
            held = await open_in_every_worker(session, url, workers)
            texts = [f"{i} ü {i * i} 😀 世界" * (i % 3 + 1) for i in range(48)]
            assert await asyncio.gather(*(ask(session, text) for text in texts)) == texts
            async with session.get(f"{url}/health") as response:
                assert (response.status, await response.json()) == (200, {"status": "ok"})
            async with session.get(f"{url}/") as response:
                assert response.status == 404
            command.process.terminate()
            for response in held:
                assert (await last_event(response))["error"]["code"] == "engine_dead"
        code, _, err = command.finish()
    assert code == 0
    assert "Traceback" not in err
    assert all_gone([*children])


async def test_clients_that_leave_are_aborted_in_every_worker(short_path: Path) -> None:
    slots = ["--max-num-seqs", "64"]
    with running(short_path, "serve", "--port", "0", "--api-workers", "2", *slots, **SLOW) as command:
        url, children = serve(command)
        async with all_connections() as session:
            for response in await open_in_every_worker(session, url, workers_of(children)):
                response.close()
        async with all_connections() as session:
            # all slots are free again: as many streams as there are begin at once
            async with asyncio.timeout(60):
                responses = await asyncio.gather(
                    *(session.post(f"{url}/v1/completions", json=ENDLESS) for _ in range(64))
                )
            for response in responses:
                response.close()
        command.process.terminate()
        assert command.finish()[0] == 0


async def test_a_worker_that_is_killed_ends_every_stream_by_name_and_leaves_nothing(short_path: Path) -> None:
    with running(short_path, "serve", "--port", "0", "--api-workers", "2", **SLOW) as command:
        url, children = serve(command)
        workers = workers_of(children)
        port = int(url.rsplit(":", 1)[1])
        async with all_connections() as session:
            held = await open_in_every_worker(session, url, workers)
            os.kill(workers[0], signal.SIGKILL)
            ends = await asyncio.gather(*(last_event(response) for response in held), return_exceptions=True)
        told = [end["error"]["message"] for end in ends if isinstance(end, dict)]
        broken = [end for end in ends if not isinstance(end, dict)]
        code, _, err = command.finish()
    names = {"api_worker 0 was killed by SIGKILL", "api_worker 1 was killed by SIGKILL"}
    assert len({*told}) == 1
    assert {*told} < names
    assert broken
    assert all(isinstance(end, aiohttp.ClientError) for end in broken)
    assert code == 1
    assert err.splitlines()[-1] == f"the engine has failed: {told[0]}"
    assert all_gone([*children])
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_a_sidecar_lost_for_good_is_named_to_the_clients_of_every_worker(short_path: Path) -> None:
    options = ["--api-workers", "2", "--max-crashes", "1"]
    with running(short_path, "serve", "--port", "0", *options, **SLOW) as command:
        url, children = serve(command)
        async with all_connections() as session:
            held = await open_in_every_worker(session, url, workers_of(children))
            os.kill(next(pid for pid, module in children.items() if module == "detokenizer_proc"), signal.SIGKILL)
            for response in held:
                assert (await last_event(response))["error"]["message"] == "detokenizer_proc was killed by SIGKILL"
        assert command.finish()[0] == 1
    assert all_gone([*children])


async def test_workers_of_a_killed_parent_are_gone_and_the_port_is_free(short_path: Path) -> None:
    with running(short_path, "serve", "--port", "0", "--api-workers", "3") as command:
        url, children = serve(command)
        assert len(workers_of(children)) == 3
        command.process.kill()
        command.process.wait()
        assert all_gone([*children])
        with socket.create_server(("127.0.0.1", int(url.rsplit(":", 1)[1]))):
            pass
        for left in short_path.iterdir():
            for file in left.iterdir():
                file.unlink()
            left.rmdir()


async def test_every_worker_tells_of_a_frozen_process(short_path: Path) -> None:
    with running(short_path, "serve", "--port", "0", "--api-workers", "2", "--device", "cpu") as command:
        url, children = serve(command)
        frozen = next(pid for pid, module in children.items() if module == "tokenizer_proc")
        os.kill(frozen, signal.SIGSTOP)
        answers: set[str] = set()
        try:
            async with asyncio.timeout(60):
                while "stalled" not in answers:
                    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
                        answers.add((await response.json())["status"])
                    await asyncio.sleep(0.05)
        finally:
            os.kill(frozen, signal.SIGCONT)
        command.process.terminate()
        assert command.finish()[0] == 0


def test_a_start_that_fails_with_workers_is_one_line_and_code_1(short_path: Path) -> None:
    with running(short_path, "serve", "--port", "0", "--api-workers", "2", refuse_start="too little") as command:
        code, out, err = command.finish()
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == "asyncengine: too little"
    assert "Traceback" not in err


async def test_a_port_that_somebody_else_took_during_the_start_is_one_line_and_code_1(short_path: Path) -> None:
    port = unused_port()
    with running(short_path, "serve", "--port", str(port), "--api-workers", "2") as command:
        await until(lambda: command.children() != [])
        first = command.children()[0]
        os.kill(first, signal.SIGSTOP)  # so that nobody listens yet, however late this process is
        with socket.create_server(("127.0.0.1", port)):
            os.kill(first, signal.SIGCONT)
            code, out, err = command.finish()
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == f"asyncengine: cannot listen on 127.0.0.1:{port}: the port is already in use"


async def test_a_signal_during_the_start_leaves_nothing(short_path: Path) -> None:
    with running(short_path, "serve", "--port", "0", "--api-workers", "2") as command:
        await until(lambda: len(command.children()) == 5)
        children = command.children()
        command.process.terminate()
        code, out, err = command.finish()
    assert (code, out) == (0, "")
    assert "Traceback" not in err
    assert all_gone(children)


async def test_a_worker_mints_rids_with_its_number_and_hears_of_no_other(short_path: Path) -> None:
    pipes = Pipes(short_path)
    tokenizer = pipes.receiver("tokenizer.0", ToTokenizer)
    control = pipes.receiver("runner.control", ToRunnerControl)
    front = FrontEnd(EngineConfig(), worker=3)
    front._open(pipes, short_path)
    front._serve(INFO, tokenizer_workers=1)
    subscriptions = [front.subscribe([1, 2], SamplingParams(n=n), listener=lambda: None) for n in (2, 1)]
    for subscription in subscriptions:
        subscription.close()
    deadline = time.monotonic() + 60
    sent: list[EncodeIds | Abort] = []
    aborted: list[Abort] = []
    while (len(sent), len(aborted)) != (5, 3) and time.monotonic() < deadline:
        sent += tokenizer.drain()
        aborted += control.drain()
        await asyncio.sleep(0.005)
    first = 3 << API_WORKER_SHIFT
    assert [message.rid for message in sent if isinstance(message, EncodeIds)] == [first, first + 2]
    assert sorted(message.rid for message in aborted) == [first, first + 1, first + 2]
    front._shut("over")
    pipes.close()
    for file in short_path.iterdir():
        file.unlink()


def test_the_number_of_workers_is_checked_and_auto_is_one_without_a_gpu() -> None:
    config = EngineConfig(device="cpu")
    assert api_workers("auto", config) == 1
    assert api_workers("64", config) == 64
    for wrong in ("0", "65", "two", "-1", "1.5"):
        with pytest.raises(StartupError, match=f"--api-workers must be auto or from 1 to 64, got {wrong}"):
            api_workers(wrong, config)


def test_auto_is_several_workers_on_a_gpu_machine_with_enough_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(16)})
    assert api_workers("auto", EngineConfig(device="cuda")) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(7)})
    assert api_workers("auto", EngineConfig(device="cuda")) == 1


async def test_every_worker_answers_with_the_metrics_of_all(short_path: Path) -> None:
    with running(short_path, "serve", "--port", "0", "--api-workers", "2", **SLOW) as command:
        url, children = serve(command)
        body = {"prompt": [40, 41], "max_tokens": 10, "ignore_eos": True}

        async def scrape(session: aiohttp.ClientSession) -> dict[str, float]:
            async with session.get(f"{url}/metrics") as response:
                lines = [line.rpartition(" ") for line in (await response.text()).splitlines() if line[0] != "#"]
            return {
                name.partition("{")[0]: float(value) for name, _, value in lines if 'finished_reason="st' not in name
            }

        async with all_connections() as session:
            held = await open_in_every_worker(session, url, workers_of(children))
            for response in held:
                response.close()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            for _ in range(20):
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    assert response.status == 200
            async with asyncio.timeout(60):
                # a worker may be slow to see who has left
                while (await scrape(session))["vllm:e2e_request_latency_seconds_count"] < 20 + len(held):
                    await asyncio.sleep(0.01)
            pages = [await scrape(session) for _ in range(20)]
        name = "vllm:time_per_output_token_seconds_count"
        assert pages[0][name] >= 9 * 20 - 20
        counts = [
            {name: value for name, value in page.items() if re.match("vllm:.*_(total|count|sum)$", name)}
            for page in pages
        ]
        assert len(counts[0]) > 20
        assert all(count == counts[0] for count in counts)
        command.process.terminate()
        assert command.finish()[0] == 0


async def test_a_request_is_cancelled_through_any_worker(short_path: Path) -> None:
    with running(short_path, "serve", "--port", "0", "--api-workers", "3", **SLOW) as command:
        url, children = serve(command)
        async with all_connections() as session:
            held = await open_in_every_worker(session, url, workers_of(children))
            (response,) = [await session.post(f"{url}/v1/completions", json=ENDLESS, headers={"X-Request-Id": "named"})]
            found = []
            for name in ("cmpl-other", "cmpl-named", "cmpl-named"):
                # every one over a connection of its own, so by whichever worker
                async with session.post(f"{url}/v1/requests/{name}/cancel", headers={"Connection": "close"}) as answer:
                    found.append(answer.status)
            assert found == [404, 200, 404]
            *_, last, done = (await response.read()).decode().strip().split("\n\n")
            assert json.loads(last[6:])["choices"][0]["finish_reason"] == "abort"
            assert done == "data: [DONE]"
            for each in held:
                each.close()
        command.process.terminate()
        assert command.finish()[0] == 0


async def test_workers_ask_each_other_for_requests_they_do_not_have(short_path: Path) -> None:
    pipes = Pipes(short_path)
    fronts = [FrontEnd(EngineConfig(), worker=worker, workers=3) for worker in range(3)]
    receivers = [pipes.receiver("tokenizer.0", ToTokenizer), pipes.receiver("runner.control", ToRunnerControl)]
    for front in fronts:
        front._open(pipes, short_path)
        front._serve(INFO, tokenizer_workers=1)
    subscription = fronts[2].subscribe([1, 2], SamplingParams(n=2), listener=lambda: None, request_id="x")
    assert not await fronts[0].cancel("y")
    assert not await fronts[0].cancel("x", tenant="another")
    assert await fronts[0].cancel("x")
    assert [delta.finish_reason for delta in subscription.take()] == ["abort", "abort"]
    assert not await fronts[1].cancel("x")
    subscription.close()
    await until(lambda: len([*receivers[1].drain()]) == 2)
    for front in fronts:
        front._shut("over")
    pipes.close()
    for file in short_path.iterdir():
        file.unlink()
