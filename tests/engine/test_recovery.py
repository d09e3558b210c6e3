"""What a front end sends again when a process of the ring was lost, and what its callers see of that: nothing."""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from front_end_ring import INFO, PROMPT, PROMPT_BYTES, deltas, encoded, front_end_ring, ids_of, int32, text_of

from asyncengine.api.worker import ApiWorker
from asyncengine.chat_prompt import ChatPrompt
from asyncengine.config import ApiWorkers, EngineConfig, Role, SidecarConfig
from asyncengine.errors import EngineError, InvalidRequestError, StartupError
from asyncengine.recent_rids import KEEP_SECONDS, RecentRids
from asyncengine.sampling import SamplingParams
from asyncengine.wire.answers import Detokenized, EngineStatus, Failed, Tokenized
from asyncengine.wire.base import Finish, Wire
from asyncengine.wire.engine_pipes import MAX_LIFE, ApiProcess, minter
from asyncengine.wire.pipes import Sender
from asyncengine.wire.requests import Abort, Detokenize, EncodeChat, EncodeIds, EncodeText, Relink, Resume, TokenizeText

PARAMS = SamplingParams(seed=7)
LOST: list[tuple[Role, int]] = [("tokenizer_proc", 0), ("detokenizer_proc", 0), ("gpu_runner", 0)]
RUNNER = Relink("gpu_runner", 0, 1)
DETOKENIZER = Relink("detokenizer_proc", 0, 1)
PHASES: dict[str, list[Wire]] = {
    "unacknowledged": [],
    "acknowledged": [encoded(0)],
    "first news": [encoded(0), deltas(0, "a", [1], shard=0)],
    "news before the acknowledgement": [deltas(0, "a", [1], shard=0)],
    "mid-stream, half a stop string held": [encoded(0), deltas(0, "aé", [1, 2], shard=0), deltas(0, "", [3])],
}
HAD = {
    "first news": Resume(0, int32(1), 1),
    "news before the acknowledgement": Resume(0, int32(1), 1),
    "mid-stream, half a stop string held": Resume(0, int32(1, 2, 3), 3),
}


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="r-") as path:
        yield Path(path)


def encode(rid: int, *resume: Resume, params: SamplingParams = PARAMS) -> EncodeIds:
    return EncodeIds(rid, int32(*PROMPT), params, "", resume, INFO.max_model_len)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("role", "index"), [*LOST, ("detokenizer_proc", 1)])
async def test_a_choice_goes_on_where_it_was_whichever_process_is_lost(
    role: Role, index: int, phase: str, short_path: Path
) -> None:
    async with front_end_ring(short_path) as ring:
        stream = ring.submit(PARAMS)
        await ring.say(*PHASES[phase])
        news = stream.take()
        assert await ring.sent("tokenizer.0") == [encode(0)]
        ring.lose(role, index, 1)
        resume = HAD.get(phase, Resume(0, b"", 0))
        again = not news or role == "gpu_runner" or (role, index) == ("detokenizer_proc", 0)
        relinks = [] if role == "tokenizer_proc" else [Relink(role, index, 1)]
        resubmitted = [Abort(0), encode(1, resume)] if again else []
        assert await ring.sent("tokenizer.0") == [*relinks, *resubmitted]
        assert await ring.sent("runner.control") == ([Abort(0)] if again else [])
        assert ring.unacked() == [PROMPT_BYTES * (again or not news or phase.startswith("news before"))]
        if again:  # what still comes of the old one is nobody's
            await ring.say(encoded(0), deltas(0, "late", [9]), deltas(0, "", [], finish=Finish.LENGTH), encoded(1))
            rid, shard = 1, 0
        else:
            await ring.say(encoded(0))
            rid, shard = 0, None
        rest = "aébc"[len("aébc".encode()[: resume.shown].decode()) :] if again else "aébc"[len(text_of(news)) :]
        have = len(ids_of(news))
        await ring.say(
            deltas(rid, rest[:1], [1, 2, 3, 4][have:], shard=shard), deltas(rid, rest[1:], [5], finish=Finish.STOP)
        )
        news += stream.take()
        assert (text_of(news), ids_of(news), news[-1].finish_reason) == ("aébc", [1, 2, 3, 4, 5], "stop")
        assert ring.unacked() == [0]
        stream.close()
        assert await ring.sent("tokenizer.0") == await ring.sent("runner.control") == []
        ring.check_empty()


async def test_tokens_without_log_probabilities_are_computed_again_and_told_once(short_path: Path) -> None:
    params = SamplingParams(seed=7, logprobs=0)
    async with front_end_ring(short_path) as ring:
        stream = ring.submit(params)
        await ring.say(deltas(0, "ab", [1, 2, 3, 4], shard=0, logprobs=[1, 2]))
        ring.lose("gpu_runner", 0, 1)
        assert (await ring.sent("tokenizer.0"))[-1] == encode(1, Resume(0, int32(1, 2), 2), params=params)
        # lost again before all that comes twice has come
        await ring.say(deltas(1, "", [3], shard=0, logprobs=[]), deltas(1, "c", [], logprobs=[3]))
        ring.lose("detokenizer_proc", 0, 1)
        assert (await ring.sent("tokenizer.0"))[-1] == encode(2, Resume(0, int32(1, 2, 3), 3), params=params)
        await ring.say(deltas(2, "d", [4, 5], shard=0, logprobs=[4]))
        await ring.say(deltas(2, "e", [], finish=Finish.LENGTH, logprobs=[5]))
        news = stream.take()
        assert (text_of(news), ids_of(news)) == ("abcde", [1, 2, 3, 4, 5])
        assert [entry.token_id for delta in news for entry in delta.logprobs] == [1, 2, 3, 4, 5]
        assert ring.front.totals().counters["generation_tokens"] == 5
        stream.close()
        ring.check_empty()


async def test_no_token_has_its_log_probabilities_yet(short_path: Path) -> None:
    params = SamplingParams(seed=7, logprobs=0, prompt_logprobs=0)
    async with front_end_ring(short_path) as ring:
        stream = ring.submit(params)
        await ring.say(deltas(0, "", [1, 2], shard=0, prompt=True))
        first = stream.take()
        ring.lose("gpu_runner", 0, 1)
        assert (await ring.sent("tokenizer.0"))[-1] == encode(1, Resume(0, b"", 0), params=params)
        await ring.say(deltas(1, "ab", [1, 2, 3], shard=0, prompt=True, finish=Finish.LENGTH, logprobs=[1, 2, 3]))
        (last,) = stream.take()
        assert [delta.prompt_logprobs is None for delta in (*first, last)] == [False, True]
        assert (ids_of([*first, last]), len(last.logprobs), last.completion_tokens) == ([1, 2, 3], 3, 3)
        stream.close()


async def test_each_choice_is_looked_at_by_itself(short_path: Path) -> None:
    params = SamplingParams(seed=7, n=3)
    async with front_end_ring(short_path, tokenizers=2) as ring:
        stream = ring.submit(params)
        other = ring.submit(PARAMS)
        await ring.say(
            encoded(0),
            deltas(0, "a", [1], shard=0),
            deltas(1, "b", [2], shard=1),
            deltas(0, "!", [9], finish=Finish.STOP),
            deltas(3, "z", [3], shard=0),
        )
        for name in ("tokenizer.0", "tokenizer.1"):
            await ring.sent(name)
        ring.lose("detokenizer_proc", 1, 1)  # has choice 1, and perhaps got choice 2
        relink = Relink("detokenizer_proc", 1, 1)
        resumes = Resume(1, int32(2), 1), Resume(2, b"", 0)
        assert await ring.sent("tokenizer.0") == [relink, Abort(1), Abort(2), encode(4, *resumes, params=params)]
        assert await ring.sent("tokenizer.1") == [relink]
        assert await ring.sent("runner.control") == [Abort(1), Abort(2)]
        assert ring.unacked() == [PROMPT_BYTES, PROMPT_BYTES]
        # one of the two goes with the next loss, and the acknowledgement of both comes only then
        await ring.say(deltas(4, "B", [4], shard=0), deltas(5, "c", [5], shard=1))
        ring.lose("detokenizer_proc", 0, 1)
        assert await ring.sent("tokenizer.0") == [
            Relink("detokenizer_proc", 0, 1),
            Abort(4),
            encode(6, Resume(1, int32(2, 4), 2), params=params),
            encode(7, Resume(0, int32(3), 1)),
        ]
        assert await ring.sent("tokenizer.1") == [Relink("detokenizer_proc", 0, 1), Abort(3)]
        await ring.say(encoded(4), encoded(6), encoded(7))
        assert ring.unacked() == [0, 0]
        await ring.say(
            deltas(4, "late", [8]),
            deltas(6, "1", [6], shard=0, finish=Finish.LENGTH),
            deltas(5, "2", [7], finish=Finish.STOP),
            deltas(7, "y", [8], shard=0, finish=Finish.STOP),
        )
        news = stream.take()
        assert [text_of(news, index) for index in range(3)] == ["a!", "bB1", "c2"]
        assert [ids_of(news, index) for index in range(3)] == [[1, 9], [2, 4, 6], [5, 7]]
        assert text_of(other.take()) == "zy"
        stream.close()
        other.close()
        ring.check_empty()
        assert ring.front.totals().counters["finished_stop"] == 3
        assert ring.front.totals().counters["finished_length"] == 1


async def test_a_lost_tokenizer_takes_along_only_what_nobody_has_heard_of(short_path: Path) -> None:
    params = SamplingParams(seed=7, n=2)
    async with front_end_ring(short_path, tokenizers=2) as ring:
        streams = [ring.submit(params) for _ in range(4)]
        assert await ring.sent("tokenizer.0") == [encode(0, params=params), encode(4, params=params)]
        # of the first request one choice has news, so gpu_runner has the other one too
        await ring.say(encoded(0), deltas(1, "a", [1], shard=0), encoded(4))
        ring.lose("tokenizer_proc", 0, 1)
        assert await ring.sent("tokenizer.0") == [
            Abort(4),
            Abort(5),
            encode(8, Resume(0, b"", 0), Resume(1, b"", 0), params=params),
        ]
        assert await ring.sent("runner.control") == [Abort(4), Abort(5)]
        assert ring.unacked() == [PROMPT_BYTES, 2 * PROMPT_BYTES]
        for stream in streams:
            stream.close()
        assert [abort.rid for abort in await ring.sent("tokenizer.0") if isinstance(abort, Abort)] == [0, 1, 8, 9]
        assert [abort.rid for abort in await ring.sent("tokenizer.1") if isinstance(abort, Abort)] == [2, 3, 6, 7]
        ring.check_empty()


async def test_a_new_tokenizer_first_hears_who_else_was_replaced_and_last_the_questions(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        front = ring.front
        for role, index, life in (("detokenizer_proc", 2, 1), ("detokenizer_proc", 0, 3), ("gpu_runner", 0, 1)):
            ring.lose(role, index, life)  # type: ignore[arg-type]
        relinks = [RUNNER, Relink("detokenizer_proc", 0, 3), Relink("detokenizer_proc", 2, 1)]
        assert await ring.sent("tokenizer.0") == [relinks[2], relinks[1], *relinks]
        asked = [asyncio.create_task(front.tokenize("ab")), asyncio.create_task(front.detokenize([5]))]
        answered = asyncio.create_task(front.tokenize("answered"))
        left = asyncio.create_task(front.tokenize("left"))
        await asyncio.sleep(0)
        await ring.say(Tokenized(2, int32(9), ()))
        left.cancel()
        assert (await answered).ids == [9]
        await asyncio.gather(left, return_exceptions=True)
        streams = [ring.submit(PARAMS), front.subscribe("text", PARAMS, listener=lambda: None)]
        streams.append(front.subscribe(ChatPrompt(messages=[{}]), PARAMS, listener=lambda: None))
        await ring.sent("tokenizer.0")
        ring.lose("tokenizer_proc", 0, 1)
        empty = (Resume(0, b"", 0),)
        questions = [TokenizeText(0, "ab", True, False, INFO.max_model_len), Detokenize(1, int32(5))]
        assert await ring.sent("tokenizer.0") == [
            *relinks,
            Abort(4),
            encode(7, *empty),
            Abort(5),
            EncodeText(8, "text", PARAMS, "", empty, INFO.max_model_len),
            Abort(6),
            EncodeChat(9, b"[{}]", PARAMS, "", resume=empty, max_model_len=INFO.max_model_len),
            *questions,
        ]
        assert ring.unacked() == [2 + 4 + 12 + 4 + 4]
        await ring.say(Tokenized(0, int32(1), ()), Detokenized(1, "x"), Tokenized(0, int32(2), ()))
        assert ((await asked[0]).ids, await asked[1]) == ([1], "x")
        for stream in streams:
            stream.close()
        ring.check_empty()


async def test_a_new_gpu_runner_gets_all_that_runs_in_order_of_arrival(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        streams = [ring.submit(PARAMS) for _ in range(3)]
        ring.lose("detokenizer_proc", 1, 1)
        await ring.say(deltas(4, "a", [1], shard=1))
        await ring.sent("tokenizer.0")
        ring.lose("gpu_runner", 0, 1)
        assert await ring.sent("tokenizer.0") == [
            RUNNER,
            Relink("detokenizer_proc", 1, 1),
            Abort(3),
            encode(6, Resume(0, b"", 0)),
            Abort(4),
            encode(7, Resume(0, int32(1), 1)),
            Abort(5),
            encode(8, Resume(0, b"", 0)),
        ]
        assert await ring.sent("runner.control") == [Abort(3), Abort(4), Abort(5)]
        ring.lose("gpu_runner", 0, 2)
        assert (await ring.sent("tokenizer.0"))[0] == Relink("gpu_runner", 0, 2)
        assert await ring.sent("runner.control") == [Abort(6), Abort(7), Abort(8)]
        for stream in streams:
            stream.close()
        ring.check_empty()


@pytest.mark.parametrize("ended", [True, False])
async def test_a_request_that_was_sent_again_is_released_with_its_stream(ended: bool, short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        stream = ring.submit(PARAMS)
        (request,) = ring.front._requests
        message = request.message
        await ring.say(deltas(0, "a", [1], shard=0))
        ring.lose("gpu_runner", 0, 1)
        if ended:
            await ring.say(deltas(1, "b", [2], shard=0, finish=Finish.STOP))
        gc.disable()
        try:
            stream.close()
            del stream, request
            assert sys.getrefcount(message) == 2  # this one, and the call's
        finally:
            gc.enable()


async def test_what_is_no_news_changes_nothing(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        stream = ring.submit(PARAMS)
        for role, index in LOST:
            ring.lose(role, index, 2)
        await ring.sent("tokenizer.0")
        await ring.sent("runner.control")
        for role, index in LOST:
            ring.front._relink(role, index, 2)
            ring.front._relink(role, index, 1)
        assert await ring.sent("tokenizer.0") == await ring.sent("runner.control") == []
        stream.close()
        ring.check_empty()


@pytest.mark.parametrize(("role", "index"), LOST)
async def test_what_has_ended_is_not_sent_again(role: Role, index: int, short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        ended, left, failed, cancelled = (ring.submit(SamplingParams(seed=7, n=2), name=name) for name in "abcd")
        await ring.say(
            deltas(0, "a", [1], shard=0, finish=Finish.STOP),
            deltas(1, "a", [1], shard=0, finish=Finish.STOP),
            Failed(4, 400, "no", "", None),
        )
        left.close()
        assert await ring.front.cancel("d")
        await ring.sent("tokenizer.0")
        await ring.sent("runner.control")
        ring.lose(role, index, 1)
        relinks = [] if role == "tokenizer_proc" else [Relink(role, index, 1)]
        assert await ring.sent("tokenizer.0") == relinks
        assert await ring.sent("runner.control") == []
        for stream in (ended, failed, cancelled):
            stream.close()
        ring.check_empty()


async def test_a_request_that_was_sent_again_is_cancelled_and_left_by_its_new_rids(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        named, left = ring.submit(SamplingParams(seed=7, n=2), name="x"), ring.submit(PARAMS)
        await ring.say(deltas(1, "a", [1], shard=0))
        ring.lose("gpu_runner", 0, 1)
        await ring.say(deltas(3, "", [], shard=0, finish=Finish.STOP))
        await ring.sent("tokenizer.0")
        await ring.sent("runner.control")
        assert await ring.front.cancel("x")
        assert not await ring.front.cancel("x")
        assert [(delta.index, delta.text, delta.finish_reason) for delta in named.take()] == [
            (1, "a", "abort"),
            (0, "", "stop"),
        ]
        assert await ring.sent("tokenizer.0") == await ring.sent("runner.control") == [Abort(4)]
        left.close()
        assert await ring.sent("tokenizer.0") == await ring.sent("runner.control") == [Abort(5)]
        named.close()
        ring.check_empty()


async def test_only_a_refusal_of_the_present_attempt_counts(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        begun, waiting = ring.submit(SamplingParams(seed=7, n=2)), ring.submit(PARAMS)
        await ring.say(deltas(1, "a", [1], shard=0))
        ring.lose("gpu_runner", 0, 1)
        await ring.say(*(Failed(rid, 500, "old", "", None) for rid in range(3)))
        assert [begun.ended, waiting.ended] == [False, False]
        await ring.say(Failed(4, 400, "new", "", None), Failed(5, 400, "refused", "", None))
        assert text_of(begun.take(), 1) == "a"
        with pytest.raises(InvalidRequestError, match="new"):
            begun.take()
        with pytest.raises(InvalidRequestError, match="refused"):
            waiting.take()
        assert ring.unacked() == [0]
        await ring.sent("runner.control")
        begun.close()
        waiting.close()
        assert await ring.sent("runner.control") == [Abort(3)]
        counters = ring.front.totals().counters
        assert (counters["finished_error"], counters["finished_abort"]) == (1, 1)
        ring.check_empty()


async def test_the_facts_of_the_first_news_stay(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        stream = ring.submit(SamplingParams(seed=7, prompt_logprobs=0))
        await ring.say(encoded(0, at_ns=50), deltas(0, "a", [1], shard=0, cached=2, stamp=100, prompt=True))
        (first,) = stream.take()
        ring.lose("gpu_runner", 0, 1)
        await ring.say(encoded(1, at_ns=60), deltas(1, "b", [2], shard=0, cached=3, stamp=200, prompt=True))
        await ring.say(deltas(1, "c", [3], finish=Finish.LENGTH))
        (last,) = stream.take()
        assert (first.cached_tokens, last.cached_tokens, last.prompt_tokens) == (2, 2, 3)
        assert (first.prompt_logprobs is None, last.prompt_logprobs) == (False, None)
        assert last.timeline is not None
        assert last.timeline.encoded == 50
        assert (last.timeline.queued, last.timeline.started, last.timeline.computed) == (100, 101, 102)
        totals = ring.front.totals()
        assert (totals.counters["prompt_tokens"], totals.counters["generation_tokens"]) == (3, 3)
        counts = {name: sum(histogram.counts) for name, histogram in totals.histograms.items()}
        once = ("time_to_first_token", "tokenize_time", "prompt_length", "output_length", "e2e_latency", "choices")
        assert [counts[name] for name in once] == [1] * len(once)
        assert counts["inter_token_latency"] == 2
        stream.close()


async def test_what_was_accepted_waits_for_room_in_its_pipe(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with front_end_ring(short_path) as ring:
        streams = [ring.submit(PARAMS) for _ in range(3)]
        await ring.sent("tokenizer.0")
        with monkeypatch.context() as patch:
            patch.setattr(Sender, "_offer", lambda self, data: False)
            ring.lose("gpu_runner", 0, 1)
            assert ring.front._retry is not None
        again = [(Abort(rid), encode(rid + 3, Resume(0, b"", 0))) for rid in range(3)]
        assert await ring.sent("tokenizer.0") == [RUNNER, *(message for pair in again for message in pair)]
        assert await ring.sent("runner.control") == [Abort(rid) for rid in range(3)]
        for stream in streams:
            stream.close()
        ring.check_empty()


async def test_a_request_that_has_grown_too_long_for_a_pipe_fails_alone(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with front_end_ring(short_path) as ring:
        long, short = ring.submit(PARAMS), ring.submit(PARAMS)
        await ring.say(deltas(0, "x" * 500, [1] * 500, shard=0))
        long.listener = short.close  # whoever hears of a failure may end anything
        long.take()
        await ring.sent("tokenizer.0")
        monkeypatch.setattr("asyncengine.wire.pipes.MAX_MESSAGE_BYTES", 1000)
        ring.lose("gpu_runner", 0, 1)
        with pytest.raises(EngineError, match="up to 1000 bytes"):
            long.take()
        assert [*await ring.sent("tokenizer.0")] == [RUNNER, Abort(0), Abort(1), encode(3, Resume(0, b"", 0)), Abort(3)]
        long.close()
        ring.check_empty()


async def test_rows_that_nobody_has_are_aborted_once(short_path: Path) -> None:
    async with front_end_ring(short_path) as ring:
        left = ring.submit(PARAMS)
        await ring.say(deltas(0, "a", [1], shard=0))
        left.close()
        assert await ring.sent("runner.control") == [Abort(0)]
        await ring.say(deltas(0, "b", [2]), deltas(77, "c", [3], shard=0), deltas(77, "d", [4]))
        await ring.say(deltas(77, "e", [5]), deltas(78, "f", [6], finish=Finish.LENGTH))
        assert await ring.sent("runner.control") == [Abort(77)]
        assert ring.front.totals().counters["generation_tokens"] == 1
        ring.check_empty()


def test_a_rid_is_recent_for_a_while() -> None:
    recent = RecentRids()
    assert [recent.add(rid, 10.0) for rid in (1, 2, 1)] == [True, True, False]
    assert not recent.add(1, 10 + 1.5 * KEEP_SECONDS)
    assert recent.add(3, 10 + 1.6 * KEEP_SECONDS)
    assert recent.add(2, 10 + 2.6 * KEEP_SECONDS)
    assert not recent.add(3, 10 + 2.7 * KEEP_SECONDS)


async def test_an_api_worker_learns_of_losses_from_its_parents_status(short_path: Path) -> None:
    engine = EngineConfig(tokenizer_workers=2)
    config = SidecarConfig(engine=engine, role="api_worker", index=0, model_path="", run_dir=str(short_path))
    info = msgspec.to_builtins(INFO)

    def status(state: str, lives: dict[str, int]) -> EngineStatus:
        return EngineStatus(state, "", info, {}, lives)

    async with front_end_ring(short_path, tokenizers=2, make=lambda pipes, _: ApiWorker(config, pipes)) as ring:
        ring.replace("tokenizer_proc", 1, 1)
        ring.replace("gpu_runner", 0, 2)
        lives = {"tokenizer_proc.1": 1, "detokenizer_proc.0": 1, "gpu_runner.0": 2}
        await ring.say(status("ready", lives))
        relinks = [Relink("gpu_runner", 0, 2), Relink("detokenizer_proc", 0, 1)]
        assert [await ring.sent(f"tokenizer.{index}") for index in range(2)] == [relinks, relinks]
        stream = ring.submit(PARAMS)
        await ring.say(encoded(0), deltas(0, "a", [1], shard=0), status("recovering", lives))
        assert await ring.sent("tokenizer.0") == [encode(0)]
        ring.replace("gpu_runner", 0, 3)
        lives["gpu_runner.0"] = 3
        for state in ("recovering", "ready", "ready"):
            await ring.say(status(state, lives))
        relinks = [Relink("gpu_runner", 0, 3), Relink("detokenizer_proc", 0, 1)]
        assert await ring.sent("tokenizer.1") == relinks
        assert await ring.sent("tokenizer.0") == [*relinks, Abort(0), encode(1, Resume(0, int32(1), 1))]
        assert await ring.sent("runner.control") == [Abort(0)]
        await ring.say(status("ready", lives | {"api_worker.3": 1}))
        relinks = [Relink("api_worker", 3, 1)]
        assert [await ring.sent(f"tokenizer.{index}") for index in range(2)] == [relinks, relinks]
        stream.close()
        ring.check_empty()


async def test_an_api_worker_in_the_place_of_a_lost_one_tells_of_itself_and_has_rids_of_its_own(
    short_path: Path,
) -> None:
    process = ApiProcess(2, 1)
    config = SidecarConfig(
        engine=EngineConfig(),
        role="api_worker",
        index=2,
        model_path="",
        run_dir=str(short_path),
        api_workers=ApiWorkers(number=3),
        life=1,
    )
    status = EngineStatus("ready", "", msgspec.to_builtins(INFO), {}, {"api_worker.0": 4, "api_worker.2": 1})
    make = lambda pipes, _: ApiWorker(config, pipes)  # noqa: E731
    async with front_end_ring(short_path, make=make) as ring:
        await ring.say(status)
        stream = ring.submit(PARAMS)
        first = process.first_rid
        assert await ring.sent("tokenizer.0") == [
            *(Relink("api_worker", 0, 4), Relink("api_worker", 2, 1)),
            msgspec.structs.replace(encode(0), rid=first),
        ]
        await ring.say(encoded(first), deltas(first, "a", [1], shard=0))
        assert text_of(stream.take()) == "a"
        stream.close()
        ring.check_empty()


def test_a_rid_tells_the_worker_and_the_life_of_the_process_that_minted_it() -> None:
    for process in (ApiProcess(0), ApiProcess(63, 2), ApiProcess(1, MAX_LIFE)):
        assert {minter(process.first_rid + count) for count in (0, 1, 2**40 - 1)} == {process}
    assert [ApiProcess(3).pipe, ApiProcess(3, 2).pipe] == ["engine.3", "engine.3.2"]
    with pytest.raises(StartupError, match="API worker 1 was lost 65536 times"):
        _ = ApiProcess(1, MAX_LIFE + 1).first_rid
