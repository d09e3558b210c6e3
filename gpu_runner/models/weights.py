"""From a checkpoint's tensors to the decoder's: names and shapes checked as a whole, Q, K, V and gate, up fused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncengine.errors import StartupError
from gpu_runner.models.checkpoint import Checkpoint
from gpu_runner.models.config import ModelConfig
from gpu_runner.models.decoder import DecoderWeights, LayerWeights
from gpu_runner.models.staging import Staging

Progress = Callable[[int, int], None]
"""Called with the bytes of the checkpoint read so far and in total."""

RANDOM_DEVIATION = 0.02
EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def load_weights(
    checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype, progress: Progress
) -> DecoderWeights:
    """Read every weight into its place on `device`, as `dtype`; see `staging`.

    Raises `StartupError` when tensors are missing, have other shapes than the config says, or are not the decoder's.
    """
    wanted = expected_shapes(checkpoint.config)
    _check(checkpoint, wanted)
    with Staging(device) as staging:
        reader = _Reader(checkpoint, wanted, device, dtype, staging, progress)
        weights = _assemble(checkpoint.config, reader)
        staging.finish(reader.count)
    return weights


def empty_weights(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """Memory of the model's shapes with nothing in it."""
    return _assemble(config, _EmptyReader(expected_shapes(config), device, dtype))


def random_weights(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> DecoderWeights:
    """Weights of the model's shapes without meaning, always the same: gains of 1, all else normal, deviation 0.02."""
    return _assemble(config, _RandomReader(expected_shapes(config), device, dtype))


def _assemble(config: ModelConfig, reader: _EmptyReader) -> DecoderWeights:
    embedding = reader.fused(EMBEDDING)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(reader, config, f"model.layers.{index}.") for index in range(config.num_layers)),
        final_norm=reader.fused(FINAL_NORM),
        lm_head=embedding if config.tied_embeddings else reader.fused(LM_HEAD),
    )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this config has, by Hugging Face name."""
    hidden, middle = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
        ("mlp.gate_proj", middle, hidden, config.mlp_bias),
        ("mlp.up_proj", middle, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, middle, config.mlp_bias),
    )
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, rows, columns, has_bias in projections:
        layer[f"{name}.weight"] = (rows, columns)
        if has_bias:
            layer[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def linear_shapes(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """[N, K] of the weights that a decoder multiplies by, as `LayerWeights` holds them: of a layer, and the head."""
    hidden, middle = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (q + 2 * kv, hidden), (hidden, q), (2 * middle, hidden), (hidden, middle), (config.vocab_size, hidden)


def _check(checkpoint: Checkpoint, wanted: dict[str, tuple[int, ...]]) -> None:
    found = checkpoint.shapes
    missing = [name for name in wanted if name not in found]
    if missing:
        raise StartupError(f"{checkpoint.source} lacks {len(missing)} tensors of the model, first {missing[0]}")
    # Some files repeat what follows from the config: the rotary frequencies, and the head where it is the embedding.
    extra = [
        name for name in found if name not in wanted and name != LM_HEAD and not name.endswith("rotary_emb.inv_freq")
    ]
    if extra:
        raise StartupError(f"{checkpoint.source} has {len(extra)} tensors the model does not know, first {extra[0]}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise StartupError(f"{checkpoint.source}: {name} has shape {found[name]}, the config says {shape}")


def _layer(reader: _EmptyReader, config: ModelConfig, prefix: str) -> LayerWeights:
    def fused(used: bool, kind: str, *names: str) -> Tensor | None:
        return reader.fused(*(f"{prefix}{name}.{kind}" for name in names)) if used else None

    def weight(*names: str) -> Tensor:
        return reader.fused(*(f"{prefix}{name}.weight" for name in names))

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return LayerWeights(
        input_norm=weight("input_layernorm"),
        qkv=weight(*qkv),
        qkv_bias=fused(config.qkv_bias, "bias", *qkv),
        q_norm=fused(config.qk_norm, "weight", "self_attn.q_norm"),
        k_norm=fused(config.qk_norm, "weight", "self_attn.k_norm"),
        o=weight("self_attn.o_proj"),
        o_bias=fused(config.o_bias, "bias", "self_attn.o_proj"),
        post_attention_norm=weight("post_attention_layernorm"),
        gate_up=weight(*gate_up),
        gate_up_bias=fused(config.mlp_bias, "bias", *gate_up),
        down=weight("mlp.down_proj"),
        down_bias=fused(config.mlp_bias, "bias", "mlp.down_proj"),
    )


class _EmptyReader:
    """Makes the decoder's tensors; readers derived from this one fill them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._device, self._dtype = device, dtype

    def fused(self, *names: str) -> Tensor:
        """The named tensors, one after another along the first dimension, in new contiguous memory."""
        shapes = [self._shapes[name] for name in names]
        return torch.empty((sum(s[0] for s in shapes), *shapes[0][1:]), dtype=self._dtype, device=self._device)


class _RandomReader(_EmptyReader):
    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(shapes, device, dtype)
        self._generator = torch.Generator(device).manual_seed(0)

    def fused(self, *names: str) -> Tensor:
        out = super().fused(*names)
        if names[0].endswith("norm.weight"):
            return out.fill_(1.0)
        return out.normal_(0.0, RANDOM_DEVIATION, generator=self._generator)


class _Reader(_EmptyReader):
    """Fills tensors from a checkpoint and counts the bytes; what has an extent is only asked for."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        wanted: dict[str, tuple[int, ...]],
        device: torch.device,
        dtype: torch.dtype,
        staging: Staging,
        progress: Progress,
    ) -> None:
        super().__init__(wanted, device, dtype)
        self._checkpoint = checkpoint
        self._staging = staging
        self._progress = progress
        self._done = 0
        self._total = sum(checkpoint.stored_bytes(name) for name in wanted)

    def fused(self, *names: str) -> Tensor:
        out = super().fused(*names)
        for name, part in zip(names, torch.split(out, [self._shapes[name][0] for name in names]), strict=True):
            extent = self._checkpoint.extent(name)
            if extent is not None:
                self._staging.fill(part, extent)
            else:
                part.copy_(self._checkpoint.read(name))
                self.count(self._checkpoint.stored_bytes(name))
        return out

    def count(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._progress(self._done, self._total)
