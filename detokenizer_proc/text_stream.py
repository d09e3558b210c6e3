"""The text of one row, token by token: what each token adds, exact at any cut.

The concatenation of all `push` results and `flush` is the library's decode of the same ids; a character whose bytes
are spread over tokens appears with the last of them. The prompt is context only: where a decoder drops a space at the
text's beginning, it is the prompt's beginning that counts.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from tokenizers import Tokenizer

from detokenizer_proc.byte_table import ByteTable

REPLACEMENT = "\ufffd"


class TableStream:
    """Reads a `ByteTable`; constant work per token.

    One difference from the library is deliberate. A byte-fallback decoder turns a whole run of `<0xNN>` tokens into
    replacement signs when any byte of it is invalid, which can only be known when the run is over. Here the run's
    valid characters appear as they complete, and only its invalid bytes are replaced.
    """

    __slots__ = ("_errors", "_pending", "_pieces", "_strip", "_strip_left")

    def __init__(self, table: ByteTable, *, pieces: list[bytes], context: Sequence[int] | None) -> None:
        """pieces: the table's, its visible ones, or between the two. context: the whole prompt when it is short enough
        to be known, else None (its beginning is long past)."""
        self._pieces = pieces
        self._errors = table.errors
        self._pending = b""
        self._strip = table.strip
        self._strip_left = 0 if context is None else table.strip_count
        if self._strip_left and context:
            for token in context:
                self.push(token)
            self.flush()

    def push(self, token: int) -> str:
        """The text that `token` completes. The token must lie in the vocabulary."""
        data = self._pending + self._pieces[token] if self._pending else self._pieces[token]
        text, used = utf_8_decode(data, self._errors, False)
        self._pending = data[used:]
        return self._strip_start(text) if self._strip_left and text else text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character."""
        text, _ = utf_8_decode(self._pending, self._errors, True)
        self._pending = b""
        return self._strip_start(text) if self._strip_left and text else text

    def _strip_start(self, text: str) -> str:
        start = 0
        while start < min(self._strip_left, len(text)) and text[start] == self._strip:
            start += 1
        self._strip_left = self._strip_left - start if start == len(text) else 0
        return text[start:]


class WindowStream:
    """The same for decoders that look at neighbouring tokens: decodes a short window twice and takes the difference.

    The window starts at the last cut but one, so that the tokens before the newest are context. The idea is that of
    `tokenizers.decoders.DecodeStream`, which itself cannot be used: it has no flush, and it raises when a decoder takes
    back text that it has shown.
    """

    WINDOW_TOKENS = 32
    """A window that long without a cut ends in invalid text, not in an incomplete character."""

    __slots__ = ("_hidden", "_shown", "_shown_tokens", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, *, hidden: frozenset[int], context: Sequence[int]) -> None:
        """hidden: ids that add no text and are no context either. context: the prompt's last ids."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window = [token for token in context if token not in hidden]
        self._shown_tokens = len(self._window)
        self._shown = self._decode()

    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._window.append(token)
        text = self._decode()
        full = len(self._window) - self._shown_tokens >= self.WINDOW_TOKENS
        if not full and (len(text) <= len(self._shown) or text.endswith(REPLACEMENT)):
            return ""
        return self._cut(text)

    def flush(self) -> str:
        return self._cut(self._decode())

    def _cut(self, text: str) -> str:
        new = text[len(self._shown) :]
        del self._window[: self._shown_tokens]
        self._shown_tokens = len(self._window)
        self._shown = self._decode()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)


TextStream = TableStream | WindowStream
