"""The routes that generate, and the models they know."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from aiohttp import web

from asyncengine.api.backend import Backend, Prompt
from asyncengine.api.chat_turn import chat_turn
from asyncengine.api.echo import Echo
from asyncengine.api.errors import NotFoundError
from asyncengine.api.generation import DeltaParser, Generation
from asyncengine.api.prompts import completion_prompts
from asyncengine.api.request_body import ignored_fields_header, json_body, json_response
from asyncengine.api.schema import (
    REQUEST_NAME,
    CompletionRequest,
    GenerationRequest,
    Parsed,
    R,
    parse_chat,
    parse_completion,
)
from asyncengine.api.shapes import AnswerOptions, ChatShape, CompletionShape, Shape
from asyncengine.engine_info import EngineInfo
from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import SamplingParams

REQUEST_ID_HEADER = "X-Request-Id"


class Routes:
    """Handlers of one engine."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._created = int(time.time())

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/completions", self.completions, name="completions")
        app.router.add_post("/v1/chat/completions", self.chat_completions, name="chat_completions")
        app.router.add_post("/v1/requests/{id}/cancel", self.cancel, name="cancel")
        app.router.add_get("/v1/models", self.models, name="models")
        # a model's name may hold slashes, as a hub id does
        app.router.add_get("/v1/models/{model:.+}", self.model, name="model")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        received_ns = time.monotonic_ns()
        parsed = parse_completion(await json_body(request))
        check_model(parsed.request.model, self._backend.info)
        prompts, params = completion_prompts(parsed.request), parsed.request.sampling_params()
        texts = await self._texts(prompts) if parsed.request.echo else []
        return await self._generate(
            request,
            parsed,
            prompts,
            params,
            CompletionShape,
            received_ns,
            parser=lambda index: Echo(texts[index // params.n]) if texts else None,
        )

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        received_ns = time.monotonic_ns()
        parsed = parse_chat(await json_body(request))
        check_model(parsed.request.model, self._backend.info)
        turn = chat_turn(parsed.request, self._backend.info)
        try:
            return await self._generate(
                request, parsed, [turn.prompt], turn.params, ChatShape, received_ns, parser=lambda _: turn.parser()
            )
        except InvalidRequestError as error:
            raise turn.refusal(error) from None

    async def _texts(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """The prompts as texts. Raises `EngineError`."""
        texts = []
        for prompt in prompts:
            try:
                texts.append(prompt if isinstance(prompt, str) else await self._backend.detokenize(prompt))
            except InvalidRequestError as error:
                raise InvalidRequestError(error.message, code=error.code, param="prompt") from None
        return texts

    async def cancel(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if not await self._backend.cancel(name):
            raise NotFoundError(f"no request {name[:128]!r} is running", code="request_not_found", param="id")
        return json_response({"id": name, "object": "request", "status": "cancelled"})

    async def models(self, request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        check_model(request.match_info["model"], self._backend.info)
        return json_response(self._model_card())

    async def _generate(
        self,
        request: web.Request,
        parsed: Parsed[R],
        prompts: Sequence[Prompt],
        params: SamplingParams,
        shape: type[Shape],
        received_ns: int,
        parser: Callable[[int], DeltaParser | None],
    ) -> web.StreamResponse:
        asked: GenerationRequest = parsed.request
        options = asked.stream_options
        include_usage = options is not None and bool(options.include_usage)
        generation = Generation(
            backend=self._backend,
            prompts=prompts,
            params=params,
            namespace=asked.cache_salt or "",
            shape=shape(
                self._backend.info.model,
                AnswerOptions(
                    name=_request_name(request) or asked.request_id,
                    token_ids=bool(asked.return_token_ids),
                    logprobs=params.logprobs is not None,
                    echo_logprobs=asked.num_logprobs if isinstance(asked, CompletionRequest) and asked.echo else None,
                    prompt_logprobs=asked.prompt_logprobs,
                    include_usage=include_usage,
                    continuous_usage=options is not None and bool(options.continuous_usage_stats),
                    timings_from=received_ns if asked.timings else None,
                ),
            ),
            include_usage=include_usage,
            parser=parser,
        )
        headers = ignored_fields_header(parsed.ignored)
        return await (generation.stream(request, headers) if asked.stream else generation.respond(headers))

    def _model_card(self) -> dict[str, object]:
        info = self._backend.info
        return {
            "id": info.model,
            "object": "model",
            "created": self._created,
            "owned_by": "asyncengine",
            "max_model_len": info.max_model_len,
        }


def check_model(name: str | None, info: EngineInfo) -> None:
    """Raises `NotFoundError` for another model than the engine's; None is whichever it has."""
    if name is not None and name != info.model:
        raise NotFoundError(
            f"the model {name!r} does not exist; this server has {info.model!r}", code="model_not_found", param="model"
        )


def _request_name(request: web.Request) -> str | None:
    """What the client, or a proxy, calls this request."""
    name = request.headers.get(REQUEST_ID_HEADER)
    if name is not None and not re.fullmatch(REQUEST_NAME, name):
        raise InvalidRequestError(f"the {REQUEST_ID_HEADER} header must match {REQUEST_NAME}", code="invalid_header")
    return name
