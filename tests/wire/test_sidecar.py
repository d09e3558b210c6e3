"""A sidecar reports to its supervisor and never outlives its parent."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import pytest

from asyncengine import __version__
from asyncengine.config import EngineConfig, GrammarConfig, Role, SidecarConfig
from asyncengine.wire.pipes import Pipes, Receiver, make_run_dir
from asyncengine.wire.reports import Fatal, Heartbeat, Progress, Ready, RunnerInfo, ToSupervisor
from asyncengine.wire.sidecar import PARENT_GONE_EXIT_CODE, Origin, write_config

CHILD = Path(__file__).with_name("sidecar_child.py")
WAIT_SECONDS = 60

# Starts a sidecar whose stdin is the pipe end this process was given, says so, and waits to be killed.
PARENT = """
import subprocess, sys, signal
child = subprocess.Popen([sys.executable, sys.argv[1], "serve"], stdin=0)
signal.pause()
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[tuple[Path, Receiver]]:
    """A run directory and the receiving end of the supervisor's pipe in it."""
    run_dir = make_run_dir()
    pipes = Pipes(run_dir)
    yield run_dir, pipes.receiver("supervisor", ToSupervisor)
    pipes.close()
    for leftover in run_dir.iterdir():
        leftover.unlink()
    run_dir.rmdir()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes to kill at the test's end whatever its outcome."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        if process.stdin:
            process.stdin.close()


def config_for(run_dir: Path, role: Role = "gpu_runner") -> SidecarConfig:
    engine = EngineConfig(max_model_len=512)
    return SidecarConfig(engine=engine, role=role, index=2, model_path="/no/such/model", run_dir=str(run_dir))


class LaterConfig(msgspec.Struct, kw_only=True):
    """What another version hands a sidecar: of today's fields it has only those of `Origin`."""

    run_dir: str
    index: int = 2
    life: int = 5
    version: str = "99.0"
    engine: str = "quite another"
    mood: tuple[float, ...] = (0.5,)


def start(
    config: msgspec.Struct,
    behaviour: str,
    started: list[subprocess.Popen[bytes]],
    *,
    stderr: IO[bytes] | int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, str(CHILD), behaviour], stdin=subprocess.PIPE, stderr=stderr)
    started.append(process)
    assert process.stdin is not None
    write_config(process.stdin, config)
    process.stdin.flush()
    return process


def reports(receiver: Receiver, last: type) -> list[object]:
    """What was reported, up to and with the first message of type `last`."""
    found: list[object] = []
    while not (found and isinstance(found[-1], last)):
        assert receiver.wait(WAIT_SECONDS * 1000), f"no {last.__name__} after {found}"
        found += receiver.drain(limit=1)
    return found


def test_a_sidecar_reports_progress_then_ready_then_heartbeats(
    supervisor: tuple[Path, Receiver], started: list[subprocess.Popen[bytes]]
) -> None:
    run_dir, receiver = supervisor
    start(config_for(run_dir), "serve", started)
    progress, ready, heartbeat = reports(receiver, Heartbeat)
    assert progress == Progress("gpu_runner", 2, "loading weights", 1, 2)
    assert isinstance(ready, Ready)
    assert (ready.role, ready.index) == ("gpu_runner", 2)
    assert msgspec.convert(ready.info, RunnerInfo).max_model_len == 512
    assert heartbeat == Heartbeat("gpu_runner", 2, {"running": 0})


def test_a_sidecar_exits_when_its_stdin_closes(
    supervisor: tuple[Path, Receiver], started: list[subprocess.Popen[bytes]]
) -> None:
    run_dir, receiver = supervisor
    process = start(config_for(run_dir), "serve", started)
    reports(receiver, Ready)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(WAIT_SECONDS) == PARENT_GONE_EXIT_CODE


@pytest.mark.parametrize("received", [0, 3, 20])
def test_a_sidecar_exits_when_its_parent_is_gone_before_the_whole_configuration_arrived(
    received: int, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    written = io.BytesIO()
    write_config(written, config_for(tmp_path))
    process = subprocess.Popen([sys.executable, str(CHILD), "serve"], stdin=subprocess.PIPE)
    started.append(process)
    assert process.stdin is not None
    process.stdin.write(written.getvalue()[:received])
    process.stdin.close()
    assert process.wait(WAIT_SECONDS) == PARENT_GONE_EXIT_CODE


def test_a_sidecar_is_killed_with_its_parent_even_while_its_stdin_stays_open(
    supervisor: tuple[Path, Receiver], started: list[subprocess.Popen[bytes]]
) -> None:
    run_dir, receiver = supervisor
    stdin_read, stdin_write = os.pipe()
    alive_read, alive_write = os.pipe()
    try:
        parent = subprocess.Popen([sys.executable, "-c", PARENT, str(CHILD)], stdin=stdin_read, stdout=alive_write)
        started.append(parent)
        os.close(alive_write)
        with os.fdopen(os.dup(stdin_write), "wb") as stream:
            write_config(stream, config_for(run_dir))
        reports(receiver, Ready)
        parent.send_signal(signal.SIGKILL)
        assert parent.wait(WAIT_SECONDS) == -signal.SIGKILL
        # parent and sidecar held the only writing ends: the end of file is the sidecar's death
        assert os.read(alive_read, 1) == b""
    finally:
        for fd in (stdin_read, stdin_write, alive_read):
            os.close(fd)


def test_sigterm_ends_a_sidecar_with_status_0(
    supervisor: tuple[Path, Receiver], started: list[subprocess.Popen[bytes]]
) -> None:
    run_dir, receiver = supervisor
    process = start(config_for(run_dir), "serve", started)
    reports(receiver, Ready)
    process.terminate()
    assert process.wait(WAIT_SECONDS) == 0


def test_ctrl_c_of_the_terminal_is_left_to_the_supervisor(
    supervisor: tuple[Path, Receiver], started: list[subprocess.Popen[bytes]]
) -> None:
    run_dir, receiver = supervisor
    process = start(config_for(run_dir), "serve", started)
    reports(receiver, Ready)
    process.send_signal(signal.SIGINT)
    process.terminate()
    assert process.wait(WAIT_SECONDS) == 0


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("raise", "ValueError: the weights are upside down"), ("refuse", "cannot load /no/such/model")],
)
def test_an_exception_is_reported_as_fatal_and_ends_the_sidecar_with_status_1(
    behaviour: str, message: str, supervisor: tuple[Path, Receiver], started: list[subprocess.Popen[bytes]]
) -> None:
    run_dir, receiver = supervisor
    process = start(config_for(run_dir), behaviour, started)
    assert reports(receiver, Fatal)[-1] == Fatal("gpu_runner", 2, message)
    assert process.wait(WAIT_SECONDS) == 1


def test_a_fault_of_a_process_that_has_texts_is_told_by_its_place_and_kind(
    supervisor: tuple[Path, Receiver], started: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    run_dir, receiver = supervisor
    with (tmp_path / "log").open("w+b") as log:
        process = start(config_for(run_dir, "tokenizer_proc"), "raise of a tokenizer", started, stderr=log)
        fatal = reports(receiver, Fatal)[-1]
        assert process.wait(WAIT_SECONDS) == 1
        log.seek(0)
        said = log.read().decode()
    assert isinstance(fatal, Fatal)
    assert re.fullmatch(rf"ValueError in {re.escape(str(CHILD))}:\d+", fatal.message)
    assert said.count("in serve") == 2
    assert re.search(r"(?s)\nValueError\nwhich came of\n.*\nKeyError\n", said)
    assert "zanzibar" not in re.sub(r"(?m)^ +raise .*$", "", said)  # but for the lines of code


def test_a_signal_to_a_sidecar_that_is_already_leaving_changes_nothing(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    errors = tmp_path / "stderr"
    with errors.open("wb") as stderr:
        process = start(config_for(tmp_path), "refuse and be stopped while leaving", started, stderr=stderr)
        assert process.wait(WAIT_SECONDS) == 1
    assert errors.read_text() == ""


def test_a_fatal_sidecar_ends_even_if_no_supervisor_listens(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    assert start(config_for(tmp_path), "raise", started).wait(WAIT_SECONDS) == 1


def test_a_sidecar_refuses_the_configuration_of_another_role(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    assert start(config_for(tmp_path, "tokenizer_proc"), "serve", started).wait(WAIT_SECONDS) == 1


@pytest.mark.parametrize("role", ["gpu_runner", "tokenizer_proc"])
def test_a_sidecar_of_another_version_than_its_parent_says_so_in_a_form_that_all_versions_read(
    role: str, supervisor: tuple[Path, Receiver], started: list[subprocess.Popen[bytes]]
) -> None:
    run_dir, receiver = supervisor
    process = start(
        LaterConfig(run_dir=str(run_dir)), "serve" if role == "gpu_runner" else "raise of a tokenizer", started
    )
    assert receiver.wait(WAIT_SECONDS * 1000)
    assert msgspec.msgpack.decode(receiver.socket.recv()) == [
        43,
        role,
        2,
        f"{role} is of asyncengine {__version__}, but was started by 99.0: what was running when asyncengine was "
        "upgraded must be started again",
        5,
    ]
    assert process.wait(WAIT_SECONDS) == 1
    assert list(receiver.drain()) == []


def test_what_other_versions_read_of_a_configuration_is_in_it(tmp_path: Path) -> None:
    fields = msgspec.to_builtins(config_for(tmp_path))
    assert {name: fields[name] for name in Origin.__struct_fields__} == {
        "run_dir": str(tmp_path),
        "index": 2,
        "life": 0,
        "version": __version__,
    }
    fields = msgspec.to_builtins(GrammarConfig(model_path="", run_dir=str(tmp_path), eos_ids=(0,), life=4))
    assert msgspec.convert(fields, Origin) == Origin(str(tmp_path), life=4, version=__version__)
    del fields["version"]  # as it was before there was any
    assert msgspec.convert(fields, Origin).version == "an earlier version"
