"""Whether greedy answers are whole and in order, told from the answers themselves: the server computes them once more.

Each token was the most likely one after those before it. Computed in one piece with its prompt, an answer's numbers
come of other kernels than those that decoded it, and are rounded otherwise, so a token may turn out less likely than
the best, but only by as much as rounding makes. Behind a token that is lost, doubled or misplaced, the model would have
gone on otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from asyncengine.delta import Delta
from asyncengine.errors import EngineError


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


class Proof(NamedTuple):
    """gaps: the largest of each answer, see `ServerModel.gaps`. shortened: the same of the answers with a token
    dropped: a control, which must be larger."""

    gaps: list[float]
    shortened: list[float]

    def faults(self, tolerance: float) -> list[str]:
        """None where every answer is within the tolerance and most of the shortened ones are not."""
        faults = [
            f"a token of stream {place} is less likely than the best by {gap:.2g} nat"
            for place, gap in enumerate(self.gaps)
            if not gap <= tolerance
        ]
        if 2 * self.found(tolerance) < len(self.shortened):
            faults.append(
                f"a dropped token is found in {self.found(tolerance)} of {len(self.shortened)}: nothing is proven"
            )
        return faults

    def found(self, tolerance: float) -> int:
        return sum(gap > tolerance for gap in self.shortened)


class ServerModel:
    """What the model behind a server makes of ids. Its methods raise `EngineError`."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def text(self, ids: Sequence[int]) -> str:
        answer = await self._post("/detokenize", {"tokens": list(ids)})
        return str(answer["prompt"])

    async def gaps(self, prompt: list[int], ids: list[int]) -> list[float]:
        """By how many nats each of `ids` is less likely than the best in its place, after the prompt and those before
        it; 0 for the best itself."""
        body = {"prompt": prompt + ids, "echo": True, "max_tokens": 0, "prompt_logprobs": 1}
        (choice,) = (await self._post("/v1/completions", body))["choices"]
        columns = choice["prompt_logprobs"][len(prompt) :]
        return [
            max(each["logprob"] for each in column.values()) - column[str(token)]["logprob"]
            for token, column in zip(ids, columns, strict=True)
        ]

    async def prove(self, answers: Sequence[Answer]) -> Proof:
        whole = (self.gaps(answer.prompt, answer.ids) for answer in answers)
        shortened = (self.gaps(answer.prompt, answer.without_one()) for answer in answers)
        return Proof(
            [max(gaps) for gaps in await asyncio.gather(*whole)],
            [max(gaps) for gaps in await asyncio.gather(*shortened)],
        )

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http.post(self._url + path, json=body) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                raise EngineError(f"{path} was answered with {response.status}: {answer}")
            return answer
