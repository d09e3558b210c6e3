"""Interrupts work of the main thread that takes too long."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

REPEAT_SECONDS = 0.05


class DeadlineExceeded(Exception):
    """The guarded block was still running when its time was over."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `DeadlineExceeded` in the block after `seconds`. Main thread only; another user's alarm is put back.

    The alarm repeats, because Python drops an exception that is raised while a finalizer happens to run. The inner
    `finally` may itself be hit by the alarm it turns off, which is why there is an outer one.
    """
    previous_handler = signal.signal(signal.SIGALRM, _expire)
    previous_delay, _ = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_SECONDS)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, previous_delay)
        signal.signal(signal.SIGALRM, previous_handler)


def _expire(_signal: int, _frame: object) -> NoReturn:
    raise DeadlineExceeded
