"""What a step meant, for those who turn tokens into text."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncengine.wire.base import Finish
from asyncengine.wire.frames import Open, RowMarks
from gpu_runner.schedule.plan import Int32, StepLogprobs, UInt8


class StepOutput(NamedTuple):
    """News for the detokenizers: rows with a new token or an end. tokens: -1 where a row ends without a new one."""

    step: int
    slots: Int32
    gens: Int32
    tokens: Int32
    finish: UInt8
    opens: tuple[Open, ...]
    logprobs: StepLogprobs | None = None
    marks: tuple[RowMarks, ...] = ()


def aborted_rows(step: int, rows: list[tuple[int, int]]) -> StepOutput:
    """The news that `rows`, (slot, generation) each, were aborted; `step` was the last one planned."""
    pairs = np.array(rows, np.int32)
    return StepOutput(
        step,
        np.ascontiguousarray(pairs[:, 0]),
        np.ascontiguousarray(pairs[:, 1]),
        np.full(len(rows), -1, np.int32),
        np.full(len(rows), Finish.ABORT, np.uint8),
        (),
    )
