"""A caller's prompt as the message that asks a tokenizer worker for it, checked as far as can be done at once."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import msgspec

from asyncengine.chat_prompt import ChatPrompt
from asyncengine.engine_info import EngineInfo
from asyncengine.errors import InvalidRequestError
from asyncengine.request_terms import cache_namespace
from asyncengine.sampling import SamplingParams
from asyncengine.terms import Terms
from asyncengine.wire.pipes import MAX_MESSAGE_BYTES
from asyncengine.wire.requests import EncodeChat, EncodeIds, EncodeText, TokenizeChat, TokenizeText

PromptMessage = EncodeText | EncodeIds | EncodeChat

MAX_PROMPT_BYTES = MAX_MESSAGE_BYTES // 2
"""A larger prompt is refused: its frame would be dropped by the pipe, and no context holds it anyway."""


def prompt_message(
    rid: int,
    prompt: str | Sequence[int] | ChatPrompt,
    params: SamplingParams,
    namespace: str,
    terms: Terms,
    *,
    info: EngineInfo,
) -> tuple[PromptMessage, int]:
    """The message and its prompt's size in bytes; raises `InvalidRequestError`."""
    message: PromptMessage
    if params.priority and info.scheduling_policy != "priority":
        raise InvalidRequestError(
            f"priority {params.priority} would change nothing: the engine's scheduling policy is "
            f"{info.scheduling_policy}, not priority",
            code="unsupported_parameter",
            param="priority",
        )
    for stop in params.stop:
        _utf8("stop", stop)
    if not isinstance(namespace, str):
        raise InvalidRequestError(f"namespace must be a text, got {namespace!r}", param="namespace")
    _utf8("namespace", namespace)
    namespace = cache_namespace(terms.tenant, namespace)
    prompt = plain_prompt(prompt)
    if isinstance(prompt, str):
        message = EncodeText(rid, prompt, params, namespace, max_model_len=info.max_model_len, terms=terms)
        size = len(_utf8("prompt", prompt))
    elif isinstance(prompt, ChatPrompt):
        messages, kwargs, tools = _conversation(prompt, info)
        message = EncodeChat(
            rid,
            messages,
            params,
            namespace,
            prompt.add_generation_prompt,
            kwargs,
            tools,
            prompt.markup,
            max_model_len=info.max_model_len,
            terms=terms,
            continue_final_message=prompt.continue_final_message,
        )
        size = len(messages) + len(kwargs) + len(tools)
    else:
        ids = pack_ids(prompt, info.vocab_size)
        message = EncodeIds(rid, ids, params, namespace, max_model_len=info.max_model_len, terms=terms)
        size = len(ids)
    _check_size(size)
    return message, size


class TokenizedPrompt(msgspec.Struct, frozen=True):
    """A prompt's tokens; texts: each one's own, as the vocabulary writes it, where that was asked for."""

    ids: list[int]
    texts: list[str] | None = None


def question_message(
    rid: int, prompt: str | ChatPrompt, *, add_special_tokens: bool, texts: bool, info: EngineInfo
) -> tuple[TokenizeText | TokenizeChat, int]:
    """The message that only asks for a prompt's tokens, and its size in bytes; raises `InvalidRequestError`."""
    message: TokenizeText | TokenizeChat
    asked = plain_prompt(prompt)
    if isinstance(asked, str):
        message = TokenizeText(rid, asked, add_special_tokens, texts, info.max_model_len)
        size = len(_utf8("prompt", asked))
    elif not isinstance(asked, ChatPrompt):
        raise InvalidRequestError("what is to be tokenized must be a text or a ChatPrompt, got ids", param="prompt")
    else:
        messages, kwargs, tools = _conversation(asked, info)
        message = TokenizeChat(
            rid,
            messages,
            asked.add_generation_prompt,
            kwargs,
            texts,
            tools,
            info.max_model_len,
            asked.continue_final_message,
        )
        size = len(messages) + len(kwargs) + len(tools)
    _check_size(size)
    return message, size


def check_params(params: SamplingParams) -> None:
    """Raises `InvalidRequestError` for what are none."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params must be SamplingParams, got {params!r}", param="params")


def plain_prompt(prompt: str | Sequence[int] | ChatPrompt) -> str | Sequence[int] | ChatPrompt:
    """`prompt`; a text of a subclass, such as numpy's, or an array of ids as what messages can hold. Raises
    `InvalidRequestError` for what is no prompt."""
    prompt = unpacked(prompt)
    if isinstance(prompt, str):
        return prompt if type(prompt) is str else str(prompt)
    if not isinstance(prompt, ChatPrompt | Sized) or isinstance(prompt, bytes | bytearray | Mapping):
        raise InvalidRequestError(
            f"a prompt must be a text, a list of token ids or a ChatPrompt, got {type(prompt).__name__}", param="prompt"
        )
    return prompt


def unpacked(value: Any) -> Any:
    """An array, numpy's or another that has `tolist`, as a list of its values; any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def pack_ids(ids: Sequence[int], vocab_size: int, *, name: str = "prompt") -> bytes:
    """Token ids as an int32 array; raises `InvalidRequestError` naming the first id that is none. name: the ids'."""
    if not isinstance(ids, Sized) or isinstance(ids, str | bytes | bytearray):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {type(ids).__name__}", param=name)
    if not {int} >= set(map(type, ids)) or len(ids) == 0 or min(ids) < 0 or max(ids) >= vocab_size:
        for position, value in enumerate(ids):
            if type(value) is not int or not 0 <= value < vocab_size:
                raise InvalidRequestError(
                    f"{name}[{position}] is {value!r}; a token id must be an integer from 0 to {vocab_size - 1}",
                    code="invalid_token_id",
                    param=name,
                )
        raise InvalidRequestError(f"{name} must have at least one token", code="empty_prompt", param=name)
    return array("i", ids).tobytes()


def _conversation(prompt: ChatPrompt, info: EngineInfo) -> tuple[bytes, bytes, bytes]:
    """Its messages, template variables and tools as JSON."""
    if not info.has_chat_template:
        raise InvalidRequestError(f"{info.model} has no chat template; use text or token ids", code="no_chat_template")
    for name in ("add_generation_prompt", "continue_final_message"):
        if not isinstance(value := getattr(prompt, name), bool):
            raise InvalidRequestError(f"{name} must be True or False, got {value!r}", param=name)
    kwargs = as_json("template_kwargs", prompt.template_kwargs) if prompt.template_kwargs else b""
    tools = as_json("tools", prompt.tools) if prompt.tools else b""
    return as_json("messages", prompt.messages), kwargs, tools


def _check_size(size: int) -> None:
    if size > MAX_PROMPT_BYTES:
        raise InvalidRequestError(
            f"the prompt is {size} bytes long; at most {MAX_PROMPT_BYTES} are accepted", code="prompt_too_large"
        )


def as_json(name: str, value: object) -> bytes:
    """Raises `InvalidRequestError`."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise _not_unicode(name, error) from None
    except (TypeError, RecursionError) as error:
        raise InvalidRequestError(f"{name} cannot be written as JSON: {error}", param=name) from None


def _utf8(name: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _not_unicode(name, error) from None


def _not_unicode(name: str, error: UnicodeEncodeError) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} holds half a surrogate pair (U+{ord(error.object[error.start]):04X}) at character {error.start}; "
        "text must be valid Unicode",
        code="invalid_unicode",
        param=name,
    )
