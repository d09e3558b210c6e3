"""Whose fault gpu_runner's end is: as its supervisor sees it, and as a front end marks its requests."""

from __future__ import annotations

import logging
import signal
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from front_end_ring import INFO, PROMPT, deltas, encoded, front_end_ring, int32

from asyncengine.config import Role
from asyncengine.crashes import Crashes
from asyncengine.errors import CrashingRequestError
from asyncengine.losses import Losses
from asyncengine.open_requests import MAX_TRIAL_TOKENS
from asyncengine.sampling import SamplingParams
from asyncengine.wire.answers import Crash
from asyncengine.wire.requests import PROVEN_TOKENS, Abort, EncodeIds, Relink, Resume
from asyncengine.wire.row_notes import LastRows, RowNotes, RowNotesReader

PARAMS = SamplingParams(seed=7)


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="c-") as path:
        yield Path(path)


def int64(*values: int) -> bytes:
    return array("q", values).tobytes()


def child(*, life: int = 0, served: bool = True, hung: str | None = None, finished: int = 0) -> Any:
    return SimpleNamespace(life=life, ready=served or None, hung=hung, gauges={"finished": finished})


# ----------------------------------------------------------------------------------------------------------- the notes


def test_the_notes_are_there_when_their_process_is_gone(short_path: Path) -> None:
    notes = RowNotes(short_path, num_slots=3)
    reader = RowNotesReader(short_path)
    assert reader.read() == LastRows()
    notes.rids[2] = 0
    notes.trial[0], notes.trial[1] = 2**62, 2
    assert reader.read() == LastRows(int64(0)), "what is on trial has no row yet"
    notes.rids[0] = 2**62 + 1
    successor = RowNotes(short_path, num_slots=1)
    del notes
    assert reader.read() == LastRows(int64(0, 2**62 + 1), (2**62, 2**62 + 1))
    reader.close()
    assert RowNotesReader(short_path).read() == LastRows()
    assert len(successor.rids) == 1


# ---------------------------------------------------------------------------------------------------- the supervisor's


@pytest.mark.parametrize("code", [0, 3, *(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT))])
def test_an_end_from_outside_is_nobodys_fault_whatever_is_on_trial(code: int, short_path: Path) -> None:
    notes = RowNotes(short_path, num_slots=1)
    notes.rids[0] = notes.trial[0] = 5
    notes.trial[1] = 1
    crashes = Crashes()
    crashes.serves(short_path)
    assert crashes.judge(child(), code) is crashes.latest is None
    assert crashes.num_convicted == crashes.num_in_a_row == 0


def test_neither_is_one_while_it_loads_nor_one_that_hung(short_path: Path) -> None:
    crashes = Crashes()
    assert crashes.judge(child(served=False), -signal.SIGSEGV) is None
    assert crashes.judge(child(hung="gave no sign of life"), -signal.SIGABRT) is None
    assert crashes.judge(child(life=3), 1) == Crash(4, b""), "a stand-in makes no notes"


@pytest.mark.parametrize("code", [1, 17, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS])
def test_a_crash_tells_who_had_rows_and_convicts_what_was_on_trial(code: int, short_path: Path) -> None:
    crashes = Crashes()
    for life, finished, in_a_row in ((1, 0, 1), (2, 0, 2), (3, 1, 1)):
        notes = RowNotes(short_path, num_slots=2)
        notes.rids[0], notes.rids[1] = 5, 6
        crashes.serves(short_path)
        assert crashes.judge(child(life=life - 1), code) == Crash(life, int64(5, 6))
        crashes.serves(short_path)
        notes.trial[0], notes.trial[1] = 5, 1
        assert crashes.judge(child(life=life, finished=finished), code) == Crash(life + 1, int64(5, 6), (5,))
        assert crashes.judge(child(life=life + 1), code) == Crash(life + 2, b""), "the notes are of one process"
        assert (crashes.num_convicted, crashes.num_in_a_row) == (life, in_a_row)


def test_crashes_that_a_request_was_to_blame_for_do_not_count_but_only_so_many_in_a_row() -> None:
    losses = Losses(most=3, window_seconds=60)
    assert losses.count("tokenizer_proc", "killed", 0) is None
    for now in (1, 3, 5):
        assert losses.count("gpu_runner", "crashed", now, crashed=True) is None
        assert losses.excuse("crashed", in_a_row=3) is None
    assert losses.count("gpu_runner", "killed", 6) is None
    assert losses.excuse("crashed", in_a_row=4) == (
        "crashed; 4 requests in a row have done so, and none has ended well since"
    )
    assert losses.count("gpu_runner", "crashed", 7, crashed=True) == (
        "3 processes were lost within 60 s (tokenizer_proc once, gpu_runner 2 times); the last: crashed"
    )


# ------------------------------------------------------------------------------------------------------ the front end's


def encode(rid: int, *resume: Resume, params: SamplingParams = PARAMS) -> EncodeIds:
    return EncodeIds(rid, int32(*PROMPT), params, "", resume, INFO.max_model_len)


def trials(messages: Sequence[Any]) -> list[int]:
    """`trial_tokens` of each choice that is sent out again."""
    return [part.trial_tokens for message in messages if isinstance(message, EncodeIds) for part in message.resume]


async def test_who_was_in_two_crashes_and_came_no_further_is_sent_first_and_for_a_trial(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        streams = [ring.submit(PARAMS) for _ in range(3)]
        await ring.say(*map(encoded, range(3)))
        assert len(await ring.sent("tokenizer.0")) == 3
        ring.replace("gpu_runner", 0, 1)
        ring.front._relink("gpu_runner", 0, 1, Crash(1, int64(0, 1, 99)))
        again = await ring.sent("tokenizer.0")
        assert again == [Relink("gpu_runner", 0, 1)] + [
            each for rid in range(3) for each in (Abort(rid), encode(rid + 3, Resume(0, b"", 0)))
        ]
        # the first comes further meanwhile, the second does not; the third had a row for the first time
        ids = [7] * (PROVEN_TOKENS + 1)
        await ring.say(deltas(3, "", ids, shard=0), deltas(4, "", ids[1:], shard=0))
        ring.replace("gpu_runner", 0, 2)
        ring.front._relink("gpu_runner", 0, 2, Crash(2, int64(3, 4, 5)))
        again = await ring.sent("tokenizer.0")
        assert [message for message in again if isinstance(message, EncodeIds)] == [
            encode(6, Resume(0, int32(*ids[1:]), 0, trial_tokens=2 * PROVEN_TOKENS)),
            encode(7, Resume(0, int32(*ids), 0)),
            encode(8, Resume(0, b"", 0)),
        ]
        # killed from outside: the same is still under suspicion
        ring.replace("gpu_runner", 0, 3)
        ring.front._relink("gpu_runner", 0, 3, Crash(2, int64(6, 7, 8)))
        again = await ring.sent("tokenizer.0")
        assert trials(again) == [2 * PROVEN_TOKENS, 0, 0]
        # somebody else, of another process, is found to have been to blame
        ring.replace("gpu_runner", 0, 4)
        ring.front._relink("gpu_runner", 0, 4, Crash(4, int64(9, 10, 11), (2**50,)))
        ring.replace("gpu_runner", 0, 5)
        ring.front._relink("gpu_runner", 0, 5, Crash(5, int64(12, 13, 14)))
        again = await ring.sent("tokenizer.0")
        assert trials(again) == [0] * 6
        for stream in streams:
            stream.close()
        ring.check_empty()


@pytest.mark.parametrize(
    ("first", "second", "trial"),
    [
        (40, 40 + PROVEN_TOKENS, 40 + 2 * PROVEN_TOKENS),
        (40, 40 - PROVEN_TOKENS, 40),
        (40, 41 + PROVEN_TOKENS, 0),
        (200, 0, PROVEN_TOKENS),
        (MAX_TRIAL_TOKENS, MAX_TRIAL_TOKENS, MAX_TRIAL_TOKENS + PROVEN_TOKENS),
        (MAX_TRIAL_TOKENS, MAX_TRIAL_TOKENS + 1, 0),
    ],
)
@pytest.mark.parametrize("logprobs", [None, 0], ids=["", "tokens come again"])
async def test_who_crashed_twice_after_as_many_tokens_is_tried_for_longer_than_that(
    short_path: Path, first: int, second: int, trial: int, logprobs: int | None
) -> None:
    async with front_end_ring(short_path) as ring:
        stream = ring.submit(SamplingParams(seed=7, logprobs=logprobs))
        for life, count in enumerate((first, second)):
            await ring.say(encoded(life), deltas(life, "", [7] * count, shard=0))
            if life == 1:  # what it had before it was sent out again counts
                ring.lose("detokenizer_proc", 0, 1)
            await ring.sent("tokenizer.0")
            ring.replace("gpu_runner", 0, life + 1)
            ring.front._relink("gpu_runner", 0, life + 1, Crash(life + 1, int64(life)))
        assert trials(await ring.sent("tokenizer.0")) == [trial]
        stream.close()
        ring.check_empty()


@pytest.mark.parametrize("role", ["detokenizer_proc", "tokenizer_proc"])
async def test_who_had_rows_is_known_by_the_names_it_had_before_others_were_replaced(
    short_path: Path, role: Role
) -> None:
    """gpu_runner crashes, and before another is ready in its place its requests are sent out again for another loss."""
    async with front_end_ring(short_path) as ring:
        twice, other = ring.submit(SamplingParams(seed=7, n=2)), ring.submit(PARAMS)
        rid = 0
        for life in (1, 2):
            ring.lose(role, 0, 2 * life - 1)
            ring.lose(role, 0, 2 * life)
            await ring.sent("tokenizer.0")
            ring.replace("gpu_runner", 0, life)
            ring.front._relink("gpu_runner", 0, life, Crash(life, int64(rid, rid + 1, rid + 3)))
            again = await ring.sent("tokenizer.0")
            rid += 9
        assert trials(again) == [PROVEN_TOKENS, PROVEN_TOKENS, 0]
        ring.lose(role, 0, 5)
        again = await ring.sent("tokenizer.0")
        assert trials(again) == [PROVEN_TOKENS, PROVEN_TOKENS, 0], "the trial is another one's now"
        ring.replace("gpu_runner", 0, 3)
        ring.front._relink("gpu_runner", 0, 3, Crash(3, int64(rid), (rid, rid + 1)))
        again = await ring.sent("tokenizer.0")
        assert [message.rid for message in again if isinstance(message, EncodeIds)] == [rid + 6]
        with pytest.raises(CrashingRequestError):
            twice.take()
        assert not other.ended
        twice.close()
        other.close()
        ring.check_empty()


async def test_the_convicted_request_ends_with_an_error_and_is_not_sent_again(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    params = SamplingParams(seed=7, n=2)
    async with front_end_ring(short_path) as ring:
        stream, other = ring.submit(params, name="mine"), ring.submit(PARAMS)
        await ring.say(encoded(0), encoded(2), deltas(0, "a", [1], shard=0))
        await ring.sent("tokenizer.0")
        ring.replace("gpu_runner", 0, 1)
        ring.front._relink("gpu_runner", 0, 1, Crash(1, int64(0, 2), (0, 1)))
        assert await ring.sent("tokenizer.0") == [Relink("gpu_runner", 0, 1), Abort(2), encode(3, Resume(0, b"", 0))]
        assert [delta.text for delta in stream.take()] == ["a"]
        with pytest.raises(CrashingRequestError) as caught:
            stream.take()
        assert (caught.value.status, caught.value.code) == (500, "request_crashes_engine")
        assert ring.front.totals().counters["finished_error"] == 2
        assert caplog.messages == ["gpu_runner crashes each time it runs request mine, which has been ended"]
        stream.close()
        other.close()
        assert await ring.sent("tokenizer.0") == [Abort(3)]
        assert ring.front.totals().counters["finished_abort"] == 1
        ring.check_empty()


async def test_a_convict_of_another_api_process_is_nobody_here(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        stream = ring.submit(PARAMS)
        await ring.say(encoded(0))
        ring.replace("gpu_runner", 0, 1)
        ring.front._relink("gpu_runner", 0, 1, Crash(1, int64(0, 2**50), (2**50,)))
        assert (await ring.sent("tokenizer.0"))[-1] == encode(1, Resume(0, b"", 0))
        assert not stream.ended
        stream.close()
        ring.check_empty()
