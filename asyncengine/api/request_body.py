"""Reading a request's body, and saying in the answer what of it was not understood."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from aiohttp import web

from asyncengine.api.endpoints import Header
from asyncengine.api.errors import BodyTimeoutError
from asyncengine.api.reception import RECEPTION
from asyncengine.engine_info import EngineInfo
from asyncengine.errors import InvalidRequestError

IGNORED_FIELDS = Header(name="x-ignored-fields", kind=str, description="Names of fields that are unknown here")
MAX_REPORTED_FIELDS = 32
MAX_REPORTED_NAME_CHARS = 64
BODY_SECONDS = 60.0
"""A client that takes longer to send its body holds a connection and memory for nothing."""


async def json_body(request: web.Request) -> bytes:
    """Raises `InvalidRequestError`, `OverloadedError`."""
    # a web page may send other content types anywhere without asking, this one it may not
    if request.content_type != "application/json":
        raise InvalidRequestError("the Content-Type header must be application/json", code="invalid_content_type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise InvalidRequestError(
            "there must be no Content-Encoding header: bodies are not decompressed", code="invalid_content_encoding"
        )
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.app[RECEPTION].read(request)
    except TimeoutError:
        raise BodyTimeoutError(f"the request body did not arrive within {BODY_SECONDS:g} seconds") from None


def json_response(value: object, *, status: int = 200, ignored: Sequence[str] = ()) -> web.Response:
    """ignored: names of the request's fields that are unknown here."""
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        content_type="application/json",
        headers=ignored_fields_header(ignored),
    )


def check_known(ignored: Sequence[str], info: EngineInfo) -> None:
    """Raises `InvalidRequestError` for fields that are unknown here, on a server that is to refuse them."""
    if ignored and info.refuse_unknown_fields:
        name = ignored[0][:MAX_REPORTED_NAME_CHARS]
        raise InvalidRequestError(f"{name!r} is no field of this request", code="unknown_parameter", param=name)


def ignored_fields_header(names: Sequence[str]) -> dict[str, str]:
    """Names as the client sent them, made safe for a header: ASCII without controls or commas, and not too long."""
    safe = [
        "".join(char if "!" <= char <= "~" and char != "," else "?" for char in name[:MAX_REPORTED_NAME_CHARS])
        for name in names[:MAX_REPORTED_FIELDS]
    ]
    return {IGNORED_FIELDS.name: ", ".join(safe)} if safe else {}
