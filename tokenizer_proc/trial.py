"""Work on input that may bring down the process that does it.

A tokenizer is native code run on a stranger's text by a stranger's tables: it may crash, or take time without end, and
nothing within its process can stop it. The kernel ends a process whose turn has used too much processor time. Whatever
was in that process is sent again, and must not end its successor:

    process 0    turn: 1 2 P 3, killed       process 1    turn: 1 2 P 3 are marked as sent again
                                               copies of it    1 2 P 3: killed   1: well  2: well  P: killed  3: well
                                               it itself       1 2 3; P is refused
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from asyncengine.wire.sidecar import CPU_LIMIT_SIGNAL, HEARTBEAT_SECONDS, arm_life_line

Item = TypeVar("Item")

TURN_CPU_SECONDS = 15.0
"""Of all threads together. The slowest real text known, 4 MB of spaces, takes 5."""
TRIAL_SECONDS = 45.0
"""By the clock, for what waits instead of computing."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """The kernel ends this process if the block takes it more processor time than that."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def dangerous(items: Sequence[Item], work: Callable[[Sequence[Item]], object], alive: Callable[[], None]) -> list[Item]:
    """Those of `items` that bring down a process that does `work` on them. alive: called now and then meanwhile."""
    if not items or _survives(lambda: work(items), alive):
        return []
    return [item for item in items if not _survives(lambda item=item: work([item]), alive)]  # type: ignore[misc]


def _survives(work: Callable[[], object], alive: Callable[[], None]) -> bool:
    """Whether a copy of this process gets to the end of `work`, within `TURN_CPU_SECONDS`; its result is lost. It must
    touch no pipe: the copy has none of the threads that move messages."""
    pid = os.fork()
    if not pid:
        _try(work)
    ended = os.pidfd_open(pid)
    poller = select.poll()
    poller.register(ended, select.POLLIN)
    while not poller.poll(HEARTBEAT_SECONDS * 1000):
        alive()
    os.close(ended)
    _, status = os.waitpid(pid, 0)
    return status == 0


def _try(work: Callable[[], object]) -> None:
    try:
        for number in (CPU_LIMIT_SIGNAL, signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        arm_life_line()
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library's threads are not copied
        signal.setitimer(signal.ITIMER_REAL, TRIAL_SECONDS)
        with cpu_limit(TURN_CPU_SECONDS):
            work()
        os._exit(0)
    finally:
        os._exit(1)
