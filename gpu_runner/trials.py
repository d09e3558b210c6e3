"""Requests that may be what crashes this process run one at a time, so that a crash tells which one it is.

    held      B C n1   A C n1 n2      A B n1 n2     all
    on trial  A        B              C
    runs      A        B              C             A B C n1 n2
              ^ noted  ^ A has come far enough and waits again: B is noted

Invariant: while a request is noted, it is alone in each step in flight, and no message is being taken in. So nobody is
blamed for a step of somebody else's, however late that one crashes: all others wait meanwhile, suspects or not, those
that have passed and what ran before the first trial, and a trial begins when the last step of these is done. Wrongly
blamed is only who is alone at a crash that is nobody's: of a broken device, by memory that another one's steps had
damaged, by a fault's signal from outside; or at one of the code that hears whether another one's structure compiles.

A request has passed when each of its choices has come as far as its front end wants (`Resume.trial_tokens`), or ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import get_args

from asyncengine.config import ServiceClass
from asyncengine.wire.requests import Generate
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
        self.busy = False

    def take(self, message: Generate) -> bool:
        """Whether it is held, and will be started in its time."""
        suspect = _trial_tokens(message) > 0
        if not suspect and not self.busy:
            return False
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

    def hush(self) -> None:
        """Until `go_on` a crash is not the doing of what is on trial: messages are taken in."""
        self._note[1] = 0

    def go_on(self) -> None:
        """End a trial that was passed, and begin the next one, or let all go on that were held."""
        if self._on_trial is not None:
            if any(self._is_tried(rid, _trial_tokens(self._on_trial)) for rid in self._on_trial.rids):
                self._note[1] = len(self._on_trial.rids)
                return
            self._note[1] = 0
            self._on_trial = None
        while self._suspects:
            if not self._scheduler.set_aside():
                return
            if not self._scheduler.slots.num_free:  # what is set aside has them all: a trial would not begin
                break
            message = self._suspects.popleft()
            if not self._aborted.issuperset(message.rids):
                self._note[0], self._note[1] = message.rid, len(message.rids)  # the latter makes it count
                self._on_trial = message
                self._begin(message)
                return
        self._scheduler.queue.release()
        for held in (self._suspects, self._others):
            while held:
                self._begin(held.popleft())
        self._aborted.clear()
        self._waiting.clear()
        self._backlogs = dict(NOTHING_HELD)
        self.busy = False

    def _is_tried(self, rid: int, tokens: int) -> bool:
        """Whether it is here and has not come so many tokens further."""
        had = self._scheduler.new_tokens(rid)
        return had is not None and had < tokens

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


def _trial_tokens(message: Generate) -> int:
    return max((part.trial_tokens for part in message.resume), default=0)
