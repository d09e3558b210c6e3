"""The heads of models as people serve them, of every number of rows."""

from __future__ import annotations

import pytest
import torch
from shape_checks import CUDA, ROWS, HeadCheck

from gpu_runner.kernels.head_config import choose_head

HEADS = [
    *[(128_256, 2048), (128_256, 3072), (128_256, 4096), (32_000, 2048), (32_000, 4096), (131_072, 5120)],
    *[(49_152, 576), (49_152, 2048), (151_936, 896), (151_936, 1024), (151_936, 2560), (152_064, 3584)],
    # Nothing divides these vocabularies.
    *[(49_153, 576), (50_257, 768), (151_667, 1024), (32_003, 2048), (30_011, 4096)],
]
"""Vocabulary and hidden size."""


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("vocab", "hidden"), HEADS)
def test_logits_and_the_best_of_them_equal_the_reference(vocab: int, hidden: int) -> None:
    check = HeadCheck(vocab, hidden, max_rows=ROWS.max_rows, device=CUDA, dtype=torch.bfloat16, choose=choose_head)
    wrongs = check.wrongs()
    assert not wrongs, "\n".join(wrongs)
