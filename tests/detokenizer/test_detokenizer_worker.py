"""One worker between the real pipes, turn by turn."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
from detokenizer_ring import WAIT_MS, Piece, Ring, Row, opened, pieces, receive_one
from toy_tokenizers import BYTE_LEVEL_SIZE, HIDDEN, LONG, byte_level

from asyncengine.config import API_WORKER_SHIFT
from asyncengine.wire.accounting import RingReader, RingWriter, TurnRecord
from asyncengine.wire.answers import Marks, Openings, ToEngine
from asyncengine.wire.base import Finish
from asyncengine.wire.engine_pipes import ApiProcess
from asyncengine.wire.frames import Open, RowMarks
from asyncengine.wire.pipes import Pipes, make_run_dir
from asyncengine.wire.requests import Relink, StopHit
from detokenizer_proc.vocabulary import Vocabulary
from detokenizer_proc.worker import ENGINE_HIGH_WATER_MARK, Worker

VOCABULARY = Vocabulary(byte_level())


@dataclass
class Bench:
    worker: Worker
    ring: Ring
    accounts: RingReader[TurnRecord]

    def step(self, *rows: Row, opens: tuple[Open, ...] = (), marks: tuple[RowMarks, ...] = ()) -> None:
        """Send one frame and let the worker take it."""
        self.ring.send(*rows, opens=opens, marks=marks)
        self.worker.turn(WAIT_MS)
        self.worker.check_integrity()

    def shown(self, *rows: Row, opens: tuple[Open, ...] = ()) -> list[Piece]:
        """The entries API worker 0 gets for one step."""
        self.step(*rows, opens=opens)
        return self.ring.receive()


@pytest.fixture
def bench() -> Iterator[Bench]:
    yield from make_bench(api_workers=2)


@pytest.fixture
def bench_without_engine() -> Iterator[Bench]:
    yield from make_bench(api_workers=0)


def make_bench(*, api_workers: int) -> Iterator[Bench]:
    run_dir = make_run_dir()
    pipes = Pipes(run_dir)
    ring = Ring(run_dir, api_workers=api_workers)
    account = RingWriter(run_dir, "detokenizer_proc", 0, TurnRecord)
    accounts = RingReader(run_dir / "detokenizer_proc.0.ring", TurnRecord)
    try:
        yield Bench(Worker(VOCABULARY, pipes, index=0, ring=account), ring, accounts)
    finally:
        pipes.close()
        ring.pipes.close()
        shutil.rmtree(run_dir)


def piece(
    rid: int, text: str, ids: list[int], finish: Finish = Finish.NONE, stop_reason: int = -1, prompt: int = 5
) -> Piece:
    return Piece(rid, text, ids, finish, stop_reason, prompt, 0)


def test_every_turn_that_had_a_frame_is_recorded(bench: Bench) -> None:
    bench.worker.turn(0)
    bench.step(Row(3, 1, ord("a")), Row(4, 1, ord("b")), opens=(opened(3, 1, 70), opened(4, 1, 71)))
    bench.step(Row(3, 1, ord("b")))
    bench.step(Row(3, 1, ord("c"), Finish.LENGTH))
    records = bench.accounts.snapshot()
    assert sum(record.messages for record in records) == 3
    assert sum(record.items for record in records) == 4
    assert records[-1].open == 1
    assert all(0 < record.begin <= record.middle <= record.end for record in records)


def test_a_row_opens_runs_and_ends_at_its_limit(bench: Bench) -> None:
    first = bench.shown(Row(3, 1, ord("a")), opens=(opened(3, 1, 70, prompt_tokens=9, cached_tokens=4),))
    assert first == [Piece(70, "a", [ord("a")], Finish.NONE, -1, 9, 4)]
    assert bench.shown(Row(3, 1, ord("b"))) == [Piece(70, "b", [ord("b")], Finish.NONE, -1, 9, 4)]
    assert bench.worker.gauges()["streams"] == 1
    assert bench.shown(Row(3, 1, ord("c"), Finish.LENGTH)) == [Piece(70, "c", [ord("c")], Finish.LENGTH, -1, 9, 4)]
    assert bench.worker.gauges()["streams"] == 0


def test_a_rows_text_begins_with_what_its_prompt_left_open(bench: Bench) -> None:
    row = opened(3, 1, 70, prefix="<t>", stop=("<t>",), shown_tokens=("<|x|>",))
    assert bench.shown(Row(3, 1, ord("a")), opens=(row,)) == [piece(70, "<t>a", [ord("a")])]
    assert bench.shown(Row(3, 1, HIDDEN)) == [piece(70, "<|x|>", [HIDDEN])]


def test_what_gpu_runner_stamped_comes_once_with_the_first_entry(bench: Bench) -> None:
    stamped = [
        msgspec.structs.replace(opened(slot, 1, 70 + slot), queued_ns=slot, started_ns=10 + slot, first_token_ns=20)
        for slot in (3, 4)
    ]
    bench.step(Row(3, 1, ord("a")), opens=(stamped[0],))
    assert bench.ring.receive_message().openings == Openings(_int32s(0), _int64s(3, 13, 20))
    bench.step(Row(3, 1, ord("b")), Row(4, 1, ord("c")), opens=(stamped[1],))
    message = bench.ring.receive_message()
    assert _rids(message.rids) == [73, 74]
    assert message.openings == Openings(_int32s(1), _int64s(4, 14, 20))
    bench.step(Row(3, 1, ord("d"), Finish.LENGTH), Row(4, 1, ord("e")))
    assert bench.ring.receive_message().openings is None


def test_what_gpu_runner_knew_of_sessions_comes_with_the_first_entry_if_it_knew_any(bench: Bench) -> None:
    known = msgspec.structs.replace(opened(4, 1, 74), session_tokens=9, session_common=2)
    bench.step(Row(3, 1, ord("a")), Row(4, 1, ord("b")), opens=(opened(3, 1, 73), known))
    openings = bench.ring.receive_message().openings
    assert openings == Openings(_int32s(0, 1), _int64s(*[0] * 6), _int32s(-1, 0, 9, 2))
    bench.step(Row(3, 1, ord("c")), Row(4, 1, ord("d")))
    assert bench.ring.receive_message().openings is None


def test_marks_of_rows_that_are_open_go_on_with_their_next_entry(bench: Bench) -> None:
    opens = (opened(3, 1, 73), opened(4, 1, 74))
    marks = (RowMarks(4, _int64s(10, 7, 11, -1)), RowMarks(3, _int64s(10, 5, 10, 0)), RowMarks(9, _int64s(1, 1)))
    bench.step(Row(3, 1, ord("a")), Row(4, 1, ord("b")), opens=opens, marks=marks)
    message = bench.ring.receive_message()
    assert message.marks == Marks(_int32s(0, 1), _int32s(2, 4), _int64s(10, 5, 10, 0, 10, 7, 11, -1))
    bench.step(Row(4, 1, ord("c")))
    assert bench.ring.receive_message().marks is None
    bench.step(Row(4, 1, ord("d")), Row(3, 1, ord("e")), marks=(RowMarks(3, _int64s(12, 5)),))
    assert bench.ring.receive_message().marks == Marks(_int32s(1), _int32s(1), _int64s(12, 5))


def _int32s(*values: int) -> bytes:
    return array("i", values).tobytes()


def _int64s(*values: int) -> bytes:
    return array("q", values).tobytes()


def _rids(column: bytes) -> list[int]:
    return array("Q", column).tolist()


def test_all_rows_of_a_frame_share_one_message(bench: Bench) -> None:
    opens = tuple(opened(slot, 0, 100 + slot) for slot in range(3))
    assert bench.shown(*(Row(slot, 0, ord("a") + slot) for slot in range(3)), opens=opens) == [
        piece(100 + slot, "abc"[slot], [ord("abc"[slot])]) for slot in range(3)
    ]


def test_frames_that_have_queued_up_become_one_entry(bench: Bench) -> None:
    bench.step(opens=(opened(0, 0, 1),))
    for char in "abc":
        bench.ring.send(Row(0, 0, ord(char)))
    received = ""
    while received != "abc":
        bench.worker.turn(WAIT_MS)
        received += "".join(entry.text for entry in bench.ring.receive())
        assert "abc".startswith(received)


@pytest.mark.parametrize(
    ("skip_special_tokens", "include_stop", "text"),
    [(True, False, "hi"), (False, False, "hi"), (True, True, "hi"), (False, True, "hi<|x|>")],
)
def test_a_stop_token_is_counted_and_its_text_is_shown_only_on_request(
    bench: Bench, skip_special_tokens: bool, include_stop: bool, text: str
) -> None:
    start = opened(0, 0, 1, skip_special_tokens=skip_special_tokens, include_stop=include_stop)
    bench.shown(Row(0, 0, ord("h")), opens=(start,))
    bench.shown(Row(0, 0, ord("i")))
    assert bench.shown(Row(0, 0, HIDDEN, Finish.STOP)) == [piece(1, text[2:], [HIDDEN], Finish.STOP, HIDDEN)]


def test_a_visible_stop_token_is_not_shown_either(bench: Bench) -> None:
    opens = (opened(0, 0, 1, skip_special_tokens=False),)
    assert bench.shown(Row(0, 0, LONG, Finish.STOP), opens=opens) == [piece(1, "", [LONG], Finish.STOP, LONG)]


def test_a_frame_may_hold_the_open_and_the_end_of_a_row(bench: Bench) -> None:
    assert bench.shown(Row(0, 0, -1, Finish.ABORT), opens=(opened(0, 0, 1),)) == [piece(1, "", [], Finish.ABORT)]
    assert bench.shown(Row(0, 1, ord("z"), Finish.LENGTH), opens=(opened(0, 1, 2),)) == [
        piece(2, "z", [ord("z")], Finish.LENGTH)
    ]


def test_a_stop_string_cuts_the_text_and_ends_the_row_in_gpu_runner(bench: Bench) -> None:
    opens = (opened(4, 9, 1, stop=("no", "END.")), opened(5, 2, 2))
    shown = bench.shown(Row(4, 9, ord("x")), Row(5, 2, ord("y")), opens=opens)
    assert shown == [piece(1, "x", [ord("x")]), piece(2, "y", [ord("y")])]
    for char in "END":
        assert bench.shown(Row(4, 9, ord(char))) == [piece(1, "", [ord(char)])]
    assert bench.shown(Row(4, 9, ord("."))) == [piece(1, "", [ord(".")], Finish.STOP_STRING, 1)]
    assert bench.ring.stop_hits(1) == [StopHit(4, 9)]
    # the row's tokens that were under way when the hit was found
    assert bench.shown(Row(4, 9, ord("!")), Row(5, 2, ord("z"))) == [piece(2, "z", [ord("z")])]
    assert bench.shown(Row(4, 9, -1, Finish.ABORT), Row(5, 2, ord("w"))) == [piece(2, "w", [ord("w")])]
    assert bench.worker.gauges() == {"streams": 1, "pending": 0, "stop_hits": 1, "bad_ids": 0, "malformed": 0}


def test_a_stop_string_inside_a_longer_token_is_found(bench: Bench) -> None:
    assert bench.shown(Row(0, 0, LONG), opens=(opened(0, 0, 1, stop=("RS",)),)) == [
        piece(1, "q", [LONG], Finish.STOP_STRING, 0)
    ]
    assert bench.shown(Row(0, 1, LONG), opens=(opened(0, 1, 2, stop=("RS",), include_stop=True),)) == [
        piece(2, "qRS", [LONG], Finish.STOP_STRING, 0)
    ]


def test_a_stop_string_in_the_last_token_wins_over_the_limit_and_gpu_runner_need_not_hear_of_it(bench: Bench) -> None:
    assert bench.shown(Row(0, 0, LONG, Finish.LENGTH), opens=(opened(0, 0, 1, stop=("ST",)),)) == [
        piece(1, "qR", [LONG], Finish.STOP_STRING, 0)
    ]
    assert not bench.ring.control.wait(20)


@pytest.mark.parametrize(
    ("token", "finish", "reason"),
    [(HIDDEN, Finish.STOP, HIDDEN), (ord("!"), Finish.LENGTH, -1), (-1, Finish.ABORT, -1)],
)
def test_text_that_was_held_back_comes_out_at_the_end(bench: Bench, token: int, finish: Finish, reason: int) -> None:
    assert bench.shown(Row(0, 0, ord("E")), opens=(opened(0, 0, 1, stop=("END",)),)) == [piece(1, "", [ord("E")])]
    last = "!" if finish == Finish.LENGTH else ""
    assert bench.shown(Row(0, 0, token, finish)) == [piece(1, "E" + last, [] if token < 0 else [token], finish, reason)]


def test_a_character_that_the_end_cuts_is_shown_as_one_replacement_sign(bench: Bench) -> None:
    bench.shown(Row(0, 0, 0xF0), opens=(opened(0, 0, 1),))
    assert bench.shown(Row(0, 0, 0x9F, Finish.LENGTH)) == [piece(1, "\ufffd", [0x9F], Finish.LENGTH)]


def test_rows_of_another_generation_are_ignored(bench: Bench) -> None:
    bench.shown(Row(0, 5, ord("a")), opens=(opened(0, 5, 1),))
    bench.step(Row(0, 4, ord("x"), Finish.STOP), Row(0, 6, ord("y")), Row(77, 0, ord("z")))
    assert bench.shown(Row(0, 5, ord("b"))) == [piece(1, "b", [ord("b")])]


def test_a_reopened_slot_starts_anew(bench: Bench) -> None:
    bench.shown(Row(0, 1, 0xF0), opens=(opened(0, 1, 1, stop=("a",)),))
    assert bench.shown(Row(0, 1, -1, Finish.ABORT)) == [piece(1, "\ufffd", [], Finish.ABORT)]
    assert bench.shown(Row(0, 2, ord("a")), opens=(opened(0, 2, 2, prompt_tokens=6),)) == [
        piece(2, "a", [ord("a")], prompt=6)
    ]


@pytest.mark.parametrize("bad", [-1, -7, BYTE_LEVEL_SIZE, 2**31 - 1])
def test_an_id_the_vocabulary_does_not_have_ends_its_row_only(bench: Bench, bad: int) -> None:
    opens = tuple(opened(slot, 0, 100 + slot, stop=("zz",)) for slot in range(8))
    bench.shown(*(Row(slot, 0, ord("z")) for slot in range(8)), opens=opens)
    tokens = [bad if slot == 3 else ord("b") for slot in range(8)]
    assert bench.shown(*(Row(slot, 0, token) for slot, token in enumerate(tokens))) == [
        piece(103, "z", [], Finish.ERROR, bad) if slot == 3 else piece(100 + slot, "zb", [ord("b")])
        for slot in range(8)
    ]
    assert bench.ring.stop_hits(1) == [StopHit(3, 0)]
    gauges = bench.worker.gauges()
    assert (gauges["bad_ids"], gauges["stop_hits"], gauges["streams"]) == (1, 0, 7)


def test_a_last_token_the_vocabulary_does_not_have_is_an_error_too(bench: Bench) -> None:
    assert bench.shown(Row(0, 0, BYTE_LEVEL_SIZE, Finish.LENGTH), opens=(opened(0, 0, 1),)) == [
        piece(1, "", [], Finish.ERROR, BYTE_LEVEL_SIZE)
    ]


def test_each_api_worker_gets_its_own_requests(bench: Bench) -> None:
    second = (1 << API_WORKER_SHIFT) + 5
    bench.step(Row(0, 0, ord("a")), Row(1, 0, ord("b")), opens=(opened(0, 0, 5), opened(1, 0, second)))
    assert bench.ring.receive(0) == [piece(5, "a", [ord("a")])]
    assert bench.ring.receive(1) == [piece(second, "b", [ord("b")])]
    bench.step(Row(1, 0, ord("c")))
    assert bench.ring.receive(1) == [piece(second, "c", [ord("c")])]
    assert bench.ring.silent(0)


def test_deltas_for_an_api_worker_that_is_behind_merge_and_lose_nothing(bench_without_engine: Bench) -> None:
    bench, steps = bench_without_engine, 200
    tokens = [ord("a") + step % 26 for step in range(steps)]
    for step, token in enumerate(tokens):
        opens = (opened(0, 0, 1), opened(1, 0, 2, stop=("c",))) if step == 0 else ()
        finish = Finish.LENGTH if step == steps - 1 else Finish.NONE
        bench.step(Row(0, 0, token, finish), Row(1, 0, token), opens=opens)
    while bench.worker.gauges()["streams"]:
        bench.worker.turn(0)
    assert bench.worker.gauges()["pending"] == 2, "one delta each, whatever it holds"
    engine = bench.ring.engine(0)
    messages: list[list[Piece]] = []
    while not messages or messages[-1][0].finish == Finish.NONE:
        bench.worker.turn(0)
        if engine.wait(5):
            messages += [pieces(message) for message in engine.drain()]
    assert len(messages) == ENGINE_HIGH_WATER_MARK + 1
    received = [entry for message in messages for entry in message if entry.rid == 1]
    assert [token for entry in received for token in entry.ids] == tokens
    assert "".join(entry.text for entry in received) == bytes(tokens).decode()
    assert [len(entry.ids) for entry in received] == [1] * ENGINE_HIGH_WATER_MARK + [steps - ENGINE_HIGH_WATER_MARK]
    assert bench.worker.gauges()["pending"] == 0


def test_rows_of_a_lost_api_worker_are_forgotten_and_what_waits_for_it_is_dropped(bench: Bench) -> None:
    lost, new = ApiProcess(5).first_rid, ApiProcess(5, 1).first_rid  # nobody reads for the first
    bench.step(Row(0, 0, ord("a")), Row(1, 0, ord("b")), opens=(opened(0, 0, lost), opened(1, 0, 7)))
    for _ in range(ENGINE_HIGH_WATER_MARK + 1):
        bench.step(Row(0, 0, ord("c")))
    assert (bench.worker.gauges()["streams"], bench.worker.gauges()["pending"]) == (2, 1)
    successor = bench.ring.pipes.receiver("engine.5.1", ToEngine)
    bench.ring.tell(Relink("api_worker", 5, 1))
    bench.worker.turn(WAIT_MS)
    bench.step(Row(0, 0, ord("d")), Row(1, 0, ord("e")), Row(2, 0, ord("f")), opens=(opened(2, 0, new),))
    assert (bench.worker.gauges()["streams"], bench.worker.gauges()["pending"]) == (2, 0)
    assert bench.ring.receive(0) == [piece(7, "b", [ord("b")])]
    assert bench.ring.receive(0) == [piece(7, "e", [ord("e")])]
    assert pieces(receive_one(successor)) == [piece(new, "f", [ord("f")])]


def test_entries_too_large_for_one_message_come_in_several(
    bench_without_engine: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("detokenizer_proc.deltas.MAX_DELTAS_BYTES", 10)
    bench = bench_without_engine
    rows = range(4)
    bench.step(*(Row(slot, 0, ord("a")) for slot in rows), opens=tuple(opened(slot, 0, slot) for slot in rows))
    engine = bench.ring.engine(0)
    messages: list[list[Piece]] = []
    while len(messages) < 2:
        assert engine.wait(WAIT_MS)
        messages += [pieces(message) for message in engine.drain()]
    assert [[entry.rid for entry in message] for message in messages] == [[0, 1], [2, 3]]
