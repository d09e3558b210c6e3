"""Whether requests leave OpenTelemetry spans: its own environment variables say so, and where they go."""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import TYPE_CHECKING

from asyncengine.errors import StartupError

if TYPE_CHECKING:
    from asyncengine.api.tracing import RequestTrace, Tracing

current_trace: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)
"""Of the request that a task handles."""
ENDPOINT, TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


def export_spans_to(url: str) -> None:
    """Set the endpoint for this process and those it starts. Raises `StartupError` for what is no URL."""
    if not url.startswith(("http://", "https://")):
        raise StartupError(f"--otlp-endpoint must be a URL that begins with http:// or https://, got {url}")
    os.environ[ENDPOINT] = url
    os.environ.pop(TRACES_ENDPOINT, None)


def make_tracing() -> Tracing | None:
    """What makes the spans of this process, None for none. Raises `StartupError` where its packages are missing."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    if off or not (os.environ.get(ENDPOINT) or os.environ.get(TRACES_ENDPOINT)):
        return None
    try:
        from asyncengine.api.tracing import exporting
    except ImportError as error:
        raise StartupError(
            f"an OpenTelemetry endpoint is set, {error.name} is not installed; run: pip install 'asyncengine[otel]', "
            "or set OTEL_SDK_DISABLED=true"
        ) from None
    return exporting()
