"""A front end over real pipes whose other ends the test holds: it plays all processes of the ring."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from asyncengine.config import EngineConfig, Role
from asyncengine.delta import Delta
from asyncengine.engine_info import EngineInfo
from asyncengine.front_end import FrontEnd
from asyncengine.sampling import SamplingParams
from asyncengine.streams import RequestStream
from asyncengine.wire.answers import Cancelled, Deltas, Encoded, LogprobColumns, Openings, PromptColumns
from asyncengine.wire.base import Wire
from asyncengine.wire.frames import PromptLogprobs
from asyncengine.wire.pipes import Pipes, Receiver, Sender, pipe_name
from asyncengine.wire.requests import Abort, ToRunnerControl, ToTokenizer

INFO = EngineInfo(
    model="m",
    model_path="m",
    architecture="scripted",
    device="cpu",
    dtype="float32",
    vocab_size=100,
    max_model_len=100,
    num_pages=2,
    weight_bytes=0,
    kv_cache_bytes=0,
    has_chat_template=True,
)
MARK = Abort(2**63)
PROMPT = [1, 2, 3]
PROMPT_BYTES = 12


def int32(*values: int) -> bytes:
    return array("i", values).tobytes()


def rids(*values: int) -> bytes:
    return array("Q", values).tobytes()


def encoded(rid: int, *, at_ns: int = 0) -> Encoded:
    return Encoded(rids(rid), at_ns)


def deltas(
    rid: int,
    text: str = "",
    ids: Sequence[int] = (),
    *,
    shard: int | None = None,
    finish: int = 0,
    stop_reason: int = -1,
    cached: int = 0,
    stamp: int = 1,
    logprobs: Sequence[int] | None = None,
    prompt: bool = False,
) -> Deltas:
    """News of one choice. shard: with its first, the detokenizer that has it. logprobs: the tokens whose entries come
    along."""
    data = text.encode()
    return Deltas(
        rids(rid),
        data,
        int32(len(data)),
        int32(*ids),
        int32(len(ids)),
        bytes([finish]),
        int32(stop_reason),
        int32(3),
        int32(cached),
        None if logprobs is None else logprob_columns(logprobs),
        None if shard is None else Openings(int32(0), array("q", [stamp, stamp + 1, stamp + 2]).tobytes()),
        (PromptColumns(0, PromptLogprobs(int32(1), int32(1), bytes(4), int32(0)), b"x", int32(1)),) if prompt else (),
        shard or 0,
    )


def logprob_columns(tokens: Sequence[int]) -> LogprobColumns:
    count = len(tokens)
    ends = int32(*range(1, count + 1))
    values = array("f", [-0.5] * count).tobytes()
    return LogprobColumns(int32(count), int32(*tokens), ends, int32(*tokens), values, b"x" * count, ends)


class FrontEndRing:
    """`sent` says what went out on a pipe since it was asked last."""

    def __init__(self, path: Path, *, tokenizers: int, make: Callable[[Pipes, Path], FrontEnd]) -> None:
        self.pipes = Pipes(path)
        self._engine: Sender | None = None
        self._receivers: dict[str, Receiver] = {}
        self._calls = itertools.count(2**62)
        for index in range(tokenizers):
            self._receive(f"tokenizer.{index}")
        self._receive("runner.control")
        self.front = make(self.pipes, path)

    async def say(self, *messages: Wire) -> None:
        """Have the front end hear `messages`, and come back when it has."""
        if self._engine is None:
            self._engine = self.pipes.sender(self.front._process.pipe)
        call = next(self._calls)
        heard = self.front._questions.ask(call)
        for message in (*messages, Cancelled(call, True)):
            self._engine.send(message)
        async with asyncio.timeout(60):
            while not self._engine.flush():
                await asyncio.sleep(0.001)
            await heard

    def lose(self, role: Role, index: int, life: int) -> None:
        """The process is lost, and number `life` takes its place."""
        self.replace(role, index, life)
        self.front._relink(role, index, life)

    def replace(self, role: Role, index: int, life: int) -> None:
        if role == "tokenizer_proc":
            self._receive(f"tokenizer.{index}", life)
        elif role == "gpu_runner":
            self._receive("runner.control", life)

    async def sent(self, name: str) -> list[ToTokenizer | ToRunnerControl]:
        """On pipe `name` into the process that is there now, in order, up to this moment."""
        links = self.front._links
        sender = links._control if name == "runner.control" else links.tokenizers[int(name[-1])].sender
        sender.send(MARK)
        received: list[ToTokenizer | ToRunnerControl] = []
        async with asyncio.timeout(60):
            while not received or received[-1] != MARK:
                sender.flush()
                received += self._receivers[name].drain()
                await asyncio.sleep(0.001)
        return received[:-1]

    def submit(self, params: SamplingParams | None = None, *, name: str = "") -> RequestStream:
        params = params or SamplingParams(seed=7)
        return self.front.subscribe(PROMPT, params, listener=lambda: None, request_id=name)

    def unacked(self) -> list[int]:
        return [link.unacked_bytes for link in self.front._tokenizers]

    def check_empty(self) -> None:
        """Nothing is left of any request."""
        self.front._requests.check_integrity()
        assert self.front._requests.count == 0
        assert not any(self.unacked())
        assert not any(link.questions for link in self.front._tokenizers)

    def _receive(self, name: str, life: int = 0) -> None:
        types = ToRunnerControl if name == "runner.control" else ToTokenizer
        self._receivers[name] = self.pipes.receiver(pipe_name(name, life), types)


@asynccontextmanager
async def front_end_ring(
    path: Path, *, tokenizers: int = 1, make: Callable[[Pipes, Path], FrontEnd] | None = None
) -> AsyncIterator[FrontEndRing]:
    """make: opens a front end, which the caller then has serve; else there is one that serves."""
    ring = FrontEndRing(path, tokenizers=tokenizers, make=make or _open)
    if make is None:
        ring.front._serve(INFO, tokenizer_workers=tokenizers)
    try:
        yield ring
    finally:
        ring.front._shut("over")
        ring.pipes.close()


def _open(pipes: Pipes, run_dir: Path) -> FrontEnd:
    front = FrontEnd(EngineConfig(), worker=0)
    front._open(pipes, run_dir)
    return front


def text_of(news: Sequence[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in news if delta.index == index)


def ids_of(news: Sequence[Delta], index: int = 0) -> list[int]:
    return [token for delta in news if delta.index == index for token in delta.token_ids]
