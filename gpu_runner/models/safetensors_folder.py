"""A Hugging Face folder: config.json, and weights in safetensors files whose headers are checked before use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncengine.errors import StartupError
from gpu_runner.models.family import Family
from gpu_runner.models.hf_config import MAX_JSON_BYTES, read_hf_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in a header; data_offsets are relative to the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class SafetensorsFolder:
    """A `Checkpoint` over the shards of a folder. Each shard is mapped when its first tensor is read."""

    def __init__(self, folder: Path, families: Sequence[Family]) -> None:
        self.source = str(folder)
        self.config = read_hf_config(folder, families)
        self._files: dict[str, Path] = {}
        self._entries: dict[str, _Entry] = {}
        self._open: dict[Path, Any] = {}
        for path in _shards(folder):
            for name, entry in _read_header(path).items():
                if name in self._entries:
                    raise StartupError(f"{path}: tensor {name} is already in {self._files[name].name}")
                self._files[name], self._entries[name] = path, entry

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._entries.items()}

    def stored_bytes(self, name: str) -> int:
        start, end = self._entries[name].data_offsets
        return end - start

    def read(self, name: str) -> Tensor:
        path = self._files[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            tensor: Tensor = self._open[path].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise StartupError(f"cannot read {name} from {path}: {error}") from error
        return tensor


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            if index.stat().st_size > MAX_JSON_BYTES:
                raise StartupError(f"{index} is larger than {MAX_JSON_BYTES} bytes")
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StartupError(f"cannot read {index}: {error}") from error
        for name in names:
            if Path(name).name != name or not (folder / name).is_file():
                raise StartupError(f"{index} names {name!r}, which is not a file of the folder")
        return [folder / name for name in sorted(names)]
    files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise StartupError(f"{folder} has neither {SINGLE} nor {INDEX}; weights are read from safetensors only")
    return files


def _read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of one file, which must fill it without gap or overlap."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise StartupError(f"{path} is damaged: {size} bytes cannot hold a header of {header_bytes} bytes")
            raw = msgspec.json.decode(file.read(header_bytes), type=dict[str, msgspec.Raw])
        entries = {
            name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items() if name != "__metadata__"
        }
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StartupError(f"{path} is damaged: its header cannot be read: {error}") from error
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in _ITEM_BYTES:
            raise StartupError(f"{path}: tensor {name} has type {entry.dtype}; {', '.join(_ITEM_BYTES)} are supported")
        start, end = entry.data_offsets
        if start != position:
            raise StartupError(f"{path} is damaged: tensor {name} starts at {start}, the one before ends at {position}")
        if min(entry.shape, default=0) < 0 or end - start != math.prod(entry.shape) * _ITEM_BYTES[entry.dtype]:
            raise StartupError(f"{path} is damaged: tensor {name} of shape {entry.shape} has {end - start} bytes")
        position = end
    available = size - 8 - header_bytes
    if position != available:
        raise StartupError(f"{path} is damaged: its tensors need {position} bytes of data, it holds {available}")
    return entries
