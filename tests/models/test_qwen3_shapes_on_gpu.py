"""Layers of Qwen3, in steps of every size."""

from __future__ import annotations

import pytest
from shape_checks import check_layers


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-0.6B",
        "Qwen3-1.7B",
        "Qwen3-4B",
        "Qwen3-8B",
    ],
)
def test_layers_equal_the_reference_in_every_step(name: str) -> None:
    check_layers(name)
