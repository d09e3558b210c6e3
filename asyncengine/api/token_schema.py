"""Bodies and answers of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

import msgspec

from asyncengine.api.json_body import decode_body
from asyncengine.api.prompts import conversation
from asyncengine.api.request_messages import Messages, Name, unread
from asyncengine.api.schema import FIELDS, Parsed, TemplateKwargs, TokenId
from asyncengine.api.tools import Tools, template_tools
from asyncengine.api.unknown_fields import decode_conversation
from asyncengine.api.unsupported import NO_EFFECT_IN_TOKENIZE, ignored_fields
from asyncengine.chat_prompt import ChatPrompt
from asyncengine.errors import InvalidRequestError


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Of a text (`prompt`) or a conversation (`messages`). add_special_tokens: those that the tokenizer puts round a
    text, which is the default; a conversation has its template's and nothing else. return_token_strs: the answer also
    has each token as the vocabulary writes it."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None

    def text(self) -> str | ChatPrompt:
        """What is to be tokenized. Raises `InvalidRequestError`."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("the body must have either prompt or messages", param="prompt")
        if self.messages is None:
            assert self.prompt is not None
            for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
                if getattr(self, name) is not None:
                    raise InvalidRequestError(f"{name} is only allowed with messages", param=name)
            return self.prompt
        if self.add_special_tokens:
            raise InvalidRequestError(
                "add_special_tokens must be false with messages: the chat template writes the special tokens",
                code="unsupported_parameter",
                param="add_special_tokens",
            )
        return conversation(
            self.messages,
            self.add_generation_prompt,
            self.continue_final_message,
            self.chat_template_kwargs,
            tools=template_tools(self.tools or ()),
        )


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: Name | None = None
    tokens: list[TokenId]


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


def parse_tokenize(body: bytes) -> Parsed[TokenizeRequest]:
    """Raises `InvalidRequestError`."""
    request, places = decode_conversation(body, _TOKENIZE)
    given = decode_body(body, FIELDS)
    ignored = ignored_fields(given, TokenizeRequest.__struct_fields__, NO_EFFECT_IN_TOKENIZE)
    return Parsed(request, ignored + places + unread(request.messages or ()))


def parse_detokenize(body: bytes) -> Parsed[DetokenizeRequest]:
    """Raises `InvalidRequestError`."""
    request = decode_body(body, _DETOKENIZE)
    given = decode_body(body, FIELDS)
    return Parsed(request, ignored_fields(given, DetokenizeRequest.__struct_fields__, {}))
