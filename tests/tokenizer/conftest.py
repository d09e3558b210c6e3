"""Real tokenizers, loaded once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from support.tokenizers_cache import default_model_file, tokenizer_folder

from asyncengine.tokenizer_file import TokenizerFile, load_tokenizer
from tokenizer_proc.chat_template import ChatTemplate
from tokenizer_proc.vocabulary import Vocabulary


class Loaded:
    """One model's tokenizer with what tokenizer_proc makes of it."""

    def __init__(self, name: str) -> None:
        self.path = default_model_file() if name == "smollm2" else tokenizer_folder(name)
        self.file: TokenizerFile = load_tokenizer(str(self.path))
        self.vocabulary = Vocabulary(self.file)
        assert self.file.chat_template is not None
        self.template = ChatTemplate(
            self.file.chat_template,
            special_tokens=self.file.special_tokens,
            control_tokens=self.vocabulary.control_tokens,
        )


@pytest.fixture(scope="session")
def loaded() -> Callable[[str], Loaded]:
    """`loaded(name)` for smollm2 or one of `support.tokenizers_cache.NAMES`."""
    return cache(Loaded)
