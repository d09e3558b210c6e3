"""What arrives at gpu_runner, turned into calls on the scheduler."""

from __future__ import annotations

import numpy as np

from asyncengine.config import API_WORKER_SHIFT
from asyncengine.errors import InvalidRequestError
from asyncengine.wire.messages import Abort, Failed, Generate, StopHit, ToRunner, ToRunnerControl
from asyncengine.wire.pipes import Pipes, Poller, Sender
from gpu_runner.schedule.scheduler import Scheduler

RETRY_MS = 1


class Inbox:
    """The two pipes into gpu_runner: requests from the tokenizers, control from everybody else.

    Requests are drained first, so that an abort finds the request it chased here.
    """

    def __init__(self, *, pipes: Pipes, scheduler: Scheduler, vocab_size: int) -> None:
        self._requests = pipes.receiver("runner.requests", ToRunner)
        self._control = pipes.receiver("runner.control", ToRunnerControl)
        self._poller = Poller(self._requests, self._control)
        self._pipes = pipes
        self._engines: dict[int, Sender] = {}
        self._scheduler = scheduler
        self._vocab_size = vocab_size

    def drain(self) -> None:
        """Take in all that has arrived, without waiting."""
        self._flush()
        if not self._poller.wait(0):  # nearly always, and quicker than to find each pipe empty
            return
        for message in self._requests.drain():
            if isinstance(message, Generate):
                self._add(message)
            else:
                self._scheduler.abort(message.rid)
        for message in self._control.drain():
            if isinstance(message, StopHit):
                self._scheduler.stop(message.slot, message.gen)
            elif isinstance(message, Abort):
                self._scheduler.abort(message.rid)

    def wait(self, timeout_ms: int) -> bool:
        """Sleep until something arrives or the time is over, and only a moment while a refusal waits for room."""
        return self._poller.wait(timeout_ms if self._flush() else min(timeout_ms, RETRY_MS))

    @property
    def malformed(self) -> int:
        """Frames that were dropped because they were no message."""
        return self._requests.malformed + self._control.malformed

    def _add(self, message: Generate) -> None:
        prompt = np.frombuffer(message.ids, np.int32)
        try:
            self._check_ids(prompt)
            self._scheduler.add(
                rid=message.rid,
                prompt=prompt,
                params=message.params,
                max_tokens=message.max_tokens,
                detok=message.detok,
                namespace=message.namespace,
            )
        except InvalidRequestError as error:
            failed = Failed(message.rid, error.status, error.message, error.code or "", error.param)
            self._engine(message.rid >> API_WORKER_SHIFT).send(failed)

    def _check_ids(self, prompt: np.ndarray) -> None:
        outside = np.flatnonzero((prompt < 0) | (prompt >= self._vocab_size))
        if len(outside):
            position = int(outside[0])
            raise InvalidRequestError(
                f"token id {int(prompt[position])} at position {position} is outside the model's vocabulary of "
                f"{self._vocab_size}",
                param="prompt",
            )

    def _flush(self) -> bool:
        """Push on refusals that found their pipe full; True when none is left."""
        flushed = [engine.flush() for engine in self._engines.values()]
        return all(flushed)

    def _engine(self, worker: int) -> Sender:
        if worker not in self._engines:
            self._engines[worker] = self._pipes.sender(f"engine.{worker}")
        return self._engines[worker]
