"""The routes that generate, and the models they know."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from asyncengine.api.access import service_class_of, tenant_of
from asyncengine.api.backend import Backend, Prompt
from asyncengine.api.chat_turn import chat_turn
from asyncengine.api.echo import Echo
from asyncengine.api.endpoints import ENGINE_CALL, NAMED_THING, Endpoint, Header
from asyncengine.api.errors import NotFoundError
from asyncengine.api.generation import DeltaParser, Generation
from asyncengine.api.patience import Patience
from asyncengine.api.prompt_ids import ids_of
from asyncengine.api.prompts import completion_prompts
from asyncengine.api.request_body import IGNORED_FIELDS, check_known, ignored_fields_header, json_body, json_response
from asyncengine.api.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Parsed,
    R,
    parse_chat,
    parse_completion,
)
from asyncengine.api.shapes import (
    AnswerOptions,
    ChatCompletionJson,
    ChatShape,
    CompletionJson,
    CompletionShape,
    Shape,
)
from asyncengine.api.stream_events import ChatCompletionChunkJson, CompletionChunkJson
from asyncengine.api.unsupported import NO_EFFECT_IN_CHAT, NO_EFFECT_IN_COMPLETIONS, NO_EFFECT_WITHOUT_REASONING
from asyncengine.engine_info import EngineInfo
from asyncengine.errors import InvalidRequestError
from asyncengine.request_terms import TenantTerms
from asyncengine.sampling import SamplingParams
from asyncengine.telemetry import current_trace

REQUEST_ID = Header(
    name="X-Request-Id",
    kind=str,
    description="As `request_id`, and before it, if it is up to 128 visible characters of ASCII",
)
_PROXYS_NAME = re.compile(r"[!-~]{1,128}")


class ModelJson(msgspec.Struct, frozen=True, kw_only=True):
    """created: when the server started, as Unix time. max_model_len: tokens of a prompt and its answer together.
    batch_invariant: whether an answer is the same, bit for bit, whatever else runs. system_fingerprint: of answers.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "asyncengine"
    max_model_len: int
    batch_invariant: bool
    system_fingerprint: str


class ModelListJson(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelJson]


class CancelledJson(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "request"
    status: str = "cancelled"


class ReleasedJson(msgspec.Struct, frozen=True, kw_only=True):
    session: str
    released: bool = True


class Routes:
    """Handlers of one engine."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._created = int(time.time())

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                method="POST",
                path="/v1/completions",
                name="completions",
                summary="Continue one text or several",
                handler=self.completions,
                headers=(REQUEST_ID,),
                body=CompletionRequest,
                no_effect=NO_EFFECT_IN_COMPLETIONS,
                answer=CompletionJson,
                answer_headers=(IGNORED_FIELDS,),
                event=CompletionChunkJson,
                errors=(*NAMED_THING, *ENGINE_CALL),
            ),
            Endpoint(
                method="POST",
                path="/v1/chat/completions",
                name="chat_completions",
                summary="Answer a conversation",
                handler=self.chat_completions,
                headers=(REQUEST_ID,),
                body=ChatRequest,
                no_effect=self._no_effect_in_chat(),
                answer=ChatCompletionJson,
                answer_headers=(IGNORED_FIELDS,),
                event=ChatCompletionChunkJson,
                errors=(*NAMED_THING, *ENGINE_CALL),
            ),
            Endpoint(
                method="POST",
                path="/v1/requests/{id:[^/]+}/cancel",  # by itself {id} takes no braces
                name="cancel",
                summary="End a running request; its id is that of its answer",
                handler=self.cancel,
                answer=CancelledJson,
                errors=(*NAMED_THING, *ENGINE_CALL),
            ),
            Endpoint(
                method="POST",
                path="/v1/sessions/{session:[^/]+}/release",
                name="release_session",
                summary="Keep a session's prefix no longer",
                handler=self.release_session,
                answer=ReleasedJson,
            ),
            Endpoint(
                method="GET",
                path="/v1/models",
                name="models",
                summary="The model, as a list",
                handler=self.models,
                answer=ModelListJson,
            ),
            Endpoint(
                method="GET",
                path="/v1/models/{model:.+}",  # its name may hold slashes, as a hub id does
                name="model",
                summary="The model",
                handler=self.model,
                answer=ModelJson,
                errors=NAMED_THING,
            ),
        ]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        received_ns = time.monotonic_ns()
        parsed = parse_completion(await json_body(request))
        check_known(parsed.ignored, self._backend.info)
        check_model(parsed.request.model, self._backend.info)
        prompts, params = completion_prompts(parsed.request), parsed.request.sampling_params()
        texts = await self._texts(prompts) if parsed.request.echo else []
        try:
            return await self._generate(
                request,
                parsed,
                prompts,
                params,
                CompletionShape,
                received_ns,
                parser=lambda index: Echo(texts[index // params.n]) if texts else None,
            )
        except InvalidRequestError as error:
            raise parsed.request.refusal(error) from None

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        received_ns = time.monotonic_ns()
        parsed = parse_chat(await json_body(request), self._no_effect_in_chat())
        check_known(parsed.ignored, self._backend.info)
        check_model(parsed.request.model, self._backend.info)
        turn = chat_turn(parsed.request, self._backend.info)
        try:
            return await self._generate(
                request, parsed, [turn.prompt], turn.params, ChatShape, received_ns, parser=lambda _: turn.parser()
            )
        except InvalidRequestError as error:
            raise parsed.request.refusal(turn.refusal(error)) from None

    async def _texts(self, prompts: Sequence[str | list[int]]) -> list[str]:
        """The prompts as texts. Raises `EngineError`."""
        texts = []
        async with Patience(self._backend.info).beginning():
            for prompt in prompts:
                try:
                    texts.append(prompt if isinstance(prompt, str) else await self._backend.detokenize(prompt))
                except InvalidRequestError as error:
                    raise InvalidRequestError(error.message, code=error.code, param="prompt") from None
        return texts

    async def cancel(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if not await self._backend.cancel(name, tenant=tenant_of(request)):
            raise NotFoundError(f"no request {name[:128]!r} is running", code="request_not_found", param="id")
        return json_response(CancelledJson(id=name))

    async def release_session(self, request: web.Request) -> web.Response:
        session = request.match_info["session"]
        await self._backend.release_session(session, tenant=tenant_of(request))
        return json_response(ReleasedJson(session=session))

    async def models(self, request: web.Request) -> web.Response:
        return json_response(ModelListJson(data=[self._model_json()]))

    async def model(self, request: web.Request) -> web.Response:
        check_model(request.match_info["model"], self._backend.info)
        return json_response(self._model_json())

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
        info = self._backend.info
        terms: TenantTerms = {
            "tenant": tenant_of(request),
            "service_class": service_class_of(request, asked.service_class),
            "session": asked.session,
            "session_ttl_seconds": asked.session_ttl_seconds,
        }
        prompt_ids: list[list[int]] | None = None
        if asked.tells_prompt_ids:
            copies = params.n if shape.prompt_is_a_choices else 1
            prompt_ids = await ids_of(self._backend, prompts, copies=copies)
            if shape is CompletionShape:  # a conversation is more than its ids
                prompts = prompt_ids
        answer = shape(
            info.model,
            info.fingerprint,
            AnswerOptions(
                name=_request_name(request) or asked.request_id,
                token_ids=bool(asked.return_token_ids),
                logprobs=params.logprobs is not None,
                echo_logprobs=asked.num_logprobs if isinstance(asked, CompletionRequest) and asked.echo else None,
                prompt_logprobs=asked.prompt_logprobs,
                prompt_token_ids=prompt_ids and [ids for ids in prompt_ids for _ in range(params.n)],
                include_usage=include_usage,
                continuous_usage=options is not None and bool(options.continuous_usage_stats),
                timings_from=received_ns if asked.timings else None,
            ),
        )
        trace = current_trace.get()
        if trace is not None:
            trace.accepted(
                model=self._backend.info.model,
                response_id=answer.id,
                n=params.n,
                prompts=len(prompts),
                streamed=bool(asked.stream),
            )
        generation = Generation(
            backend=self._backend,
            prompts=prompts,
            params=params,
            namespace=asked.cache_salt or "",
            terms=terms,
            shape=answer,
            include_usage=include_usage,
            parser=parser,
            trace=trace,
        )
        headers = ignored_fields_header(parsed.ignored)
        return await (generation.stream(request, headers) if asked.stream else generation.respond(headers))

    def _no_effect_in_chat(self) -> Mapping[str, tuple[Any, ...]]:
        return NO_EFFECT_IN_CHAT if self._backend.info.reasoning else NO_EFFECT_WITHOUT_REASONING

    def _model_json(self) -> ModelJson:
        info = self._backend.info
        return ModelJson(
            id=info.model,
            created=self._created,
            max_model_len=info.max_model_len,
            batch_invariant=info.batch_invariant,
            system_fingerprint=info.fingerprint,
        )


def check_model(name: str | None, info: EngineInfo) -> None:
    """Raises `NotFoundError` for another model than the engine's; None is whichever it has."""
    if name is not None and name != info.model:
        raise NotFoundError(
            f"the model {name!r} does not exist; this server has {info.model!r}", code="model_not_found", param="model"
        )


def _request_name(request: web.Request) -> str | None:
    """What the client, or a proxy, calls this request. A proxy's names are its own: an unusable one is none."""
    name = request.headers.get(REQUEST_ID.name, "")
    return name if _PROXYS_NAME.fullmatch(name) else None
