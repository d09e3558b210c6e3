"""One OpenTelemetry span per generation request, with a child for each part of its time. Imported only when wanted.

Children are made when the request ends, out of timelines that the ring's processes keep in any case. No text of a
prompt or an answer is in them. Names of attributes are OpenTelemetry's semantic conventions for HTTP and `gen_ai`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from asyncengine.api.merge import News
from asyncengine.api.timings import PARTS, part_ends
from asyncengine.api.usage import UsageCounter
from asyncengine.delta import Delta
from asyncengine.telemetry import current_trace
from asyncengine.timeline import Timeline

OPERATIONS = {"completions": "text_completion", "chat_completions": "chat"}
"""By route."""
MAX_CHOICES = 16
"""Choices of one request that have children."""
MAX_DETAILS = 32
"""Chunks, and preemptions, of one choice that have spans."""
FLUSH_SECONDS = 2.0
"""At the end, how long a collector has to take what is left."""


class RequestTrace:
    """What is learnt of one request while it runs, and its span. Times are ns of CLOCK_MONOTONIC."""

    def __init__(self, tracer: Tracer, request: web.Request, operation: str) -> None:
        self._tracer = tracer
        self._received = time.monotonic_ns()
        self._epoch = time.time_ns() - self._received
        self._span = tracer.start_span(
            f"POST {request.path}",
            context=TraceContextTextMapPropagator().extract(request.headers),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": "POST",
                "http.route": request.path,
                "gen_ai.operation.name": operation,
            },
            start_time=self._epoch + self._received,
        )
        self._usage = UsageCounter(n=1)
        self._choices = 0
        self._streamed = self._failed = False
        self._ended: dict[int, tuple[Delta, int]] = {}  # choice -> its last delta, and when that came

    def accepted(self, *, model: str, response_id: str, n: int, prompts: int, streamed: bool) -> None:
        self._usage, self._choices, self._streamed = UsageCounter(n=n), prompts * n, streamed
        self._span.set_attribute("gen_ai.request.model", model)
        self._span.set_attribute("gen_ai.request.choice.count", n)
        self._span.set_attribute("gen_ai.response.id", response_id)

    def take(self, news: News) -> None:
        for index, delta in news:
            self._usage.add(index, delta)
            if delta.finish_reason is not None:
                self._ended[index] = (delta, time.monotonic_ns())

    def fail(self, error_type: str) -> None:
        """For the reason `error_type` there is no answer, or not all of it."""
        self._failed = True
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(StatusCode.ERROR)

    def end(self, status: int | None) -> None:
        """status: the answer's; None where its client has not waited for it."""
        now, ended, usage = time.monotonic_ns(), sorted(self._ended.items()), self._usage.total()
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
            if status >= 500:
                self.fail(str(status))
        if status is None or (status < 400 and len(ended) < self._choices and not self._failed):
            self._span.set_attribute("asyncengine.client_left", True)
        self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        self._span.set_attribute(
            "gen_ai.response.finish_reasons", [delta.finish_reason or "" for _, (delta, _) in ended]
        )
        for index, (delta, came) in ended[:MAX_CHOICES] if self._span.is_recording() else ():
            if delta.timeline is not None:
                self._add_parts(index, delta.timeline, came if self._streamed else now)
        self._span.end(self._epoch + now)

    def _add_parts(self, index: int, timeline: Timeline, written: int) -> None:
        context, choice = set_span_in_context(self._span), {"asyncengine.choice": index}
        if timeline.seen:
            self._span.add_event("first token", choice, self._epoch + timeline.seen)
        begin = self._received
        chunks, preemptions = timeline.chunks[:MAX_DETAILS], timeline.preemptions[:MAX_DETAILS]
        for part, end in zip(PARTS, part_ends(timeline, written), strict=True):
            if end > begin:
                child = self._child(part, context, choice, begin, end)
                inside = set_span_in_context(child)
                for chunk in chunks:
                    if begin <= chunk.begin < end:
                        attributes = {**choice, "asyncengine.tokens": chunk.tokens}
                        self._child("prefill chunk", inside, attributes, chunk.begin, chunk.end)
                for preemption in preemptions:
                    if begin <= preemption.begin < end:
                        self._child("preempted", inside, choice, preemption.begin, preemption.end)
                begin = end

    def _child(self, name: str, context: Context, attributes: Mapping[str, int], begin: int, end: int) -> Span:
        """A span that has ended, of what lies between two times."""
        child = self._tracer.start_span(name, context, attributes=attributes, start_time=self._epoch + begin)
        child.end(self._epoch + end)
        return child


class Tracing:
    """Makes the spans of a process's requests and hands them to `exporter`, in batches, from a thread of its own."""

    def __init__(self, exporter: SpanExporter) -> None:
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "asyncengine"}))
        self._exporter = exporter
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("asyncengine")

    @web.middleware
    async def middleware(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Goes outside of what turns errors into responses."""
        operation = OPERATIONS.get(request.match_info.route.name or "")
        if operation is None:
            return await handler(request)
        trace = RequestTrace(self._tracer, request, operation)
        current_trace.set(trace)
        status: int | None = None
        try:
            response = await handler(request)
            status = response.status
        finally:
            trace.end(status)
        return response

    async def close(self, _: web.Application) -> None:
        """Export what is left, unless the collector is slow to take it."""
        closing = asyncio.create_task(asyncio.to_thread(self._provider.shutdown))
        await asyncio.wait([closing], timeout=FLUSH_SECONDS)
        if not closing.done():
            self._exporter.shutdown()  # ends its attempts to try again
        await closing


def exporting() -> Tracing:
    """To the collector that OpenTelemetry's environment variables name, over HTTP."""
    return Tracing(OTLPSpanExporter())
