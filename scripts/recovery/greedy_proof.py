"""Whether greedy answers are whole and in order, told from the answers themselves: the server computes them once more.

Each token was the most likely one after those before it. Computed in one piece with its prompt, an answer's numbers
come of other kernels than those that decoded it, and are rounded otherwise, so a token may turn out less likely than
the best, but only by as much as rounding makes. Behind a token that is lost, doubled or misplaced, the model would have
gone on otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
from recovery.followed_streams import Answer

from asyncengine.errors import EngineError


class Proof(NamedTuple):
    """gaps: the largest of each answer, see `ServerModel.gaps`. shortened: the same of the answers with a token
    dropped: a control, which must be larger."""

    gaps: list[float]
    shortened: list[float]

    def faults(self, tolerance: float) -> list[str]:
        """None where every answer is within the tolerance and at least half of the shortened ones are not."""
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

    async def texts(self, answers: Sequence[Answer]) -> list[str]:
        """What the ids of each read."""
        read = (self._post("/detokenize", {"tokens": answer.ids}) for answer in answers)
        return [str(each["prompt"]) for each in await asyncio.gather(*read)]

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
