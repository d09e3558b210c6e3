"""The detokenizer's neighbours as test doubles on the real pipes: gpu_runner on one side, API workers on the other."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec

from asyncengine.wire.answers import Deltas, ToEngine
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import DetokenizeOptions, Open, PromptLogprobs, RowMarks, StepFrame
from asyncengine.wire.pipes import Pipes, Receiver
from asyncengine.wire.requests import Relink, ToRunnerControl

WAIT_MS = 60_000


class Piece(NamedTuple):
    """One request's entry of one `Deltas` message."""

    rid: int
    text: str
    ids: list[int]
    finish: int
    stop_reason: int
    prompt_tokens: int
    cached_tokens: int


class Row(NamedTuple):
    """One row of a step frame."""

    slot: int
    gen: int
    token: int
    finish: Finish = Finish.NONE
    logprobs: tuple[float, ...] = ()
    """Of the token and then of `top_ids`; () where none were asked."""
    top_ids: tuple[int, ...] = ()


class Ring:
    def __init__(self, run_dir: Path, *, api_workers: int = 1) -> None:
        self.pipes = Pipes(run_dir)
        self.control = self.pipes.receiver("runner.control", ToRunnerControl)
        self._frames = self.pipes.sender("detokenizer.0")
        self._engines = [self.engine(index) for index in range(api_workers)]
        self._step = 0

    def engine(self, index: int) -> Receiver:
        """The reading end of API worker `index`."""
        return self.pipes.receiver(f"engine.{index}", ToEngine)

    def send(self, *rows: Row, opens: tuple[Open, ...] = (), marks: tuple[RowMarks, ...] = (), life: int = 0) -> None:
        self._step += 1
        self._frames.send(step_frame(self._step, *rows, opens=opens, marks=marks, life=life))

    def tell(self, relink: Relink) -> None:
        self._frames.send(relink)

    def receive(self, index: int = 0) -> list[Piece]:
        """The entries of the next message for API worker `index`."""
        return pieces(self.receive_message(index))

    def receive_message(self, index: int = 0) -> Deltas:
        message = receive_one(self._engines[index])
        assert isinstance(message, Deltas)
        return message

    def silent(self, index: int = 0) -> bool:
        """True when nothing more has come for API worker `index`."""
        return not self._engines[index].wait(20)

    def stop_hits(self, count: int) -> list[msgspec.Struct]:
        return [receive_one(self.control) for _ in range(count)]


def step_frame(
    step: int, *rows: Row, opens: tuple[Open, ...] = (), marks: tuple[RowMarks, ...] = (), life: int = 0
) -> StepFrame:
    asked = [index for index, row in enumerate(rows) if row.logprobs]
    return StepFrame(
        step,
        array("i", [row.slot for row in rows]).tobytes(),
        array("i", [row.gen for row in rows]).tobytes(),
        array("i", [row.token for row in rows]).tobytes(),
        bytes([row.finish for row in rows]),
        opens,
        logprob_rows=array("i", asked).tobytes(),
        logprobs=array("f", [rows[index].logprobs[0] for index in asked]).tobytes(),
        top_ends=array("i", accumulate(len(rows[index].top_ids) for index in asked)).tobytes(),
        top_ids=array("i", [token for index in asked for token in rows[index].top_ids]).tobytes(),
        top_logprobs=array("f", [value for index in asked for value in rows[index].logprobs[1:]]).tobytes(),
        life=life,
        marks=marks,
    )


def receive_one(receiver: Receiver) -> msgspec.Struct:
    assert receiver.wait(WAIT_MS), "nothing arrived"
    (message,) = receiver.drain(1)
    return message


def pieces(message: msgspec.Struct) -> list[Piece]:
    assert isinstance(message, Deltas)
    rids = memoryview(message.rids).cast("Q").tolist()
    column: Callable[[bytes], list[int]] = lambda data: memoryview(data).cast("i").tolist()  # noqa: E731
    text_ends, ids, ids_ends = column(message.text_ends), column(message.ids), column(message.ids_ends)
    assert len(set(rids)) == len(rids) == len(text_ends) == len(ids_ends) == len(message.finish)
    return [
        Piece(
            rid,
            message.text[text_start:text_end].decode(),
            ids[ids_start:ids_end],
            finish,
            stop_reason,
            prompt_tokens,
            cached_tokens,
        )
        for rid, text_start, text_end, ids_start, ids_end, finish, stop_reason, prompt_tokens, cached_tokens in zip(
            rids,
            [0, *text_ends],
            text_ends,
            [0, *ids_ends],
            ids_ends,
            message.finish,
            column(message.stop_reason),
            column(message.prompt_tokens),
            column(message.cached_tokens),
            strict=False,
        )
    ]


def opened(
    slot: int,
    gen: int,
    rid: int,
    *,
    stop: tuple[str, ...] = (),
    skip_special_tokens: bool = True,
    include_stop: bool = False,
    prompt_tail: tuple[int, ...] = (),
    prompt_tokens: int = 5,
    cached_tokens: int = 0,
    logprobs: bool = False,
    shown_tokens: tuple[str, ...] = (),
    prefix: str = "",
    no_output: bool = False,
    prompt: PromptLogprobs | None = None,
    resumed: Sequence[int] = (),
    shown: int = 0,
) -> Open:
    tail = array("i", prompt_tail).tobytes()
    options = DetokenizeOptions(
        stop, skip_special_tokens, include_stop, tail, logprobs, shown_tokens, prefix, no_output
    )
    return Open(
        slot,
        gen,
        rid,
        msgspec.msgpack.encode(options),
        prompt_tokens,
        cached_tokens,
        prompt=prompt,
        resumed=array("i", list(resumed)).tobytes(),
        shown=shown,
    )
