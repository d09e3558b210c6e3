"""Who gets the next text, and when nobody does."""

from __future__ import annotations

from typing import cast

import pytest

from asyncengine.errors import OverloadedError
from asyncengine.open_requests import Attempt
from asyncengine.questions import Questions
from asyncengine.tokenizer_links import MAX_UNACKED_BYTES, TokenizerLinks
from asyncengine.wire.pipes import Sender
from asyncengine.wire.requests import Abort, ToTokenizer

TEXT = Abort(rid=1)


class Pipe:
    def __init__(self, room: int) -> None:
        self.room = room
        self.sent = 0

    def try_send(self, message: ToTokenizer) -> bool:
        self.sent += self.sent < self.room
        return self.sent < self.room

    def send(self, message: ToTokenizer) -> None:
        self.sent += 1


def test_text_that_waits_for_tokenizers_is_bounded_in_bytes_and_whoever_owes_least_gets_the_next() -> None:
    pipes = [Pipe(100), Pipe(100)]
    links = TokenizerLinks([cast(Sender, pipe) for pipe in pipes], Questions())
    half = MAX_UNACKED_BYTES // 2
    attempts = [Attempt(links.send(TEXT), half) for _ in range(4)]
    assert [attempt.tokenizer for attempt in attempts] == [links[0], links[1], links[0], links[1]]
    with pytest.raises(OverloadedError, match="no room for another prompt"):
        links.send(TEXT)
    assert [pipe.sent for pipe in pipes] == [2, 2]
    assert links.resend(TEXT) is links[0], "what was accepted before is never turned away"
    attempts[3].acknowledge()
    assert links.send(TEXT) is links[1]


def test_a_pipe_without_room_is_a_refusal_too() -> None:
    links = TokenizerLinks([cast(Sender, Pipe(0))], Questions())
    with pytest.raises(OverloadedError, match="no room for another prompt"):
        links.send(TEXT)
