"""What leaves gpu_runner: one columnar frame per step and detokenizer shard."""

from __future__ import annotations

from collections.abc import Mapping

from asyncengine.config import worker_key
from asyncengine.wire.frames import StepFrame
from asyncengine.wire.pipes import Pipes, Sender, pipe_name
from asyncengine.wire.requests import Relink
from gpu_runner.schedule.plan import StepLogprobs
from gpu_runner.schedule.step_output import StepOutput

MAX_BACKLOG = 256
"""Frames that may wait for a slow detokenizer before the loop stops launching steps."""


class Outbox:
    """Frames to the detokenizers, each of which has the slots congruent to its index. Never blocks and never drops."""

    def __init__(
        self, *, pipes: Pipes, detokenizers: int, life: int = 0, lives: Mapping[str, int] | None = None
    ) -> None:
        """life, lives: of this process and the others, as in `SidecarConfig`."""
        lives = lives or {}
        self._pipes = pipes
        self._life = life
        self._lives = [lives.get(worker_key("detokenizer_proc", index), 0) for index in range(detokenizers)]
        self._senders = [self._connect(index) for index in range(detokenizers)]
        if life:  # what the detokenizers have of the gpu_runner before this is over
            for sender in self._senders:
                sender.send(StepFrame(0, b"", b"", b"", b"", life=life))

    def relink(self, index: int, life: int) -> None:
        """Detokenizer `index` was lost, and this is the one in its place. What waits for the lost one is dropped.
        Numbers that no detokenizer has are ignored."""
        if 0 <= index < len(self._lives) and life > self._lives[index]:
            self._pipes.drop(self._senders[index])
            self._lives[index] = life
            self._senders[index] = self._connect(index)

    def tell(self, relink: Relink) -> None:
        """Pass on that an API worker was lost, behind the frames of what it asked for."""
        for sender in self._senders:
            sender.send(relink)

    def send(self, output: StepOutput) -> None:
        if not len(output.slots):
            return
        if len(self._senders) == 1:
            self._senders[0].send(_frame(output, self._life))
            return
        shards = output.slots % len(self._senders)
        for index, sender in enumerate(self._senders):
            mine = shards == index
            if mine.any():
                sender.send(
                    StepFrame(
                        output.step,
                        output.slots[mine].tobytes(),
                        output.gens[mine].tobytes(),
                        output.tokens[mine].tobytes(),
                        output.finish[mine].tobytes(),
                        tuple(row for row in output.opens if row.slot % len(self._senders) == index),
                        *_logprob_columns(output.logprobs and output.logprobs.of(mine)),
                        self._life,
                        marks=tuple(row for row in output.marks if row.slot % len(self._senders) == index),
                    )
                )

    def flush(self) -> bool:
        """Push waiting frames on; False while so many wait that no further step should be launched."""
        backlog = 0
        for sender in self._senders:
            if not sender.flush():
                backlog = max(backlog, sender.backlog)
        return backlog < MAX_BACKLOG

    def _connect(self, index: int) -> Sender:
        return self._pipes.sender(pipe_name(f"detokenizer.{index}", self._lives[index]))


def _frame(output: StepOutput, life: int) -> StepFrame:
    return StepFrame(
        output.step,
        output.slots.tobytes(),
        output.gens.tobytes(),
        output.tokens.tobytes(),
        output.finish.tobytes(),
        output.opens,
        *_logprob_columns(output.logprobs),
        life,
        marks=output.marks,
    )


def _logprob_columns(logprobs: StepLogprobs | None) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """The frame's fields behind `opens`."""
    if logprobs is None:
        return b"", b"", b"", b"", b""
    return (
        logprobs.rows.tobytes(),
        logprobs.logprobs.tobytes(),
        logprobs.top_ends.tobytes(),
        logprobs.top_ids.tobytes(),
        logprobs.top_logprobs.tobytes(),
    )
