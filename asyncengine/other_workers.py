"""The other API processes of an engine, each of which has requests that this one knows nothing of.

here        Cancel(call, here, "cmpl-7") to all ....................... Cancelled(call, ...) of each
another     ............................ ends its request, if it has it | answers
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from asyncengine.errors import EngineError
from asyncengine.questions import Questions
from asyncengine.wire.answers import Cancel, Cancelled
from asyncengine.wire.pipes import Pipes, Sender

CANCEL_SECONDS = 2.0
"""How long another process may take to say whether it has a request."""


class OtherWorkers:
    """worker: this one's number, of `workers` in all. mint: a number that no other question has. The owner flushes
    `senders` after each call here."""

    def __init__(
        self, pipes: Pipes, *, worker: int, workers: int, questions: Questions, mint: Callable[[], int]
    ) -> None:
        self._worker = worker
        self._questions = questions
        self._mint = mint
        self._senders = {other: pipes.sender(f"engine.{other}") for other in range(workers) if other != worker}

    @property
    def senders(self) -> Iterator[Sender]:
        return iter(self._senders.values())

    def cancel(self, tenant: str, request_id: str) -> list[Awaitable[bool]]:
        """Ask all to cancel `request_id` of `tenant`: of each, whether it had such a request. Awaiting that raises
        `EngineError` when there is no answer."""
        answers: list[Awaitable[bool]] = []
        for other, sender in self._senders.items():
            call = self._mint()
            sender.send(Cancel(call, self._worker, request_id, tenant))
            answers.append(_answer(other, self._questions.ask(call)))
        return answers

    def tell(self, asked: Cancel, *, found: bool) -> None:
        """Answer another worker's question."""
        if asked.worker in self._senders:
            self._senders[asked.worker].send(Cancelled(asked.call, found))


async def _answer(other: int, future: asyncio.Future[bool]) -> bool:
    try:
        async with asyncio.timeout(CANCEL_SECONDS):
            return await future
    except TimeoutError:
        raise EngineError(f"API worker {other} does not answer", code="cancel_timeout") from None
