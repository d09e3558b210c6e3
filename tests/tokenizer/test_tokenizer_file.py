"""Loading tokenizers from folders and GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.tokenizers_cache import default_model_file, tokenizer_folder
from tokenizers import Tokenizer

from asyncengine.errors import StartupError
from asyncengine.gguf_metadata import read_gguf_metadata
from asyncengine.tokenizer_file import TokenizerFile, load_tokenizer

TEXTS = (
    "The quick brown fox, it's 42.5% done - don't you THINK'LL? 1234567",
    "今天天气很好 👨‍👩‍👧 e\u0301 مرحبا\r\n\r\n\t  x  ",
    "<|im_start|>a<|eot_id|> <think>b</think>",
)


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


def test_the_default_models_file_gives_its_tokenizer_template_and_context_length() -> None:
    file = load_tokenizer(str(default_model_file()))
    assert (file.vocab_size, file.context_length) == (49152, 8192)
    assert file.special_tokens["eos_token"] == "<|im_end|>"
    assert file.chat_template is not None
    assert "You are a helpful AI assistant named SmolLM" in file.chat_template
    ids = file.tokenizer.encode("<|im_start|>user\nHello 1234<|im_end|>").ids
    assert ids == [1, 4093, 198, 19556, 216, 33, 34, 35, 36, 2]
    assert file.tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHello 1234<|im_end|>"


@pytest.mark.parametrize(("name", "pre"), [("qwen3", "qwen2"), ("llama3_1", "llama-bpe")])
def test_a_gguf_tokenizer_equals_the_folder_it_was_made_from(tmp_path: Path, name: str, pre: str) -> None:
    folder = tokenizer_folder(name)
    ours = as_gguf(folder, tmp_path / "model.gguf", pre).tokenizer
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids


def test_gguf_tokens_marked_control_or_user_defined_are_found_in_text(tmp_path: Path) -> None:
    file = load_tokenizer(str(write_gguf(tmp_path / "m.gguf")))
    assert file.tokenizer.encode("ab<|end|>ba<tool> ").ids == [2, 3, 1, 0, 4, 5]
    added = file.tokenizer.get_added_tokens_decoder()
    assert [token for token, entry in added.items() if entry.special] == [3]
    assert (file.vocab_size, file.context_length) == (6, 77)
    assert file.special_tokens == {"eos_token": "<|end|>"}


def test_a_gguf_file_that_asks_for_bos_gets_it(tmp_path: Path) -> None:
    file = load_tokenizer(str(write_gguf(tmp_path / "m.gguf", bos_token_id=3, add_bos_token=True)))
    assert file.tokenizer.encode("ab").ids == [3, 2]
    assert file.tokenizer.encode("ab", add_special_tokens=False).ids == [2]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"model": "llama"}, "has a tokenizer of kind 'llama'; supported is gpt2"),
        ({"model": None}, "lacks the metadata tokenizer.ggml.model"),
        ({"tokens": None}, "lacks the metadata tokenizer.ggml.tokens"),
        ({"pre": "tekken"}, "needs the pre-tokenizer 'tekken'; supported are"),
        ({"token_type": [1, 1]}, "the tokenizer in .* is damaged"),
        ({"merges": ["a zz"]}, "the tokenizer in .* is damaged"),
        ({"eos_token_id": 99}, "the tokenizer in .* is damaged"),
    ],
)
def test_a_gguf_tokenizer_that_is_of_no_use_stops_the_start(
    tmp_path: Path, override: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        load_tokenizer(str(write_gguf(tmp_path / "m.gguf", **override)))


def test_metadata_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", add_bos_token=True)
    reader = gguf.GGUFReader(path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert read_gguf_metadata(path) == theirs


def test_a_gguf_file_cut_anywhere_in_its_header_is_called_damaged(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    header = len(whole.rstrip(b"\0"))
    for size in (*range(0, header - 1, 7), header - 1):
        cut.write_bytes(whole[:size])
        with pytest.raises(StartupError, match="is not a GGUF file of version 2 or 3, or is damaged"):
            read_gguf_metadata(cut)
    cut.write_bytes(b"PK" + whole[2:])
    with pytest.raises(StartupError, match="is not a GGUF file"):
        read_gguf_metadata(cut)


def test_a_gguf_array_that_claims_more_than_the_file_holds_costs_nothing(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "m.gguf").read_bytes())
    at = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    whole[at : at + 8] = (2**60).to_bytes(8, "little")
    (tmp_path / "m.gguf").write_bytes(whole)
    with pytest.raises(StartupError, match="damaged"):
        read_gguf_metadata(tmp_path / "m.gguf")


# ------------------------------------------------------------------------------------------------------------- folders


def folder_with(tmp_path: Path, **files: Any) -> Path:
    """A folder with qwen3's tokenizer.json (linked) and the given files; a dot in a name is written as `__`."""
    (tmp_path / "tokenizer.json").symlink_to(tokenizer_folder("qwen3") / "tokenizer.json")
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (tmp_path / name.replace("__", ".")).write_text(text)
    return tmp_path


def test_chat_template_files_go_before_the_configs_own(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, tokenizer_config__json={"chat_template": "config"})
    assert load_tokenizer(str(folder)).chat_template == "config"
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert load_tokenizer(str(folder)).chat_template == "json"
    (folder / "chat_template.jinja").write_text("jinja")
    assert load_tokenizer(str(folder)).chat_template == "jinja"


def test_of_several_named_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = folder_with(tmp_path, tokenizer_config__json={"chat_template": named, "bos_token": {"content": "<B>"}})
    file = load_tokenizer(str(folder))
    assert (file.chat_template, file.special_tokens) == ("d", {"bos_token": "<B>"})


def test_the_context_length_is_read_from_the_model_config(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config__json={"text_config": {"max_position_embeddings": 512}})
    file = load_tokenizer(str(folder))
    assert (file.context_length, file.chat_template) == (512, None)


def test_a_missing_or_damaged_folder_file_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="there is no model at"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StartupError, match=r"tokenizer\.json is damaged"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    folder = folder_with(tmp_path, tokenizer_config__json="{")
    with pytest.raises(StartupError, match=r"tokenizer_config\.json is damaged"):
        load_tokenizer(str(folder))
    (folder / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(StartupError, match="neither a text nor a list of named texts"):
        load_tokenizer(str(folder))
