"""What a request body asks the model to continue, in the form the engine takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncengine.api.request_messages import Message, template_message
from asyncengine.api.schema import (
    MAX_CHOICES,
    MAX_LOGPROBS_AT_ONCE,
    MAX_PROMPT_LOGPROBS_AT_ONCE,
    MAX_PROMPTS,
    TEMPLATE_KWARGS,
    ChatRequest,
    CompletionRequest,
    TemplateValue,
)
from asyncengine.chat_prompt import ChatPrompt
from asyncengine.errors import InvalidRequestError


def completion_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts of a completion request, one text or list of ids each. Raises `InvalidRequestError`."""
    given = request.prompt
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]  # type: ignore[list-item]  # all are ids, as just seen
    if kinds not in ({str}, {list}):
        raise InvalidRequestError("prompt must not mix texts, token ids and lists of token ids", param="prompt")
    if request.session is not None and len(given) > 1:
        raise InvalidRequestError(
            f"session names what the next request begins with, so there can be one prompt; got {len(given)}",
            param="session",
        )
    if len(given) > MAX_PROMPTS or len(given) * request.num_choices > MAX_CHOICES:
        raise InvalidRequestError(
            f"a request may have {MAX_PROMPTS} prompts, and {MAX_CHOICES} prompts times n; "
            f"got {len(given)} prompts and n {request.num_choices}",
            param="prompt",
        )
    if len(given) * request.num_choices * (1 + (request.logprobs or 0)) > MAX_LOGPROBS_AT_ONCE:
        raise InvalidRequestError(
            f"prompts times n times (1 + logprobs) may be {MAX_LOGPROBS_AT_ONCE} in one request; "
            f"got {len(given)} prompts, n {request.num_choices} and logprobs {request.logprobs}",
            param="logprobs",
        )
    asked = request.num_prompt_logprobs
    if asked is not None:
        size = sum(len(prompt) for prompt in given if not isinstance(prompt, int))
        if size * request.num_choices * (1 + asked) > MAX_PROMPT_LOGPROBS_AT_ONCE:
            raise InvalidRequestError(
                f"the prompts' characters or ids times n times (1 + their log-probabilities) may be "
                f"{MAX_PROMPT_LOGPROBS_AT_ONCE} in one request; got {size}, n {request.num_choices} and {asked}",
                code="too_many_logprobs",
                param="prompt",
            )
    return given  # type: ignore[return-value]  # all are texts, or all lists of ids


def chat_prompt(request: ChatRequest, *, tools: list[dict[str, object]]) -> ChatPrompt:
    """The conversation for the model's chat template. tools: what the model is told of, as templates have them. Raises
    `InvalidRequestError`."""
    return conversation(
        request.messages,
        request.add_generation_prompt,
        request.continue_final_message,
        request.chat_template_kwargs,
        tools=tools,
    )


def conversation(
    messages: Sequence[Message],
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: Mapping[str, TemplateValue] | None,
    *,
    tools: list[dict[str, object]],
) -> ChatPrompt:
    """As `chat_prompt`, of the fields alone."""
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "an answer either continues the last message or is a new one: with continue_final_message there can be no "
            "add_generation_prompt",
            param="continue_final_message",
        )
    kwargs: dict[str, object] = {name: value for name, value in (template_kwargs or {}).items() if value is not None}
    for name in kwargs:
        if name not in TEMPLATE_KWARGS:
            raise InvalidRequestError(
                f"chat_template_kwargs may set {', '.join(TEMPLATE_KWARGS)}; got {name[:64]!r}",
                code="unsupported_parameter",
                param="chat_template_kwargs",
            )
    return ChatPrompt(
        messages=[template_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        add_generation_prompt=add_generation_prompt is not False,
        continue_final_message=bool(continue_final_message),
        template_kwargs=kwargs,
        tools=tools,
    )
