"""The server's processes as the system shows them: which there are, what each is, and what each holds."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROLE_OF_MODULE = {
    "asyncengine.cli": "server",
    "support.scripted_cli": "server",
    "support.scripted_runner": "gpu_runner",
    "asyncengine.api.worker": "api_worker",
}
"""Other processes are called as their module is."""
SIDECARS = ("tokenizer_proc", "detokenizer_proc", "gpu_runner")
ON_DEMAND = ("gpu_runner.grammar.child",)
"""Roles of processes that gpu_runner starts when it needs them."""
ESTABLISHED = "01"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """One that runs. state: as /proc has it, "T" for a stopped one, "Z" for one that has ended."""

    pid: int
    role: str
    state: str
    fds: int
    rss_bytes: int


def family(root: int) -> list[Process]:
    """Process `root` and all its descendants, parents first; those that end meanwhile may be missing."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop(0)
        process = look_at(pid)
        if process is not None:
            found.append(process)
            waiting += children_of(pid)
    return found


def look_at(pid: int) -> Process | None:
    """None when there is no such process (any more)."""
    at = Path(f"/proc/{pid}")
    try:
        words = (at / "cmdline").read_bytes().decode().split("\0")
        state = (at / "stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            return Process(pid, "ended", state, 0, 0)
        resident = int((at / "statm").read_text().split()[1])
        return Process(pid, _role(words), state, len(os.listdir(at / "fd")), resident * PAGE_BYTES)
    except (FileNotFoundError, ProcessLookupError):
        return None


def clients_of(pid: int, port: int) -> set[int]:
    """The clients' own ports of the connections to `port` of 127.0.0.1 that the process has."""
    held = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                held.add(os.readlink(fd))
    clients = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_, inode = line.split()[:10]
        if int(local.split(":")[1], 16) == port and state == ESTABLISHED and f"socket:[{inode}]" in held:
            clients.add(int(remote.split(":")[1], 16))
    return clients


def count_roles(processes: list[Process]) -> Counter[str]:
    return Counter(process.role for process in processes)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _role(words: list[str]) -> str:
    module = words[words.index("-m") + 1] if "-m" in words else words[0]
    return ROLE_OF_MODULE.get(module, module)


def children_of(pid: int) -> list[int]:
    """Those that any of its threads has started."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += map(int, task.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return children
