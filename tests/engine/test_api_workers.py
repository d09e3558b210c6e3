"""Several processes that serve HTTP on one port, with the real tokenizer and detokenizer and the scripted runner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import aiohttp
import pytest
from chaos.processes import clients_of
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
SLOTS = 64
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


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def open_in_every_worker(
    session: aiohttp.ClientSession, url: str, workers: list[int], **headers: str
) -> dict[aiohttp.ClientResponse, str]:
    """Endless streams, opened until each worker has one, and the first event of each, which has been read."""
    port = int(url.rsplit(":", 1)[1])
    responses: dict[aiohttp.ClientResponse, str] = {}
    while not all(clients_of(pid, port) for pid in workers):
        assert len(responses) < 200
        response = await session.post(f"{url}/v1/completions", json=ENDLESS, headers=headers)
        responses[response] = (await response.content.readline()).decode()
        assert responses[response].startswith("data: {")
    return responses


def own_port(response: aiohttp.ClientResponse) -> int:
    """Of an answer that has not ended."""
    assert response.connection is not None
    assert response.connection.transport is not None
    return int(response.connection.transport.get_extra_info("sockname")[1])


async def scrape(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """The metrics by name and labels, but those that all have."""
    async with session.get(f"{url}/metrics") as response:
        page = re.sub(r'model_name="[^"]*",?|engine="0",?', "", await response.text()).replace("{}", "")
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in page.splitlines() if line[0] != "#")
    }


def replaced(command: Command, before: Collection[int]) -> int:
    """The worker that takes the place of one of `before` that was lost; it may not be ready yet."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        for pid in {*command.children()} - {*before}:
            with contextlib.suppress(OSError, IndexError):  # not quite there yet
                if module_of(pid) == "asyncengine.api.worker":
                    return pid
        time.sleep(0.005)


def text_and_end(stream: str) -> tuple[str, list[str]]:
    """The text of a stream, its last finish_reason, and its last event."""
    *events, done = stream.strip().split("\n\n")
    choices = [json.loads(event[6:])["choices"][0] for event in events]
    return "".join(choice["text"] for choice in choices), [choices[-1]["finish_reason"], done]


async def last_event(response: aiohttp.ClientResponse) -> dict:
    *_, last = (await response.read()).decode().strip().split("\n\n")
    event: dict = json.loads(last.removeprefix("data: "))
    return event


def all_connections() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def test_streams_through_two_workers_are_byte_exact_and_a_signal_leaves_nothing(short_path: Path) -> None:
    options = ["--api-workers", "2", "--no-console", "--drain-timeout-seconds", "0", "--allowed-host", "llm.test"]
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
            for host, status in (("llm.test", 200), ("evil.test", 403)):
                async with session.get(f"{url}/ready", headers={"Host": host}) as response:
                    assert response.status == status
            command.process.terminate()
            for response in held:
                assert (await last_event(response))["error"]["code"] == "engine_dead"
        code, _, err = command.finish()
    assert code == 0
    assert "Traceback" not in err
    assert all_gone([*children])


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[str, list[int]]]:
    """Address and workers of a server that several tests ask, none of which it notices afterwards."""
    options = ["--api-workers", "3", "--max-num-seqs", str(SLOTS)]
    with (
        tempfile.TemporaryDirectory(prefix="w-") as path,
        running(Path(path), "serve", "--port", "0", *options, **SLOW) as command,
    ):
        url, children = serve(command)
        assert len(workers_of(children)) == 3
        yield url, workers_of(children)
        command.process.terminate()
        assert command.finish()[0] == 0


async def test_clients_that_leave_are_aborted_in_every_worker(shared: tuple[str, list[int]]) -> None:
    url, workers = shared
    async with all_connections() as session:
        for response in await open_in_every_worker(session, url, workers):
            response.close()
    async with all_connections() as session:
        # all slots are free again: as many streams as there are begin at once
        async with asyncio.timeout(60):
            responses = await asyncio.gather(
                *(session.post(f"{url}/v1/completions", json=ENDLESS) for _ in range(SLOTS))
            )
        for response in responses:
            response.close()


async def test_of_a_killed_worker_only_its_own_connections_break_and_another_takes_its_place(short_path: Path) -> None:
    slots = ["--max-num-seqs", "256"]  # enough for all streams at once
    with running(short_path, "serve", "--port", "0", "--api-workers", "2", *slots, **SLOW) as command:
        url, children = serve(command)
        victim, other = workers_of(children)
        async with all_connections() as session:
            async with session.post(
                f"{url}/v1/completions", json=ENDLESS | {"max_tokens": 2, "stream": False}
            ) as answer:
                both_tokens = (await answer.json())["choices"][0]["text"]
            held = await open_in_every_worker(session, url, [victim, other], **{"X-Request-Id": "held"})
            before = await scrape(session, url)
            its_own = clients_of(victim, int(url.rsplit(":", 1)[1]))
            cut = [response for response in held if own_port(response) in its_own]
            kept = [response for response in held if response not in cut]
            os.kill(victim, signal.SIGKILL)
            for response in cut:
                with pytest.raises(aiohttp.ClientError):
                    await response.read()
            successor = replaced(command, children)
            async with asyncio.timeout(60):
                while (page := await scrape(session, url))['asyncengine:sidecar_restarts_total{role="api_worker"}'] < 1:
                    await asyncio.sleep(0.01)
                while (page := await scrape(session, url))["vllm:num_requests_running"] > len(kept):
                    await asyncio.sleep(0.01)
            async with session.post(f"{url}/v1/requests/cmpl-held/cancel") as answer:
                assert answer.status == 200
            assert cut
            assert kept
            for response in kept:
                text, end = text_and_end(held[response] + await response.text())
                assert text == (both_tokens * len(text))[: len(text)]
                assert end == ["abort", "data: [DONE]"]

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            async with asyncio.timeout(60):
                while (page := await scrape(session, url))["vllm:num_requests_running"] > 0:
                    await asyncio.sleep(0.01)
            assert page["asyncengine:kv_cache_free_pages"] == page["asyncengine:kv_cache_pages"]
            counted = [name for name in before if re.search(r"_(total|count|sum|bucket)\b", name)]
            assert len(counted) > 50
            assert [name for name in counted if page[name] < before[name]] == []
            for response in await open_in_every_worker(session, url, [successor, other]):
                response.close()
            async with session.get(f"{url}/ready") as response:
                assert response.status == 200
        command.process.terminate()
        code, _, err = command.finish()
    assert code == 0
    assert "api_worker 0 was killed by SIGKILL; it is being replaced" in err
    assert re.search(r"api_worker 0 was replaced within \d+\.\d s", err)
    assert "Traceback" not in err
    assert all_gone([*children, successor])


async def test_when_all_workers_are_lost_connections_wait_for_their_successors(short_path: Path) -> None:
    with running(short_path, "serve", "--port", "0", "--api-workers", "2", **SLOW) as command:
        url, children = serve(command)
        for pid in workers_of(children):
            os.kill(pid, signal.SIGKILL)
        async with all_connections() as session:
            # one that was accepted by a worker on its way out breaks
            body = {"prompt": [40, 41], "max_tokens": 10}
            await until(lambda: not {*workers_of(children)} & {*command.children()})
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200
        command.process.terminate()
        assert command.finish()[0] == 0


async def test_a_worker_that_is_lost_again_and_again_ends_the_engine_by_name(short_path: Path) -> None:
    options = ["--api-workers", "2", "--crash-window-seconds", "3600"]
    with running(short_path, "serve", "--port", "0", *options, **SLOW) as command:
        url, children = serve(command)
        victim, other = workers_of(children)
        known, port = [*children], int(url.rsplit(":", 1)[1])
        async with all_connections() as session:
            opened = await open_in_every_worker(session, url, [other])
            its_own = clients_of(other, port)
            held = [response for response in opened if own_port(response) in its_own]
            for _ in range(3):  # the second and the third while they start, most likely
                os.kill(victim, signal.SIGKILL)
                if len(known) == len(children) + 2:
                    break
                victim = replaced(command, known)
                known.append(victim)
            told = {(await last_event(response))["error"]["message"] for response in held}
        code, _, err = command.finish()
    reason = "3 processes were lost within 3600 s (api_worker 0 3 times); the last: api_worker 0 was killed by SIGKILL"
    assert told == {reason}
    assert code == 1
    assert err.splitlines()[-1] == f"the engine has failed: {reason}"
    assert all_gone(known)
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_a_worker_whose_loss_is_one_too_many_ends_every_stream_by_name_and_leaves_nothing(
    short_path: Path,
) -> None:
    options = ["--api-workers", "2", "--max-crashes", "1"]
    with running(short_path, "serve", "--port", "0", *options, **SLOW) as command:
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
        os.kill(workers_of(children)[1], signal.SIGKILL)
        successor = replaced(command, children)
        command.process.kill()
        command.process.wait()
        assert all_gone([*children, successor])
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


async def test_every_worker_answers_with_the_metrics_of_all(shared: tuple[str, list[int]]) -> None:
    url, workers = shared
    body = {"prompt": [40, 41], "max_tokens": 10, "ignore_eos": True}
    requests, tokens = "vllm:e2e_request_latency_seconds_count", "vllm:time_per_output_token_seconds_count"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        async with asyncio.timeout(60):
            while (before := await scrape(session, url))["vllm:num_requests_running"] > 0:
                await asyncio.sleep(0.01)
        async with all_connections() as others:
            held = await open_in_every_worker(others, url, workers)
            for response in held:
                response.close()
        for _ in range(20):
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200
        async with asyncio.timeout(60):
            # a worker may be slow to see who has left
            while (await scrape(session, url))[requests] < before.get(requests, 0) + 20 + len(held):
                await asyncio.sleep(0.01)
        pages = [await scrape(session, url) for _ in range(20)]
    assert pages[0][tokens] - before.get(tokens, 0) >= 9 * 20 - 20
    counts = [
        {name: value for name, value in page.items() if re.match("vllm:.*_(total|count|sum)$", name)} for page in pages
    ]
    assert len(counts[0]) > 20
    assert all(count == counts[0] for count in counts)


async def test_a_request_is_cancelled_through_any_worker(shared: tuple[str, list[int]]) -> None:
    url, workers = shared
    async with all_connections() as session:
        held = await open_in_every_worker(session, url, workers)
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


async def test_a_lost_worker_has_no_request_to_cancel_and_its_successor_is_asked_from_then_on(short_path: Path) -> None:
    pipes = Pipes(short_path)
    fronts = [FrontEnd(EngineConfig(), worker=0, workers=2), FrontEnd(EngineConfig(), worker=1, workers=2, life=3)]
    pipes.receiver("tokenizer.0", ToTokenizer)
    fronts[0]._open(pipes, short_path)
    fronts[0]._serve(INFO, tokenizer_workers=1)
    asking = asyncio.create_task(fronts[0].cancel("x"))
    await asyncio.sleep(0)
    fronts[0]._relink("api_worker", 1, 3)
    assert not await asking
    fronts[1]._open(pipes, short_path)
    fronts[1]._serve(INFO, tokenizer_workers=1)
    subscription = fronts[1].subscribe([1, 2], SamplingParams(), listener=lambda: None, request_id="x")
    assert await fronts[0].cancel("x")
    subscription.close()
    for front in fronts:
        front._shut("over")
    pipes.close()
    for file in short_path.iterdir():
        file.unlink()
