"""Processes that do not speak this version's language: refused by name, at a start and in the place of a lost one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.puppets import PUPPETS, Heard
from support.python_path import PYTHON_PATH

from asyncengine import AsyncEngine, EngineDeadError, SamplingParams, __version__, children, collect
from asyncengine.api.app import bind
from asyncengine.api.worker_group import WorkerGroup
from asyncengine.config import EngineConfig, GrammarConfig, Role, SidecarConfig
from asyncengine.errors import StartupError
from asyncengine.supervisor import Supervisor
from asyncengine.wire.pipes import Pipes
from asyncengine.wire.reports import Heartbeat, Ready
from asyncengine.wire.sidecar import config_bytes

ROLES = tuple(PUPPETS)


@pytest.fixture(autouse=True)
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the stand-ins' orders (`support.puppet`). A test must leave no run directory."""
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    monkeypatch.setenv("ASYNCENGINE_ORDERS", str(tmp_path))
    parent = Path(tempfile.mkdtemp(prefix="runs-"))
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    yield tmp_path
    assert [*parent.iterdir()] == []
    parent.rmdir()


@pytest.fixture
def pids() -> Iterator[list[int]]:
    """Of processes that must be gone after the test."""
    found: list[int] = []
    yield found
    assert found != []
    assert [pid for pid in found if Path(f"/proc/{pid}").exists()] == []


def upgrade(monkeypatch: pytest.MonkeyPatch, role: Role, *, since_life: int) -> None:
    """From that life on, this role's processes find that whoever started them is of version 0.0.9."""

    def config(**fields: Any) -> SidecarConfig:
        is_newer = fields["role"] == role and fields["life"] >= since_life
        return SidecarConfig(**fields, version="0.0.9" if is_newer else __version__)

    monkeypatch.setattr(children, "SidecarConfig", config)


def refusal(role: str) -> str:
    return (
        f"{role} is of asyncengine {__version__}, but was started by 0.0.9: what was running when asyncengine was "
        "upgraded must be started again"
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


# ------------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize("role", ROLES)
async def test_a_start_with_a_process_of_another_version_ends_with_both_versions(
    role: Role, monkeypatch: pytest.MonkeyPatch, pids: list[int]
) -> None:
    upgrade(monkeypatch, role, since_life=0)
    modules = {other: module for other, module in PUPPETS.items() if other != role}  # of the role, the real one
    sockets = bind("127.0.0.1", 0)
    group = WorkerGroup(EngineConfig(), sockets, workers=1, modules=modules)
    starting = asyncio.create_task(group.start())
    await until(lambda: len(group._supervisor.pids()) == 4 or starting.done())
    pids += group._supervisor.pids().values()
    async with asyncio.timeout(60):
        with pytest.raises(StartupError) as caught:
            await starting
    assert caught.value.message == refusal(role)
    assert [listener.fileno() for listener in sockets] == [-1]


@pytest.mark.parametrize("role", ROLES)
async def test_a_successor_of_another_version_ends_the_engine_at_once(
    role: Role, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pids: list[int]
) -> None:
    upgrade(monkeypatch, role, since_life=1)
    group = WorkerGroup(EngineConfig(), bind("127.0.0.1", 0), workers=1, modules=PUPPETS)
    try:
        await group.start()
        os.kill(group._supervisor.pids()[role], signal.SIGKILL)
        reason = f"{role} was lost and cannot be replaced: {refusal(role)}"
        async with asyncio.timeout(60):
            assert await group.wait_failed() == reason
        pids += group._supervisor.pids().values()
    finally:
        await group.close()
    assert caplog.messages == [
        f"{role} was killed by SIGKILL; it is being replaced",
        f"the engine has failed: {reason}",
    ]


async def test_requests_of_a_server_that_was_upgraded_under_them_end_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, pids: list[int]
) -> None:
    monkeypatch.setenv("ASYNCENGINE_SCRIPT", '{"step_ms": 4}')
    upgrade(monkeypatch, "detokenizer_proc", since_life=1)
    async with AsyncEngine.start(EngineConfig(), modules={"gpu_runner": "support.scripted_runner"}) as engine:
        stream = engine.generate("word " * 8, SamplingParams(max_tokens=2000, ignore_eos=True))
        await anext(stream)
        os.kill(engine._supervisor.pids()["detokenizer_proc"], signal.SIGKILL)
        with pytest.raises(EngineDeadError) as caught:
            await asyncio.wait_for(collect(stream), 60)
        assert caught.value.message == (
            f"detokenizer_proc was lost and cannot be replaced: {refusal('detokenizer_proc')}"
        )
        pids += engine._supervisor.pids().values()


def test_a_grammar_process_of_another_version_ends_with_both_versions(orders: Path) -> None:
    config = GrammarConfig(model_path="", run_dir=str(orders), eos_ids=(0,), version="0.0.9")
    command = [sys.executable, "-P", "-m", "gpu_runner.grammar.child"]
    child = subprocess.run(command, input=config_bytes(config), capture_output=True, timeout=60)
    assert child.returncode == 1
    assert child.stderr.decode().splitlines()[-1].endswith(f": {refusal('a grammar process')}")


# ------------------------------------------------------------------------------------------ reports that nobody reads


@asynccontextmanager
async def supervising(heard: Heard, config: EngineConfig) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(config, on_failure=heard.failures.append, on_relink=heard.relink, modules=PUPPETS)
    try:
        yield supervisor
    finally:
        await supervisor.close()


def say(supervisor: Supervisor, *frames: bytes) -> None:
    """Send them as if the processes had."""
    with closing(Pipes(supervisor.run_dir)) as pipes:
        sender = pipes.sender("supervisor")
        for frame in frames:
            sender.socket.send(frame)
        pipes.close(linger_ms=60_000)


GARBAGE = b"\xc1 no message"


def other_ready(role: str, index: int) -> bytes:
    """As another version may have it."""
    return msgspec.msgpack.encode([Ready.__struct_config__.tag, role, index, "1 GiB", ["cuda"]])


@pytest.mark.parametrize(
    ("frame", "names"),
    [
        (GARBAGE, "gpu_runner or tokenizer_proc 1"),
        (msgspec.msgpack.encode([[]]), "gpu_runner or tokenizer_proc 1"),
        (other_ready("tokenizer_proc", 1), "tokenizer_proc 1"),
        (other_ready("gpu_runner", 0), "gpu_runner"),
    ],
    ids=["garbage", "of no sender", "another Ready of a tokenizer", "another Ready of gpu_runner"],
)
async def test_a_report_that_cannot_be_read_ends_the_start_that_waits_for_it(
    frame: bytes, names: str, orders: Path, pids: list[int]
) -> None:
    for name in ("gpu_runner.0.0", "tokenizer_proc.1.0"):
        (orders / name).write_text("wait")
    async with supervising(Heard(), EngineConfig(tokenizer_workers=2)) as supervisor:
        launching = asyncio.create_task(supervisor.launch(await supervisor.prepare()))
        await until(lambda: sum(child.ready is not None for child in supervisor._children) == 2)
        say(supervisor, other_ready("tokenizer_proc", 0), other_ready("nobody", 3))  # for which nobody waits
        await until(lambda: supervisor._receiver is not None and supervisor._receiver.malformed == 2)
        assert not launching.done()
        pids += supervisor.pids().values()
        say(supervisor, frame)
        async with asyncio.timeout(60):
            with pytest.raises(StartupError) as caught:
                await launching
    assert caught.value.message == f"{names} sent a report that cannot be read"


async def test_a_successor_whose_report_cannot_be_read_is_a_loss_and_too_many_of_them_end_the_engine(
    orders: Path, caplog: pytest.LogCaptureFixture, pids: list[int]
) -> None:
    for life in (1, 2):
        (orders / f"detokenizer_proc.0.{life}").write_text("wait")
    heard = Heard()
    async with supervising(heard, EngineConfig()) as supervisor:
        await supervisor.launch(await supervisor.prepare())
        say(supervisor, GARBAGE, msgspec.msgpack.encode(Heartbeat("tokenizer_proc", 0, {"seen": 1})))
        await until(lambda: "seen" in supervisor.gauges("tokenizer_proc"))  # nobody was waited for
        os.kill(supervisor.pids()["detokenizer_proc"], signal.SIGKILL)
        for life, frame in ((1, other_ready("detokenizer_proc", 0)), (2, GARBAGE)):
            await until(lambda life=life: supervisor._children["detokenizer_proc", 0].life == life)  # type: ignore[misc]
            pids += supervisor.pids().values()
            say(supervisor, frame)
        await until(lambda: heard.failures != [])
    said = "detokenizer_proc sent a report that cannot be read, and was killed"
    assert heard.failures == [f"3 processes were lost within 60 s (detokenizer_proc 3 times); the last: {said}"]
    assert heard.relinks == []
    assert caplog.messages == [
        "detokenizer_proc was killed by SIGKILL; it is being replaced",
        f"{said}; it is being replaced",
    ]


async def test_one_report_that_cannot_be_read_costs_a_successor_and_no_more(orders: Path, pids: list[int]) -> None:
    (orders / "gpu_runner.0.1").write_text("wait")
    heard = Heard()
    async with supervising(heard, EngineConfig()) as supervisor:
        await supervisor.launch(await supervisor.prepare())
        others = {name: pid for name, pid in supervisor.pids().items() if name != "gpu_runner"}
        os.kill(supervisor.pids()["gpu_runner"], signal.SIGKILL)
        await until(lambda: supervisor._children["gpu_runner", 0].life == 1)
        say(supervisor, GARBAGE)
        await until(lambda: heard.relinks != [])
        assert heard.relinks == [("gpu_runner", 0, 2)]
        assert heard.failures == []
        assert others.items() <= supervisor.pids().items()
        pids += supervisor.pids().values()
