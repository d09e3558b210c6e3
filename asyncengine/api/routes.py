"""The routes and what each does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from asyncengine.api.backend import Backend, Prompt
from asyncengine.api.errors import BodyTimeoutError, NotFoundError
from asyncengine.api.exposition import CONTENT_TYPE
from asyncengine.api.generation import Generation
from asyncengine.api.metric_families import metrics_text
from asyncengine.api.prompts import chat_prompt, completion_prompts
from asyncengine.api.schema import GenerationRequest, Parsed, R, parse_chat, parse_completion
from asyncengine.api.shapes import ChatShape, CompletionShape, Shape
from asyncengine.errors import InvalidRequestError

IGNORED_FIELDS_HEADER = "x-ignored-fields"
MAX_REPORTED_FIELDS = 32
MAX_REPORTED_NAME_CHARS = 64
BODY_SECONDS = 60.0
"""A client that takes longer to send its body holds a connection and memory for nothing."""


class Routes:
    """Handlers of one engine. None of them but the two generating ones makes the engine do anything."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._created = int(time.time())

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/completions", self.completions, name="completions")
        app.router.add_post("/v1/chat/completions", self.chat_completions, name="chat_completions")
        app.router.add_get("/v1/models", self.models, name="models")
        # a model's name may hold slashes, as a hub id does
        app.router.add_get("/v1/models/{model:.+}", self.model, name="model")
        app.router.add_get("/health", self.health, name="health")
        app.router.add_get("/metrics", self.metrics, name="metrics")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        parsed = parse_completion(await _json_body(request))
        return await self._generate(request, parsed, completion_prompts(parsed.request), CompletionShape)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        parsed = parse_chat(await _json_body(request))
        return await self._generate(request, parsed, [chat_prompt(parsed.request)], ChatShape)

    async def models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return _json(self._model_card())

    async def health(self, request: web.Request) -> web.Response:
        health = self._backend.health
        if health.state == "ready":
            return _json({"status": "ok"})
        return _json({"status": health.state, "reason": health.detail}, status=503)

    async def metrics(self, request: web.Request) -> web.Response:
        backend = self._backend
        text = metrics_text(
            model=backend.info.model, health=backend.health, gauges=backend.gauges(), totals=backend.totals()
        )
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def _generate(
        self, request: web.Request, parsed: Parsed[R], prompts: Sequence[Prompt], shape: type[Shape]
    ) -> web.StreamResponse:
        asked: GenerationRequest = parsed.request
        if asked.model is not None:
            self._check_model(asked.model)
        params = asked.sampling_params()
        options = asked.stream_options
        include_usage = options is not None and bool(options.include_usage)
        generation = Generation(
            backend=self._backend,
            prompts=prompts,
            params=params,
            shape=shape(
                self._backend.info.model,
                token_ids=bool(asked.return_token_ids),
                logprobs=params.logprobs is not None,
                include_usage=include_usage,
                continuous_usage=options is not None and bool(options.continuous_usage_stats),
            ),
            include_usage=include_usage,
        )
        headers = {IGNORED_FIELDS_HEADER: _header_text(parsed.ignored)} if parsed.ignored else {}
        return await (generation.stream(request, headers) if asked.stream else generation.respond(headers))

    def _check_model(self, name: str) -> None:
        if name != self._backend.info.model:
            raise NotFoundError(
                f"the model {name!r} does not exist; this server has {self._backend.info.model!r}",
                code="model_not_found",
                param="model",
            )

    def _model_card(self) -> dict[str, object]:
        info = self._backend.info
        return {
            "id": info.model,
            "object": "model",
            "created": self._created,
            "owned_by": "asyncengine",
            "max_model_len": info.max_model_len,
        }


async def _json_body(request: web.Request) -> bytes:
    # a web page may send other content types anywhere without asking, this one it may not
    if request.content_type != "application/json":
        raise InvalidRequestError("the Content-Type header must be application/json", code="invalid_content_type")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise BodyTimeoutError(f"the request body did not arrive within {BODY_SECONDS:g} seconds") from None


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _header_text(names: Sequence[str]) -> str:
    """Names as the client sent them, made safe for a header: ASCII without controls or commas, and not too long."""
    safe = [
        "".join(char if "!" <= char <= "~" and char != "," else "?" for char in name[:MAX_REPORTED_NAME_CHARS])
        for name in names[:MAX_REPORTED_FIELDS]
    ]
    return ", ".join(safe)
