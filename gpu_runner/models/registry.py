"""The model families there are, and loading of a model from its path."""

from __future__ import annotations

from pathlib import Path

import torch

from asyncengine.errors import StartupError
from gpu_runner.kernels.ops import ModelOps
from gpu_runner.kernels.reference_ops import ReferenceOps
from gpu_runner.models.checkpoint import Checkpoint
from gpu_runner.models.config import ModelConfig
from gpu_runner.models.decoder import Decoder
from gpu_runner.models.gguf_file import GGUFFile
from gpu_runner.models.hf_config import read_hf_config
from gpu_runner.models.llama import LLAMA
from gpu_runner.models.mistral import MISTRAL
from gpu_runner.models.qwen2 import QWEN2
from gpu_runner.models.qwen3 import QWEN3
from gpu_runner.models.safetensors_folder import SafetensorsFolder
from gpu_runner.models.weights import Progress, empty_weights, load_weights, random_weights

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3)


def read_model_config(model_path: str) -> ModelConfig:
    """What the model is; its weights need not be there. Raises `StartupError` as `load_model` does."""
    if Path(model_path).is_dir():
        return read_hf_config(Path(model_path), FAMILIES)
    return _open(model_path).config


def random_model(model_path: str, *, device: torch.device, dtype: torch.dtype, ops: ModelOps | None = None) -> Decoder:
    """A model of the config in `model_path` with random weights: for measuring speed without a checkpoint."""
    config = read_model_config(model_path)
    return Decoder(config, random_weights(config, device=device, dtype=dtype), ops or ReferenceOps())


def sketch_model(config: ModelConfig, *, dtype: torch.dtype, ops: ModelOps) -> Decoder:
    """A model of tensors without memory: it computes nothing, but calls what a real one calls."""
    return Decoder(config, empty_weights(config, device=torch.device("meta"), dtype=dtype), ops)


def load_model(
    model_path: str, *, device: torch.device, dtype: torch.dtype, progress: Progress, ops: ModelOps | None = None
) -> Decoder:
    """The model in `model_path`, a Hugging Face folder or a GGUF file, with weights on `device` as `dtype`.

    progress: called with bytes of the checkpoint read and in total, after each tensor. ops: what the layers run on;
    None is the reference. Raises `StartupError` when the model is missing, damaged, or of a kind that is not supported.
    """
    checkpoint = _open(model_path)
    weights = load_weights(checkpoint, device=device, dtype=dtype, progress=progress)
    return Decoder(checkpoint.config, weights, ops or ReferenceOps())


def _open(model_path: str) -> Checkpoint:
    path = Path(model_path)
    if path.is_dir():
        return SafetensorsFolder(path, FAMILIES)
    if path.suffix == ".gguf" and path.is_file():
        return GGUFFile(path, FAMILIES)
    raise StartupError(f"{model_path} is neither a model folder nor a .gguf file")
