"""One generation request, from accepted body to the last byte of its answer."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from asyncengine.api.backend import Backend, Prompt
from asyncengine.api.errors import INTERNAL_ERROR, error_json
from asyncengine.api.merge import News, merge
from asyncengine.api.patience import Patience
from asyncengine.api.relay import Relay
from asyncengine.api.shapes import Answer, Shape
from asyncengine.api.sse import DONE, EventStream, event
from asyncengine.api.usage import UsageCounter
from asyncengine.delta import Delta
from asyncengine.errors import EngineError
from asyncengine.request_terms import TenantTerms
from asyncengine.sampling import SamplingParams

if TYPE_CHECKING:
    from asyncengine.api.tracing import RequestTrace

logger = logging.getLogger(__name__)


class DeltaParser(Protocol):
    """Of one choice."""

    def parse(self, delta: Delta) -> Delta: ...


class Generation:
    """Runs all prompts of a request at once. The caller leaving cancels the handler, which closes the engine's streams,
    which aborts what still runs."""

    def __init__(
        self,
        *,
        backend: Backend,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        namespace: str,
        terms: TenantTerms,
        shape: Shape,
        include_usage: bool,
        parser: Callable[[int], DeltaParser | None] = lambda _: None,
        trace: RequestTrace | None = None,
    ) -> None:
        """namespace: whose prefixes the prompts may share. parser: makes what the deltas of the choice at an index pass
        through, or None. trace: hears what becomes of it."""
        self._backend = backend
        self._prompts = prompts
        self._params = params
        self._namespace = namespace
        self._terms = terms
        self._shape = shape
        self._include_usage = include_usage
        self._usage = UsageCounter(n=params.n)
        self._new_parser = parser
        self._parsers: dict[int, DeltaParser | None] = {}
        self._trace = trace

    async def respond(self, headers: Mapping[str, str]) -> web.Response:
        """The whole answer at once. Raises `EngineError`."""
        answers: dict[int, Answer] = {}
        patience = Patience(self._backend.info)
        async with aclosing(self._news()) as batches:
            async with patience.beginning():
                news = await anext(batches)
            async with patience.whole():
                while news:
                    for index, delta in news:
                        answers.setdefault(index, Answer()).add(delta)
                    news = await anext(batches, [])
        body = self._shape.response(answers, self._usage.total())
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def stream(self, request: web.Request, headers: Mapping[str, str]) -> web.StreamResponse:
        """The answer as events. Raises `EngineError` before anything is sent, and then no more: a failure after that
        is the stream's last event. Of several prompts one may be refused when another's text is already out."""
        out = EventStream(request, headers)
        relay = Relay(
            self._backend,
            self._prompts,
            self._params,
            namespace=self._namespace,
            request_id=self._shape.id,
            terms=self._terms,
            events=self._events,
            out=out,
        )
        patience = Patience(self._backend.info)
        with closing(relay):
            async with patience.beginning():
                first = await relay.first()
            try:
                await out.start(first)
                await out.close(await self._rest(relay, patience))
            except ConnectionError:
                pass  # the client is gone: leaving this block is all there is to do
        return out.response

    async def _rest(self, relay: Relay, patience: Patience) -> bytes:
        """Relay all there is; returns how the stream ends."""
        try:
            async with patience.whole():
                await relay.run()
        except EngineError as error:
            return self._failed(error)
        except ConnectionError:
            raise
        except Exception:  # the status is sent: the stream itself must tell that it is incomplete
            logger.exception("a stream failed")
            return self._failed(INTERNAL_ERROR)
        return (self._shape.usage_chunk(self._usage.total()) if self._include_usage else b"") + DONE

    def _failed(self, error: EngineError) -> bytes:
        if self._trace is not None:
            self._trace.fail(error.code or error.type)
        return event(error_json(error))

    def _events(self, news: News) -> bytes:
        news = self._take_in(news)
        if len(news) == 1:
            return self._shape.chunk(*news[0])
        return b"".join([self._shape.chunk(index, delta) for index, delta in news])

    async def _news(self) -> AsyncGenerator[News, None]:
        streams = [
            self._backend.generate(
                prompt, self._params, namespace=self._namespace, request_id=self._shape.id, **self._terms
            )
            for prompt in self._prompts
        ]
        async with aclosing(merge(streams, self._params.n)) as batches:
            async for news in batches:
                yield self._take_in(news)

    def _take_in(self, news: News) -> News:
        """Count the news; returns them as the choices' parsers leave them."""
        if self._trace is not None:
            self._trace.take(news)
        parsed: News = []
        for index, delta in news:
            self._usage.add(index, delta)
            if index not in self._parsers:
                self._parsers[index] = self._new_parser(index)
            parser = self._parsers[index]
            parsed.append((index, delta if parser is None else parser.parse(delta)))
        return parsed
