"""Text to token ids with the model's own tokenizer, a batch at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import Normalizer, Replace
from tokenizers.normalizers import Sequence as NormalizerSequence

from asyncengine.tokenizer_file import TokenizerFile
from tokenizer_proc.chat_template import Rendered
from tokenizer_proc.control_tokens import ControlTokens

Int32 = NDArray[np.int32]

_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)


class Vocabulary:
    """The tokenizer and what is derived from it.

    size: ids are below this. max_token_bytes: no token stands for more bytes of text than this.
    control_tokens: the added tokens that only a template or a raw prompt may produce: those the tokenizer calls
    special, and those that look like it (`<|...|>`), since some models leave their turn markers unmarked.
    """

    def __init__(self, file: TokenizerFile) -> None:
        self._tokenizer = file.tokenizer
        self.size = file.vocab_size
        self.max_token_bytes = max(len(text.encode()) for text in file.tokenizer.get_vocab())
        named = frozenset(file.special_tokens.values())
        control = {
            token.content: token
            for token in file.tokenizer.get_added_tokens_decoder().values()
            if token.special or token.content in named or _LOOKS_LIKE_CONTROL.fullmatch(token.content)
        }
        self.control_tokens = ControlTokens(control)
        _find_before_normalizing(self._tokenizer, list(control.values()))

    def encode_prompts(self, texts: Sequence[str]) -> list[Int32 | None]:
        """Raw prompts: control tokens in the text are control tokens, and the post-processor adds its own (BOS).

        None stands where the tokenizer cannot encode a text.
        """
        return self._encode(texts, add_special_tokens=True)

    def encode_chats(self, chats: Sequence[Rendered]) -> list[Int32 | None]:
        """Rendered conversations; the template has already written whatever control tokens the model wants."""
        results: list[Int32 | None] = [None] * len(chats)
        for marker in sorted({chat.marker for chat in chats}):
            places = [place for place, chat in enumerate(chats) if chat.marker == marker]
            encoded = self._encode_marked([chats[place].text for place in places], marker)
            for place, ids in zip(places, encoded, strict=True):
                results[place] = ids
        return results

    def encode_text(self, text: str, *, add_special_tokens: bool) -> Int32 | None:
        """One text; control tokens in it are control tokens. None when the tokenizer cannot encode it."""
        (ids,) = self._encode([text], add_special_tokens=add_special_tokens)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, all below `size`, special tokens included."""
        (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=False)
        return str(text)

    def token_text(self, token: int) -> str:
        """How the vocabulary writes `token`; "" for a number that it leaves out."""
        return self._tokenizer.id_to_token(token) or ""

    def count_tokens(self, text: str) -> int:
        """Tokens of `text` as part of a prompt; 0 when it cannot be encoded."""
        ids = self.encode_text(text, add_special_tokens=False)
        return 0 if ids is None else len(ids)

    def _encode_marked(self, texts: Sequence[str], marker: str) -> list[Int32 | None]:
        """Control tokens are found in the raw text, so a normalizer that deletes the marker acts just after that."""
        if not marker:
            return self._encode(texts, add_special_tokens=False)
        own: Normalizer | None = self._tokenizer.normalizer
        unmark = Replace(marker, "")
        self._tokenizer.normalizer = unmark if own is None else NormalizerSequence([unmark, own])
        try:
            return self._encode(texts, add_special_tokens=False)
        finally:
            self._tokenizer.normalizer = own

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Int32 | None]:
        if not texts:
            return []
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except Exception:  # noqa: BLE001 - the library raises bare Exception; only the text at fault must pay for it
            if len(texts) == 1:
                return [None]
            return [ids for text in texts for ids in self._encode([text], add_special_tokens=add_special_tokens)]
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]


def _find_before_normalizing(tokenizer: Tokenizer, tokens: list[AddedToken]) -> None:
    """Have control tokens found in the text as it came: a normalizer could make one of text that is none."""
    late = [token for token in tokens if token.normalized]
    for token in late:
        flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
        early = AddedToken(token.content, normalized=False, special=token.special, **flags)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([early])
