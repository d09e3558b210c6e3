"""Every message survives its pipe, and no two messages of one pipe can be confused."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncengine.sampling import SamplingParams, Structured
from asyncengine.terms import Terms
from asyncengine.wire import answers, frames, grammar_messages, reports, requests
from asyncengine.wire.base import Finish, Wire
from asyncengine.wire.frames import DetokenizeOptions, StepFrame

PIPES: dict[str, Any] = {
    "tokenizer": requests.ToTokenizer,
    "runner.requests": requests.ToRunner,
    "runner.control": requests.ToRunnerControl,
    "detokenizer": frames.ToDetokenizer,
    "engine": answers.ToEngine,
    "supervisor": reports.ToSupervisor,
    "grammar": grammar_messages.ToGrammar,
    "runner.grammar": grammar_messages.FromGrammar,
}
NOT_SENT_ALONE = {
    requests.Markup,
    answers.Marks,
    frames.RowMarks,
    requests.Resume,
    answers.Crash,
    frames.Open,
    frames.DetokenizeOptions,
    answers.LogprobColumns,
    answers.Openings,
    answers.PromptColumns,
    frames.PromptLogprobs,
}
ALL = set(Wire.__subclasses__())

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
STRUCTURED = st.builds(Structured, kind=st.just("regex"), text=TEXT.filter(bool))
SAMPLING = st.builds(
    SamplingParams,
    n=st.integers(1, 16),
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 2**31 - 1),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    logprobs=st.none() | st.integers(0, 20),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(TEXT.filter(bool), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    priority=st.integers(-(2**31 - 1), 2**31 - 1),
    structured=st.none(),
) | st.builds(SamplingParams, structured=STRUCTURED)
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**64 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: TEXT,
    bytes: st.binary(max_size=40),
    type(None): st.none(),
    Any: st.none() | st.booleans() | st.integers(-(2**63), 2**63) | TEXT | st.binary(max_size=8),
}


def members(union: Any) -> tuple[type, ...]:
    return typing.get_args(union) or (union,)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of one field's type, as far as messages use types."""
    if hint in SIMPLE:
        return SIMPLE[hint]
    if hint is SamplingParams:
        return SAMPLING
    if hint is Structured:
        return STRUCTURED
    if isinstance(hint, type) and issubclass(hint, Wire | Terms):
        return messages_of(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([values_of(argument) for argument in arguments])
    raise TypeError(f"no values known for a field of type {hint}")


def messages_of(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{name: values_of(hint) for name, hint in typing.get_type_hints(cls).items()})


@pytest.mark.parametrize("pipe", PIPES)
@given(data=st.data())
def test_every_message_of_a_pipe_comes_out_as_it_went_in(pipe: str, data: st.DataObject) -> None:
    decoder = msgspec.msgpack.Decoder(PIPES[pipe])
    message = data.draw(st.one_of([messages_of(cls) for cls in members(PIPES[pipe])]))
    decoded = decoder.decode(msgspec.msgpack.encode(message))
    assert type(decoded) is type(message)
    assert decoded == message


@given(messages_of(DetokenizeOptions))
def test_detokenize_options_survive_as_the_opaque_bytes_of_a_generate(options: Wire) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=DetokenizeOptions) == options


def test_every_message_belongs_to_a_pipe_or_to_another_message() -> None:
    on_pipes = {cls for union in PIPES.values() for cls in members(union)}
    assert on_pipes | NOT_SENT_ALONE == ALL


def test_every_message_has_a_tag_of_its_own_and_is_frozen_columnar_and_untracked() -> None:
    configs = [cls.__struct_config__ for cls in ALL]
    assert len({config.tag for config in configs}) == len(ALL)
    assert all(config.frozen and config.array_like and not config.gc for config in configs)


def test_a_step_frame_carries_arrays_as_their_little_endian_bytes() -> None:
    slots = np.array([3, 1, 2], "<i4")
    tokens = np.array([-1, 49151, 0], "<i4")
    finish = np.array([Finish.ABORT, Finish.NONE, Finish.STOP], "u1")
    frame = StepFrame(7, slots.tobytes(), np.zeros(3, "<i4").tobytes(), tokens.tobytes(), finish.tobytes())
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=StepFrame)
    assert np.frombuffer(decoded.slots, "<i4").tolist() == [3, 1, 2]
    assert np.frombuffer(decoded.tokens, "<i4").tolist() == [-1, 49151, 0]
    assert np.frombuffer(decoded.finish, "u1").tolist() == [3, 0, 1]


def test_a_step_frame_without_new_rows_costs_thirteen_bytes_a_row_plus_a_constant() -> None:
    def size(rows: int) -> int:
        column = np.zeros(rows, "<i4").tobytes()
        return len(msgspec.msgpack.encode(StepFrame(2**40, column, column, column, bytes(rows))))

    assert size(1024) - 13 * 1024 <= 40


def test_a_step_frame_pays_for_log_probabilities_only_where_they_are_asked() -> None:
    column = np.zeros(64, "<i4").tobytes()
    frame = StepFrame(7, column, column, column, bytes(64))
    encoded = msgspec.msgpack.encode(frame)
    columns = ("logprob_rows", "logprobs", "top_ends", "top_ids", "top_logprobs")
    assert [getattr(frame, name) for name in columns] == [b""] * 5
    assert encoded == msgspec.msgpack.encode([22, 7, column, column, column, bytes(64), (), *[b""] * 5, 0, ()])
