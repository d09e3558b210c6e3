"""What leaves gpu_runner: one columnar frame per step and detokenizer shard."""

from __future__ import annotations

from asyncengine.wire.messages import StepFrame
from asyncengine.wire.pipes import Pipes
from gpu_runner.schedule.plan import StepLogprobs
from gpu_runner.schedule.step_output import StepOutput

MAX_BACKLOG = 256
"""Frames that may wait for a slow detokenizer before the loop stops launching steps."""


class Outbox:
    """Frames to the detokenizers, each of which has the slots congruent to its index. Never blocks and never drops."""

    def __init__(self, *, pipes: Pipes, detokenizers: int) -> None:
        self._senders = [pipes.sender(f"detokenizer.{index}") for index in range(detokenizers)]

    def send(self, output: StepOutput) -> None:
        if not len(output):
            return
        if len(self._senders) == 1:
            self._senders[0].send(_frame(output))
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


def _frame(output: StepOutput) -> StepFrame:
    return StepFrame(
        output.step,
        output.slots.tobytes(),
        output.gens.tobytes(),
        output.tokens.tobytes(),
        output.finish.tobytes(),
        output.opens,
        *_logprob_columns(output.logprobs),
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
