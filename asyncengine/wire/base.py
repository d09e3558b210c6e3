"""What all messages are made of. See `asyncengine.wire` for who sends which."""

from __future__ import annotations

from enum import IntEnum

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
    """Base of all messages. See `checks` for what is looked at where one is read."""
