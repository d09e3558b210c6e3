"""/tokenize and /detokenize: what a prompt's tokens are, without running it."""

from __future__ import annotations

from aiohttp import web

from asyncengine.api.backend import Backend
from asyncengine.api.endpoints import ENGINE_CALL, NAMED_THING, Endpoint
from asyncengine.api.patience import Patience
from asyncengine.api.request_body import IGNORED_FIELDS, check_known, json_body, json_response
from asyncengine.api.routes import check_model
from asyncengine.api.token_schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    parse_detokenize,
    parse_tokenize,
)
from asyncengine.api.unsupported import NO_EFFECT_IN_TOKENIZE


class TokenRoutes:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                method="POST",
                path="/tokenize",
                name="tokenize",
                summary="The tokens of a text or a conversation",
                handler=self.tokenize,
                body=TokenizeRequest,
                no_effect=NO_EFFECT_IN_TOKENIZE,
                answer=TokenizeResponse,
                answer_headers=(IGNORED_FIELDS,),
                errors=(*NAMED_THING, *ENGINE_CALL),
            ),
            Endpoint(
                method="POST",
                path="/detokenize",
                name="detokenize",
                summary="The text of tokens",
                handler=self.detokenize,
                body=DetokenizeRequest,
                answer=DetokenizeResponse,
                answer_headers=(IGNORED_FIELDS,),
                errors=(*NAMED_THING, *ENGINE_CALL),
            ),
        ]

    async def tokenize(self, request: web.Request) -> web.Response:
        parsed = parse_tokenize(await json_body(request))
        check_known(parsed.ignored, self._backend.info)
        asked = parsed.request
        check_model(asked.model, self._backend.info)
        async with Patience(self._backend.info).beginning():
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
        check_known(parsed.ignored, self._backend.info)
        check_model(parsed.request.model, self._backend.info)
        async with Patience(self._backend.info).beginning():
            text = await self._backend.detokenize(parsed.request.tokens)
        return json_response(DetokenizeResponse(prompt=text), ignored=parsed.ignored)
