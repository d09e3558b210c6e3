"""Turns a batch of requests into checked token ids, or into the reason why not. Knows no sockets."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from asyncengine.errors import InvalidRequestError
from asyncengine.sampling import MAX_PROMPT_LOGPROBS, SamplingParams
from asyncengine.wire.answers import Failed
from asyncengine.wire.frames import DetokenizeOptions
from asyncengine.wire.requests import EncodeChat, EncodeIds, EncodeText, Generate, Markup, TokenizeChat, TokenizeText
from tokenizer_proc.chat_template import ChatTemplate, Rendered
from tokenizer_proc.conversation import parse_conversation, parse_template_kwargs, parse_tools
from tokenizer_proc.vocabulary import Int32, Vocabulary

Job = EncodeText | EncodeIds | EncodeChat
Message = Job | TokenizeText | TokenizeChat

PROMPT_TAIL_TOKENS = 8
PROBE_CHARS_PER_TOKEN = 16
"""A text with more characters than this for each token of context is first judged by its beginning."""
PROBE_SLACK_TOKENS = 16
"""More than what a word cut at the end of that beginning can add to the count."""
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class PromptEncoder:
    """max_model_len: the model's context length in tokens; or that asked for, prompt and answer together."""

    def __init__(self, *, vocabulary: Vocabulary, template: ChatTemplate | None, max_model_len: int) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._max_model_len = max_model_len
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, jobs: Sequence[Job]) -> list[Generate | Failed]:
        """One outcome for each job, in order. All texts of a kind go through the tokenizer in one call."""
        texts: dict[int, str] = {}
        chats: dict[int, Rendered] = {}
        ids: dict[int, Int32 | None] = {}
        failed: dict[int, Failed] = {}
        for place, job in enumerate(jobs):
            try:
                match job:
                    case EncodeText():
                        self.check_size(job, job.text, "prompt")
                        texts[place] = job.text
                    case EncodeChat():
                        chats[place] = self.render(job)
                    case EncodeIds():
                        ids[place] = read_ids(job.ids)
            except InvalidRequestError as error:
                failed[place] = refusal(job.rid, error)
        ids.update(zip(texts, self._vocabulary.encode_prompts(list(texts.values())), strict=True))
        ids.update(zip(chats, self._vocabulary.encode_chats(list(chats.values())), strict=True))
        return [
            failed[place] if place in failed else self._finish(job, ids[place], chats.get(place))
            for place, job in enumerate(jobs)
        ]

    def render(self, job: EncodeChat | TokenizeChat) -> Rendered:
        """A conversation as text. Raises `InvalidRequestError`."""
        if self._template is None:
            raise InvalidRequestError(
                "the model has no chat template: use a plain prompt, or start the server with --chat-template",
                code="no_chat_template",
                param="messages",
            )
        kwargs = parse_template_kwargs(job.template_kwargs)
        if job.tools:
            kwargs["tools"] = parse_tools(job.tools)
        rendered = self._template.render(
            parse_conversation(job.messages),
            add_generation_prompt=job.add_generation_prompt,
            continue_final_message=job.continue_final_message,
            kwargs=kwargs,
        )
        self.check_size(job, rendered.text, "messages")
        return rendered

    def _finish(self, job: Job, ids: Int32 | None, rendered: Rendered | None) -> Generate | Failed:
        param = "messages" if isinstance(job, EncodeChat) else "prompt"
        params, markup = job.params, (job.markup if isinstance(job, EncodeChat) else None) or Markup()
        prefix = markup.think if rendered is not None and markup.think and _leaves_open(rendered, markup.think) else ""
        if prefix and markup.structured_thinking is not None:
            params = msgspec.structs.replace(params, structured=markup.structured_thinking)
        try:
            if ids is None:
                raise InvalidRequestError("the prompt cannot be tokenized", param=param)
            self._check_ids(ids, params, param)
            _check_prompt_logprobs(len(ids), params)
            max_tokens = self._max_tokens(len(ids), job, param)
        except InvalidRequestError as error:
            return refusal(job.rid, error)
        options = DetokenizeOptions(
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_str_in_output=params.include_stop_str_in_output,
            prompt_tail=ids[-PROMPT_TAIL_TOKENS:].tobytes(),
            logprobs=params.logprobs is not None,
            shown_tokens=markup.shown_tokens,
            prefix=prefix,
            no_output=max_tokens == 0,
        )
        return Generate(
            rid=job.rid,
            ids=ids.tobytes(),
            params=params,
            max_tokens=max(1, max_tokens),  # a row ends by a token, which the detokenizer drops
            detok=self._encoder.encode(options),
            namespace=job.namespace,
            resume=job.resume,
            terms=job.terms,
        )

    def check_size(self, message: Message, text: str, param: str) -> None:
        """Refuse a text that cannot fit without tokenizing all of it: long texts of one letter take seconds."""
        context = self._context(message)
        probe_chars = context * PROBE_CHARS_PER_TOKEN
        if len(text) <= probe_chars:
            return
        size = len(text.encode())
        tokens = -(-size // self._vocabulary.max_token_bytes)
        if tokens <= context:
            tokens = self._vocabulary.count_tokens(text[:probe_chars]) - PROBE_SLACK_TOKENS
        if tokens > context:
            raise InvalidRequestError(
                f"the prompt of {size} bytes has at least {tokens} tokens, but {self._limit(context)}",
                code=CONTEXT_LENGTH_EXCEEDED,
                param=param,
            )

    def _check_ids(self, ids: Int32, params: SamplingParams, param: str) -> None:
        size = self._vocabulary.size
        if not len(ids):
            raise InvalidRequestError("the prompt is empty: it has no tokens", code="empty_prompt", param=param)
        outside = (ids < 0) | (ids >= size)
        if outside.any():
            place = int(outside.argmax())
            raise InvalidRequestError(
                f"token id {ids[place]} at position {place} of the prompt is outside the vocabulary (0 to {size - 1})",
                code="invalid_token_id",
                param=param,
            )
        biased = [token for token, _ in params.logit_bias]
        for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", biased)):
            for token in tokens:
                if token >= size:
                    raise InvalidRequestError(
                        f"{name} has {token}, which is outside the vocabulary (0 to {size - 1})",
                        code="invalid_token_id",
                        param=name,
                    )

    def _context(self, message: Message) -> int:
        """Most tokens of its prompt and the answer together."""
        return message.max_model_len or self._max_model_len

    def _limit(self, context: int) -> str:
        if context < self._max_model_len:
            return f"the context length is the {context} tokens that the KV cache holds"
        return f"the model's context length is {context} tokens"

    def _max_tokens(self, prompt_tokens: int, job: Job, param: str) -> int:
        """The answer's length limit, once it is known to fit."""
        params, context = job.params, self._context(job)
        room = context - prompt_tokens
        if room < 1:
            raise InvalidRequestError(
                f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer: {self._limit(context)}",
                code=CONTEXT_LENGTH_EXCEEDED,
                param=param,
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequestError(
                f"the prompt's {prompt_tokens} tokens and max_tokens {params.max_tokens} are "
                f"{prompt_tokens + params.max_tokens} tokens together, but {self._limit(context)}",
                code=CONTEXT_LENGTH_EXCEEDED,
                param="max_tokens",
            )
        if params.min_tokens > room:
            raise InvalidRequestError(
                f"min_tokens {params.min_tokens} is more than the {room} tokens that the prompt's {prompt_tokens} "
                f"leave: {self._limit(context)}",
                code=CONTEXT_LENGTH_EXCEEDED,
                param="min_tokens",
            )
        return room if params.max_tokens is None else params.max_tokens


def _check_prompt_logprobs(prompt_tokens: int, params: SamplingParams) -> None:
    if params.prompt_logprobs is None:
        return
    number = prompt_tokens * params.n * (1 + params.prompt_logprobs)
    if number > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"log-probabilities of the prompt: its {prompt_tokens} tokens times n {params.n} times the "
            f"{1 + params.prompt_logprobs} of a token are {number}, but a request may have {MAX_PROMPT_LOGPROBS}",
            code="too_many_logprobs",
            param="prompt_logprobs",
        )


def _leaves_open(rendered: Rendered, tag: str) -> bool:
    """Whether the model is to go on within a block that the template has opened, or the message that is continued."""
    if rendered.text.rstrip().endswith(tag):
        return True
    block = tag + rendered.text.rpartition(tag)[2].replace(rendered.marker, "")
    return rendered.continued.endswith(block) and tag.replace("<", "</") not in block


def read_ids(data: bytes) -> Int32:
    """Raises `InvalidRequestError`."""
    if len(data) % 4:
        raise InvalidRequestError("the prompt's ids are not an array of 32-bit integers", param="prompt")
    return np.frombuffer(data, dtype="<i4")


def refusal(rid: int, error: InvalidRequestError) -> Failed:
    return Failed(
        rid=rid, status=error.status, message=error.message, code=error.code or "invalid_value", param=error.param
    )
