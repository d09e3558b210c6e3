"""Answers to those who only want to know a prompt's tokens, or the text of some, and run nothing."""

from __future__ import annotations

from asyncengine.errors import InvalidRequestError
from asyncengine.wire.answers import Detokenized, Failed, Tokenized
from asyncengine.wire.pipes import MAX_MESSAGE_BYTES
from asyncengine.wire.requests import Detokenize, TokenizeChat, TokenizeText
from tokenizer_proc.prompt_encoder import PromptEncoder, read_ids, refusal
from tokenizer_proc.vocabulary import Int32, Vocabulary

Question = TokenizeText | TokenizeChat | Detokenize

MAX_ANSWER_BYTES = MAX_MESSAGE_BYTES // 4
"""By a count that each token's text may exceed twofold, so that every answer fits its pipe."""


class TokenService:
    """One question at a time: they are rare beside prompts that are run, and never worth a batch of their own."""

    def __init__(self, vocabulary: Vocabulary, encoder: PromptEncoder) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder

    def answer(self, question: Question) -> Tokenized | Detokenized | Failed:
        try:
            match question:
                case Detokenize():
                    return Detokenized(question.rid, self._text(question.ids))
                case TokenizeText():
                    self._encoder.check_size(question, question.text, "prompt")
                    ids = self._vocabulary.encode_text(question.text, add_special_tokens=question.add_special_tokens)
                    return self._tokenized(question, ids, "prompt")
                case TokenizeChat():
                    (ids,) = self._vocabulary.encode_chats([self._encoder.render(question)])
                    return self._tokenized(question, ids, "messages")
        except InvalidRequestError as error:
            return refusal(question.rid, error)

    def _tokenized(self, question: TokenizeText | TokenizeChat, ids: Int32 | None, param: str) -> Tokenized:
        if ids is None:
            raise InvalidRequestError(f"the {param} cannot be tokenized", param=param)
        self._check_size(len(ids), len(ids) * (self._vocabulary.max_token_bytes if question.texts else 4), param)
        texts = tuple(self._vocabulary.token_text(token) for token in ids.tolist()) if question.texts else ()
        return Tokenized(question.rid, ids.tobytes(), texts)

    def _text(self, data: bytes) -> str:
        ids = read_ids(data)
        outside = (ids < 0) | (ids >= self._vocabulary.size)
        if outside.any():
            place = int(outside.argmax())
            raise InvalidRequestError(
                f"tokens[{place}] is {ids[place]}, which is outside the vocabulary (0 to {self._vocabulary.size - 1})",
                code="invalid_token_id",
                param="tokens",
            )
        self._check_size(len(ids), len(ids) * self._vocabulary.max_token_bytes, "tokens")
        return self._vocabulary.decode(ids.tolist())

    def _check_size(self, num_tokens: int, size: int, param: str) -> None:
        if size > MAX_ANSWER_BYTES:
            raise InvalidRequestError(
                f"the answer for {num_tokens} tokens could take {size} bytes; at most {MAX_ANSWER_BYTES} are allowed",
                code="request_too_large",
                param=param,
            )
