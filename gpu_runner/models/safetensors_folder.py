"""A Hugging Face folder: config.json, and weights in safetensors files whose headers are checked before use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from asyncengine.errors import StartupError
from gpu_runner.models.family import Family
from gpu_runner.models.hf_config import MAX_JSON_BYTES, read_hf_config
from gpu_runner.models.staging import Extent

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Entry(msgspec.Struct, frozen=True):
    """One tensor in a header; data_offsets are relative to the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class SafetensorsFolder:
    """A `Checkpoint` over the shards of a folder, whose tensors all have extents."""

    def __init__(self, folder: Path, families: Sequence[Family]) -> None:
        self.source = str(folder)
        self.config = read_hf_config(folder, families)
        self._extents: dict[str, Extent] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in _shards(folder):
            data_start, entries = _read_header(path)
            for name, entry in entries.items():
                if name in self._extents:
                    raise StartupError(f"{path}: tensor {name} is already in {self._extents[name].path.name}")
                start, end = entry.data_offsets
                self._extents[name] = Extent(path, data_start + start, end - start, _DTYPES[entry.dtype])
                self._shapes[name] = entry.shape

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def stored_bytes(self, name: str) -> int:
        return self._extents[name].num_bytes

    def extent(self, name: str) -> Extent:
        return self._extents[name]

    def read(self, name: str) -> Tensor:
        raise ValueError(f"{name} lies in its file as it is; read its extent")


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
            if Path(name).name != name or Path(name).suffix != ".safetensors" or not (folder / name).is_file():
                raise StartupError(f"{index} names {name!r}, which is not a safetensors file of the folder")
        return [folder / name for name in sorted(names)]
    files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise StartupError(f"{folder} has neither {SINGLE} nor {INDEX}; weights are read from safetensors only")
    return files


def _read_header(path: Path) -> tuple[int, dict[str, _Entry]]:
    """Where one file's data begins, and its tensors, which must fill the rest without gap or overlap."""
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
        if entry.dtype not in _DTYPES:
            raise StartupError(f"{path}: tensor {name} has type {entry.dtype}; {', '.join(_DTYPES)} are supported")
        start, end = entry.data_offsets
        if start != position:
            raise StartupError(f"{path} is damaged: tensor {name} starts at {start}, the one before ends at {position}")
        if min(entry.shape, default=0) < 0 or end - start != math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize:
            raise StartupError(f"{path} is damaged: tensor {name} of shape {entry.shape} has {end - start} bytes")
        position = end
    available = size - 8 - header_bytes
    if position != available:
        raise StartupError(f"{path} is damaged: its tensors need {position} bytes of data, it holds {available}")
    return 8 + header_bytes, entries
