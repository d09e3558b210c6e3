"""Every error a caller of the engine can meet. Each knows the HTTP status and the OpenAI error type it maps to."""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors raised by the engine; `code` is machine-readable, the message is for a person."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class InvalidRequestError(EngineError):
    """The request itself is wrong: nothing was queued, and repeating it unchanged cannot succeed."""

    status = 400
    type = "invalid_request_error"


class OverloadedError(EngineError):
    """The engine has no room to queue the request now; the same request may succeed later."""

    status = 503
    type = "overloaded_error"


class QueueFullError(OverloadedError):
    """As many requests as may wait are waiting already: this one was turned away at once."""

    status = 429


class RequestTimeoutError(EngineError):
    """A limit of time has passed, the caller's own or the server's; the request was cancelled. `code` names it."""

    status = 504
    type = "timeout_error"


class CrashingRequestError(EngineError):
    """The request crashed a process of the engine again and again, at last while it ran alone. It would do so again."""


class EngineDeadError(EngineError):
    """A process of the engine died or the engine was closed while the request was in it."""


class StartupError(EngineError):
    """The engine could not start; the message is one sentence a person can act on."""
