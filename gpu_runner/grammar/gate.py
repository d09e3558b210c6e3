"""All that gpu_runner does for structured output; nothing of it runs, and no process is there, until a request asks."""

from __future__ import annotations

import time

import msgspec

from asyncengine.config import GrammarConfig, GrammarJob, ServiceClass
from asyncengine.errors import EngineError
from asyncengine.wire.grammar_messages import FromGrammar
from asyncengine.wire.pipes import Pipes, Receiver, pipe_name
from asyncengine.wire.requests import Generate
from gpu_runner.grammar.checker import GrammarChecker
from gpu_runner.grammar.matches import Matches
from gpu_runner.grammar.process import GrammarProcess
from gpu_runner.schedule.masked_rows import MaskedRows


class GrammarGate:
    """A request's structure is checked before it is queued, in one process; its masks come from another."""

    def __init__(self, *, pipes: Pipes, rows: MaskedRows, config: GrammarConfig) -> None:
        """config: of its processes, but for `job` and `incarnation`."""
        self.receiver: Receiver = pipes.receiver(pipe_name("runner.grammar", config.life), FromGrammar)
        self._pipes = pipes
        self._rows = rows
        self._config = config
        self._started = 0
        self._checker = GrammarChecker(lambda: self._start("check"))
        self._matches = Matches(rows, lambda: self._start("match"), num_slots=config.num_slots)
        # rids of choices that wait for a verdict
        self._parked: dict[ServiceClass, set[int]] = {"interactive": set(), "background": set()}

    @property
    def busy(self) -> bool:
        """Whether time must be kept: `poll` wants to be called now and then."""
        return self._checker.busy or self._matches.busy

    def num_parked(self, service_class: ServiceClass) -> int:
        """Choices of that class that wait for a verdict."""
        return len(self._parked[service_class])

    def parked_rids(self) -> set[int]:
        """Of choices that wait for a verdict."""
        return set().union(*self._parked.values())

    def submit(self, message: Generate) -> None:
        """Have a request checked that asks for a structure; it comes back by `take_settled`."""
        self._matches.prepare()  # so that it loads what it needs meanwhile
        self._parked[message.terms.service_class].update(message.rids)
        self._checker.submit(message)

    def abort(self, rid: int) -> None:
        """Nobody waits for this choice any more."""
        for parked in self._parked.values():
            parked.discard(rid)

    def poll(self) -> None:
        """Take in what the processes said, and keep time."""
        for message in self.receiver.drain():
            self._checker.hear(message)
            self._matches.hear(message)
        self._checker.poll()
        self._matches.poll()

    def take_settled(self) -> list[tuple[Generate, list[int], EngineError | None]]:
        """Requests that were judged since the last call, those of their choices that were aborted meanwhile, and why
        they cannot run."""
        settled = []
        for message, error in self._checker.take_settled():
            parked = self._parked[message.terms.service_class]
            settled.append((message, [rid for rid in message.rids if rid not in parked], error))
            parked.difference_update(message.rids)
        return settled

    def take_failed(self) -> list[tuple[int, int, str]]:
        """Rows that will get no mask: slot, generation and why."""
        return self._matches.take_failed()

    def ask(self) -> None:
        """Pass on which rows want masks."""
        work = self._rows.take_work()
        if work is not None:
            self._matches.ask(work)

    def await_masks(self, seconds: float) -> None:
        """Wait, but not long, for the masks that are on their way."""
        until = time.monotonic() + seconds
        while self._matches.busy and time.monotonic() < until:
            if self.receiver.wait(0):
                self.poll()

    def close(self) -> None:
        self._checker.close()
        self._matches.close()

    def _start(self, job: GrammarJob) -> GrammarProcess:
        self._started += 1
        config = msgspec.structs.replace(self._config, job=job, incarnation=self._started)
        return GrammarProcess(self._pipes, config)
