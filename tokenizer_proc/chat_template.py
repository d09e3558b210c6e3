"""Renders conversations with the model's (or the operator's) Jinja template: sandboxed, under a deadline, and so that
text from a request cannot become a control token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from asyncengine.errors import InvalidRequestError, StartupError
from tokenizer_proc.control_tokens import ControlTokens
from tokenizer_proc.conversation import join_parts, split_parts
from tokenizer_proc.deadline import DeadlineExceeded, deadline

RENDER_SECONDS = 2.0
MAX_RENDERED_CHARS = 64 * 1024 * 1024
ERROR_CODE = "chat_template_error"

_PROBE = "qzprobeqz"
_PROBE_PARTS = [{"type": "text", "text": _PROBE}]


class TemplateRefusal(jinja2.TemplateError):
    """The template itself rejected the conversation, by its `raise_exception`."""


class _TooLong(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the model wants it. `marker`: a character that is not part of the text and cuts what would
    otherwise read as a control token; "" when there is none. continued: of the message that the text ends within, the
    whole; "" when there is none."""

    text: str
    marker: str
    continued: str = ""


class ChatTemplate:
    """One compiled template. `render` must run on the main thread (its deadline is an alarm signal)."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: dict[str, str],
        control_tokens: ControlTokens,
        render_seconds: float = RENDER_SECONDS,
        max_chars: int = MAX_RENDERED_CHARS,
    ) -> None:
        """special_tokens: variables such as `bos_token`. Raises `StartupError` when `source` is not a template."""
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise StartupError(f"the chat template is not valid: {error}") from error
        self._source = source
        self._special_tokens = special_tokens
        self._control_tokens = control_tokens
        self._render_seconds = render_seconds
        self._max_chars = max_chars
        self._adapt = self._content_form()

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        kwargs: dict[str, Any],
    ) -> Rendered:
        """Raises `InvalidRequestError` when the template rejects the messages, fails, or takes too long, or when the
        last one is not to be continued."""
        try:
            end = continued = ""
            if continue_final_message:
                end = self._control_tokens.unused_char([messages, kwargs], reserved=self._source)
                continued = _continued(messages[-1])
                messages = [*messages[:-1], {**messages[-1], "content": continued + end}]
            adapted = [self._adapt(message) for message in messages]
            marked, marker = self._control_tokens.mark([adapted, kwargs], reserved=self._source)
            text = self._run(marked[0], marked[1], add_generation_prompt and not continue_final_message)
            return Rendered(_cut(text, end) if end else text, marker, continued)
        except TemplateRefusal as error:
            _refuse(f"the chat template rejects these messages: {error.message}", error)
        except DeadlineExceeded as error:
            _refuse(f"the chat template took longer than {self._render_seconds:g} s for these messages", error)
        except _TooLong as error:
            _refuse(f"the chat template makes more than {self._max_chars} characters of these messages", error)
        except InvalidRequestError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the template's code runs into is a fault of what it was given
            _refuse("the chat template cannot render these messages", error)

    def _run(self, messages: list[dict[str, Any]], kwargs: dict[str, Any], add_generation_prompt: bool) -> str:
        variables = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **kwargs,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        with deadline(self._render_seconds):
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > self._max_chars:
                    raise _TooLong
        return "".join(pieces)

    def _content_form(self) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """How to hand over `content`: as it came where the template takes texts and lists, else in the form it takes.

        Found by trying: only a template that looks into the parts shows their text without their keys.
        """
        takes_text, takes_parts = self._shows_probe(_PROBE), self._shows_probe(_PROBE_PARTS)
        if takes_parts:
            return (lambda message: message) if takes_text else split_parts
        return join_parts

    def _shows_probe(self, content: Any) -> bool:
        try:
            text = self._run([{"role": "user", "content": content}], {}, True)
        except Exception:  # noqa: BLE001 - a template that fails here has answered the question
            return False
        return _PROBE in text and "'text'" not in text


def _continued(message: dict[str, Any]) -> str:
    content = message.get("content")
    if message["role"] != "assistant" or message.get("tool_calls") or not isinstance(content, str) or not content:
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant, with a text and without calls",
            param="continue_final_message",
        )
    return content


def _cut(text: str, end: str) -> str:
    """What is before `end`, a sign behind the last message's text, which shows where that ends in a prompt."""
    continued, *rest = text.split(end)
    if len(rest) != 1:
        raise InvalidRequestError(
            "the model's chat template does not show the last message as it is", param="continue_final_message"
        )
    return continued


def _refuse(message: str, cause: Exception) -> NoReturn:
    raise InvalidRequestError(message, code=ERROR_CODE, param="messages") from cause


# -------------------------------------------------------------------------------------------------- what templates use


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)
