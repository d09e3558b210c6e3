"""Whatever comes out of the detokenizer's pipe: the process goes on, and valid rows behind it get their text."""

from __future__ import annotations

import shutil
from array import array

import msgspec
from detokenizer_ring import Ring, Row, opened
from hypothesis import given
from hypothesis import strategies as st
from support.byte_tokenizer import EOS, byte_tokenizer
from support.fuzzing import counted, read_frame, slice_of, strange_frame
from support.wire_examples import DELTAS, FRAME, PROMPT

from asyncengine.wire.accounting import RingWriter, TurnRecord
from asyncengine.wire.answers import Deltas
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import RowMarks, ToDetokenizer
from asyncengine.wire.pipes import Pipes, make_run_dir
from asyncengine.wire.requests import Relink
from detokenizer_proc.vocabulary import Vocabulary
from detokenizer_proc.worker import Worker

TEXT = "ok 😀"
BASE = 1_000_000
"""Slots and rids from here on are those of valid rows."""
FRAMES: list[msgspec.Struct] = [
    FRAME,
    DELTAS,
    Relink("api_worker", 1, 1),
    msgspec.structs.replace(FRAME, marks=(RowMarks(0, array("q", [5, 1]).tobytes()),)),
    msgspec.structs.replace(FRAME, opens=(opened(0, 1, 9, resumed=(65, 66), shown=1), opened(1, 1, 9, prompt=PROMPT))),
]


def test_a_running_detokenizer_takes_any_frame_and_serves_the_rows_behind_it() -> None:
    run_dir = make_run_dir()
    pipes, ring = Pipes(run_dir), Ring(run_dir)
    worker = Worker(
        Vocabulary(byte_tokenizer()), pipes, index=0, ring=RingWriter(run_dir, "detokenizer_proc", 0, TurnRecord)
    )
    malformed = 0

    @slice_of(120)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        nonlocal malformed
        frames = [strange_frame(FRAMES, data.draw) for _ in range(data.draw(st.integers(1, 8)))]
        number = BASE + len(tried)
        life = worker._runner_life
        for raw in frames:
            if (frame := read_frame(raw, ToDetokenizer)) is None:
                malformed += 1
            else:
                life = max(life, frame.life)
            ring._frames.socket.send(raw)
        tokens = list(TEXT.encode())
        ring.send(Row(number, 1, tokens[0]), opens=(opened(number, 1, number, prompt_tokens=3),), life=life)
        for token in tokens[1:]:
            ring.send(Row(number, 1, token), life=life)
        ring.send(Row(number, 1, EOS, Finish.STOP), life=life)
        text = b""
        ids: list[int] = []
        ends: list[int] = []
        while not ends:
            worker.turn(20)
            worker.check_integrity()
            for message in ring._engines[0].drain():
                assert isinstance(message, Deltas)
                text_part, ids_part, finish = part_of(message, number)
                text, ids, ends = text + text_part, ids + ids_part, ends + finish
        assert (text.decode(), ids, ends) == (TEXT, [*tokens, EOS], [Finish.STOP])
        assert worker._frames.malformed == malformed
        tried.append(len(frames))

    try:
        with counted("running detokenizer") as tried:
            fuzz()
        assert malformed > 10
    finally:
        pipes.close()
        ring.pipes.close()
        shutil.rmtree(run_dir)


def part_of(message: Deltas, rid: int) -> tuple[bytes, list[int], list[int]]:
    """Text, ids and end of one choice in a message."""
    rids = memoryview(message.rids).cast("Q").tolist()
    if rid not in rids:
        return b"", [], []
    place = rids.index(rid)
    text_ends, ids_ends = ([0, *memoryview(ends).cast("i")] for ends in (message.text_ends, message.ids_ends))
    ids = memoryview(message.ids).cast("i").tolist()[ids_ends[place] : ids_ends[place + 1]]
    text = message.text[text_ends[place] : text_ends[place + 1]]
    return text, ids, [end for end in message.finish[place : place + 1] if end]
