"""Where compiled kernels are kept from one start to the next: Triton's own cache, if it can be written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from triton import knobs


def use_writable_cache() -> Path:
    """Have Triton keep kernels in a folder that this process can write, and return it: the one it is configured to
    (TRITON_CACHE_DIR, ~/.triton/cache), or where that is read-only or there is no home, one of this user's in the
    temporary directory. Where somebody else may have written to that, it is not used: what is in a cache is run.
    """
    configured = Path(knobs.cache.dir)
    if _can_write(configured):
        return configured
    chosen = Path(tempfile.gettempdir()) / f"asyncengine-kernels-{os.geteuid()}"
    if not (_can_write(chosen) and _is_private(chosen)):
        chosen = Path(tempfile.mkdtemp(prefix="asyncengine-kernels-"))
    knobs.cache.dir = str(chosen)
    return chosen


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022 and not folder.is_symlink()
