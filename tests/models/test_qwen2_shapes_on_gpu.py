"""Layers of Qwen2.5, in steps of every size."""

from __future__ import annotations

import pytest
from shape_checks import check_layers


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [
        "Qwen2.5-0.5B",
        "Qwen2.5-1.5B",
        "Qwen2.5-1.5B, the upper layers with windows",
        "Qwen2.5-3B",
        "Qwen2.5-7B",
    ],
)
def test_layers_equal_the_reference_in_every_step(name: str) -> None:
    check_layers(name)
