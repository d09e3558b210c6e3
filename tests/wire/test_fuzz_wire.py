"""Whatever bytes come out of a pipe: a frame is taken in whole or not at all, and valid traffic goes on."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import counted, mutate, slice_of
from support.wire_examples import DELTAS, ENCODE, FRAME, GENERATE, PROMPT, ints

from asyncengine.config import EngineConfig
from asyncengine.delta_feed import DeltaFeed
from asyncengine.metrics import RequestMetrics
from asyncengine.open_requests import OpenRequest, OpenRequests
from asyncengine.prompt_messages import PromptMessage
from asyncengine.request_terms import targets_of
from asyncengine.sampling import SamplingParams
from asyncengine.streams import RequestStream
from asyncengine.terms import Terms
from asyncengine.tokenizer_links import TokenizerLink
from asyncengine.wire.answers import Crash, Deltas, EngineStatus, Marks, PromptColumns, ToEngine
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import Open, RowMarks, StepFrame, ToDetokenizer
from asyncengine.wire.pipes import Receiver, Sender
from asyncengine.wire.requests import Abort, EncodeText, ReleaseSession, ToRunner, ToRunnerControl, ToTokenizer

EVERYTHING = msgspec.structs.replace(
    DELTAS,
    prompts=(PromptColumns(1, PROMPT, b"abc", ints(1, 2, 3)),),
    marks=Marks(ints(0, 1), ints(1, 3), bytes(48)),
)
"""Deltas with all that they may have."""
VALID: tuple[msgspec.Struct, ...] = (
    FRAME,
    msgspec.structs.replace(
        FRAME, opens=(msgspec.structs.replace(FRAME.opens[0], session_tokens=3, session_common=2), FRAME.opens[1])
    ),
    EVERYTHING,
    GENERATE,
    msgspec.structs.replace(GENERATE, terms=Terms("a", "background", "s", 5.0)),
    EncodeText(7, "a", SamplingParams(n=2, seed=0), "", terms=Terms("a", "background", "s", 5.0)),
    ReleaseSession("a", "s"),
)


class Frames:
    """A socket that has received these."""

    def __init__(self, *frames: bytes) -> None:
        self._frames = iter(frames)

    def recv(self, flags: int) -> bytes:
        for frame in self._frames:
            return frame
        raise zmq.Again


def received(types: Any, *frames: bytes) -> tuple[list[Any], int]:
    """The messages that a pipe's reader gets of these frames, and how many frames it counts as none."""
    receiver = Receiver(cast(Any, Frames(*frames)), types, lambda frame: None)
    return list(receiver.drain()), receiver.malformed


def is_dropped(message: msgspec.Struct, types: Any = ToEngine | ToRunner | ToDetokenizer) -> bool:
    """Whether the reader drops and counts it, and takes what comes behind it."""
    messages, malformed = received(types, ENCODE(message), ENCODE(Abort(7)))
    return (messages, malformed) == ([Abort(7)], 1)


def wrong_columns(message: Any) -> Iterator[Any]:
    """The message with each of its columns, and of those that it holds, in lengths that fit no other."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, bytes) and value and name not in ("detok",):
            for wrong in (value[:-1], value + b"\0", value + b"\0\0"):
                yield msgspec.structs.replace(message, **{name: wrong})
        elif isinstance(value, tuple) and value and isinstance(value[0], msgspec.Struct):
            for part in wrong_columns(value[0]):
                yield msgspec.structs.replace(message, **{name: (part, *value[1:])})
        elif isinstance(value, msgspec.Struct) and name != "params":
            for part in wrong_columns(value):
                yield msgspec.structs.replace(message, **{name: part})


@pytest.mark.parametrize("types", [ToDetokenizer, ToEngine, ToRunner, ToRunnerControl, ToTokenizer])
def test_random_and_mutated_bytes_are_a_message_or_none(types: Any) -> None:
    @slice_of(150)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        valid = data.draw(st.sampled_from([*map(ENCODE, VALID), b""]))
        raw = mutate(valid, data.draw) if valid else data.draw(st.binary(max_size=64))
        messages, malformed = received(types, raw)
        assert len(messages) + malformed == 1
        assert all(isinstance(message, types) for message in messages)
        tried.append(1)

    with counted(f"wire {re.sub(r'asyncengine[.][a-z_.]+[.]', '', getattr(types, '__name__', str(types)))}") as tried:
        fuzz()


def open_requests() -> OpenRequests:
    """One request of two choices, which the examples' deltas are about."""
    requests = OpenRequests()
    message: PromptMessage = EncodeText(7, "", SamplingParams(n=2, seed=0), "")
    stream = RequestStream(n=2, stop=(), stop_token_ids=())
    link = TokenizerLink(cast(Sender, None))
    requests.add(OpenRequest(stream, message, 0, ""), num_choices=2, tokenizer=link)
    return requests


def test_a_mutated_frame_that_is_taken_at_all_is_taken_in_to_its_end(tmp_path: Path) -> None:
    metrics = RequestMetrics(tmp_path, 0, targets_of(EngineConfig()))

    @slice_of(300)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        messages, _ = received(Deltas, mutate(ENCODE(EVERYTHING), data.draw))
        for deltas in messages:  # whatever raises has taken in a part
            DeltaFeed(open_requests(), metrics).deltas(deltas)
        tried.append(1)
        whole.extend(messages)

    whole: list[Any] = []
    with counted("deltas") as tried:
        fuzz()
    metrics.close()
    assert whole  # some mutations leave a message


@pytest.mark.parametrize(
    "valid",
    [
        GENERATE,
        EVERYTHING,
        FRAME,
        msgspec.structs.replace(
            FRAME,
            opens=(Open(0, 1, 7, b"", 2, 0, prompt=PROMPT, resumed=ints(5)),),
            marks=(RowMarks(0, bytes(32)),),
        ),
    ],
)
def test_a_column_of_another_length_is_no_message(valid: msgspec.Struct) -> None:
    assert received(type(valid), ENCODE(valid)) == ([valid], 0)
    wrong = list(wrong_columns(valid))
    assert wrong
    assert all(is_dropped(message) for message in wrong)


@pytest.mark.parametrize("ends", [(3, 1), (-1, 3), (1, 4), (1, 2), (2**31 - 1, 3)])
def test_ends_that_do_not_ascend_to_the_blobs_end_are_no_message(ends: tuple[int, int]) -> None:
    for name in ("text_ends", "ids_ends"):
        assert is_dropped(msgspec.structs.replace(DELTAS, **{name: ints(*ends)}))
    assert is_dropped(msgspec.structs.replace(DELTAS, marks=Marks(ints(0, 1), ints(*ends), bytes(48))))
    assert DELTAS.logprobs is not None
    for name in ("item_ends", "ends"):
        logprobs = msgspec.structs.replace(DELTAS.logprobs, **{name: ints(*ends)})
        if (name, ends) != ("ends", (1, 2)):  # there it is what it was
            assert is_dropped(msgspec.structs.replace(DELTAS, logprobs=logprobs))


def test_a_token_without_an_item_is_no_message() -> None:
    assert DELTAS.logprobs is not None
    for item_ends in (ints(0, 3), ints(3, 3)):
        logprobs = msgspec.structs.replace(DELTAS.logprobs, item_ends=item_ends)
        assert is_dropped(msgspec.structs.replace(DELTAS, logprobs=logprobs))


@pytest.mark.parametrize("row", [-1, 2, 2**31 - 1])
def test_what_is_about_a_row_that_is_not_there_is_no_message(row: int) -> None:
    stamps = array("q", [1, 2, 3]).tobytes()
    assert DELTAS.openings is not None
    for changes in (
        {"openings": msgspec.structs.replace(DELTAS.openings, rows=ints(row), stamps=stamps, sessions=b"")},
        {"marks": Marks(ints(row), ints(1), bytes(16))},
        {"prompts": (PromptColumns(row, PROMPT, b"abc", ints(1, 2, 3)),)},
    ):
        assert is_dropped(msgspec.structs.replace(DELTAS, **changes))
    assert is_dropped(msgspec.structs.replace(FRAME, logprob_rows=ints(row)))


def test_what_is_known_of_a_session_is_of_every_row_or_of_none_and_counts_tokens() -> None:
    assert DELTAS.openings is not None
    for sessions in (ints(1, 1), ints(1, 1, 1), ints(*[1] * 6), b"x" * 16 + b"y"):
        openings = msgspec.structs.replace(DELTAS.openings, sessions=sessions)
        assert is_dropped(msgspec.structs.replace(DELTAS, openings=openings))
    for known in ({"session_tokens": -2}, {"session_tokens": 2**31}, {"session_common": -1}, {"session_common": 2**31}):
        opens = (msgspec.structs.replace(FRAME.opens[0], **known), FRAME.opens[1])
        assert is_dropped(msgspec.structs.replace(FRAME, opens=opens))


def test_an_end_for_no_known_reason_is_no_message() -> None:
    for valid in (FRAME, DELTAS):
        assert is_dropped(msgspec.structs.replace(valid, finish=bytes([Finish.NONE, max(Finish) + 1])))


def test_a_frame_without_log_probabilities_has_no_part_of_them() -> None:
    bare = StepFrame(3, ints(0), ints(1), ints(65), bytes(1))
    assert not is_dropped(bare)
    for name in ("logprob_rows", "logprobs", "top_ends", "top_ids", "top_logprobs"):
        assert is_dropped(msgspec.structs.replace(bare, **{name: ints(0)}))


@pytest.mark.parametrize("reason", [-1, 1, 2**31 - 1])
def test_a_stop_string_that_the_request_does_not_have_ends_its_own_choice_only(reason: int) -> None:
    stream = RequestStream(n=1, stop=("END",), stop_token_ids=())
    stream.feed(
        0,
        memoryview(b"x"),
        memoryview(ints(1)),
        finish=Finish.STOP_STRING,
        stop_reason=reason,
        prompt_tokens=1,
        cached_tokens=0,
    )
    (delta,) = stream.take()
    assert (delta.finish_reason, delta.stop_reason) == ("stop", None)


def test_prompts_are_arrays_of_whole_ids() -> None:
    for ids in (b"", b"\0", b"\0" * 5):
        assert is_dropped(msgspec.structs.replace(GENERATE, ids=ids))
    assert np.frombuffer(GENERATE.ids, np.int32).tolist() == [1, 2, 3]


def test_a_crash_has_an_array_of_whole_rids() -> None:
    status = EngineStatus("ready", "", {}, {}, {}, Crash(1, bytes(12)))
    assert is_dropped(status)
    assert not is_dropped(msgspec.structs.replace(status, crash=Crash(1, bytes(16))))
    assert not is_dropped(msgspec.structs.replace(status, crash=None))
