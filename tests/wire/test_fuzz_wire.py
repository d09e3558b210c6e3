"""Whatever bytes come out of a pipe: a frame is taken in whole or not at all, and valid traffic goes on."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import counted, mutate, slice_of
from support.wire_examples import DELTAS, ENCODE, FRAME, GENERATE, ints

from asyncengine.streams import RequestStream
from asyncengine.wire.answers import ToEngine
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import ToDetokenizer
from asyncengine.wire.requests import ToRunner, ToRunnerControl, ToTokenizer


@pytest.mark.parametrize("types", [ToDetokenizer, ToEngine, ToRunner, ToRunnerControl, ToTokenizer])
def test_random_and_mutated_bytes_are_a_message_or_none(types: Any) -> None:
    decoder = msgspec.msgpack.Decoder(types)

    @slice_of(150)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        valid = data.draw(st.sampled_from([ENCODE(FRAME), ENCODE(DELTAS), ENCODE(GENERATE), b""]))
        raw = mutate(valid, data.draw) if valid else data.draw(st.binary(max_size=64))
        try:
            message = decoder.decode(raw)
        except Exception:  # noqa: BLE001 - what `Receiver.drain` counts as malformed
            message = None
        assert message is None or isinstance(message, types)
        tried.append(1)

    with counted(f"wire {re.sub(r'asyncengine[.][a-z_.]+[.]', '', getattr(types, '__name__', str(types)))}") as tried:
        fuzz()


@pytest.mark.parametrize("valid", [FRAME, DELTAS, GENERATE, DELTAS.logprobs, DELTAS.openings])
def test_a_column_of_another_length_is_no_message(valid: msgspec.Struct) -> None:
    checked = 0
    for name in valid.__struct_fields__:
        column = getattr(valid, name)
        if isinstance(column, bytes) and column and name not in ("detok",):
            for wrong in (column[:-1], column + b"\0", column + b"\0\0"):
                with pytest.raises(ValueError, match="contradict"):
                    msgspec.structs.replace(valid, **{name: wrong})
                checked += 1
    assert checked


@pytest.mark.parametrize("ends", [(3, 1), (-1, 3), (1, 4), (1, 2), (2**31 - 1, 3)])
def test_ends_that_do_not_ascend_to_the_blobs_end_are_no_message(ends: tuple[int, int]) -> None:
    for name in ("text_ends", "ids_ends"):
        with pytest.raises(ValueError, match="contradict"):
            msgspec.structs.replace(DELTAS, **{name: ints(*ends)})


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
        with pytest.raises(ValueError, match="contradict"):
            msgspec.structs.replace(GENERATE, ids=ids)
    assert np.frombuffer(GENERATE.ids, np.int32).tolist() == [1, 2, 3]
