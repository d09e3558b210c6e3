"""The clients: who asks what, when and how, drawn from a seed, and whether each got what it should."""

from __future__ import annotations

import asyncio
import heapq
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaos.answers import Answer, WrongAnswerError, answer_of, departure, difference, part_of
from chaos.arrivals import Row, burst_times, trace_times
from chaos.cases import Case
from chaos.exchange import Client, Manner, Reply
from chaos.malformed import REFUSED, refused
from chaos.terms import Terms, draw_terms

MANNERS: dict[Manner, int] = {"plain": 76, "slow": 6, "close": 9, "reset": 9}
"""Of a hundred requests."""
MALFORMED_SHARE = 0.08
STREAM_SHARE = 0.75
MAX_STAY_SECONDS = 1.5
"""A client that leaves does so within this time."""
BURST_EVERY_SECONDS, BURST_SECONDS = 6.0, 3.0
"""How often bursts come, and that each has as many requests as come in so long otherwise."""
MAX_OPEN = 256
"""Clients at once; more wait until others are done."""
ENOUGH_FAILURES = 10
"""A run with so many is over."""
TRY_AGAIN = (429, 503)
TRY_AGAIN_SECONDS = 0.5


@dataclass(frozen=True)
class Arrival:
    """One client. case: the number of what it asks; None sends malformed request `pick`."""

    at: float
    case: int | None
    pick: int
    stream: bool
    manner: Manner
    leave_after: float
    terms: Terms


def draw_arrivals(rng: random.Random, trace: Sequence[Row], *, rate: float, cases: int) -> Iterator[Arrival]:
    """In order, for ever. rate: requests a second in the mean, besides bursts."""
    one_by_one = ((at, 1) for at in trace_times(list(trace), rate=rate, begin=rng.randrange(len(trace))))
    bursts = (
        (at, round(BURST_SECONDS * rate)) for at in burst_times(random.Random(rng.random()), every=BURST_EVERY_SECONDS)
    )
    for at, count in heapq.merge(one_by_one, bursts):
        for _ in range(count):
            yield Arrival(
                at=at,
                case=None if rng.random() < MALFORMED_SHARE else rng.randrange(cases),
                pick=rng.randrange(len(REFUSED)),
                stream=rng.random() < STREAM_SHARE,
                manner=rng.choices(list(MANNERS), list(MANNERS.values()))[0],
                leave_after=rng.uniform(0, MAX_STAY_SECONDS),
                terms=draw_terms(rng),
            )


class Load:
    """Clients of one server. `tally` counts what became of them; `failures` tells each that went wrong."""

    def __init__(self, client: Client, cases: Sequence[Case], expected: Sequence[Answer], *, tolerance: float) -> None:
        """expected: the answer to each case. tolerance: between log-probabilities."""
        self._client = client
        self._cases = cases
        self._expected = expected
        self._tolerance = tolerance
        self._room = asyncio.Semaphore(MAX_OPEN)
        self._open: set[asyncio.Task[None]] = set()
        self.tally: Counter[str] = Counter()
        self.failures: list[str] = []

    async def run(self, arrivals: Iterator[Arrival], seconds: float) -> None:
        """Let those come who arrive within `seconds`, and wait until all have left."""
        begin = time.monotonic()
        for arrival in arrivals:
            if arrival.at >= seconds or len(self.failures) >= ENOUGH_FAILURES:
                break
            await asyncio.sleep(max(0.0, begin + arrival.at - time.monotonic()))
            await self._room.acquire()
            task = asyncio.create_task(self._serve(arrival))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        await asyncio.gather(*self._open)

    async def _serve(self, arrival: Arrival) -> None:
        try:
            if arrival.case is None:
                await self._send_malformed(arrival)
            else:
                await self._ask(arrival, self._cases[arrival.case], self._expected[arrival.case])
        finally:
            self._room.release()

    async def _send_malformed(self, arrival: Arrival) -> None:
        self.tally["refused"] += 1
        request = REFUSED[arrival.pick]
        reply = await self._client.send(request)
        if not (reply.cut or refused(reply)):
            self._fail(
                arrival, f"{request[:200]!r}", f"not refused: {reply.status} {reply.broken} {reply.body[:300]!r}"
            )

    async def _ask(self, arrival: Arrival, case: Case, expected: Answer) -> None:
        self.tally["asked"] += 1
        body = case.request(stream=arrival.stream) | arrival.terms.fields(session=case.may_have_session)
        releasing = asyncio.create_task(self._release(arrival)) if case.may_have_session else None
        reply = await self._post(arrival, case.path, body, arrival.manner)
        wrong = self._judge(reply, expected)
        if wrong:
            self._fail(arrival, f"case {case.number} ({case.kind}): POST {case.path} {json.dumps(body)}", wrong)
        if releasing is not None:
            await releasing

    async def _release(self, arrival: Arrival) -> None:
        """Release the session of an arrival, if that is to be; it may not have begun, or be over already."""
        if arrival.terms.release_after is None:
            return
        await asyncio.sleep(arrival.terms.release_after)
        self.tally["releases"] += 1
        path = f"/v1/sessions/{arrival.terms.session['session']}/release"
        reply = await self._post(arrival, path, {}, "plain")
        if not reply.cut and (reply.broken or reply.status != 200):
            self._fail(arrival, f"POST {path}", f"not released: {reply.status} {reply.broken} {reply.body[:300]!r}")

    async def _post(self, arrival: Arrival, path: str, body: object, manner: Manner) -> Reply:
        """The answer, asked for until there is room for it."""
        deadline = time.monotonic() + self._client.limit
        while True:
            reply = await self._client.post(
                path, body, key=arrival.terms.key, manner=manner, leave_after=arrival.leave_after
            )
            if reply.status not in TRY_AGAIN or time.monotonic() > deadline:
                return reply
            self.tally["sent again"] += 1
            await asyncio.sleep(TRY_AGAIN_SECONDS)

    def _judge(self, reply: Reply, expected: Answer) -> str:
        try:
            if reply.left or reply.cut:
                self.tally["cut off" if reply.cut else "left early"] += 1
                return departure(part_of(reply), expected)
            wrong = difference(answer_of(reply), expected, tolerance=self._tolerance)
        except (WrongAnswerError, json.JSONDecodeError) as error:
            wrong = str(error)
        self.tally["wrong" if wrong else "right"] += 1
        return wrong

    def _fail(self, arrival: Arrival, request: str, wrong: str) -> None:
        self.failures.append(f"{wrong}\n    of {arrival}\n    {request}")


async def expectations(client: Client, cases: Sequence[Case], *, at_once: int) -> list[Answer]:
    """The answer to each case, asked while nothing goes wrong. Raises `WrongAnswerError`."""
    room = asyncio.Semaphore(at_once)

    async def expect(case: Case) -> Answer:
        async with room:
            reply = await client.post(case.path, case.request(stream=False))
        try:
            return answer_of(reply)
        except WrongAnswerError as error:
            raise WrongAnswerError(f"{error}, asked {case}") from None

    return list(await asyncio.gather(*map(expect, cases)))
