"""Layers of Mistral, with windows and without, SmolLM2, in steps of every size."""

from __future__ import annotations

import pytest
from shape_checks import check_layers


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [
        "Mistral-7B-v0.1",
        "Mistral-Nemo",
        "SmolLM2-135M",
        "SmolLM2-360M",
        "SmolLM2-1.7B",
    ],
)
def test_layers_equal_the_reference_in_every_step(name: str) -> None:
    check_layers(name)
