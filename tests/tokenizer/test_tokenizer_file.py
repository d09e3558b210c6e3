"""Loading tokenizers from folders and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.tokenizers_cache import NAMES, default_model_file, tokenizer_folder
from tokenizers import Tokenizer

from asyncengine.errors import StartupError
from asyncengine.gguf_metadata import read_gguf_metadata
from asyncengine.tokenizer_file import TokenizerFile, load_tokenizer

TEXTS = {
    "english": "The quick brown fox, it's 42.5% done - don't you think?",
    "chinese": "今天天气很好，我们去公园吧。",
    "zwj emoji": "👨‍👩‍👧‍👦 and 🏳️‍🌈 at 100%",
    "combining marks": "é ä Z̷̢̛a̵l̴g̶o é",
    "arabic": "مرحبا بالعالم، كيف الحال؟",
    "crlf": "one\r\ntwo\r\n\r\n\tthree  \r\n",
    "code": "def f(x: int) -> str:\n    return f\"{x!r:>8}\\n\" if x >= 10_000 else '<|>'\n",
}


def write_gguf(path: Path, **overrides: Any) -> Path:
    """A GGUF file with a six-token byte-level tokenizer; an override of None leaves the key out."""
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": "default",
        "tokens": ["a", "b", "ab", "<|end|>", "<tool>", "Ġ"],
        "token_type": [1, 1, 1, 3, 4, 1],
        "merges": ["a b"],
        "eos_token_id": 3,
        **overrides,
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(77)
    for key, value in values.items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(f"tokenizer.ggml.{key}", value)
            case str():
                writer.add_string(f"tokenizer.ggml.{key}", value)
            case int():
                writer.add_uint32(f"tokenizer.ggml.{key}", value)
            case _:
                writer.add_array(f"tokenizer.ggml.{key}", value)
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def as_gguf(folder: Path, path: Path, pre: str) -> TokenizerFile:
    """The folder's byte-level BPE written as a GGUF file and loaded from there."""
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = data["model"]["vocab"]
    kinds = {token["content"]: 3 if token["special"] else 4 for token in data["added_tokens"]}
    ids = {**vocabulary, **{token["content"]: token["id"] for token in data["added_tokens"]}}
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]]
    types = [kinds.get(token, 1) for token in tokens]
    bos = {"bos_token_id": ids["<|begin_of_text|>"]} if pre == "llama-bpe" else {}
    return load_tokenizer(
        str(write_gguf(path, pre=pre, tokens=tokens, token_type=types, merges=merges, eos_token_id=None, **bos))
    )


@pytest.mark.parametrize("name", ["smollm2", *NAMES])
@pytest.mark.parametrize("kind", TEXTS)
def test_text_survives_encoding_and_decoding(loaded: Callable[[str], Any], name: str, kind: str) -> None:
    model = loaded(name)
    (ids,) = model.vocabulary.encode_prompts([TEXTS[kind]])
    tokenizer = load_reference(name)
    assert ids.tolist() == tokenizer.encode(TEXTS[kind]).ids
    decoded = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    assert decoded == (tokenizer.normalizer.normalize_str(TEXTS[kind]) if name == "qwen3" else TEXTS[kind])


def load_reference(name: str) -> Tokenizer:
    return load_tokenizer(str(default_model_file() if name == "smollm2" else tokenizer_folder(name))).tokenizer
