"""Layers of some models in the batch-invariant mode, in steps of every size."""

from __future__ import annotations

import pytest
from shape_checks import check_layers


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen3-4B", "SmolLM2-135M"])
def test_layers_equal_the_reference_in_every_step(name: str) -> None:
    check_layers(name, invariant=True)
