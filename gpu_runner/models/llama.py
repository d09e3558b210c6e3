"""Llama 2 and 3, SmolLM2 and others of the same shape. GGUF files of Mistral models say `llama` too."""

from __future__ import annotations

from collections.abc import Set

from gpu_runner.models.family import Family, Traits
from gpu_runner.models.fields import Fields


def _from_hf(fields: Fields) -> Traits:
    bias = fields.flag("attention_bias")
    return Traits(qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _from_gguf(tensors: Set[str]) -> Traits:
    return Traits(
        qkv_bias="blk.0.attn_q.bias" in tensors,
        o_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
    )


LLAMA = Family(
    hf_architecture="LlamaForCausalLM",
    from_hf=_from_hf,
    gguf_architecture="llama",
    from_gguf=_from_gguf,
    gguf_interleaved_rope=True,
)
