"""Layers of Llama 2 and 3, and TinyLlama, in steps of every size."""

from __future__ import annotations

import pytest
from shape_checks import check_layers


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [
        "Llama-3.2-1B",
        "Llama-3.2-3B",
        "Llama-3.1-8B",
        "Llama-2-7B",
        "TinyLlama-1.1B",
    ],
)
def test_layers_equal_the_reference_in_every_step(name: str) -> None:
    check_layers(name)
