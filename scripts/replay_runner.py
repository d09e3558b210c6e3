"""Stands in for gpu_runner and the detokenizers in bench_api.py: plays steps at a fixed rate, over the real sockets.

Every open row gets a token each step. Its text is the time at which the step was played, so that whoever reads the text
knows how long it was on its way; its id is 0. As from a real detokenizer, what an API worker has no room for is merged:
each of its requests then gets the texts of several steps at once. A step costs a few numpy operations, whatever its
size.

ASYNCENGINE_REPLAY_STEP_MS in the environment is the time between steps.

It takes up nothing that was lost with a process: when it hears of one it ends, and the server with it, by name.
"""

from __future__ import annotations

import os
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from asyncengine.config import API_WORKER_SHIFT, PAGE_SIZE, SidecarConfig
from asyncengine.errors import StartupError
from asyncengine.wire.answers import Deltas
from asyncengine.wire.base import Finish
from asyncengine.wire.pipes import Pipes, Poller, Sender
from asyncengine.wire.reports import RunnerInfo
from asyncengine.wire.requests import Abort, Generate, Relink, ToRunner, ToRunnerControl
from asyncengine.wire.sidecar import HEARTBEAT_SECONDS, Reporter, run_sidecar

DETOKENIZER_HIGH_WATER_MARK = 2
STAMP = "{:013.6f} "
STAMP_BYTES = len(STAMP.format(0.0))
KEPT_STAMPS = 1 << 14
MAX_MODEL_LEN = 1 << 20


class WorkerRows:
    """The open rows of one API worker, in order of arrival: what each is owed and what it has left to get."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.rids: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.owed: NDArray[np.int32] = np.zeros(0, np.int32)
        self.left: NDArray[np.int32] = np.zeros(0, np.int32)
        self.prompts: NDArray[np.int32] = np.zeros(0, np.int32)

    def open(self, requests: list[Generate]) -> None:
        self.rids = np.append(self.rids, np.array([request.rid for request in requests], np.uint64))
        self.owed = np.append(self.owed, np.zeros(len(requests), np.int32))
        self.left = np.append(self.left, np.array([request.max_tokens for request in requests], np.int32))
        self.prompts = np.append(self.prompts, np.array([len(r.ids) // 4 for r in requests], np.int32))

    def keep(self, mask: NDArray[np.bool_]) -> None:
        self.rids, self.owed, self.left, self.prompts = (
            self.rids[mask],
            self.owed[mask],
            self.left[mask],
            self.prompts[mask],
        )

    def step(self) -> None:
        running = self.left > 0
        self.owed += running
        self.left -= running

    def send(self, stamps: deque[str]) -> None:
        """One message of all that is owed, if the pipe takes it now."""
        if not len(self.rids) or not self.sender.writable():
            return
        longest = int(self.owed.max())
        # a row that ends waits in the pipe with the others: only then may its last texts be older than the newest
        recent = "".join(list(stamps)[-longest:]).encode()
        text = recent * len(self.rids) if (self.owed == longest).all() else self._ragged(recent)
        ends = np.cumsum(self.owed, dtype=np.int32)
        finished = self.left == 0
        message = Deltas(
            rids=self.rids.tobytes(),
            text=text,
            text_ends=(ends * STAMP_BYTES).tobytes(),
            ids=bytes(4 * int(ends[-1])),
            ids_ends=ends.tobytes(),
            finish=np.where(finished, int(Finish.LENGTH), 0).astype(np.uint8).tobytes(),
            stop_reason=np.full(len(self.rids), -1, np.int32).tobytes(),
            prompt_tokens=self.prompts.tobytes(),
            cached_tokens=np.zeros(len(self.rids), np.int32).tobytes(),
        )
        if self.sender.try_send(message):
            self.owed[:] = 0
            if finished.any():
                self.keep(~finished)

    def _ragged(self, recent: bytes) -> bytes:
        return b"".join([recent[len(recent) - STAMP_BYTES * owed :] for owed in self.owed.tolist()])


class ReplayRunner:
    """All workers' rows, and the requests that wait for one of `max_rows`."""

    def __init__(self, pipes: Pipes, *, max_rows: int, step_s: float) -> None:
        self._pipes = pipes
        self._max_rows = max_rows
        self._step_s = step_s
        self._requests = pipes.receiver("runner.requests", ToRunner)
        self._control = pipes.receiver("runner.control", ToRunnerControl)
        self._poller = Poller(self._requests, self._control)
        self._workers: dict[int, WorkerRows] = {}
        self._waiting: deque[Generate] = deque()
        self._stamps: deque[str] = deque(maxlen=KEPT_STAMPS)

    def run(self, reporter: Reporter) -> None:
        next_step = time.monotonic()
        while True:
            self._drain()
            if reporter.heartbeat_due():
                reporter.heartbeat(self.gauges())
            now = time.monotonic()
            if not self._running() and not self._waiting:
                self._poller.wait(int(HEARTBEAT_SECONDS * 1000))
                next_step = time.monotonic()
            elif now < next_step:
                time.sleep(next_step - now)
            else:
                self._step()
                next_step = max(next_step + self._step_s, now)

    def gauges(self) -> dict[str, int]:
        return {"running": self._running(), "waiting": len(self._waiting)}

    def _running(self) -> int:
        return sum(len(worker.rids) for worker in self._workers.values())

    def _drain(self) -> None:
        for pipe in (self._requests, self._control):
            for message in pipe.drain():
                if isinstance(message, Generate):
                    self._waiting.append(message)
                elif isinstance(message, Abort):
                    self._waiting = deque(request for request in self._waiting if request.rid != message.rid)
                    for worker in self._workers.values():
                        worker.keep(worker.rids != message.rid)
                elif isinstance(message, Relink):
                    raise StartupError(f"{message.role} {message.index} was lost, which ends a replay")

    def _step(self) -> None:
        self._admit()
        self._stamps.append(STAMP.format(time.monotonic()))
        for worker in self._workers.values():
            worker.step()
            worker.send(self._stamps)

    def _admit(self) -> None:
        admitted: dict[int, list[Generate]] = {}
        for _ in range(min(len(self._waiting), self._max_rows - self._running())):
            request = self._waiting.popleft()
            admitted.setdefault(request.rid >> API_WORKER_SHIFT, []).append(request)
        for worker, requests in admitted.items():
            if worker not in self._workers:
                sender = self._pipes.sender(f"engine.{worker}", high_water_mark=DETOKENIZER_HIGH_WATER_MARK)
                self._workers[worker] = WorkerRows(sender)
            self._workers[worker].open(requests)


def serve(config: SidecarConfig, pipes: Pipes, reporter: Reporter) -> None:
    if config.life:
        raise StartupError("the one before it has ended, which ends a replay")
    step_s = float(os.environ.get("ASYNCENGINE_REPLAY_STEP_MS", "3")) / 1000
    runner = ReplayRunner(pipes, max_rows=config.engine.max_num_seqs, step_s=step_s)
    reporter.ready(
        RunnerInfo(
            device="cpu",
            dtype="float32",
            architecture="replay",
            vocab_size=32000,
            max_model_len=MAX_MODEL_LEN,
            num_pages=MAX_MODEL_LEN // PAGE_SIZE,
            weight_bytes=0,
            kv_cache_bytes=0,
        )
    )
    runner.run(reporter)


if __name__ == "__main__":
    run_sidecar("gpu_runner", serve)
