"""Messages whose columns agree, for tests that make them disagree."""

from __future__ import annotations

from array import array

import msgspec

from asyncengine.sampling import SamplingParams
from asyncengine.wire.answers import Deltas, LogprobColumns, Openings
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import DetokenizeOptions, Open, PromptLogprobs, StepFrame
from asyncengine.wire.requests import Generate, Resume

ENCODE = msgspec.msgpack.Encoder().encode


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


DETOK = ENCODE(DetokenizeOptions(("stop",), True, False, ints(1, 2), logprobs=True))
PROMPT = PromptLogprobs(ints(1, 3), ints(5, 6, 7), array("f", [float("-inf"), -1.0, -2.0]).tobytes(), ints(0, 1))
FRAME = StepFrame(
    3,
    ints(0, 1),
    ints(1, 1),
    ints(65, 66),
    bytes([Finish.NONE, Finish.LENGTH]),
    (Open(0, 1, 7, DETOK, 2, 0), Open(1, 1, 8, DETOK, 2, 0)),
    ints(0),
    array("f", [-1.0]).tobytes(),
    ints(2),
    ints(65, 66),
    array("f", [-1.0, -2.0]).tobytes(),
)
DELTAS = Deltas(
    array("Q", [7, 8]).tobytes(),
    b"abc",
    ints(1, 3),
    ints(65, 66, 67),
    ints(1, 3),
    bytes([Finish.NONE, Finish.STOP_STRING]),
    ints(-1, 0),
    ints(2, 2),
    ints(0, 0),
    logprobs=LogprobColumns(
        ints(1, 2),
        ints(0, 1),
        ints(1, 3),
        ints(65, 66, 67),
        array("f", [-1.0, -1.0, -2.0]).tobytes(),
        b"abc",
        ints(1, 2, 3),
    ),
    openings=Openings(ints(0, 1), array("q", [1, 2, 3, 1, 2, 3]).tobytes(), ints(-1, 0, 2, 1)),
)
GENERATE = Generate(7, ints(1, 2, 3), SamplingParams(n=2), 5, DETOK, "ns", (Resume(0, ints(4), 1),))
