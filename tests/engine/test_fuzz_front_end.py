"""Whatever comes out of an API process's pipe: it goes on, and streams whose news is behind it are whole."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec
from front_end_ring import deltas, encoded, front_end_ring, ids_of, text_of
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import counted, read_frame, slice_of, strange_frame
from support.wire_examples import DELTAS, GENERATE

from asyncengine.sampling import SamplingParams
from asyncengine.wire.answers import Cancel, Cancelled, Detokenized, Failed, ToEngine, Tokenized
from asyncengine.wire.base import Finish

FRAMES: list[msgspec.Struct] = [
    DELTAS,
    DELTAS,
    deltas(1, "x", [1], shard=0, logprobs=[5], prompt=True),
    encoded(1),
    GENERATE,
    Failed(1, 400, "no", "code", None),
    Tokenized(1, bytes(8), ("a", "b")),
    Detokenized(1, "a"),
    Cancel(1, 0, "name"),
    Cancelled(1, True),
]
STREAMS_WITH_STRANGE_NEWS = SamplingParams(n=16, seed=7, logprobs=2, prompt_logprobs=0, stop=("END",))


def test_a_running_front_end_takes_any_frame_and_serves_the_streams_behind_it() -> None:
    async def run(frames: list[bytes], path: Path) -> None:
        expected = 0
        async with front_end_ring(path) as ring:
            victim = ring.submit(STREAMS_WITH_STRANGE_NEWS)  # rids 0 to 15, which the frames are about
            rid = ring.front._next_rid = 10**9
            stream = ring.submit()
            await ring.say()
            assert ring._engine is not None
            for raw in frames:
                expected += read_frame(raw, ToEngine) is None
                ring._engine.socket.send(raw)
            await ring.say(
                encoded(rid), deltas(rid, "ok 世", [5, 6], shard=0), deltas(rid, "!", [7], finish=Finish.STOP)
            )
            news = stream.take()
            assert (text_of(news), ids_of(news), news[-1].finish_reason) == ("ok 世!", [5, 6, 7], "stop")
            assert ring.front._receiver is not None
            assert ring.front._receiver.malformed == expected
            ring.front._requests.check_integrity()
            malformed.append(expected)
            victim.close()
            stream.close()
            ring.check_empty()

    @slice_of(60)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        frames = [strange_frame(FRAMES, data.draw) for _ in range(data.draw(st.integers(1, 12)))]
        with tempfile.TemporaryDirectory(prefix="f-") as path:
            asyncio.run(run(frames, Path(path)))
        tried.append(len(frames))

    malformed: list[int] = []
    with counted("running front end") as tried:
        fuzz()
    assert sum(malformed) > 10
