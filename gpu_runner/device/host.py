"""What this process may use of the machine, containers' limits included."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """CPU cores this process may run on; a container's quota of CPU time counts as that many cores, at least one."""
    cores = len(os.sched_getaffinity(0))
    quota, period = (_words(cgroup / "cpu.max") or ["max", "100000"])[:2]
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def available_memory_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Memory the kernel can give without swapping, at most what a container's limit leaves. What files are cached in
    can be given: a model's that was just read are many."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, current = _words(cgroup / "memory.max"), _words(cgroup / "memory.current")
    if limit and current and limit[0] != "max":
        stat = _words(cgroup / "memory.stat")
        kinds = dict(zip(stat[::2], map(int, stat[1::2]), strict=True))
        cached = kinds.get("active_file", 0) + kinds.get("inactive_file", 0)
        available = min(available, max(0, int(limit[0]) - int(current[0]) + cached))
    return available


def _words(path: Path) -> list[str]:
    """The file's words; none where this machine or its cgroup version has no such file."""
    return path.read_text().split() if path.is_file() else []
