"""What arrives at gpu_runner, turned into calls on the scheduler."""

from __future__ import annotations

import numpy as np

from asyncengine.config import ServiceClass
from asyncengine.errors import EngineError, InvalidRequestError, QueueFullError
from asyncengine.wire.answers import Failed
from asyncengine.wire.engine_pipes import EnginePipes
from asyncengine.wire.pipes import Pipes, Poller, pipe_name
from asyncengine.wire.requests import Abort, Generate, ReleaseSession, Relink, StopHit, ToRunner, ToRunnerControl
from gpu_runner.grammar.gate import GrammarGate
from gpu_runner.outbox import Outbox
from gpu_runner.schedule.limits import Backlog, QueueLimits
from gpu_runner.schedule.scheduler import Scheduler
from gpu_runner.trials import Trials

RETRY_MS = 1
KEEP_TIME_MS = 20
TRIAL_MS = 1
FIRST_PART = 16
"""Requests of a burst that are taken in at once, each next time twice as many: the device has the first of them to do,
and who decodes beside them hardly waits, while the host takes in the others; and however many come, they are soon all
where it is decided who is first."""
MAX_PART = 4096


class Inbox:
    """The pipes into gpu_runner: requests from the tokenizers, control from everybody else, and what the processes of
    structured output say.

    Requests are drained first, so that an abort finds the request it chased here; one that overtakes it, because the
    request is of a later part of a burst, comes once more behind it.
    """

    def __init__(
        self,
        *,
        pipes: Pipes,
        scheduler: Scheduler,
        outbox: Outbox,
        vocab_size: int,
        limits: QueueLimits,
        grammar: GrammarGate | None = None,
        life: int = 0,
        trial_note: memoryview[int] | None = None,
    ) -> None:
        """outbox: learns which detokenizers and API workers were replaced. grammar: None where no text can have a
        structure, because nothing would end it or no device sees masks. life: as in `SidecarConfig`. trial_note: as of
        `RowNotes`."""
        self._requests = pipes.receiver(pipe_name("runner.requests", life), ToRunner)
        self._control = pipes.receiver(pipe_name("runner.control", life), ToRunnerControl)
        self._grammar = grammar
        receivers = (
            (self._requests, self._control) if grammar is None else (self._requests, self._control, grammar.receiver)
        )
        self._poller = Poller(*receivers)
        self._engines = EnginePipes(pipes)
        self._scheduler = scheduler
        self._outbox = outbox
        self._vocab_size = vocab_size
        self._limits = limits
        self._repeated = 0
        self._part = FIRST_PART  # messages that are taken in next, at most
        self._trials = Trials(scheduler, note=trial_note or [0, 0], start=self._start)

    def drain(self) -> None:
        """Take in what has arrived, of many requests the first part, without waiting."""
        self._engines.flush()
        arrived = self._poller.wait(0)  # nearly never, and this is quicker than to find each pipe empty
        if arrived:
            self._trials.hush()
            self._take_messages()
        else:
            self._part = FIRST_PART
        if self._grammar is not None and (arrived or self._grammar.busy):
            self._hear_grammar(self._grammar)
        if self._trials.busy:
            self._trials.go_on()

    def wait(self, timeout_ms: int) -> bool:
        """Sleep until something arrives or the time is over, and only a moment while a refusal waits for room. True if
        `drain` has something to do."""
        if not self._engines.flush():
            timeout_ms = min(timeout_ms, RETRY_MS)
        if self._trials.busy:
            self._poller.wait(min(timeout_ms, TRIAL_MS))
            return True
        if self._grammar is None or not self._grammar.busy:
            return self._poller.wait(timeout_ms)
        self._poller.wait(min(timeout_ms, KEEP_TIME_MS))
        return True

    @property
    def malformed(self) -> int:
        """Frames that were dropped because they were no message, or one that was there before."""
        return self._requests.malformed + self._control.malformed + self._repeated

    def gauges(self) -> dict[str, int]:
        """Choices that wait here, for a trial or for the verdict on their structure, to be added to the scheduler's
        gauges of these names."""
        interactive, background = self._num_held("interactive"), self._num_held("background")
        return {"waiting": interactive + background, "waiting_background": background}

    def _num_held(self, service_class: ServiceClass) -> int:
        parked = 0 if self._grammar is None else self._grammar.num_parked(service_class)
        return parked + self._trials.held(service_class).requests + self._trials.num_suspects(service_class)

    def _take_messages(self) -> None:
        taken = 0
        for message in self._requests.drain(self._part):
            taken += 1
            if isinstance(message, Generate):
                self._take(message)
            elif isinstance(message, Abort):
                self._abort(message.rid)
            elif message.role == "detokenizer_proc":
                self._outbox.relink(message.index, message.life)
            elif message.role == "api_worker":
                self._relink_engine(message)
        self._part = FIRST_PART if taken < self._part else min(2 * self._part, MAX_PART)
        for message in self._control.drain():
            if isinstance(message, StopHit):
                self._scheduler.stop(message.slot, message.gen)
            elif isinstance(message, Abort):
                self._abort(message.rid)
            elif isinstance(message, ReleaseSession):
                self._scheduler.release_session(message.tenant, message.session)

    def _take(self, message: Generate) -> None:
        if self._engines.lost(message.rid):
            return
        if any(map(self._scheduler.knows, message.rids)):
            self._repeated += 1
            return
        try:
            self._check_room(message)
        except QueueFullError as full:
            self._refuse(message.rid, full)
            return
        if message.params.structured is None:
            self._add(message)
        elif self._grammar is not None:
            self._grammar.submit(message)
        else:
            error = InvalidRequestError(
                "structured output needs a model with an end-of-sequence token, and a device that can read the host's "
                "memory; one of them is missing here",
                code="unsupported_parameter",
                param="structured_outputs",
            )
            self._refuse(message.rid, error)

    def _check_room(self, message: Generate) -> None:
        """Raises QueueFullError. What goes on after the loss of a process was accepted before."""
        if message.resume:
            return
        n = message.params.n
        self._limits.check(
            Backlog(n, n * len(message.ids) // 4),
            is_background=message.terms.service_class == "background",
            interactive=self._backlog("interactive"),
            background=self._backlog("background"),
            rows=self._scheduler.rows_to_fill,
        )

    def _backlog(self, service_class: ServiceClass) -> Backlog:
        waiting = self._scheduler.queue.backlog(service_class)
        if self._grammar is None and not self._trials.busy:
            return waiting
        parked = 0 if self._grammar is None else self._grammar.num_parked(service_class)
        held = self._trials.held(service_class)
        return Backlog(waiting.requests + held.requests + parked, waiting.tokens + held.tokens)

    def _abort(self, rid: int) -> None:
        if self._grammar is not None:
            self._grammar.abort(rid)
        self._trials.abort(rid)
        self._scheduler.abort(rid)

    def _relink_engine(self, relink: Relink) -> None:
        """An API worker was lost, and its connections with it: what it asked for is nobody's."""
        if not self._engines.relink(relink.index, relink.life):
            return
        self._outbox.tell(relink)
        rids = self._scheduler.rids() | self._trials.held_rids()
        if self._grammar is not None:
            rids |= self._grammar.parked_rids()
        for rid in filter(self._engines.lost, rids):
            self._abort(rid)

    def _hear_grammar(self, grammar: GrammarGate) -> None:
        grammar.poll()
        for message, aborted, error in grammar.take_settled():
            if error is not None:
                self._refuse(message.rid, error)
            elif len(aborted) < len(message.rids):
                self._add(message)
                for rid in aborted:
                    self._abort(rid)
        for slot, gen, reason in grammar.take_failed():
            failed = self._scheduler.rid_of(slot, gen)
            if failed is not None:
                self._scheduler.abort(failed)
                self._refuse(failed, EngineError(reason, code="structured_output_failed"))

    def _refuse(self, rid: int, error: EngineError) -> None:
        failed = Failed(rid, error.status, error.message, error.code or "", error.param)
        self._engines.send(rid, failed)

    def _add(self, message: Generate) -> None:
        if not self._trials.take(message):
            self._start(message)

    def _start(self, message: Generate) -> None:
        if any(map(self._scheduler.knows, message.rids)):  # its like was held as well
            self._repeated += 1
            return
        prompt = np.frombuffer(message.ids, np.int32)
        try:
            self._check_ids(prompt, "prompt")
            for part in message.resume:
                self._check_ids(np.frombuffer(part.ids, np.int32), "resume")
            self._scheduler.add(
                rid=message.rid,
                prompt=prompt,
                params=message.params,
                max_tokens=message.max_tokens,
                detok=message.detok,
                namespace=message.namespace,
                resume=message.resume,
                terms=message.terms,
            )
        except InvalidRequestError as error:
            self._refuse(message.rid, error)

    def _check_ids(self, ids: np.ndarray, param: str) -> None:
        unsigned = ids.view(np.uint32)  # in which a negative id is outside, too
        if len(ids) and unsigned[unsigned.argmax()] >= self._vocab_size:
            position = int((unsigned >= self._vocab_size).argmax())
            raise InvalidRequestError(
                f"token id {int(ids[position])} at position {position} is outside the model's vocabulary of "
                f"{self._vocab_size}",
                param=param,
            )
