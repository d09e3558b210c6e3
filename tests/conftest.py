"""What holds for every test: no network, few threads, the same random examples each time, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.processes import children_of
from hypothesis import settings
from support.triton_interpreter import use_interpreter

# Set before any test imports torch or a hub client, and inherited by the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"
# Hundreds of processes import this project: only the first of them should have to compile it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min(2, len(os.sched_getaffinity(0)) // _WORKERS))))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Ignored where a shell without a terminal runs the tests in the background; tests that interrupt a process need it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not Path("/dev/nvidiactl").exists():
    use_interpreter()

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
settings.load_profile("deterministic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is none; torch is imported only if there is such a test to decide on."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Give the session, which is one worker's where several run, a temporary directory of its own; after the last test
    it holds no run directory, and no process that a test started still runs. Its name is short, for it is part of the
    names of sockets, which have a limit."""
    temporary = Path(tempfile.mkdtemp(prefix="ae-"))
    previous, previous_environ = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
    yield
    tempfile.tempdir = previous
    if previous_environ is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = previous_environ

    deadline = time.monotonic() + 60
    while (children := running_children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children, f"tests left processes running: {children}"
    run_dirs = sorted(path.name for path in temporary.glob("asyncengine-*"))
    shutil.rmtree(temporary, ignore_errors=True)
    assert not run_dirs, f"tests left run directories: {run_dirs}"


def running_children() -> list[str]:
    """Command lines of this process's children that have not ended; empty where there is no /proc."""
    found = []
    for pid in children_of(os.getpid()):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # An ended child that was not waited for has no command line; the tracker of shared memory ends with us.
        if command and "multiprocessing.resource_tracker" not in command:
            found.append(command)
    return found
