"""A decoder's config from the `config.json` and `generation_config.json` of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncengine.errors import StartupError
from gpu_runner.models.config import MAX_LAYERS, Llama3Scaling, ModelConfig, RopeConfig
from gpu_runner.models.family import Family
from gpu_runner.models.fields import Fields

MAX_JSON_BYTES = 16 * 1024 * 1024

_SILU_NAMES = ("silu", "swish")
_ROPE_TYPES = ("default", "linear", "llama3")


def read_hf_config(folder: Path, families: Sequence[Family]) -> ModelConfig:
    """Raises `StartupError` when a file is missing, broken, or asks for what the decoder does not do."""
    path = folder / "config.json"
    if not path.is_file():
        raise StartupError(f"{folder} has no config.json, so it is not a model folder")
    fields = _read_fields(path)
    family = _family(fields, families)
    if fields.get("quantization_config") is not None:
        raise StartupError(f"{path}: quantised safetensors are not supported; use the plain weights or a GGUF file")
    activation = fields.text("hidden_act", "silu")
    if activation not in _SILU_NAMES:
        raise StartupError(f"{path}: activation {activation!r} is not supported; silu is")
    traits = family.from_hf(fields)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers", limit=MAX_LAYERS)
    return ModelConfig(
        source=str(path),
        architecture=family.hf_architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=fields.count("head_dim", family.default_head_dim or max(1, hidden_size // num_heads)),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        layer_windows=traits.layer_windows or (None,) * num_layers,
        max_position=fields.count("max_position_embeddings"),
        eos_ids=_eos_ids(folder, fields),
        qk_norm=traits.qk_norm,
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        tied_embeddings=fields.flag("tie_word_embeddings"),
    )


def _read_fields(path: Path) -> Fields:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise StartupError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (OSError, msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    return Fields(str(path), values)


def _family(fields: Fields, families: Sequence[Family]) -> Family:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    for family in families:
        if family.hf_architecture == name:
            return family
    supported = ", ".join(family.hf_architecture for family in families)
    raise StartupError(f"{fields.source}: architecture {name!r} is not supported; {supported} are")


def _rope(fields: Fields) -> RopeConfig:
    """Both spellings: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    if fields.positive("partial_rotary_factor", 1.0) != 1.0:
        raise StartupError(f"{fields.source}: partial_rotary_factor other than 1 is not supported")
    base = fields.positive("rope_theta", 10000.0)
    scaling = fields.nested("rope_parameters") or fields.nested("rope_scaling")
    if scaling is None:
        return RopeConfig(base=base)
    base = scaling.positive("rope_theta", base)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return RopeConfig(base=base)
    if kind == "linear":
        return RopeConfig(base=base, linear=scaling.positive("factor"))
    if kind != "llama3":
        raise StartupError(f"{scaling.source}: rope type {kind!r} is not supported; {', '.join(_ROPE_TYPES)} are")
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    if low >= high:
        raise StartupError(f"{scaling.source}: low_freq_factor {low} must be below high_freq_factor {high}")
    trained = scaling.count("original_max_position_embeddings")
    llama3 = Llama3Scaling(
        factor=scaling.positive("factor"), low_freq_factor=low, high_freq_factor=high, original_max_position=trained
    )
    return RopeConfig(base=base, llama3=llama3)


def _eos_ids(folder: Path, fields: Fields) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    generation = _read_fields(path).ids("eos_token_id") if path.is_file() else ()
    return tuple(dict.fromkeys(generation + fields.ids("eos_token_id")))
