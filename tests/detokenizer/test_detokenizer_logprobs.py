"""Log-probabilities through one worker between the real pipes, from a step's columns to a caller's entries."""

from __future__ import annotations

import math
import shutil
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from detokenizer_ring import WAIT_MS, Ring, Row, opened, pieces
from tokenizers import Tokenizer
from toy_tokenizers import BYTE_LEVEL_SIZE, BYTE_START, HIDDEN, LONG, NAMELESS, byte_fallback, byte_level, word_pieces

from asyncengine.logprobs import LOWEST_LOGPROB, PromptLogprob, TokenLogprob, TopLogprob, unpack, unpack_prompt
from asyncengine.wire.accounting import RingWriter, TurnRecord
from asyncengine.wire.answers import Deltas
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import Open, PromptLogprobs
from asyncengine.wire.pipes import Pipes, make_run_dir
from detokenizer_proc.vocabulary import Vocabulary
from detokenizer_proc.worker import ENGINE_HIGH_WATER_MARK, Worker


class Bench:
    def __init__(self, tokenizer: Tokenizer, *, api_workers: int = 1) -> None:
        self._run_dir = make_run_dir()
        self._pipes = Pipes(self._run_dir)
        self.ring = Ring(self._run_dir, api_workers=api_workers)
        self._account = RingWriter(self._run_dir, "detokenizer_proc", 0, TurnRecord)
        self.worker = Worker(Vocabulary(tokenizer), self._pipes, index=0, ring=self._account)

    def close(self) -> None:
        self._pipes.close()
        self.ring.pipes.close()
        self._account.close()
        shutil.rmtree(self._run_dir)

    def step(self, *rows: Row, opens: tuple[Open, ...] = ()) -> None:
        self.ring.send(*rows, opens=opens)
        self.worker.turn(WAIT_MS)
        self.worker.check_integrity()

    def message(self, *rows: Row, opens: tuple[Open, ...] = ()) -> Deltas:
        self.step(*rows, opens=opens)
        return self.ring.receive_message()

    def entries(self, *rows: Row, opens: tuple[Open, ...] = ()) -> list[TokenLogprob]:
        """What API worker 0 gets for one step, of all requests."""
        return flat(self.message(*rows, opens=opens))


def flat(message: Deltas) -> list[TokenLogprob]:
    return [] if message.logprobs is None else [entry for part in unpack(message.logprobs) for entry in part]


@contextmanager
def running(tokenizer: Tokenizer, *, api_workers: int = 1) -> Iterator[Bench]:
    bench = Bench(tokenizer, api_workers=api_workers)
    try:
        yield bench
    finally:
        bench.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with running(byte_level()) as bench:
        yield bench


@pytest.fixture
def bench_without_engine() -> Iterator[Bench]:
    with running(byte_level(), api_workers=0) as bench:
        yield bench


@pytest.fixture
def bench_with_byte_fallback() -> Iterator[Bench]:
    with running(byte_fallback()) as bench:
        yield bench


@pytest.fixture
def bench_without_table() -> Iterator[Bench]:
    with running(word_pieces()) as bench:
        yield bench


def asked(rid: int = 1, *, slot: int = 0, stop: tuple[str, ...] = (), include_stop: bool = False) -> Open:
    return opened(slot, 0, rid, stop=stop, include_stop=include_stop, logprobs=True)


def test_the_generated_and_the_most_likely_tokens_come_with_their_bytes(bench: Bench) -> None:
    row = Row(0, 0, ord("a"), logprobs=(-1.5, -0.25, -2.0), top_ids=(LONG, HIDDEN))
    assert bench.entries(row, opens=(asked(),)) == [
        TokenLogprob(
            token_id=ord("a"),
            token=b"a",
            logprob=-1.5,
            text_offset=0,
            top=(TopLogprob(LONG, b"qRSTq", -0.25), TopLogprob(HIDDEN, b"<|x|>", -2.0)),
        )
    ]
    assert bench.entries(Row(0, 0, ord("b"), logprobs=(-0.5,))) == [
        TokenLogprob(token_id=ord("b"), token=b"b", logprob=-0.5, text_offset=1)
    ]


def test_rows_that_did_not_ask_get_nothing_and_cost_nothing(bench: Bench) -> None:
    rows = [Row(slot, 0, ord("a")) for slot in range(3)]
    message = bench.message(*rows, opens=tuple(opened(slot, 0, slot) for slot in range(3)))
    assert message.logprobs is None
    asking = Row(3, 0, ord("b"), logprobs=(-1.0, -0.5), top_ids=(7,))
    message = bench.message(rows[2], asking, rows[0], opens=(asked(3, slot=3),))
    assert memoryview(message.rids).cast("Q").tolist() == [2, 3, 0]
    assert message.logprobs is not None
    assert [len(entries) for entries in unpack(message.logprobs)] == [0, 1, 0]
    assert bench.message(*rows).logprobs is None


def test_each_row_has_its_own_number_of_most_likely_tokens(bench: Bench) -> None:
    opens = tuple(asked(10 + slot, slot=slot) for slot in range(3))
    tops = ((), (5, 6, 7), (8,))
    rows = [Row(s, 0, ord("a"), logprobs=(-1.0, *(-0.5 for _ in tops[s])), top_ids=tops[s]) for s in range(3)]
    message = bench.message(*rows, opens=opens)
    assert message.logprobs is not None
    assert [[[top.token_id for top in entry.top] for entry in entries] for entries in unpack(message.logprobs)] == [
        [[]],
        [[5, 6, 7]],
        [[8]],
    ]


def test_parts_of_a_character_have_their_exact_bytes_and_come_when_it_is_whole(bench: Bench) -> None:
    first, *middle, last = "👩".encode()
    assert bench.entries(Row(0, 0, first, logprobs=(-0.5,)), opens=(asked(),)) == []
    for byte in middle:
        assert bench.entries(Row(0, 0, byte, logprobs=(-0.5,))) == []
    entries = bench.entries(Row(0, 0, last, logprobs=(-0.5,)))
    assert [entry.token for entry in entries] == [bytes([byte]) for byte in "👩".encode()]
    assert [entry.text for entry in entries] == ["\ufffd"] * 4
    assert [entry.text_offset for entry in entries] == [0] * 4
    (after,) = bench.entries(Row(0, 0, ord("!"), logprobs=(-0.5,)))
    assert after.text_offset == 1


def test_a_character_that_the_end_cuts_keeps_its_tokens(bench: Bench) -> None:
    bench.message(Row(0, 0, 0xF0, logprobs=(-0.5,)), opens=(asked(),))
    entries = bench.entries(Row(0, 0, 0x9F, Finish.LENGTH, logprobs=(-0.5,)))
    assert [(entry.token, entry.text_offset) for entry in entries] == [(b"\xf0", 0), (b"\x9f", 0)]


def test_the_end_of_sequence_token_has_no_entry(bench: Bench) -> None:
    bench.message(Row(0, 0, ord("a"), logprobs=(-0.5,)), opens=(asked(),))
    assert bench.entries(Row(0, 0, HIDDEN, Finish.STOP, logprobs=(-0.5,))) == []


@pytest.mark.parametrize(("include_stop", "tokens"), [(False, []), (True, [b"qRSTq"])])
def test_a_stop_token_has_an_entry_where_its_text_is_shown(
    bench: Bench, include_stop: bool, tokens: list[bytes]
) -> None:
    bench.message(Row(0, 0, ord("a"), logprobs=(-0.5,)), opens=(asked(include_stop=include_stop),))
    entries = bench.entries(Row(0, 0, LONG, Finish.STOP, logprobs=(-0.5,)))
    assert [entry.token for entry in entries] == tokens


def test_a_stop_token_that_is_not_shown_still_releases_what_was_held(bench: Bench) -> None:
    bench.message(Row(0, 0, ord("E"), logprobs=(-0.5,)), opens=(asked(stop=("END",)),))
    entries = bench.entries(Row(0, 0, HIDDEN, Finish.STOP, logprobs=(-0.5,)))
    assert [entry.token for entry in entries] == [b"E"]


def test_tokens_of_a_cut_stop_string_have_no_entries(bench: Bench) -> None:
    assert len(bench.entries(Row(0, 0, ord("x"), logprobs=(-0.5,)), opens=(asked(stop=("END.",)),))) == 1
    for char in "END.":
        assert bench.entries(Row(0, 0, ord(char), logprobs=(-0.5,))) == []
    assert bench.worker.gauges()["stop_hits"] == 1


def test_tokens_of_a_stop_string_that_is_shown_have_entries(bench: Bench) -> None:
    bench.message(Row(0, 0, ord("E"), logprobs=(-0.5,)), opens=(asked(stop=("END",), include_stop=True),))
    bench.message(Row(0, 0, ord("N"), logprobs=(-0.5,)))
    entries = bench.entries(Row(0, 0, ord("D"), logprobs=(-0.5,)))
    assert [(entry.token, entry.text_offset) for entry in entries] == [(b"E", 0), (b"N", 1), (b"D", 2)]


def test_an_abort_shows_what_was_held_and_nothing_more(bench: Bench) -> None:
    bench.message(Row(0, 0, ord("E"), logprobs=(-0.5,)), opens=(asked(stop=("END",)),))
    assert [entry.token for entry in bench.entries(Row(0, 0, -1, Finish.ABORT))] == [b"E"]


def test_a_generated_token_outside_the_vocabulary_has_no_entry(bench: Bench) -> None:
    bench.message(Row(0, 0, ord("a"), logprobs=(-0.5,)), opens=(asked(),))
    message = bench.message(Row(0, 0, BYTE_LEVEL_SIZE, logprobs=(-0.5,)))
    assert message.finish == bytes([Finish.ERROR])
    assert message.logprobs is None


def test_likely_tokens_that_the_tokenizer_does_not_have_are_shown_without_bytes(bench: Bench) -> None:
    row = Row(0, 0, ord("a"), logprobs=(-0.5, -0.25, -0.75), top_ids=(BYTE_LEVEL_SIZE + 40, NAMELESS))
    (entry,) = bench.entries(row, opens=(asked(),))
    assert [(top.token_id, top.token) for top in entry.top] == [(BYTE_LEVEL_SIZE + 40, b""), (NAMELESS, b"")]


def test_minus_infinity_becomes_a_number(bench: Bench) -> None:
    row = Row(0, 0, ord("a"), logprobs=(float("-inf"), -1e30), top_ids=(5,))
    (entry,) = bench.entries(row, opens=(asked(),))
    assert (entry.logprob, entry.top[0].logprob) == (LOWEST_LOGPROB, LOWEST_LOGPROB)


def test_log_probabilities_of_a_row_that_is_not_open_or_did_not_ask_are_ignored(bench: Bench) -> None:
    bench.message(Row(0, 0, ord("a")), opens=(opened(0, 0, 1),))
    late = (Row(0, 5, ord("x"), logprobs=(-0.5,)), Row(9, 0, ord("x"), logprobs=(-0.5,)))
    message = bench.message(Row(0, 0, ord("b"), logprobs=(-0.5,)), *late)
    assert (message.text, message.logprobs) == (b"b", None)


def test_byte_fallback_tokens_are_their_bytes(bench_with_byte_fallback: Bench) -> None:
    bench = bench_with_byte_fallback
    entries = bench.entries(Row(0, 0, 2, logprobs=(-0.5,)), opens=(asked(),))
    assert [entry.token for entry in entries] == [b" Hello"]
    bench.message(Row(0, 0, BYTE_START + 0xC3, logprobs=(-0.5,)))
    entries = bench.entries(Row(0, 0, BYTE_START + 0xA9, logprobs=(-0.5,)))
    assert [(entry.token, entry.text_offset) for entry in entries] == [(b"\xc3", 6), (b"\xa9", 6)]


def test_without_a_byte_table_a_token_is_what_the_tokenizer_makes_of_it_alone(bench_without_table: Bench) -> None:
    bench = bench_without_table
    entries = []
    for step, token in enumerate((0, 1, 2, 3)):
        finish = Finish.LENGTH if step == 3 else Finish.NONE
        row = Row(0, 0, token, finish, logprobs=(-0.5, -0.25), top_ids=(4,))
        entries += bench.entries(row, opens=(asked(),) if step == 0 else ())
    decode = word_pieces().decode
    assert [entry.token.decode() for entry in entries] == [decode([token]) for token in (0, 1, 2, 3)]
    assert [entry.text_offset for entry in entries] == [0, 2, 8, 12]
    assert all(entry.top == (TopLogprob(4, b".", -0.25),) for entry in entries)


def test_entries_for_an_api_worker_that_is_behind_merge_and_lose_nothing(bench_without_engine: Bench) -> None:
    bench, steps = bench_without_engine, 100
    sent = [(ord("a") + step % 26, -step / 4, step % 3) for step in range(steps)]
    for step, (token, logprob, num_top) in enumerate(sent):
        tops = tuple(range(num_top))
        row = Row(0, 0, token, logprobs=(logprob, *(-float(top) for top in tops)), top_ids=tops)
        bench.step(row, Row(1, 0, token), opens=(asked(), opened(1, 0, 2)) if step == 0 else ())
    while not bench.worker.gauges()["pending"]:
        bench.worker.turn(0)
    engine = bench.ring.engine(0)
    messages: list[Deltas] = []
    while sum(len(flat(message)) for message in messages) < steps:
        bench.worker.turn(0)
        if engine.wait(5):
            messages += [message for message in engine.drain() if isinstance(message, Deltas)]
    assert len(messages) == ENGINE_HIGH_WATER_MARK + 1
    entries = [entry for message in messages for entry in flat(message)]
    assert [(entry.token_id, entry.logprob, len(entry.top)) for entry in entries] == sent
    assert [entry.text_offset for entry in entries] == list(range(steps))


def test_log_probabilities_count_towards_the_size_of_a_message(
    bench_without_engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("detokenizer_proc.deltas.MAX_DELTAS_BYTES", 100)
    bench = bench_without_engine
    row = {"logprobs": (-0.5, -0.5, -0.5), "top_ids": (1, 2)}  # 8 + 3 * 13 bytes
    bench.step(
        *(Row(slot, 0, ord("a"), **row) for slot in range(4)), opens=tuple(asked(slot, slot=slot) for slot in range(4))
    )
    engine = bench.ring.engine(0)
    messages: list[Deltas] = []
    while len(messages) < 4:
        assert engine.wait(WAIT_MS), len(messages)
        messages += [message for message in engine.drain() if isinstance(message, Deltas)]
        bench.worker.turn(0)
    assert [len(flat(message)) for message in messages] == [1, 1, 1, 1]


def prompt_of(*tokens: tuple[int, list[int]]) -> PromptLogprobs:
    """Tokens with their likely ones; the item numbered i has the log-probability -i, a token's rank is its number."""
    counts = [1 + len(tops) for _, tops in tokens]
    ends = [sum(counts[: end + 1]) for end in range(len(counts))]
    logprobs = [math.nan, *(-float(item) for item in range(1, sum(counts)))]
    return PromptLogprobs(
        item_ends=array("i", ends).tobytes(),
        ids=array("i", [id for token, tops in tokens for id in (token, *tops)]).tobytes(),
        logprobs=array("f", logprobs).tobytes(),
        ranks=array("i", range(len(tokens))).tobytes(),
    )


def test_a_prompts_entries_come_once_with_its_rows_first_news_and_know_their_bytes_and_offsets() -> None:
    a, b, euro = ord("a"), ord("b"), "€".encode()  # the ids are bytes
    prompt = prompt_of((a, []), (euro[0], [b]), (euro[1], []), (euro[2], [a, b]), (b, []))
    with running(byte_level()) as bench:
        opens = (opened(0, 0, 5), opened(1, 0, 6, prompt=prompt), opened(2, 0, 7, prompt=prompt_of((b, []))))
        message = bench.message(*(Row(slot, 0, a) for slot in range(3)), opens=opens)
        assert [columns.row for columns in message.prompts] == [1, 2]
        assert unpack_prompt(message.prompts[0]) == [
            PromptLogprob(token_id=a, token=b"a", logprob=None, rank=None, text_offset=0),
            PromptLogprob(
                token_id=euro[0], token=b"\xe2", logprob=-1, rank=1, text_offset=1, top=(TopLogprob(b, b"b", -2),)
            ),
            PromptLogprob(token_id=euro[1], token=b"\x82", logprob=-3, rank=2, text_offset=1),
            PromptLogprob(
                token_id=euro[2],
                token=b"\xac",
                logprob=-4,
                rank=3,
                text_offset=1,
                top=(TopLogprob(a, b"a", -5), TopLogprob(b, b"b", -6)),
            ),
            PromptLogprob(token_id=b, token=b"b", logprob=-7, rank=4, text_offset=2),
        ]
        assert bench.message(Row(1, 0, a)).prompts == ()


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH])
def test_a_row_that_is_to_put_out_nothing_ends_by_length_without_its_token(finish: Finish) -> None:
    a = ord("a")
    with running(byte_level()) as bench:
        open_ = opened(0, 0, 5, no_output=True, logprobs=True, stop=("a",), prompt=prompt_of((a, [])))
        message = bench.message(Row(0, 0, a, finish, (-1.0,)), opens=(open_,))
        (piece,) = pieces(message)
        assert (piece.text, piece.ids, piece.finish, piece.stop_reason) == ("", [], Finish.LENGTH, -1)
        assert message.logprobs is None
        assert len(message.prompts) == 1
