"""Moves the news of a streamed request to its client from within the engine's call, without waking a task for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from asyncengine.api.backend import Backend, Prompt, Subscription
from asyncengine.api.merge import News
from asyncengine.api.sse import EventStream
from asyncengine.errors import EngineError
from asyncengine.request_terms import TenantTerms
from asyncengine.sampling import SamplingParams

MAX_PENDING_BYTES = 4 * 1024 * 1024
"""What may wait for a client that is behind. A text of 128k tokens is a quarter of it; log-probabilities are more."""


class Relay:
    """Submits every prompt; choice `k` of prompt `i` has index `i * n + k`. Raises `EngineError`, and then none is
    submitted. Must be closed. `events` turns news into what is written and may raise, which ends the relay; and so
    does a client for whom more than `MAX_PENDING_BYTES` wait.

    engine's call   hear: push | hear: push | hear: client behind | (news merge)       | hear: push, over
    task            sleeps ................... wakes, waits: drain | push what has come | wakes, returns
    """

    def __init__(
        self,
        backend: Backend,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        events: Callable[[News], bytes],
        out: EventStream,
        namespace: str,
        request_id: str,
        terms: TenantTerms,
    ) -> None:
        self._n = params.n
        self._events = events
        self._out = out
        self._flowing = False
        self._failure: Exception | None = None
        self._stirred = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        try:
            for prompt in prompts:
                subscription = backend.subscribe(
                    prompt, params, listener=self._hear, namespace=namespace, request_id=request_id, **terms
                )
                self._subscriptions.append(subscription)
        except BaseException:
            self.close()
            raise

    async def first(self) -> bytes:
        """The first events, waiting for them."""
        while not (events := self._take()):
            await self._stirred.wait()
            self._stirred.clear()
        return events

    async def run(self) -> None:
        """Write news until all have ended. Raises what `events` does, `EngineError`, and ConnectionError when the
        client is gone."""
        try:
            while not self._over:
                self._flowing = True
                self._push()  # what has come while nobody heard
                await self._stirred.wait()
                self._stirred.clear()
                if self._out.behind:
                    await self._out.drain()
        finally:
            self._flowing = False  # whoever leaves early, for a time-out say, writes an end that nothing may follow
        if self._failure is not None:
            raise self._failure
        self._take()  # raises what ended it early

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        for subscription in self._subscriptions:
            subscription.close()

    @property
    def _over(self) -> bool:
        return self._failure is not None or all(subscription.over for subscription in self._subscriptions)

    def _hear(self) -> None:
        if self._flowing and not self._out.behind:
            self._push()
        else:
            self._flowing = False
            self._stirred.set()
            if sum(subscription.pending_bytes for subscription in self._subscriptions) > MAX_PENDING_BYTES:
                self._give_up()

    def _give_up(self) -> None:
        """Free what the request holds now; its client hears of that when it reads on."""
        if self._failure is None:
            self._failure = EngineError(
                f"the client reads too slowly: more than {MAX_PENDING_BYTES} bytes waited for it", code="slow_reader"
            )
            self.close()

    def _push(self) -> None:
        try:
            events = self._take()
        except Exception as error:  # noqa: BLE001 - raised again by `run`, in the handler's task
            self._failure = error
        else:
            if events:
                self._out.push(events)
        for subscription in self._subscriptions:
            if not (subscription.over or self._failure):
                return
        self._flowing = False
        self._stirred.set()

    def _take(self) -> bytes:
        if len(self._subscriptions) == 1:
            news = [(delta.index, delta) for delta in self._subscriptions[0].take()]
        else:
            news = [
                (i * self._n + delta.index, delta)
                for i, subscription in enumerate(self._subscriptions)
                for delta in subscription.take()
            ]
        return self._events(news)
