"""Requests that may be what crashes this process run one at a time, so that a crash tells which one it is.

    held      B C n1   C n1 n2        n1 n2         all
    on trial  A        B              C
    runs      A        A B            A B C         A B C n1 n2
              ^ noted  ^ A has come far enough: B is noted

One that has come `PROVEN_TOKENS` further than it was, or has ended, is not the one. All others wait meanwhile, suspects
or not: what crashes for the first time must not do so beside a request that would be blamed for it. For the same reason
a trial begins only when whatever started before it has come as far; what came before it and has not started waits, too,
or the trial, and all that comes behind it, would wait for the whole queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import get_args

from asyncengine.config import ServiceClass
from asyncengine.wire.requests import PROVEN_TOKENS, Generate
from gpu_runner.schedule.limits import Backlog
from gpu_runner.schedule.scheduler import Scheduler

NOTHING_HELD: Mapping[ServiceClass, Backlog] = {name: Backlog(0, 0) for name in get_args(ServiceClass)}


class Trials:
    """`busy`: something is on trial or held, and `go_on` is to be called each turn."""

    def __init__(
        self, scheduler: Scheduler, *, note: list[int] | memoryview[int], start: Callable[[Generate], None]
    ) -> None:
        """note: the first rid on trial, and how many there are. start: has the scheduler queue a request."""
        self._scheduler = scheduler
        self._note = note
        self._start = start
        self._suspects: deque[Generate] = deque()
        self._others: deque[Generate] = deque()
        self._waiting: dict[int, Generate] = {}  # by rid, choices of `_others` that somebody waits for
        self._backlogs = dict(NOTHING_HELD)
        self._on_trial: Generate | None = None
        self._aborted: set[int] = set()
        self._settles_at = 0  # the step with which all that had started by then have come far enough
        self._left_with = 0  # the last step that may hold a row whose trial has ended
        self.busy = False

    def take(self, message: Generate) -> bool:
        """Whether it is held, and will be started in its time."""
        suspect = any(part.suspect for part in message.resume)
        if not suspect and not self.busy:
            return False
        if not self.busy:
            self._settles_at = self._scheduler.num_steps + PROVEN_TOKENS
            self._scheduler.queue.withhold()
        self.busy = True
        if suspect:
            self._suspects.append(message)
        else:
            self._others.append(message)
            for rid in message.rids:
                if rid not in self._aborted and rid not in self._waiting:
                    self._waiting[rid] = message
                    self._count(message, 1)
        return True

    def abort(self, rid: int) -> None:
        """Nobody waits for this choice any more."""
        if self.busy:
            self._aborted.add(rid)
            message = self._waiting.pop(rid, None)
            if message is not None:
                self._count(message, -1)

    def num_suspects(self, service_class: ServiceClass) -> int:
        """Choices of that class that wait for their trial."""
        own_class = (message for message in self._suspects if message.terms.service_class == service_class)
        return sum(rid not in self._aborted for message in own_class for rid in message.rids)

    def held_rids(self) -> set[int]:
        return {rid for message in (*self._suspects, *self._others) for rid in message.rids}

    def held(self, service_class: ServiceClass) -> Backlog:
        """What of that class waits here and is no suspect. Asked for each request that comes, however many are held."""
        return self._backlogs[service_class]

    def go_on(self) -> None:
        """End a trial that was passed, and begin the next one, or let all go on that were held."""
        if self._scheduler.starting:
            self._settles_at = self._scheduler.num_steps + PROVEN_TOKENS
        if self._on_trial is not None:
            if any(map(self._is_tried, self._on_trial.rids)):
                return
            self._note[1] = 0
            self._on_trial = None
            self._left_with = self._scheduler.num_steps
        while self._suspects:
            if not self._is_settled():
                return
            message = self._suspects.popleft()
            if not self._aborted.issuperset(message.rids):
                self._note[0] = message.rid
                self._note[1] = len(message.rids)  # last: it makes the note count
                self._on_trial = message
                self._begin(message)
                return
        self._scheduler.queue.release()
        while self._others:
            self._begin(self._others.popleft())
        self._aborted.clear()
        self._waiting.clear()
        self._backlogs = dict(NOTHING_HELD)
        self.busy = False

    def _is_tried(self, rid: int) -> bool:
        """Whether it is here and has not come far enough."""
        tokens = self._scheduler.new_tokens(rid)
        return tokens is not None and tokens < PROVEN_TOKENS

    def _is_settled(self) -> bool:
        scheduler = self._scheduler
        if scheduler.starting or scheduler.num_steps_done < self._left_with:
            return False
        return not scheduler.num_running or scheduler.num_steps >= self._settles_at

    def _begin(self, message: Generate) -> None:
        aborted = self._aborted.intersection(message.rids)
        if len(aborted) == len(message.rids):
            return
        self._start(message)
        for rid in aborted:
            self._scheduler.abort(rid)

    def _count(self, message: Generate, choices: int) -> None:
        held = self._backlogs[message.terms.service_class]
        tokens = choices * (len(message.ids) // 4)
        self._backlogs[message.terms.service_class] = Backlog(held.requests + choices, held.tokens + tokens)
