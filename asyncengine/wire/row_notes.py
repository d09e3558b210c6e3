"""What gpu_runner's end leaves behind of its requests: memory that it writes and its supervisor has open.

words   0 first rid on trial   1 how many rids that is; 0 = nothing is on trial   2 .. rid of each slot's latest row
"""

from __future__ import annotations

import mmap
from array import array
from pathlib import Path
from typing import NamedTuple

from asyncengine.wire.shared_memory import make_memory, publish

NAME = "gpu_runner.rows"
_TRIAL_WORDS = 2
NOBODY = -1
"""In the place of a rid: the slot has had no row."""


class RowNotes:
    """gpu_runner's side. trial: the first two words; rids: the others, to be written as a row starts. Goes with its
    process. Raises OSError where it cannot be made."""

    def __init__(self, run_dir: str | Path, *, num_slots: int) -> None:
        path = Path(run_dir) / NAME
        self._fd, memory = make_memory(path, 8 * (_TRIAL_WORDS + num_slots))
        cells = memoryview(memory).cast("q")
        self.trial: memoryview[int] = cells[:_TRIAL_WORDS]
        self.rids: memoryview[int] = cells[_TRIAL_WORDS:]
        for slot in range(num_slots):
            self.rids[slot] = NOBODY
        publish(self._fd, path)


class LastRows(NamedTuple):
    """rids: int64 array, those that had rows, and some whose rows had ended. on_trial: those of the request that was on
    trial and had a row."""

    rids: bytes = b""
    on_trial: tuple[int, ...] = ()


class RowNotesReader:
    """Keeps the notes of the gpu_runner that is there now, also when that is gone. Raises OSError where there are
    none."""

    def __init__(self, run_dir: Path) -> None:
        with (run_dir / NAME).open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self) -> LastRows:
        with memoryview(self._memory) as view, view.cast("q") as cells:
            first, count, *rids = cells.tolist()
        had = set(rids) - {NOBODY}
        on_trial = range(first, first + count)
        return LastRows(array("q", sorted(had)).tobytes(), tuple(on_trial) if had.intersection(on_trial) else ())

    def close(self) -> None:
        self._memory.close()
