"""The bodies that one process is receiving, which have a bound together, as each has one of its own."""

from __future__ import annotations

from aiohttp import web

from asyncengine.errors import OverloadedError


class Reception:
    """num_bytes: what there is of bodies that are not there to their end. A client that says how much it will send has
    no room kept for it: it need never send that."""

    def __init__(self, *, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0

    async def read(self, request: web.Request) -> bytes:
        """Its body. Nothing else keeps it, as aiohttp would to the request's end. Raises `OverloadedError` where there
        is no room for it, and `web.HTTPRequestEntityTooLarge`."""
        body = bytearray()
        try:
            while chunk := await request.content.readany():
                body += chunk
                self.num_bytes += len(chunk)
                if len(body) > request.client_max_size:
                    raise web.HTTPRequestEntityTooLarge(request.client_max_size)
                if self.num_bytes > self._most_bytes:
                    raise OverloadedError("the server is receiving too many large bodies now", code="overloaded")
            return bytes(body)
        finally:
            self.num_bytes -= len(body)


RECEPTION = web.AppKey("reception", Reception)
