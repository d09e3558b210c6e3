"""Rows that go on after a loss: whatever was cut, and wherever, a caller gets what one worker without a loss gives."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import pytest
from detokenizer_ring import Row, opened, pieces, step_frame
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_pipes import MemoryPipes, NoRing
from toy_tokenizers import (
    BYTE_LEVEL_SIZE,
    BYTE_START,
    HIDDEN,
    LONG,
    NAMELESS,
    SPELLED,
    byte_fallback,
    byte_level,
    metaspace,
    word_pieces,
)

from asyncengine.logprobs import TokenLogprob, unpack
from asyncengine.wire.answers import Deltas
from asyncengine.wire.base import Finish
from asyncengine.wire.pipes import pipe_name
from asyncengine.wire.requests import StopHit
from detokenizer_proc.vocabulary import Vocabulary
from detokenizer_proc.worker import Worker

VOCABULARIES = {
    "byte_level": Vocabulary(byte_level()),
    "byte_fallback": Vocabulary(byte_fallback(strip=2)),
    "metaspace": Vocabulary(metaspace()),
    "word_pieces": Vocabulary(word_pieces()),
}
TOKENS = {
    "byte_level": [*b"ab<", *"é\u2603".encode(), 0xFF, HIDDEN, SPELLED, LONG, NAMELESS],
    "byte_fallback": [*range(9), *(BYTE_START + byte for byte in "é\u2603".encode()), BYTE_START + 0xFF],
    "metaspace": [*range(9)],
    "word_pieces": [*range(5)],
}
STOPS = ["ab", "ba", "aab", "b<", "é", "é\u2603", "STa", "<tool>", "<|x|>", "lo, wor", "! H", "\n", "able un", "."]
BAD_ID = BYTE_LEVEL_SIZE + 9
SLOT, SHARD = 2, 5


class Text(NamedTuple):
    """What one choice is made of: the tokens that gpu_runner will have for it whatever is lost, the last of them with
    `finish` (with ABORT, the end comes behind them)."""

    kind: str
    tokens: list[int]
    finish: Finish
    options: dict[str, Any]

    def row(self, gen: int, place: int) -> Row:
        """Token number `place`."""
        if place == len(self.tokens):
            return Row(SLOT, gen, -1, Finish.ABORT)
        last = place == len(self.tokens) - 1 and self.finish != Finish.ABORT
        token = self.tokens[place]
        logprobs = (-1.0 - place, -0.5) if self.options["logprobs"] else ()
        finish = self.finish if last else Finish.NONE
        return Row(SLOT, gen, token, finish, logprobs, (place,) if logprobs else ())


class Caller:
    """An engine's stream of the choice: what has arrived, and from where it is resumed."""

    def __init__(self, text: Text) -> None:
        self._logprobs = text.options["logprobs"]
        self.rid = 0
        self.text = b""
        self.ids: list[int] = []
        self.entries: list[TokenLogprob] = []
        self.finish = (int(Finish.NONE), -1)
        self._repeated = 0

    def resume(self) -> tuple[list[int], int]:
        """A new request takes the place of the lost one: its `resumed` and `shown`."""
        self.rid += 1
        count = len(self.entries) if self._logprobs else len(self.ids)
        self._repeated = len(self.ids) - count
        return self.ids[:count], len(self.text)

    def take(self, message: Deltas) -> None:
        assert message.shard == SHARD
        entries = None if message.logprobs is None else list(unpack(message.logprobs))
        for place, piece in enumerate(pieces(message)):
            if piece.rid != self.rid:
                continue
            assert not self.finish[0], "nothing comes behind the end"
            repeated, self._repeated = piece.ids[: self._repeated], max(0, self._repeated - len(piece.ids))
            self.text += piece.text.encode()
            self.ids += piece.ids[len(repeated) :]
            self.entries += [] if entries is None else entries[place]
            self.finish = (piece.finish, piece.stop_reason)

    @property
    def state(self) -> tuple[Any, ...]:
        return self.text.decode(), self.ids, self.entries, self.finish


class Engine:
    """A worker, its gpu_runner and the caller, of which the first two may be lost."""

    def __init__(self, text: Text) -> None:
        self._choice = text
        self.caller = Caller(text)
        self._life = self._runner_life = self._place = self._step = 0
        self._resumed: list[int] = []
        self._shown = 0
        self._opens = True
        self._start_worker()

    def run(self, reads: list[bool], *, lose_runner: bool = False) -> None:
        """One step for each of `reads`: whether the engine has room for news in it. Then a loss, unless all is over."""
        for read in reads:
            if self._step_over():
                return
            self._one_step(read)
        if self.caller.finish[0]:
            return
        if lose_runner:
            self._runner_life += 1
            self._frames.append(step_frame(0, life=self._runner_life))
        else:
            self._life += 1
            self._start_worker()
        self._resumed, self._shown = self.caller.resume()
        self._place = len(self._resumed)
        self._opens = True

    def finish(self) -> tuple[Any, ...]:
        """Let it run to the end; what the caller got of it all."""
        while not self._step_over():
            self._one_step(read=True)
        self._turn(read=True)
        return self.caller.state

    def _step_over(self) -> bool:
        ends = len(self._choice.tokens) + (self._choice.finish == Finish.ABORT)
        return bool(self.caller.finish[0]) or self._place >= ends

    def _one_step(self, read: bool) -> None:
        gen = self.caller.rid
        options = self._choice.options
        start = opened(SLOT, gen, gen, **options, resumed=self._resumed, shown=self._shown)
        row = self._choice.row(gen, self._place)
        opens = (start,) if self._opens else ()
        self._frames.append(step_frame(self._step, row, opens=opens, life=self._runner_life))
        self._opens = False
        self._place += 1
        self._step += 1
        self._turn(read)

    def _turn(self, read: bool) -> None:
        sender = self._pipes.sender("engine.0")
        sender.open = read
        self._worker.turn(0)
        self._worker.check_integrity()
        for message in sender.sent:
            self.caller.take(message)
        sender.sent.clear()

    def _start_worker(self) -> None:
        self._pipes = MemoryPipes()
        self._worker = Worker(
            VOCABULARIES[self._choice.kind],
            self._pipes.as_pipes(),
            index=SHARD,
            ring=cast(Any, NoRing()),
            life=self._life,
            runner_life=self._runner_life,
        )
        self._frames = self._pipes.receivers[pipe_name(f"detokenizer.{SHARD}", self._life)].arrived


@st.composite
def texts(draw: st.DrawFn) -> Text:
    kind = draw(st.sampled_from(sorted(VOCABULARIES)))
    tokens = draw(st.lists(st.sampled_from(TOKENS[kind]), min_size=1, max_size=16))
    if draw(st.integers(0, 9)) == 0:
        tokens.append(BAD_ID)
    options = {
        "stop": tuple(draw(st.lists(st.sampled_from(STOPS), max_size=3, unique=True))),
        "skip_special_tokens": draw(st.booleans()),
        "include_stop": draw(st.booleans()),
        "logprobs": draw(st.booleans()),
        "shown_tokens": draw(st.sampled_from([(), ("<|x|>",)])),
        "prefix": draw(st.sampled_from(["", "<é>"])),
        "prompt_tail": tuple(draw(st.lists(st.sampled_from(TOKENS[kind]), max_size=3))),
        "prompt_tokens": 3,
    }
    return Text(kind, tokens, draw(st.sampled_from([Finish.LENGTH, Finish.STOP, Finish.ABORT])), options)


losses = st.lists(st.tuples(st.lists(st.booleans(), max_size=12), st.booleans()), min_size=1, max_size=4)


@settings(max_examples=200)
@given(texts(), losses)
def test_a_caller_gets_the_same_whatever_is_lost_and_when(text: Text, lost: list[tuple[list[bool], bool]]) -> None:
    whole = Engine(text).finish()
    engine = Engine(text)
    for reads, lose_runner in lost:
        engine.run(reads, lose_runner=lose_runner)
    assert engine.finish() == whole


# ---------------------------------------------------------------------------------------------------------- exact cases


class Bench:
    """A worker of its own that is shown one row at a time."""

    def __init__(self) -> None:
        self.pipes = MemoryPipes()
        self.worker = Worker(
            VOCABULARIES["byte_level"], self.pipes.as_pipes(), index=SHARD, ring=cast(Any, NoRing()), runner_life=3
        )

    def send(self, *rows: Row, life: int = 3, **options: Any) -> list[Deltas]:
        """What the engine gets for a frame, which with `options` opens the row."""
        opens = (opened(SLOT, 1, 70, **options),) if options else ()
        frames = self.pipes.receivers[f"detokenizer.{SHARD}"].arrived
        frames.append(step_frame(1, *rows, opens=opens, life=life))
        self.worker.turn(0)
        self.worker.check_integrity()
        sent = self.pipes.sender("engine.0").sent
        arrived = sent.copy()
        sent.clear()
        return arrived

    def shown(self, *tokens: int, finish: Finish = Finish.NONE, **options: Any) -> tuple[str, list[int], int, int]:
        """Of the one delta for one frame with one token (or none): text, ids, finish, stop_reason."""
        (message,) = self.send(*(Row(SLOT, 1, token, finish) for token in tokens), **options)
        (piece,) = pieces(message)
        return piece.text, piece.ids, piece.finish, piece.stop_reason

    def stop_hits(self, life: int = 3) -> list[StopHit]:
        return self.pipes.sender(pipe_name("runner.control", life)).sent


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_resumed_row_sends_only_what_is_new(bench: Bench) -> None:
    assert bench.shown(ord("d"), resumed=b"abc", shown=3) == ("d", [ord("d")], 0, -1)
    assert bench.shown(ord("e"), finish=Finish.LENGTH) == ("e", [ord("e")], Finish.LENGTH, -1)


def test_text_that_the_caller_has_is_left_out_of_later_tokens_too(bench: Bench) -> None:
    assert bench.shown(ord("c"), resumed=b"ab", shown=8, prefix="<é>") == ("", [ord("c")], 0, -1)
    assert bench.shown(LONG) == ("RSTq", [LONG], 0, -1)


def test_text_that_was_held_back_is_sent_when_it_is_free(bench: Bench) -> None:
    assert bench.shown(ord("N"), resumed=b"xE", shown=1, stop=("END",)) == ("", [ord("N")], 0, -1)
    assert bench.shown(ord("!")) == ("EN!", [ord("!")], 0, -1)


def test_a_stop_string_and_a_character_may_lie_over_the_border(bench: Bench) -> None:
    first, second = "é".encode()
    assert bench.shown(second, resumed=[ord("x"), first], shown=1) == ("é", [second], 0, -1)
    stopped = bench.shown(ord("D"), resumed=b"xEN", shown=1, stop=("END",), include_stop=True)
    assert stopped == ("END", [ord("D")], Finish.STOP_STRING, 0)
    assert bench.stop_hits() == [StopHit(SLOT, 1)]


@pytest.mark.parametrize(("include_stop", "text"), [(False, "y"), (True, "yEND")])
def test_a_row_that_has_found_its_stop_string_already_ends_there(bench: Bench, include_stop: bool, text: str) -> None:
    row: dict[str, Any] = {"resumed": b"xyENDz", "shown": 1, "stop": ("?", "END"), "include_stop": include_stop}
    assert bench.shown(ord("!"), **row) == (text, [], Finish.STOP_STRING, 1)
    assert bench.stop_hits() == [StopHit(SLOT, 1)]
    assert bench.send(Row(SLOT, 1, ord("a"))) == []
    assert bench.worker.gauges()["streams"] == 0


def test_an_id_that_the_vocabulary_does_not_have_ends_a_resumed_row(bench: Bench) -> None:
    stopped = bench.shown(ord("!"), resumed=[ord("x"), ord("E"), BAD_ID, ord("y")], shown=1, stop=("END",))
    assert stopped == ("E", [], Finish.ERROR, BAD_ID)
    assert bench.stop_hits() == [StopHit(SLOT, 1)]


def test_a_row_may_be_resumed_only_to_end(bench: Bench) -> None:
    assert bench.shown(-1, finish=Finish.ABORT, resumed=b"xE", shown=1, stop=("END",)) == ("E", [], Finish.ABORT, -1)


def test_a_row_without_output_is_resumed_without_it(bench: Bench) -> None:
    row: dict[str, Any] = {"no_output": True, "prefix": "<é>", "shown": 4}
    assert bench.shown(ord("a"), finish=Finish.LENGTH, **row) == ("", [], Finish.LENGTH, -1)


def test_a_new_gpu_runner_ends_the_rows_of_the_old_one_and_hears_of_its_own(bench: Bench) -> None:
    engine = bench.pipes.sender("engine.0")
    engine.open = False
    bench.send(Row(SLOT, 1, ord("a")), stop=("x",))
    assert bench.worker.gauges()["streams"] == 1
    bench.send(life=4)
    assert (bench.worker.gauges()["streams"], bench.worker.gauges()["pending"]) == (0, 1)
    assert "runner.control.3" not in bench.pipes.senders
    engine.open = True
    (message,) = bench.send(Row(SLOT, 1, ord("x")), life=3, stop=("x",))  # the lost one's, late
    assert [(piece.text, piece.ids) for piece in pieces(message)] == [("a", [ord("a")])]
    assert bench.worker.gauges()["streams"] == 0
    (message,) = bench.send(Row(SLOT, 1, ord("x")), life=4, stop=("x",))
    assert [piece.finish for piece in pieces(message)] == [Finish.STOP_STRING]
    assert bench.stop_hits(life=4) == [StopHit(SLOT, 1)]
