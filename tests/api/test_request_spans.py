"""OpenTelemetry spans of requests, with the SDK's own exporter to memory; and nothing of it where nobody asks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import openai
import pytest
from api_server import CHAT, COMPLETIONS, serving
from fake_backend import MODEL, FakeBackend
from support.python_path import PYTHON_PATH

from asyncengine.delta import Delta
from asyncengine.errors import EngineDeadError, StartupError
from asyncengine.telemetry import export_spans_to, make_tracing
from asyncengine.timeline import Timeline

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry's packages are not installed")
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from asyncengine.api.tracing import Tracing

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "the prompt's own words"


class Recorded:
    """A server whose spans are kept; they are there once it has closed."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(self.exporter)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    @property
    def request(self) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.kind is SpanKind.SERVER]
        return span

    @property
    def parts(self) -> list[ReadableSpan]:
        return self.below(self.request)

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        assert parent.context is not None
        below = [span for span in self.spans if span.parent and span.parent.span_id == parent.context.span_id]
        return sorted(below, key=lambda span: span.start_time or 0)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def timeline_of_the_last_6_ms() -> Timeline:
    now = time.monotonic_ns()
    arrived, encoded, queued, started, computed, seen, finished = (
        now - left * 1_000_000 for left in (6, 5, 5, 4, 3, 2, 1)
    )
    return Timeline(
        arrived=arrived,
        encoded=encoded,
        queued=queued,
        started=started,
        computed=computed,
        seen=seen,
        finished=finished,
        marks=array("q", [started, 7, started + 300_000, 2, computed, -1, seen, 0, seen + 500_000, 9]).tobytes(),
    )


class SlowBackend(FakeBackend):
    """Answers after 10 ms, of which its timeline accounts for the last 6."""

    async def generate(self, *args: Any, **named: Any) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(0.01)
        self.timeline = timeline_of_the_last_6_ms()
        async with aclosing(super().generate(*args, **named)) as deltas:
            async for delta in deltas:
                yield delta


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_span_below_its_clients(recorded: Recorded, stream: bool) -> None:
    async with serving(SlowBackend(), tracing=recorded.tracing) as server:
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": SECRET}],
            stream=stream,
            extra_headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"},
        )
        if isinstance(answer, openai.AsyncStream):
            (identity,) = {chunk.id async for chunk in answer}
        else:
            identity = answer.id
        await client.close()
    span = recorded.request
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    assert (span.name, span.status.status_code) == ("POST /v1/chat/completions", StatusCode.UNSET)
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.id": identity,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 5,
    }
    assert span.resource.attributes["service.name"] == "asyncengine"
    assert len(recorded.parts) == 7
    assert all(SECRET not in span.to_json() and "Hel" not in span.to_json() for span in recorded.spans)


async def test_each_choice_has_parts_that_follow_each_other_from_the_requests_arrival_to_its_end(
    recorded: Recorded,
) -> None:
    async with serving(SlowBackend(), tracing=recorded.tracing) as server:
        assert (await server.post(COMPLETIONS, {"prompt": SECRET, "n": 2}))[0] == 200
    for index in range(2):
        parts = [part for part in recorded.parts if (part.attributes or {})["asyncengine.choice"] == index]
        names = ["accept", "tokenize", "queue", "prefill", "detokenize", "decode", "write"]
        assert [part.name for part in parts] == names
        assert parts[0].start_time == recorded.request.start_time
        assert parts[-1].end_time == recorded.request.end_time
        assert [part.end_time for part in parts[:-1]] == [part.start_time for part in parts[1:]]
        assert [(part.end_time or 0) - (part.start_time or 0) for part in parts[1:6]] == [1_000_000] * 5
        assert [
            (
                span.name,
                (span.attributes or {}).get("asyncengine.tokens"),
                (span.end_time or 0) - (span.start_time or 0),
            )
            for part in parts
            for span in recorded.below(part)
        ] == [("prefill chunk", 7, 300_000), ("prefill chunk", 2, 700_000), ("preempted", None, 500_000)]
        assert recorded.request.events[index].name == "first token"
        assert recorded.request.events[index].timestamp == parts[4].end_time


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), ({"prompt": "a", "model": "other"}, 404), ({"prompt": "a" * 10, "n": 99}, 400)]
)
async def test_a_refusal_is_a_span_with_its_status_and_no_error(
    recorded: Recorded, backend: FakeBackend, body: object, status: int
) -> None:
    async with serving(backend, tracing=recorded.tracing) as server:
        assert (await server.post(COMPLETIONS, body))[0] == status
        assert (await server.post("/tokenize", {"prompt": "a"}))[0] == 200, "which has no span"
    assert (recorded.request.attributes or {})["http.response.status_code"] == status
    assert recorded.request.status.status_code is StatusCode.UNSET
    assert "asyncengine.client_left" not in (recorded.request.attributes or {})


@pytest.mark.parametrize(("stream", "error"), [(False, "500"), (True, "engine_dead")])
async def test_a_failure_is_an_error_of_the_span(
    recorded: Recorded, backend: FakeBackend, stream: bool, error: str
) -> None:
    backend.failure, backend.fail_after = EngineDeadError("gpu_runner died", code="engine_dead"), 2
    async with serving(backend, tracing=recorded.tracing) as server:
        body = {"messages": [{"role": "user", "content": SECRET}]}
        await (server.events(CHAT, body) if stream else server.post(CHAT, body))
    assert recorded.request.status.status_code is StatusCode.ERROR
    assert (recorded.request.attributes or {})["error.type"] == error


async def test_a_client_that_leaves_is_told_from_one_that_stays(recorded: Recorded, backend: FakeBackend) -> None:
    backend.hold_after = 1
    asked = {"prompt": "a", "stream": True}
    async with (
        serving(backend, tracing=recorded.tracing) as server,
        server.session.post(server.url + COMPLETIONS, json=asked) as response,
    ):
        await response.content.readline()
        response.close()
    attributes = recorded.request.attributes or {}
    assert attributes["asyncengine.client_left"] is True
    assert (attributes["gen_ai.response.finish_reasons"], attributes["gen_ai.usage.output_tokens"]) == ((), 1)
    assert recorded.request.status.status_code is StatusCode.UNSET


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    program = (
        "import sys, asyncengine.api.worker, asyncengine.cli, asyncengine.telemetry as telemetry\n"
        "assert telemetry.make_tracing() is None\n"
        "print(sum(name.partition('.')[0] in ('opentelemetry', 'requests') for name in sys.modules))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    for more in ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"}):
        result = subprocess.run(
            [sys.executable, "-c", program],
            env=environment | more | {"PYTHONPATH": PYTHON_PATH},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout == "0\n"


def test_the_endpoint_comes_from_the_flag_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/elsewhere")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    with pytest.raises(StartupError, match="must be a URL"):
        export_spans_to("127.0.0.1:4318")
    export_spans_to("http://127.0.0.1:9")
    tracing = make_tracing()
    assert tracing is not None
    assert tracing._exporter._endpoint == "http://127.0.0.1:9/v1/traces"  # type: ignore[attr-defined]
    tracing._provider.shutdown()
    monkeypatch.setitem(sys.modules, "asyncengine.api.tracing", None)
    with pytest.raises(StartupError, match=r"pip install 'asyncengine\[otel\]'"):
        make_tracing()
