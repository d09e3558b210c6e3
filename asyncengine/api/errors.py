"""Every failure leaves the server in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from asyncengine.errors import CrashingRequestError, EngineError, InvalidRequestError, OverloadedError

logger = logging.getLogger(__name__)

INTERNAL_ERROR = EngineError("the server failed to handle this request", code="internal_error")
"""What a caller learns of a fault that is ours; the log has the rest."""


RETRY_AFTER_SECONDS = 1
"""When to ask again of an engine that had no room: requests end all the time, so soon."""


class NotFoundError(InvalidRequestError):
    """The model or route that was asked for does not exist here."""

    status = 404


class UnauthorizedError(InvalidRequestError):
    """The caller has shown no key that is known here."""

    status = 401


class ForbiddenError(InvalidRequestError):
    """The caller's key is not for what it asks, or the server has none and is asked by the page of another site."""

    status = 403


class BodyTimeoutError(InvalidRequestError):
    """The client began a request and did not go on with it."""

    status = 408


class ErrorBodyJson(msgspec.Struct, frozen=True):
    """param: the field, or the part of the path, that is at fault. code: for programs, as `message` is for people."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorJson(msgspec.Struct, frozen=True):
    """Of every answer that is no success."""

    error: ErrorBodyJson


def error_json(error: EngineError) -> bytes:
    """The error object, as a response body or as the data of an event."""
    return msgspec.json.encode(ErrorJson(ErrorBodyJson(error.message, error.type, error.param, error.code)))


def error_response(error: EngineError) -> web.Response:
    response = web.Response(body=error_json(error), status=error.status, content_type="application/json")
    if isinstance(error, OverloadedError):
        response.headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if isinstance(error, CrashingRequestError):  # clients of this API ask again after a 500, unless told
        response.headers["x-should-retry"] = "false"
    return response


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn whatever a handler, the router or the body reader raises into an error response."""
    try:
        return await handler(request)
    except BodyTimeoutError as error:
        return last_error_response(error, request)
    except EngineError as error:
        return error_response(error)
    except web.HTTPException as error:
        return _http_error_response(request, error)
    except web.RequestPayloadError:
        return last_error_response(
            InvalidRequestError("the request body could not be read", code="invalid_body"), request
        )
    except ConnectionError:
        raise  # the caller is gone: nobody to answer, nothing to report
    except Exception:  # the edge of the process: a fault must become a response, without details
        logger.exception("%s failed", request.match_info.route.name or "request")
        return error_response(INTERNAL_ERROR)


def last_error_response(error: EngineError, request: web.Request) -> web.Response:
    """An answer to a request that was not read to its end: where the next one begins cannot be known."""
    request.content.feed_eof()  # otherwise aiohttp would go on reading it
    response = error_response(error)
    response.force_close()
    return response


def _http_error_response(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    if error.status < 400:
        raise error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        message, code = f"the request body is larger than {request.client_max_size} bytes", "request_too_large"
    elif isinstance(error, web.HTTPNotFound):
        message, code = "no such route", "not_found"
    elif isinstance(error, web.HTTPMethodNotAllowed):
        message, code = f"this route allows {', '.join(sorted(error.allowed_methods))}", "method_not_allowed"
    else:
        message, code = error.reason, "http_error"
    response = error_response(InvalidRequestError(message, code=code))
    response.set_status(error.status)
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = error.headers["Allow"]
    return response
