"""Loads a model's tokenizer and chat template from its folder or .gguf file, for the processes that touch text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from asyncengine.errors import StartupError
from asyncengine.gguf_metadata import read_gguf_metadata

_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type` that make a token an added one."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """What a model's files say about text.

    tokenizer: as the files define it; `encode` with special tokens applies their post-processor (BOS where the model
        wants one). chat_template: Jinja source, None if the model has none.
    special_tokens: text of `bos_token`, `eos_token`, ... , the variables a template may use.
    vocab_size: one above the largest id the tokenizer knows. context_length: the model's own, in tokens, None if the
        files do not say.
    """

    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]
    vocab_size: int
    context_length: int | None


def load_tokenizer(model_path: str) -> TokenizerFile:
    """Read the tokenizer of a model folder (tokenizer.json, tokenizer_config.json) or of a .gguf file.

    Raises `StartupError` when a file is missing, damaged, or of a kind that is not supported.
    """
    path = Path(model_path)
    if path.is_dir():
        return _from_folder(path)
    if not path.exists():
        raise StartupError(f"there is no model at {path}")
    return _from_gguf(path)


def _loaded(
    tokenizer: Tokenizer, chat_template: str | None, special_tokens: dict[str, str], context_length: int | None
) -> TokenizerFile:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder()
    size = tokenizer.get_vocab_size(with_added_tokens=False)
    return TokenizerFile(
        tokenizer=tokenizer,
        chat_template=chat_template,
        special_tokens=special_tokens,
        vocab_size=max(size, *(token + 1 for token in added)) if added else size,
        context_length=context_length,
    )


# ------------------------------------------------------------------------------------------------------------- folder


def _from_folder(folder: Path) -> TokenizerFile:
    source = folder / "tokenizer.json"
    if not source.is_file():
        raise StartupError(f"{folder} has no tokenizer.json, the only tokenizer format that is supported in a folder")
    try:
        tokenizer = Tokenizer.from_file(str(source))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise StartupError(f"{source} is damaged or not a tokenizer file: {error}") from error
    config = _json_object(folder / "tokenizer_config.json")
    special_tokens = {**_token_texts(_json_object(folder / "special_tokens_map.json")), **_token_texts(config)}
    if config.get("add_bos_token") is True and "bos_token" in special_tokens:
        _ensure_bos(tokenizer, special_tokens["bos_token"])
    return _loaded(tokenizer, _folder_template(folder, config), special_tokens, _folder_context_length(folder))


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    try:
        return (folder / "chat_template.jinja").read_text("utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {folder / 'chat_template.jinja'}: {error}") from error
    template = _json_object(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise StartupError(f"the chat_template in {folder} is neither a text nor a list of named texts")
    return template


def _folder_context_length(folder: Path) -> int | None:
    config = _json_object(folder / "config.json")
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, dict) else {}):
        length = part.get("max_position_embeddings")
        if isinstance(length, int) and length > 0:
            return length
    return None


def _json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, empty when there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is damaged or unreadable: {error}") from error


def _token_texts(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, given as a text or as an object with the text in `content`."""
    texts = {}
    for name, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            texts[name] = value
    return texts


def _ensure_bos(tokenizer: Tokenizer, bos: str) -> None:
    """Put `bos` in front of encoded text unless the tokenizer's own post-processor already does."""
    bos_id = tokenizer.token_to_id(bos)
    if bos_id is None:
        raise StartupError(f"the tokenizer's bos_token {bos!r} is not in its vocabulary")
    if tokenizer.encode("").ids[:1] == [bos_id]:
        return
    prefix = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"], special_tokens=[(bos, bos_id)]
    )
    own = tokenizer.post_processor
    tokenizer.post_processor = prefix if own is None else processors.Sequence([own, prefix])


# --------------------------------------------------------------------------------------------------------------- GGUF


def _from_gguf(path: Path) -> TokenizerFile:
    metadata = read_gguf_metadata(path)
    try:
        model, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
        if model != "gpt2":
            raise StartupError(f"{path} has a tokenizer of kind {model!r}; supported is gpt2 (byte-level BPE)")
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        tokenizer = _byte_level_bpe(metadata, tokens, ignore_merges=pre == "llama-bpe")
        context_length = metadata.get(f"{metadata['general.architecture']}.context_length")
        special_tokens = {
            f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if f"tokenizer.ggml.{key}_token_id" in metadata
        }
    except KeyError as error:
        raise StartupError(f"{path} lacks the metadata {error.args[0]}") from error
    except StartupError:
        raise
    except Exception as error:  # the library raises bare Exception for every fault of the tables
        raise StartupError(f"the tokenizer in {path} is damaged: {error}") from error
    _set_pre_tokenizer(tokenizer, pre, path)
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in special_tokens:
        _ensure_bos(tokenizer, special_tokens["bos_token"])
    return _loaded(tokenizer, metadata.get("tokenizer.chat_template"), special_tokens, context_length)


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str], *, ignore_merges: bool) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = list(zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _GGUF_CONTROL]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in kinds if kind == _GGUF_USER_DEFINED])
    return tokenizer


def _set_pre_tokenizer(tokenizer: Tokenizer, name: str, path: Path) -> None:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps: list[pre_tokenizers.PreTokenizer]
    match name:
        case "default" | "gpt-2":
            steps = [gpt2]
        case "smollm":
            steps = [pre_tokenizers.Digits(individual_digits=True), gpt2]
        case "llama-bpe":
            steps = [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), bytes_only]
        case "qwen2":
            steps = [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), bytes_only]
            tokenizer.normalizer = normalizers.NFC()
        case _:
            raise StartupError(
                f"{path} needs the pre-tokenizer {name!r}; supported are default, gpt-2, smollm, llama-bpe and qwen2"
            )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
