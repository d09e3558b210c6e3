"""The processes of a server on this machine, and the memory of its GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:  # it has ended
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def runs(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def gpu_runner(server: int) -> int | None:
    for pid in descendants(server):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"-m" in words and words[words.index(b"-m") + 1] == b"gpu_runner":
            return pid
    return None


def gpu_mib() -> int | None:
    """In use of the first GPU; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
    return int(answer.stdout.split()[0]) if answer.returncode == 0 else None
