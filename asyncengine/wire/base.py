"""What all messages are made of. See `asyncengine.wire` for who sends which."""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise

import msgspec


class Finish(IntEnum):
    """Why a row ended; 0 while it runs. STOP is an end-of-sequence or stop token id, STOP_STRING a stop string.

    ERROR only leaves the detokenizer: gpu_runner produced a token id that the vocabulary does not have."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    STOP_STRING = 4
    ERROR = 5


class Wire(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages. Columns that contradict each other are a ValueError where a message is made, which at its
    reader makes it one that was never sent: nobody takes in half of a frame."""


MAX_RID = 2**63
FINISHES = bytes(Finish)


def check(consistent: bool) -> None:
    if not consistent:
        raise ValueError("a message whose columns contradict each other")


def int32(column: bytes) -> list[int]:
    check(len(column) % 4 == 0)
    values: list[int] = memoryview(column).cast("i").tolist()
    return values


def last_end(column: bytes, *, least: int = 0) -> int:
    """The last of an int32 column of end offsets, each at least `least` above the one before; 0 for none."""
    ends = int32(column)
    check(all(end - start >= least for start, end in pairwise((0, *ends))))
    return ends[-1] if ends else 0
