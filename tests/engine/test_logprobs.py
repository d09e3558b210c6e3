"""From the columns of a message to each request's entries."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest

from asyncengine.logprobs import TokenLogprob, TopLogprob, unpack
from asyncengine.wire.answers import LogprobColumns


def columns(**changes: bytes) -> LogprobColumns:
    """Of three requests: the first has one token with one likely token, the second none, the third two tokens."""
    fields: dict[str, Any] = {
        "ends": array("i", [1, 1, 3]).tobytes(),
        "text_offsets": array("i", [0, 4, 5]).tobytes(),
        "item_ends": array("i", [2, 3, 4]).tobytes(),
        "ids": array("i", [7, 8, 9, 10]).tobytes(),
        "logprobs": array("f", [-0.5, -0.25, -1.0, -2.0]).tobytes(),
        "token_bytes": b"ab\xe4\xb8",
        "token_ends": array("i", [1, 2, 4, 4]).tobytes(),
    }
    return LogprobColumns(**fields | changes)


def test_each_request_gets_its_own_entries() -> None:
    assert list(unpack(columns())) == [
        [TokenLogprob(token_id=7, token=b"a", logprob=-0.5, text_offset=0, top=(TopLogprob(8, b"b", -0.25),))],
        [],
        [
            TokenLogprob(token_id=9, token=b"\xe4\xb8", logprob=-1.0, text_offset=4),
            TokenLogprob(token_id=10, token=b"", logprob=-2.0, text_offset=5),
        ],
    ]


def test_a_part_of_a_character_is_shown_as_a_replacement_sign() -> None:
    *_, last = unpack(columns())
    assert [entry.text for entry in last] == ["\ufffd", ""]
    assert TopLogprob(1, "é".encode(), -1.0).text == "é"


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": array("i", [7, 8, 9]).tobytes()},
        {"logprobs": b""},
        {"token_ends": array("i", [1]).tobytes()},
        {"text_offsets": array("i", [0]).tobytes()},
        {"item_ends": array("i", [2, 2, 4]).tobytes()},
    ],
)
def test_columns_that_contradict_each_other_are_an_error(changes: dict[str, bytes]) -> None:
    with pytest.raises(ValueError, match=r"zip\(\)|unpack"):
        list(unpack(columns(**changes)))


def test_entries_of_a_message_survive_the_wire() -> None:
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(columns()), type=LogprobColumns)
    assert list(unpack(decoded)) == list(unpack(columns()))
