"""Finds out, before a request is queued, whether its structure can be used at all, in a process that may be killed.

What a client sends may take a compiler for ever, or bring it down. So it is tried where only those wait who wait for
the same: one structure at a time, each within a deadline. Verdicts are remembered.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable

from asyncengine.errors import EngineError, InvalidRequestError
from asyncengine.sampling import Structured
from asyncengine.wire.grammar_messages import CheckGrammar, FromGrammar, GrammarChecked
from asyncengine.wire.requests import Generate
from gpu_runner.grammar.process import START_SECONDS, GrammarProcess

CHECK_SECONDS = 2.0
"""CPU time that a check may take. On a busy machine it may last `PATIENCE` times as long."""
PATIENCE = 10
_AGAIN_SECONDS = 0.05
KNOWN_VERDICTS = 256

Settled = tuple[Generate, EngineError | None]
"""A request, and why it cannot run."""


class GrammarChecker:
    """Requests go in by `submit` and come out by `take_settled`."""

    def __init__(
        self,
        start: Callable[[], GrammarProcess],
        *,
        check_seconds: float = CHECK_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """start: makes a process for checks; called when there is something to check and no process."""
        self._start = start
        self._check_seconds = check_seconds
        self._clock = clock
        self._process: GrammarProcess | None = None
        self._verdicts: OrderedDict[Structured, str] = OrderedDict()
        self._waiting: dict[Structured, list[Generate]] = {}
        self._queue: deque[Structured] = deque()
        self._current: Structured | None = None  # the head of the queue, once it was sent
        self._came_up = False
        self._number = 0
        self._deadline = 0.0
        self._last_deadline = 0.0
        self._cpu_before = 0.0  # of the process, when the check began
        self._settled: list[Settled] = []

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do."""
        return bool(self._waiting)

    def submit(self, message: Generate) -> None:
        structured = message.params.structured
        assert structured is not None
        verdict = self._verdicts.get(structured)
        if verdict is not None:
            self._verdicts.move_to_end(structured)
            self._settled.append((message, _refusal(verdict)))
        elif structured in self._waiting:
            self._waiting[structured].append(message)
        else:
            self._waiting[structured] = [message]
            self._queue.append(structured)
            self.poll()

    def take_settled(self) -> list[Settled]:
        """Requests that were judged since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def hear(self, message: FromGrammar) -> None:
        if self._process is None or not self._process.hear(message):
            return
        if isinstance(message, GrammarChecked) and self._current is not None and message.number == self._number:
            self._judge(message.error)
        self.poll()

    def poll(self) -> None:
        """Start, send on, and keep time. Call it often while `busy`."""
        if not self._queue:
            return
        now = self._clock()
        if self._process is None:
            self._process = self._start()
            self._deadline = now + START_SECONDS
        elif now > self._deadline and not (self._process.ready and self._current is None):
            if self._starved(self._process) and now < self._last_deadline:
                self._deadline = now + _AGAIN_SECONDS
            else:
                self._lost(f"takes more than {self._check_seconds:g} s to compile")
        elif not self._process.alive:
            self._lost("is more than can be compiled")
        elif self._process.ready and self._current is None:
            self._came_up = True
            self._number += 1
            self._current = self._queue[0]
            self._deadline = now + self._check_seconds
            self._last_deadline = now + PATIENCE * self._check_seconds
            self._cpu_before = self._process.cpu_seconds
            self._process.send(CheckGrammar(self._number, self._current))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _starved(self, process: GrammarProcess) -> bool:
        """Whether its time is over only because others had the CPU."""
        return (
            self._current is not None and process.alive and process.cpu_seconds - self._cpu_before < self._check_seconds
        )

    def _lost(self, reason: str) -> None:
        """The process is gone. Whose check it was that ended it pays; if it never came up, all that wait do."""
        self.close()
        if self._current is not None:
            self._judge(f"the {self._current.kind} cannot be used: it {reason}")
        while self._queue and not self._came_up:
            self._settle(EngineError("structured output is not available: its process does not start"))
        self._came_up = False

    def _judge(self, error: str) -> None:
        """The verdict on the structure that is being checked."""
        assert self._current is not None
        self._verdicts[self._current] = error
        if len(self._verdicts) > KNOWN_VERDICTS:
            self._verdicts.popitem(last=False)
        self._current = None
        self._settle(_refusal(error))

    def _settle(self, error: EngineError | None) -> None:
        self._settled += [(message, error) for message in self._waiting.pop(self._queue.popleft())]


def _refusal(error: str) -> EngineError | None:
    return InvalidRequestError(error, code="invalid_structure", param="structured_outputs") if error else None
