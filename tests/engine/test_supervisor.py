"""The sidecars' start, watch and end, with the scripted runner and idle sidecars as children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from support.poisoned_runner import STEP_SECONDS
from support.python_path import PYTHON_PATH

from asyncengine import supervisor as supervisor_module
from asyncengine import watchdog
from asyncengine.child import Child, describe_exit, sidecar_environment
from asyncengine.config import EngineConfig, Role, SidecarConfig
from asyncengine.engine_info import Health
from asyncengine.errors import StartupError
from asyncengine.model_files import ResolvedModel
from asyncengine.run_dir import RunDir
from asyncengine.supervisor import Supervisor

MODULES: dict[Role, str] = {
    "gpu_runner": "support.scripted_runner",
    "tokenizer_proc": "support.idle_tokenizer",
    "detokenizer_proc": "support.idle_detokenizer",
}


@pytest.fixture(autouse=True)
def run_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[Path]]]:
    """Lists the run directories there are; the test must leave none."""
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    parent = Path(tempfile.mkdtemp(prefix="runs-"))
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    yield lambda: [*parent.iterdir()]
    assert [*parent.iterdir()] == []
    parent.rmdir()


class Heard:
    """Collects what a supervisor reports."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.phases: list[tuple[str, int, str]] = []
        self.updates: list[tuple[str, int, int]] = []
        self.ready_roles: list[str] = []
        self.seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        self.whole: dict[tuple[str, int], float] = {}

    def update(self, role: str, index: int, phase: str, done: int, total: int) -> None:
        self.updates.append((phase, done, total))

    def phase_done(self, role: str, index: int, phase: str, seconds: float) -> None:
        assert seconds >= 0
        self.phases.append((role, index, phase))
        self.seconds[role, index].append(seconds)

    def ready(self, role: str, index: int, seconds: float) -> None:
        self.ready_roles.append(role)
        self.whole[role, index] = seconds


def make(heard: Heard, config: EngineConfig | None = None, *, modules: Mapping[Role, str] = MODULES) -> Supervisor:
    return Supervisor(config or EngineConfig(), on_failure=heard.failures.append, progress=heard, modules=modules)


@asynccontextmanager
async def started(
    heard: Heard, config: EngineConfig | None = None, *, modules: Mapping[Role, str] = MODULES
) -> AsyncIterator[Supervisor]:
    supervisor = make(heard, config, modules=modules)
    try:
        await supervisor.launch(await supervisor.prepare())
        yield supervisor
    finally:
        await supervisor.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends between opening and reading
        return False


def is_in_health(supervisor: Supervisor, health: Health) -> bool:
    return supervisor.health() == health


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_all_sidecars_become_ready_and_close_leaves_nothing() -> None:
    heard = Heard()
    async with started(heard, EngineConfig(tokenizer_workers=2)) as supervisor:
        assert sorted(heard.ready_roles) == ["detokenizer_proc", "gpu_runner", "tokenizer_proc", "tokenizer_proc"]
        assert supervisor.engine_info(ResolvedModel(Path("model"), "model")).architecture == "scripted"
        assert ("gpu_runner", 0, "loading weights") in heard.phases
        assert ("tokenizer_proc", 1, "start process") in heard.phases
        assert ("loading weights", 50, 100) in heard.updates
        del heard.seconds["engine", 0]  # the search for the model, before there are processes
        assert {place: sum(parts) for place, parts in heard.seconds.items()} == pytest.approx(heard.whole)
        await until(lambda: supervisor.gauges("gpu_runner") != {})
        assert supervisor.gauges("gpu_runner")["total_pages"] == 1024
        await until(lambda: supervisor.stalled() == [])
        pids = supervisor.pids()
        assert [*pids] == ["gpu_runner", "tokenizer_proc 0", "tokenizer_proc 1", "detokenizer_proc"]
    assert not any(is_running(pid) for pid in pids.values())
    assert heard.failures == []
    await supervisor.close()


async def test_gpu_runner_takes_its_first_steps_before_it_is_ready() -> None:
    heard = Heard()
    async with started(heard, modules={**MODULES, "gpu_runner": "support.poisoned_runner"}):
        phases = [phase for role, _, phase in heard.phases if role == "gpu_runner"]
        assert phases == ["start process", "importing torch", "warming up"]
        # a prompt, and the two tokens behind the first; on this device a step sleeps
        assert heard.seconds["gpu_runner", 0][2] >= 3 * STEP_SECONDS


async def test_a_missing_model_fails_before_anything_is_made(run_dirs: Callable[[], list[Path]]) -> None:
    supervisor = make(Heard(), EngineConfig(model="/nowhere/model.gguf"))
    with pytest.raises(StartupError, match=r"there is no model file or folder at /nowhere/model\.gguf"):
        await supervisor.prepare()
    assert run_dirs() == []
    await supervisor.close()


async def test_a_sidecar_that_refuses_to_start_ends_the_start_with_its_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ASYNCENGINE_SCRIPT", '{"refuse_start": "the model needs 9 GB and 3 GB are free"}')
    supervisor = make(Heard())
    model = await supervisor.prepare()
    with pytest.raises(StartupError, match=r"^the model needs 9 GB and 3 GB are free$"):
        await supervisor.launch(model)
    pids = supervisor.pids()
    await supervisor.close()
    assert not any(is_running(pid) for pid in pids.values())


async def test_a_sidecar_that_dies_without_a_word_is_named() -> None:
    supervisor = make(Heard(), modules={**MODULES, "tokenizer_proc": "support.no_such_module"})
    model = await supervisor.prepare()
    with pytest.raises(StartupError, match=r"^tokenizer_proc exited with code 1$"):
        await supervisor.launch(model)
    await supervisor.close()


async def test_a_cancelled_start_leaves_nothing() -> None:
    heard = Heard()
    supervisor = make(heard)
    launching = asyncio.create_task(supervisor.launch(await supervisor.prepare()))
    await until(lambda: len(supervisor.pids()) == 3)
    pids = supervisor.pids()
    launching.cancel()
    await supervisor.close()
    assert not any(is_running(pid) for pid in pids.values())
    assert (await asyncio.gather(launching, return_exceptions=True))[0].__class__ is asyncio.CancelledError
    assert heard.failures == []


async def test_closing_a_start_from_another_task_ends_it() -> None:
    supervisor = make(Heard())
    launching = asyncio.create_task(supervisor.launch(await supervisor.prepare()))
    await until(lambda: len(supervisor.pids()) == 3)
    await supervisor.close()
    with pytest.raises(StartupError, match="closed while it started"):
        await launching


async def test_a_sidecar_that_is_deaf_to_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCENGINE_STUBBORN", "1")
    monkeypatch.setattr(supervisor_module, "STOP_SECONDS", 0.2)
    async with started(Heard()) as supervisor:
        pids = supervisor.pids()
    assert not any(is_running(pid) for pid in pids.values())


async def test_closing_goes_on_to_the_end_though_its_caller_is_cancelled() -> None:
    async with started(Heard()) as supervisor:
        pids = supervisor.pids()
        closing = asyncio.create_task(supervisor.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not any(is_running(pid) for pid in pids.values())


async def test_a_frozen_sidecar_is_named_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 0.8)
    async with started(Heard()) as supervisor:
        for name, pid in supervisor.pids().items():
            os.kill(pid, signal.SIGSTOP)
            try:
                # on a busy machine others may be silent for as long, too
                stalled = Health(state="stalled", detail=f"no sign of life from {name}")
                await until(partial(is_in_health, supervisor, stalled))
                assert name in supervisor.stalled()
            finally:
                os.kill(pid, signal.SIGCONT)
            await until(lambda: supervisor.stalled() == [])
        await until(lambda: supervisor.health() == Health(state="ready"))


@pytest.mark.parametrize(
    ("moment", "runner"),
    [
        ("spawned", "support.idle_runner"),
        ("ready", "support.scripted_runner"),
        ("ready", "support.grammar_runner"),
    ],
)
def test_children_of_a_killed_parent_are_gone_and_the_next_engine_removes_its_run_directory(
    moment: str, runner: str, monkeypatch: pytest.MonkeyPatch, run_dirs: Callable[[], list[Path]]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tempfile.tempdir))
    command = [sys.executable, "-m", "support.dying_parent", moment, runner]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3
    if runner == "support.grammar_runner":
        pids += [int(pid) for pid in Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split()]
        assert len(pids) == 4
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_running(pid) for pid in pids)
    (left,) = run_dirs()
    RunDir().remove()
    assert not left.exists()


def test_a_sidecar_gets_no_secrets_and_few_threads() -> None:
    environ = {"PATH": "/bin", "HF_TOKEN": "secret", "API_KEY": "secret", "CUDA_VISIBLE_DEVICES": "1", "LC_ALL": "C"}
    assert sidecar_environment(environ, EngineConfig(), "detokenizer_proc") == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "LC_ALL": "C",
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    collector = {"OTEL_EXPORTER_OTLP_HEADERS": "key=secret"}
    assert collector.items() <= sidecar_environment(environ | collector, EngineConfig(), "api_worker").items()
    assert not collector.keys() & sidecar_environment(environ | collector, EngineConfig(), "gpu_runner").keys()
    cores = str(len(os.sched_getaffinity(0)))
    passive = {"OMP_WAIT_POLICY": "PASSIVE"}
    on_cpu, on_gpu = EngineConfig(device="cpu"), EngineConfig(device="cuda")
    assert sidecar_environment({}, on_cpu, "gpu_runner") == {"OMP_NUM_THREADS": cores} | passive
    assert sidecar_environment({}, on_gpu, "gpu_runner") == {"OMP_NUM_THREADS": "1"} | passive
    assert sidecar_environment({"OMP_NUM_THREADS": "3"}, on_cpu, "gpu_runner") == {"OMP_NUM_THREADS": "3"} | passive


@pytest.mark.parametrize(("reads", "code"), [(True, 7), (False, 0)])
async def test_a_configuration_that_no_pipe_holds_is_handed_over_as_the_child_reads_it(reads: bool, code: int) -> None:
    model_path = "m" * 3_000_000
    config = SidecarConfig(engine=EngineConfig(), role="gpu_runner", index=0, model_path=model_path, run_dir="")
    program = "import sys; sys.stdin.buffer.read(1)"
    if reads:
        program = (
            "from asyncengine.config import SidecarConfig; from asyncengine.wire.sidecar import read_config\n"
            f"raise SystemExit(7 * (read_config(SidecarConfig, 'it').model_path == 'm' * {len(model_path)}))"
        )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    child = Child("gpu_runner", 0, 1, 0, process, os.pidfd_open(process.pid), 0.0, 0.0, 0.0)
    async with asyncio.timeout(60):
        await child.configure(config)
        assert await child.wait() == code
    child.release()


def test_an_exit_is_described_for_a_person() -> None:
    assert describe_exit(17) == "exited with code 17"
    assert describe_exit(-9) == "was killed by SIGKILL"
