"""/tokenize and /detokenize: what a prompt's tokens are, without running it."""

from __future__ import annotations

from aiohttp import web

from asyncengine.api.backend import Backend
from asyncengine.api.request_body import json_body, json_response
from asyncengine.api.routes import check_model
from asyncengine.api.token_schema import (
    DetokenizeResponse,
    TokenizeResponse,
    parse_detokenize,
    parse_tokenize,
)


class TokenRoutes:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/tokenize", self.tokenize, name="tokenize")
        app.router.add_post("/detokenize", self.detokenize, name="detokenize")

    async def tokenize(self, request: web.Request) -> web.Response:
        parsed = parse_tokenize(await json_body(request))
        asked = parsed.request
        check_model(asked.model, self._backend.info)
        tokenized = await self._backend.tokenize(
            asked.text(),
            add_special_tokens=asked.add_special_tokens is not False,
            texts=bool(asked.return_token_strs),
        )
        answer = TokenizeResponse(
            count=len(tokenized.ids),
            max_model_len=self._backend.info.max_model_len,
            tokens=tokenized.ids,
            token_strs=tokenized.texts,
        )
        return json_response(answer, ignored=parsed.ignored)

    async def detokenize(self, request: web.Request) -> web.Response:
        parsed = parse_detokenize(await json_body(request))
        check_model(parsed.request.model, self._backend.info)
        text = await self._backend.detokenize(parsed.request.tokens)
        return json_response(DetokenizeResponse(prompt=text), ignored=parsed.ignored)
