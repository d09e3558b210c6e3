"""Sidecars that die or hang are replaced, with stand-ins on strings in their place (`support.puppet`)."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.puppets import PUPPETS, Heard
from support.python_path import PYTHON_PATH

from asyncengine import watchdog
from asyncengine.api.app import bind
from asyncengine.api.worker_group import WorkerGroup
from asyncengine.config import SIDECARS, EngineConfig
from asyncengine.engine_info import Health
from asyncengine.errors import StartupError
from asyncengine.losses import Losses
from asyncengine.model_files import ResolvedModel
from asyncengine.supervisor import Supervisor
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.reports import Fatal, Heartbeat, Ready


class Orders:
    """The folder of the stand-ins' orders."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def give(self, process: str, order: str) -> None:
        """process: as `gpu_runner.0.1`, with index and life."""
        (self.path / process).write_text(order)

    def end(self, process: str) -> None:
        (self.path / process).unlink()


@pytest.fixture(autouse=True)
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orders:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.setenv("ASYNCENGINE_ORDERS", str(tmp_path))
    return Orders(tmp_path)


def make(heard: Heard, config: EngineConfig | None = None) -> Supervisor:
    return Supervisor(
        config or EngineConfig(), on_failure=heard.failures.append, on_relink=heard.relink, modules=PUPPETS
    )


@asynccontextmanager
async def started(heard: Heard, config: EngineConfig | None = None) -> AsyncIterator[Supervisor]:
    supervisor = make(heard, config)
    try:
        await supervisor.launch(await supervisor.prepare())
        yield supervisor
    finally:
        await supervisor.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def kill(supervisor: Supervisor, name: str) -> None:
    os.kill(supervisor.pids()[name], signal.SIGKILL)


# -------------------------------------------------------------------------------------------------------------- losses


async def test_every_sidecar_that_is_killed_is_replaced_and_the_engine_hears_of_it(
    orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard()
    model = ResolvedModel(Path("model"), "model")
    async with started(heard, EngineConfig(tokenizer_workers=2, max_crashes=9)) as supervisor:
        await until(lambda: supervisor.health() == Health(state="ready"))
        for name, role, index in (
            ("gpu_runner", "gpu_runner", 0),
            ("tokenizer_proc 1", "tokenizer_proc", 1),
            ("detokenizer_proc", "detokenizer_proc", 0),
        ):
            orders.give(f"{role}.{index}.1", "wait")
            info = supervisor.engine_info(model)
            before = supervisor.pids()[name]
            kill(supervisor, name)
            await until(lambda: supervisor.health().state == "recovering")
            assert re.fullmatch(rf"being replaced: {name} \(lost \d+\.\d s ago\)", supervisor.health().detail)
            assert (role, index, 1) not in heard.relinks
            assert supervisor.engine_info(model) == info
            assert f"{role}.{index}" not in supervisor.lives()
            orders.end(f"{role}.{index}.1")
            await until(lambda: supervisor.health().state == "ready")
            assert heard.relinks[-1] == (role, index, 1)
            assert supervisor.pids()[name] != before
        kill(supervisor, "gpu_runner")
        await until(lambda: len(heard.relinks) == 4)
        assert heard.relinks[-1] == ("gpu_runner", 0, 2)
        others = {"tokenizer_proc.1": 1, "detokenizer_proc.0": 1}
        assert supervisor.lives() == others | {"gpu_runner.0": 2}
        await until(lambda: supervisor.gauges("gpu_runner") == others)
        assert supervisor.engine_gauges() == others | {
            "gpu_runner_restarts": 2,
            "tokenizer_proc_restarts": 1,
            "detokenizer_proc_restarts": 1,
            "convicted_requests": 0,
        }
    assert heard.failures == []
    assert caplog.messages[0] == "gpu_runner was killed by SIGKILL; it is being replaced"
    assert re.fullmatch(r"gpu_runner was replaced within \d+\.\d s", caplog.messages[1])
    assert len(caplog.messages) == 8


async def test_losses_at_once_and_of_a_successor_that_loads_are_made_good(orders: Orders) -> None:
    heard = Heard()
    async with started(heard, EngineConfig(max_crashes=9)) as supervisor:
        orders.give("gpu_runner.0.1", "wait")
        orders.give("tokenizer_proc.0.1", "wait")
        pids = supervisor.pids()
        for role in SIDECARS:
            kill(supervisor, role)
        await until(lambda: not set(pids.values()) & set(supervisor.pids().values()))
        await until(lambda: supervisor.lives() == {"detokenizer_proc.0": 1})
        kill(supervisor, "gpu_runner")
        await until(lambda: supervisor.lives() == {"detokenizer_proc.0": 1, "gpu_runner.0": 2})
        assert [place.split(" (")[0] for place in supervisor.recovering()] == ["tokenizer_proc"]
        orders.end("tokenizer_proc.0.1")
        await until(lambda: supervisor.recovering() == [])
        assert sorted(heard.relinks) == [("detokenizer_proc", 0, 1), ("gpu_runner", 0, 2), ("tokenizer_proc", 0, 1)]
        assert supervisor.engine_gauges()["gpu_runner_restarts"] == 1
    assert heard.failures == []


async def test_a_sidecar_that_is_killed_during_the_start_is_replaced(orders: Orders) -> None:
    heard = Heard()
    supervisor = make(heard)
    orders.give("gpu_runner.0.0", "wait")
    launching = asyncio.create_task(supervisor.launch(await supervisor.prepare()))
    try:
        await until(lambda: len(supervisor.pids()) == 3)
        kill(supervisor, "gpu_runner")
        await launching
        assert heard.relinks == [("gpu_runner", 0, 1)]
        assert supervisor.lives() == {"gpu_runner.0": 1}
    finally:
        await supervisor.close()


async def test_too_many_losses_during_the_start_end_it(orders: Orders) -> None:
    supervisor = make(Heard(), EngineConfig(max_crashes=1))
    orders.give("tokenizer_proc.0.0", "wait")
    launching = asyncio.create_task(supervisor.launch(await supervisor.prepare()))
    try:
        await until(lambda: len(supervisor.pids()) == 3)
        kill(supervisor, "tokenizer_proc")
        with pytest.raises(StartupError, match=r"^tokenizer_proc was killed by SIGKILL$"):
            await launching
    finally:
        await supervisor.close()


async def test_too_many_losses_end_the_engine_and_so_does_a_successor_that_cannot_start(orders: Orders) -> None:
    heard = Heard()
    orders.give("detokenizer_proc.0.0", "fail")
    async with started(heard) as supervisor:
        orders.end("detokenizer_proc.0.0")
        await until(lambda: len(heard.relinks) == 1)
        for _ in range(2):
            before = supervisor.pids()["tokenizer_proc"]
            kill(supervisor, "tokenizer_proc")
            await until(lambda before=before: heard.failures != [] or supervisor.pids()["tokenizer_proc"] != before)  # type: ignore[misc]
        assert heard.failures == [
            "3 processes were lost within 60 s (detokenizer_proc once, tokenizer_proc 2 times); the last: "
            "tokenizer_proc was killed by SIGKILL"
        ]
    heard = Heard()
    orders.give("gpu_runner.0.1", "refuse")
    async with started(heard) as supervisor:
        kill(supervisor, "gpu_runner")
        await until(lambda: heard.failures != [])
        assert heard.failures == ["gpu_runner was lost and cannot be replaced: the model file is gone"]
        kill(supervisor, "tokenizer_proc")
    assert len(heard.failures) == 1


async def test_what_a_lost_process_still_says_is_not_heard_as_its_successors(orders: Orders) -> None:
    heard = Heard()
    async with started(heard) as supervisor:
        orders.give("gpu_runner.0.1", "wait")
        kill(supervisor, "gpu_runner")
        await until(lambda: supervisor.recovering() != [])
        pipes = Pipes(supervisor.run_dir)
        sender = pipes.sender("supervisor")
        sender.send(Ready("gpu_runner", 0, {}))
        sender.send(Heartbeat("gpu_runner", 0, {"running": 5}))
        sender.send(Fatal("gpu_runner", 0, "no"))
        sender.send(Heartbeat("tokenizer_proc", 0, {"seen": 1}))
        await until(lambda: "seen" in supervisor.gauges("tokenizer_proc"))
        pipes.close()
        assert supervisor.health().state == "recovering"
        assert heard.relinks == []
        assert supervisor.gauges("gpu_runner") == {}
        orders.end("gpu_runner.0.1")
        await until(lambda: heard.relinks != [])
        assert heard.failures == []


def test_losses_count_for_as_long_as_the_window() -> None:
    losses = Losses(most=3, window_seconds=10)
    assert [losses.count("gpu_runner", "why", now) for now in (0, 5, 10.5, 15.5)] == [None, None, None, None]
    assert losses.lost_at("gpu_runner") == 0
    assert losses.count("gpu_runner", "why", 20) == (
        "3 processes were lost within 10 s (gpu_runner 3 times); the last: why"
    )
    assert losses.end("gpu_runner", 21) == 21
    assert losses.lost_at("gpu_runner") is None


async def test_the_status_of_api_workers_tells_of_successors_their_own_among_them(
    orders: Orders,
) -> None:
    group = WorkerGroup(EngineConfig(max_crashes=9), bind("127.0.0.1", 0), workers=1, modules=PUPPETS)

    def statuses() -> list[list[object]]:
        path = orders.path / "statuses"  # made after the worker has said that it is ready
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    try:
        await group.start()
        await until(lambda: statuses()[-1:] == [["ready", "", {}]])
        orders.give("tokenizer_proc.0.1", "wait")
        os.kill(group._supervisor.pids()["tokenizer_proc"], signal.SIGKILL)
        await until(lambda: statuses()[-1][0] == "recovering")
        orders.end("tokenizer_proc.0.1")
        await until(lambda: statuses()[-1] == ["ready", "", {"tokenizer_proc.0": 1}])
        os.kill(group._supervisor.pids()["api_worker"], signal.SIGKILL)
        lives, waited_for = {"tokenizer_proc.0": 1, "api_worker.0": 1}, list[str]()

        def is_replaced() -> bool:
            waited_for.extend(group._supervisor.recovering())
            return statuses()[-1:] == [["ready", "", lives]]

        await until(is_replaced)
        assert waited_for == [], "other workers serve meanwhile"
        assert group._supervisor.engine_gauges()["api_worker_restarts"] == 1
        assert "waiting" not in group._supervisor.engine_gauges()
        orders.give("gpu_runner.0.1", "wait")
        os.kill(group._supervisor.pids()["gpu_runner"], signal.SIGKILL)
        await until(lambda: group._supervisor.health().state == "recovering")
        gauges = group._supervisor.engine_gauges()
        assert (gauges["running"], gauges["waiting"], gauges["waiting_for_pages"]) == (0, 5, 0)
        orders.end("gpu_runner.0.1")
        await until(lambda: group._supervisor.health().state == "ready")
        assert "waiting" not in group._supervisor.engine_gauges()
    finally:
        await group.close()


async def test_a_second_signal_while_api_workers_are_closed_breaks_nothing_off(orders: Orders) -> None:
    sockets = bind("127.0.0.1", 0)
    group = WorkerGroup(EngineConfig(), sockets, workers=1, modules=PUPPETS)
    await group.start()
    pids = group._supervisor.pids()
    closing = asyncio.create_task(group.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await group.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    assert [listener.fileno() for listener in sockets] == [-1] * len(sockets)


# --------------------------------------------------------------------------------------------------------------- hangs


async def test_a_sidecar_that_stays_silent_is_killed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    async with started(heard, EngineConfig(hang_timeout_seconds=1, max_crashes=99)) as supervisor:
        os.kill(supervisor.pids()["detokenizer_proc"], signal.SIGSTOP)
        # on a busy machine others may be silent for a second, too
        await until(lambda: ("detokenizer_proc", 0, 1) in heard.relinks)
    assert "detokenizer_proc gave no sign of life for 1 s and was killed; it is being replaced" in caplog.messages


async def test_an_api_worker_that_stays_silent_is_killed_and_replaced_too(
    orders: Orders, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(hang_timeout_seconds=1, max_crashes=99)
    group = WorkerGroup(config, bind("127.0.0.1", 0), workers=1, modules=PUPPETS)
    try:
        await group.start()
        os.kill(group._supervisor.pids()["api_worker"], signal.SIGSTOP)
        await until(lambda: "api_worker.0" in group._supervisor.lives())
    finally:
        await group.close()
    assert "api_worker gave no sign of life for 1 s and was killed; it is being replaced" in caplog.messages


async def test_an_engine_in_which_nothing_moves_says_what_it_knows_once(
    orders: Orders,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(watchdog, "STANDSTILL_SECONDS", 0.2)
    orders.give("gpu_runner.0.0", "stand still")
    err = ""

    def stacks() -> int:
        nonlocal err
        err += capfd.readouterr().err
        return len(re.findall(r"puppet\.py\", line \d+ in play", err))

    async with started(Heard()) as supervisor:
        await until(lambda: caplog.records != [])
        await until(lambda: stacks() == 1)
        looked = supervisor._watchdog._looked
        await until(lambda: supervisor._watchdog._looked != looked)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    head, *states = record.message.split("\n  ")
    assert re.fullmatch(r"requests wait or run, and gpu_runner has launched no step for \d+ s", head)
    assert re.fullmatch(r"gpu_runner \(pid \d+\), heard \d+\.\d s ago: running=1 steps=7", states[0])
    assert [state.split(" ")[0] for state in states] == [*SIDECARS]
    assert stacks() == 1
