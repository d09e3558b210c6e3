"""Streams of a server, of which everything is kept that comes, across the loss of one of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from asyncengine.client import AsyncClient
from asyncengine.delta import Delta
from asyncengine.errors import EngineError
from asyncengine.sampling import SamplingParams


@dataclass
class Answer:
    """What a client has of one stream. early: how many of its ids came before the kill. faults: what cannot be of a
    stream whose tokens all come once, in order, and are counted so."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    early: int = 0
    finishes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, delta: Delta, *, early: bool) -> None:
        if self.finishes:
            self.faults.append(f"output after its end: {delta.text!r}")
        self.ids += delta.token_ids
        self.text += delta.text
        if early:
            self.early = len(self.ids)
        if delta.completion_tokens != len(self.ids):
            self.faults.append(f"{len(self.ids)} ids had come, {delta.completion_tokens} were counted")
        if delta.finish_reason is not None:
            self.finishes.append(delta.finish_reason)

    def check_end(self, tokens: int, text: str) -> None:
        """tokens: that it was to have. text: what its ids read."""
        if self.finishes != ["length"] or len(self.ids) != tokens:
            self.faults.append(f"it ended as {self.finishes} with {len(self.ids)} ids of {tokens}")
        if self.text != text:
            self.faults.append(f"its ids do not read {self.text[:40]!r}..., which it said")

    def without_one(self) -> list[int]:
        """Its ids, had the last that came before the kill been lost."""
        place = max(0, self.early - 1)
        return self.ids[:place] + self.ids[place + 1 :]


class Streams:
    """answers: what came of each. under_way: set once each has had some output. after: by stream, when output came
    after the kill, in seconds."""

    def __init__(self, client: AsyncClient, prompts: list[list[int]], tokens: int) -> None:
        self.answers = [Answer(prompt) for prompt in prompts]
        self.under_way = asyncio.Event()
        self.killed_at: float | None = None
        self.after: list[list[float]] = [[] for _ in prompts]
        self._client = client
        self._tokens = tokens
        # of all ids, so that the text can be compared with what they read
        self._params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, skip_special_tokens=False)

    async def run(self) -> None:
        """Until all have ended."""
        await asyncio.gather(*map(self._read, self.answers, self.after))

    async def _read(self, answer: Answer, after: list[float]) -> None:
        try:
            async for delta in self._client.generate(answer.prompt, self._params):
                if self.killed_at is not None:
                    after.append(time.monotonic() - self.killed_at)
                answer.add(delta, early=self.killed_at is None)
                if all(each.ids for each in self.answers):
                    self.under_way.set()
        except EngineError as error:
            answer.faults.append(f"{type(error).__name__}: {error}")

    def faults(self, texts: Iterable[str]) -> list[str]:
        """Of all that have ended, each with its stream. texts: what the ids of each read."""
        for answer, text in zip(self.answers, texts, strict=True):
            answer.check_end(self._tokens, text)
        return [f"stream {place}: {fault}" for place, each in enumerate(self.answers) for fault in each.faults]

    def equal(self, others: Streams) -> int:
        """How many answers are those of the others, in ids and text."""
        pairs = zip(self.answers, others.answers, strict=True)
        return sum((one.ids, one.text) == (other.ids, other.text) for one, other in pairs)

    def back(self) -> list[float]:
        """When each stream went on, ascending: at the end of its longest silence, since what had left gpu_runner before
        the kill still comes after it."""
        ends = []
        for times in self.after:
            if times:
                ends.append(max(zip([0.0, *times], times, strict=False), key=lambda gap: gap[1] - gap[0])[1])
        return sorted(ends)

    async def kill_amid(self, pid: int) -> asyncio.Task[None]:
        """Start all and kill the process once they are under way; `run` goes on."""
        running = asyncio.create_task(self.run())
        under_way = asyncio.create_task(self.under_way.wait())
        await asyncio.wait([running, under_way], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            under_way.cancel()
            raise SystemExit("the streams ended before anything could be killed: more --tokens are needed")
        os.kill(pid, signal.SIGKILL)
        self.killed_at = time.monotonic()
        return running
