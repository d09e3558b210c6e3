"""An engine's run directory, marked as in use for as long as its process lives.

A process that is killed leaves its directory behind. The kernel gives up the lock it held, and the next engine of the
same user removes what it finds unlocked. A directory without the marked file is not one of these and never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from asyncengine.wire.pipes import RUN_DIR_PREFIX, make_run_dir

OWNER_FILE = "owner"


class RunDir:
    """A fresh run directory at `path`; raises OSError. `remove` deletes it. Removes those of killed engines first."""

    def __init__(self) -> None:
        remove_stale(Path(tempfile.gettempdir()))
        self.path = make_run_dir()
        self._lock = _mark(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_stale(parent: Path) -> None:
    """Delete the run directories in `parent` whose owners, of this user, are gone."""
    for path in parent.glob(f"{RUN_DIR_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.geteuid():
                continue
            lock = os.open(path / OWNER_FILE, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def in_use(parent: Path) -> list[Path]:
    """The run directories in `parent` of this user's living engines, the newest first."""
    found = []
    for path in parent.glob(f"{RUN_DIR_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and _is_locked(path / OWNER_FILE):
                found.append((status.st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _is_locked(path: Path) -> bool:
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _mark(path: Path) -> int | None:
    """The lock's descriptor; None where the file system has no locks, which leaves the directory unmarked."""
    draft = path / f"{OWNER_FILE}.new"
    lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        draft.unlink()
        return None
    # it gets its name only now: under it, nobody may ever find it unlocked while its owner lives
    draft.rename(path / OWNER_FILE)
    return lock
