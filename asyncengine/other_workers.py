"""The other API processes of an engine, each of which has requests that this one knows nothing of.

here        Cancel(call, here, "cmpl-7") to all ....................... Cancelled(call, ...) of each
another     ............................ ends its request, if it has it | answers
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable

from asyncengine.errors import EngineError
from asyncengine.questions import Questions
from asyncengine.wire.answers import Cancel, Cancelled
from asyncengine.wire.engine_pipes import EnginePipes
from asyncengine.wire.pipes import Pipes

CANCEL_SECONDS = 2.0
"""How long another process may take to say whether it has a request."""


class OtherWorkers:
    """worker: this one's number, of `workers` in all. mint: a number that no other question has. The owner calls
    `flush` after each other call here."""

    def __init__(
        self, pipes: Pipes, *, worker: int, workers: int, questions: Questions, mint: Callable[[], int]
    ) -> None:
        self._worker = worker
        self._questions = questions
        self._mint = mint
        self._engines = EnginePipes(pipes)
        self._others = [other for other in range(workers) if other != worker]
        self._asked: defaultdict[int, set[int]] = defaultdict(set)  # calls without an answer, by whose it would be
        self.flush = self._engines.flush

    def relink(self, worker: int, life: int) -> None:
        """This worker was lost, its requests with it, and number `life` is in its place. Idempotent."""
        if self._engines.relink(worker, life):
            for call in self._asked.pop(worker, ()):
                self._questions.answer(call, False)

    def cancel(self, tenant: str, request_id: str) -> list[Awaitable[bool]]:
        """Ask all to cancel `request_id` of `tenant`: of each, whether it had such a request. Awaiting that raises
        `EngineError` when there is no answer."""
        answers: list[Awaitable[bool]] = []
        for other in self._others:
            call = self._mint()
            self._engines.send_to(other, Cancel(call, self._worker, request_id, tenant))
            self._asked[other].add(call)
            answers.append(self._answer(other, call, self._questions.ask(call)))
        return answers

    def tell(self, asked: Cancel, *, found: bool) -> None:
        """Answer another worker's question."""
        if asked.worker in self._others:
            self._engines.send_to(asked.worker, Cancelled(asked.call, found))

    async def _answer(self, other: int, call: int, future: asyncio.Future[bool]) -> bool:
        try:
            async with asyncio.timeout(CANCEL_SECONDS):
                return await future
        except TimeoutError:
            raise EngineError(f"API worker {other} does not answer", code="cancel_timeout") from None
        finally:
            self._asked[other].discard(call)
