"""A folder with a small model of random weights and a tokenizer: for any device the same, unlike load_format dummy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from make_toy_tokenizer import toy_tokenizer
from safetensors.numpy import save_file
from support.random_model import VOCAB_SIZE, write_config

from gpu_runner.models.registry import read_model_config
from gpu_runner.models.weights import expected_shapes

DEVIATION = 0.05


def write_checkpoint(folder: Path, **changes: Any) -> str:
    """changes: of the config. Gains are 1, all else is normal. Returns the folder's path."""
    path = write_config(folder, **changes)
    rng = np.random.default_rng(0)
    tensors = {
        name: np.ones(shape, np.float32)
        if name.endswith("norm.weight")
        else DEVIATION * rng.standard_normal(shape, np.float32)
        for name, shape in expected_shapes(read_model_config(path)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    toy_tokenizer(VOCAB_SIZE).save(str(folder / "tokenizer.json"))
    return path
