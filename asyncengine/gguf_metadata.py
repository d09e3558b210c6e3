"""The key-value header of a GGUF file, without its tensors.

The `gguf` package's reader makes several numpy arrays for each of the 100,000 strings of a vocabulary, which takes
seconds; a process that needs the metadata only reads it here in some tens of milliseconds.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from asyncengine.errors import StartupError

MAGIC = b"GGUF"
VERSIONS = (2, 3)

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type -> `struct` code."""


def read_gguf_metadata(path: str | Path) -> dict[str, Any]:
    """All metadata of `path`: numbers, booleans, strings, and lists of them, by key.

    Raises `StartupError` when the file is missing, is no little-endian GGUF file of version 2 or 3, or ends early.
    """
    try:
        with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data)
    except OSError as error:
        raise StartupError(f"cannot read the model file {path}: {error.strerror or error}") from error
    except (ValueError, struct.error, IndexError) as error:
        # mmap refuses an empty file with ValueError; the others are a header that leads nowhere
        raise StartupError(f"{path} is not a GGUF file of version 2 or 3, or is damaged") from error


def _parse(data: mmap.mmap) -> dict[str, Any]:
    magic, version, _tensors, keys = struct.unpack_from("<4sIQQ", data)
    if magic != MAGIC or version not in VERSIONS:
        raise ValueError("not GGUF")
    at = struct.calcsize("<4sIQQ")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key, at = _string(data, at)
        (kind,) = struct.unpack_from("<I", data, at)
        metadata[key], at = _value(data, at + 4, kind)
    return metadata


def _value(data: mmap.mmap, at: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _string(data, at)
    if kind == _ARRAY:
        return _array(data, at)
    if kind not in _SCALARS:
        raise ValueError("unknown value type")
    (value,) = struct.unpack_from("<" + _SCALARS[kind], data, at)
    return value, at + struct.calcsize("<" + _SCALARS[kind])


def _array(data: mmap.mmap, at: int) -> tuple[list[Any], int]:
    kind, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if kind in _SCALARS:
        size = count * struct.calcsize("<" + _SCALARS[kind])
        if at + size > len(data):
            raise ValueError("array beyond the end of the file")
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", data, at)), at + size
    values = []
    for _ in range(count):
        value, at = _value(data, at, kind)
        values.append(value)
    return values, at


def _string(data: mmap.mmap, at: int) -> tuple[str, int]:
    start = at + 8
    end = start + int.from_bytes(data[at:start], "little")
    if end > len(data) or start > len(data):
        raise ValueError("string beyond the end of the file")
    return data[start:end].decode("utf-8"), end
