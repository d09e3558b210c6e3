"""Memory that other processes of the same user find at a path.

It is no file on a disk (memfd; the path is a link to it): the pages of such a file are written back now and then, and
whoever writes to one meanwhile waits for the disk. It is gone with its process, but for those that have it open.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path


def make_memory(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """`size` bytes of zeros, every page of them there, to be found at `path` once `publish`ed. The descriptor must stay
    open for as long as somebody is to find them. What was at `path` is gone; whoever has that open keeps it."""
    path.unlink(missing_ok=True)
    fd = os.memfd_create(path.name)
    os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    memory[:] = bytes(size)
    return fd, memory


def publish(fd: int, path: Path) -> None:
    """Last, so that whoever finds it finds it whole."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
    draft.replace(path)
