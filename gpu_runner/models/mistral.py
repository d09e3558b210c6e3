"""Mistral 7B and its kin: Llama's shape, in early versions with a sliding window on every layer."""

from __future__ import annotations

from gpu_runner.models.family import Family, Traits
from gpu_runner.models.fields import Fields

DEFAULT_WINDOW = 4096


def _from_hf(fields: Fields) -> Traits:
    if fields.has("sliding_window") and fields.get("sliding_window") is None:
        return Traits()
    window = fields.count("sliding_window", DEFAULT_WINDOW)
    return Traits(layer_windows=(window,) * fields.count("num_hidden_layers"))


MISTRAL = Family(hf_architecture="MistralForCausalLM", from_hf=_from_hf)
