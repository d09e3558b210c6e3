"""What a caller may ask of one request's generation, validated where it enters the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec
from msgspec.structs import force_setattr

from asyncengine.config import MAX_BIAS_IDS, MAX_TOP_LOGPROBS
from asyncengine.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 512
MAX_STOP_TOKEN_IDS = 8
"""Stop ids a request may name itself; the model's own end-of-sequence ids come on top."""
MAX_N = 16
MAX_LOGIT_BIAS = MAX_BIAS_IDS
"""Tokens one request may bias."""
MAX_LOGPROBS = MAX_TOP_LOGPROBS
"""Most likely tokens one request may ask to see at each position."""
MAX_STRUCTURED_BYTES = 64 * 1024
"""UTF-8 bytes of one schema, pattern, list of choices or grammar."""
MAX_PROMPT_LOGPROBS = 2**17
"""Tokens of one request's prompt times its choices times the log-probabilities that each reports of a token."""
INT32_MAX = 2**31 - 1

StructuredKind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


class Structured(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a text must match from its first character to its last. Construction raises `InvalidRequestError`.

    json_schema: `text` is a JSON schema; json_object: any JSON object, `text` is "". regex: a regular expression
    without look-around and back references, matched as a whole. choice: a JSON list of texts, one of which it must be.
    grammar: Lark's or GBNF's notation, from the rule `start` or `root`. Whether it is valid the engine finds out.
    """

    kind: StructuredKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructuredKind):
            raise InvalidRequestError(
                f"structured output must be one of {', '.join(get_args(StructuredKind))}, got {self.kind!r}",
                param="structured_outputs",
            )
        if type(self.text) is not str:
            raise InvalidRequestError(f"the {self.kind} must be a text, got {self.text!r}", param="structured_outputs")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError(
                f"the {self.kind} has half a surrogate pair, which no text can hold", param="structured_outputs"
            ) from None
        if (size == 0) != (self.kind == "json_object") or size > MAX_STRUCTURED_BYTES:
            raise InvalidRequestError(
                f"the {self.kind} must have "
                + ("no text" if self.kind == "json_object" else f"1 to {MAX_STRUCTURED_BYTES} bytes")
                + f", got {size}",
                param="structured_outputs",
            )


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """Parameters of one request. Construction raises `InvalidRequestError` naming the field and what is allowed; of
    `stop` it takes a single text too, of what is a tuple a list, of `logit_bias` a mapping.

    Logits are adjusted in the order `logit_bias`, `repetition_penalty` (over prompt and output: a positive logit is
    divided by it, a negative one multiplied), `presence_penalty` and `frequency_penalty` (over the output), the ban on
    stop tokens before `min_tokens`; each of `n` choices counts its own output. `logit_bias` is (token id, bias) pairs.
    Filters then apply in the order temperature, top-k, top-p, min-p. `temperature` 0 is greedy and so is any
    temperature too small for float32 logits to be divided by (below 1e-5). `top_k` 0 or -1 and `top_p` 1 mean "no
    filter".
    `seed` None draws a fresh seed; the same seed, prompt and parameters give the same tokens whatever else is in the
    batch on the same device. Choice `k` of `n` uses `seed + k`.
    `max_tokens` None means "up to the model's context length". `priority`: smaller runs first, with the scheduling
    policy of that name; an engine with another one refuses any but 0.
    `logprobs` None reports no log-probabilities; k >= 0 the chosen token's and the k most likely tokens'. They are the
    model's own: natural logarithms, before bias, penalties and temperature.
    `prompt_logprobs`: the same of the prompt's tokens, from the second on; the request computes all of its prompt, and
    takes nothing from the prefix cache. `max_tokens` 0 computes the prompt alone.
    `structured` masks every token that cannot lead to a text of that structure, after all adjustments; once the text is
    complete only an end-of-sequence token is left. `max_tokens` may cut it short.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int = 0
    structured: Structured | None = None

    def __post_init__(self) -> None:
        # all have the very types that the wire has: a message that its reader does not understand is never answered
        _int("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _int("max_tokens", self.max_tokens, 0, INT32_MAX)
        _int("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )
        _float("temperature", self.temperature, 0.0, 2.0)
        _int("top_k", self.top_k, -1, INT32_MAX)
        _float("top_p", self.top_p, 0.0, 1.0)
        _float("min_p", self.min_p, 0.0, 1.0)
        _float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _float("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        for name in ("logit_bias", "stop", "stop_token_ids"):
            if type(getattr(self, name)) is not tuple:
                force_setattr(self, name, _tuple(name, getattr(self, name)))
        if self.logit_bias:
            _logit_bias(self.logit_bias)
        if self.logprobs is not None:
            _int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _int("seed", self.seed, -(2**63), 2**63 - 1)
        _int("priority", self.priority, -INT32_MAX, INT32_MAX)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", param="stop")
        for text in self.stop:
            if type(text) is not str:
                raise InvalidRequestError(f"a stop string must be a text, got {text!r}", param="stop")
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"a stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}", param="stop"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids, got {len(self.stop_token_ids)}", param="stop_token_ids"
            )
        for token in self.stop_token_ids:
            _int("stop_token_ids", token, 0, INT32_MAX)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if type(getattr(self, name)) is not bool:
                raise InvalidRequestError(f"{name} must be True or False, got {getattr(self, name)!r}", param=name)
        if self.structured is not None and type(self.structured) is not Structured:
            raise InvalidRequestError(
                f"structured must be a Structured or None, got {self.structured!r}", param="structured_outputs"
            )
        if self.structured is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidRequestError(
                f"{name} contradicts structured output, whose structure says where the text ends", param=name
            )


def _int(name: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}, got {value!r}", param=name)


def _float(name: str, value: float, low: float, high: float) -> None:
    if type(value) is not int and (type(value) is not float or not math.isfinite(value)):
        raise InvalidRequestError(f"{name} must be a finite number (int or float), got {value!r}", param=name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be from {low:g} to {high:g}, got {value!r}", param=name)


def _tuple(name: str, values: Any) -> tuple[Any, ...]:
    match values:
        case None:
            return ()
        case str() if name == "stop":
            return (values,)
        case Mapping() if name == "logit_bias":
            return tuple(values.items())
        case list() | tuple():
            return tuple(tuple(each) if type(each) is list else each for each in values)
    raise InvalidRequestError(f"{name} must be a list, got {values!r}", param=name)


def _logit_bias(pairs: tuple[tuple[int, float], ...]) -> None:
    if len(pairs) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias may name at most {MAX_LOGIT_BIAS} tokens, got {len(pairs)}", param="logit_bias"
        )
    for pair in pairs:
        if type(pair) is not tuple or len(pair) != 2:
            raise InvalidRequestError(
                f"logit_bias must be pairs of a token id and a bias, got {pair!r}", param="logit_bias"
            )
        token, bias = pair
        if type(token) is not int or not 0 <= token <= INT32_MAX:
            raise InvalidRequestError(
                f"a token id in logit_bias must be an integer from 0 to {INT32_MAX}, got {token!r}", param="logit_bias"
            )
        _float("logit_bias", bias, -100.0, 100.0)
    if len({token for token, _ in pairs}) < len(pairs):
        raise InvalidRequestError("logit_bias names a token twice", param="logit_bias")
