"""Which of gpu_runner's ends are its own fault, and which request is to blame for one.

    crash 1    requests A to Z had rows: all go on in the successor, at once
    crash 2    A to Z had rows again; A to K came no further meanwhile, or just as far as before: these are suspects
    then       A runs, alone | passes and waits | B runs, ... | crash 3: B is to blame for all three, and suspicion of
               the others ends

Whatever ends gpu_runner from outside (SIGKILL, SIGTERM, the out-of-memory killer, the watchdog) casts no suspicion. Who
is a suspect is decided where the requests are (`open_requests`), how trials run in gpu_runner (`trials`, which says why
nobody is blamed for what another one does).
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from asyncengine.child import Child
from asyncengine.wire.answers import Crash
from asyncengine.wire.row_notes import LastRows, RowNotesReader
from asyncengine.wire.sidecar import PARENT_GONE_EXIT_CODE

FAULTS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGABRT,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)
"""With these the kernel or the process itself ends what does the impossible."""


class Crashes:
    """latest: the last crash of a gpu_runner that served. num_convicted: requests that were found to be to blame;
    num_in_a_row: those of them since a request had last ended as it should."""

    def __init__(self) -> None:
        self.latest: Crash | None = None
        self.num_convicted = 0
        self.num_in_a_row = 0
        self._notes: RowNotesReader | None = None

    def serves(self, run_dir: Path) -> None:
        """A gpu_runner is ready: what it notes from now on is there when it is gone."""
        self.forget()
        with contextlib.suppress(OSError):  # it has ended meanwhile, or a stand-in makes no notes
            self._notes = RowNotesReader(run_dir)

    def judge(self, child: Child, code: int) -> Crash | None:
        """gpu_runner has ended, with that returncode: None unless it served and it is its own fault."""
        last = LastRows() if self._notes is None else self._notes.read()
        self.forget()
        if child.ready is None:
            return None
        if child.gauges.get("finished"):
            self.num_in_a_row = 0
        if child.hung or not _is_own_fault(code):
            return None
        self.latest = Crash(child.life + 1, last.rids, last.on_trial)
        self.num_convicted += bool(last.on_trial)
        self.num_in_a_row += bool(last.on_trial)
        return self.latest

    def forget(self) -> None:
        """Close the notes."""
        if self._notes is not None:
            self._notes.close()
            self._notes = None


def _is_own_fault(code: int) -> bool:
    return -code in FAULTS if code < 0 else code not in (0, PARENT_GONE_EXIT_CODE)
