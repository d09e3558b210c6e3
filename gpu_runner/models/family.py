"""What a model family adds to the shared decoder. A new family is one file that makes a `Family`, and a line in
`registry`."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from asyncengine.errors import StartupError
from gpu_runner.models.fields import Fields

Windows = tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The switches of the decoder; see `ModelConfig`. layer_windows None: every layer sees all positions."""

    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    layer_windows: Windows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """hf_architecture: the entry of `architectures` in config.json. gguf_architecture: `general.architecture`, None
    when GGUF files of the family say another family's.

    from_hf: traits by config.json. from_gguf: traits by the names of a file's tensors. gguf_interleaved_rope: the rows
    of Q and K are stored with the two halves of each head interleaved. default_head_dim: where config.json has none;
    None = hidden_size / num_heads.
    """

    hf_architecture: str
    from_hf: Callable[[Fields], Traits]
    gguf_architecture: str | None = None
    from_gguf: Callable[[Set[str]], Traits] = lambda tensors: Traits()
    gguf_interleaved_rope: bool = False
    default_head_dim: int | None = None


def windows_of_layers(fields: Fields) -> Windows | None:
    """As Qwen's configs say: layers `max_window_layers` and later have sliding windows if `use_sliding_window`, unless
    `layer_types` lists the layers itself."""
    used, from_layer = fields.flag("use_sliding_window"), fields.count("max_window_layers", 28)
    num_layers = fields.count("num_hidden_layers")
    types = fields.get("layer_types")
    if types is None:
        if not used:
            return None
        sliding = [layer >= from_layer for layer in range(num_layers)]
    else:
        if not isinstance(types, list) or len(types) != num_layers:
            raise StartupError(f"{fields.source}: layer_types must list {num_layers} layers")
        unknown = [kind for kind in types if kind not in ("full_attention", "sliding_attention")]
        if unknown:
            raise StartupError(
                f"{fields.source}: layer type {unknown[0]!r} is not supported; full_attention and sliding_attention are"
            )
        sliding = [kind == "sliding_attention" for kind in types]
    if not any(sliding):
        return None
    window = fields.count("sliding_window")
    return tuple(window if slides else None for slides in sliding)
