"""A model in a GGUF file: its config from the metadata, its tensors dequantised one at a time."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from asyncengine.errors import StartupError
from gpu_runner.models.config import MAX_LAYERS, ModelConfig, RopeConfig
from gpu_runner.models.family import Family
from gpu_runner.models.fields import Fields
from gpu_runner.models.gguf_header import DamagedError, GGUFHeader, TensorInfo, read_header
from gpu_runner.models.staging import Extent

ROPE_DIVISORS = "rope_freqs.weight"
PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


class GGUFFile:
    """A `Checkpoint` over one file, which stays mapped for as long as this object lives."""

    def __init__(self, path: Path, families: Sequence[Family]) -> None:
        self.source = str(path)
        self._path = path
        try:
            with path.open("rb") as file:
                self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise StartupError(f"cannot read the GGUF file {path}: {error}") from error
        try:
            header = read_header(self._data)
        except DamagedError as error:
            raise StartupError(f"the GGUF file {path} is damaged or not supported: {error}") from error
        self._family = _family(self.source, header, families)
        self._infos = {_hf_name(name): info for name, info in header.tensors.items() if name != ROPE_DIVISORS}
        divisors = header.tensors.get(ROPE_DIVISORS)
        self.config = _config(
            self.source, header, self._family, None if divisors is None else self._dequantise(ROPE_DIVISORS, divisors)
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: info.shape for name, info in self._infos.items()}

    def stored_bytes(self, name: str) -> int:
        return self._infos[name].num_bytes

    def extent(self, name: str) -> Extent | None:
        info = self._infos[name]
        if info.kind not in PLAIN_TYPES or self._interleaved_heads(name):
            return None
        return Extent(self._path, info.start, info.num_bytes, PLAIN_TYPES[info.kind])

    def read(self, name: str) -> Tensor:
        tensor = self._dequantise(name, self._infos[name])
        num_heads = self._interleaved_heads(name)
        return _separate_halves(tensor, num_heads) if num_heads else tensor

    def _interleaved_heads(self, name: str) -> int:
        """Heads whose rows the tensor holds in llama.cpp's order; 0 for tensors in no need of another."""
        if self._family.gguf_interleaved_rope:
            if ".q_proj." in name:
                return self.config.num_heads
            if ".k_proj." in name:
                return self.config.num_kv_heads
        return 0

    def _dequantise(self, name: str, info: TensorInfo) -> Tensor:
        row_bytes = info.num_bytes // max(1, int(np.prod(info.shape[:-1], dtype=np.int64)))
        raw = np.frombuffer(self._data, np.uint8, info.num_bytes, info.start).reshape(*info.shape[:-1], row_bytes)
        try:
            values = dequantize(raw, info.kind)
        except NotImplementedError as error:
            raise StartupError(f"{self.source}: tensor {name} has type {info.kind.name}, not supported") from error
        return torch.from_numpy(values if values.flags.writeable else values.copy())


def _separate_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's order of Q and K rows: pairs (2i, 2i + 1) of each head go to (i, i + head_dim / 2)."""
    return tensor.reshape(num_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _hf_name(name: str) -> str:
    """The Hugging Face name; the name itself, which no config expects, where there is none."""
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    elif (match := _TOP_TENSOR.fullmatch(name)) and match[1] in _TOP_NAMES:
        return f"{_TOP_NAMES[match[1]]}.{match[2]}"
    return name


def _family(source: str, header: GGUFHeader, families: Sequence[Family]) -> Family:
    architecture = header.metadata.get("general.architecture")
    known = {family.gguf_architecture: family for family in families if family.gguf_architecture is not None}
    if architecture not in known:
        raise StartupError(f"{source}: architecture {architecture!r} is not supported in GGUF; {', '.join(known)} are")
    return known[architecture]


def _config(source: str, header: GGUFHeader, family: Family, rope_divisors: Tensor | None) -> ModelConfig:
    prefix = f"{family.gguf_architecture}."
    own = {name.removeprefix(prefix): value for name, value in header.metadata.items() if name.startswith(prefix)}
    fields, general = Fields(f"{source}: {family.gguf_architecture}", own), Fields(source, header.metadata)
    if general.count("split.count", 1) > 1:
        raise StartupError(f"{source} is one part of a split GGUF file; merge the parts with llama-gguf-split --merge")
    if fields.get("expert_count"):
        raise StartupError(f"{source} is a mixture-of-experts model, which is not supported")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise StartupError(f"{source} has no tensor token_embd.weight")
    num_heads, hidden_size = fields.count("attention.head_count"), fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", max(1, hidden_size // num_heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.count(name, head_dim) != head_dim:
            raise StartupError(f"{fields.source}.{name} must equal the head dimension {head_dim}")
    names = header.tensors.keys()
    traits = family.from_gguf(names)
    num_layers = fields.count("block_count", limit=MAX_LAYERS)
    return ModelConfig(
        source=source,
        architecture=family.hf_architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=fields.count("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.positive("attention.layer_norm_rms_epsilon"),
        rope=_rope(fields, rope_divisors),
        layer_windows=traits.layer_windows or (None,) * num_layers,
        max_position=fields.count("context_length"),
        eos_ids=tuple(dict.fromkeys(token for key in EOS_KEYS for token in general.ids(key))),
        qk_norm=traits.qk_norm,
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        tied_embeddings="output.weight" not in names,
    )


def _rope(fields: Fields, divisors: Tensor | None) -> RopeConfig:
    kind = fields.text("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise StartupError(f"{fields.source}: rope scaling {kind!r} is not supported; none and linear are")
    factor = fields.positive("rope.scaling.factor", 1.0) if kind == "linear" else 1.0
    per_pair = None if divisors is None else tuple(divisors.tolist())
    return RopeConfig(base=fields.positive("rope.freq_base", 10000.0), linear=factor, divisors=per_pair)
