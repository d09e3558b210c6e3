"""The head of a GGUF file: scalar metadata and where each tensor lies, checked against the file's size.

Written out here because the `gguf` package's reader makes Python objects of every vocabulary entry (seconds, where
walking past them takes milliseconds) and trusts the counts that it reads. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


class DamagedError(Exception):
    """The bytes are not a GGUF file this module can read; the message completes "the file is damaged: ..."."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """shape: slowest dimension first, as in torch. start, num_bytes: where in the file, in bytes."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """metadata: scalars and strings; an array is there only as a text saying so, since none is needed."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(data: memoryview) -> GGUFHeader:
    """Parse the head of a file whose bytes are `data`. Raises `DamagedError`."""
    cursor = _Cursor(data)
    if cursor.take(4) != MAGIC:
        raise DamagedError("it does not start with GGUF")
    version = cursor.scalar("<I")
    if version not in VERSIONS:
        raise DamagedError(f"version {version} is not one of {VERSIONS}")
    num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        name = cursor.string()
        metadata[name] = _value(cursor, cursor.value_type())
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise DamagedError(f"its alignment is {alignment!r}")
    base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in infos:
        info = TensorInfo(shape, kind, base + offset, _num_bytes(name, shape, kind))
        if info.start + info.num_bytes > len(data):
            raise DamagedError(f"tensor {name} ends at byte {info.start + info.num_bytes} of {len(data)}")
        if tensors.setdefault(name, info) is not info:
            raise DamagedError(f"tensor {name} is there twice")
    return GGUFHeader(metadata, tensors)


class _Cursor:
    """Reads forward through bytes and never past their end."""

    def __init__(self, data: memoryview) -> None:
        self.position = 0
        self._data = data

    def take(self, count: int) -> bytes:
        start = self.position
        self.skip(count)
        return self._data[start : self.position].tobytes()

    def skip(self, count: int) -> None:
        if count > len(self._data) - self.position:
            raise DamagedError(f"it ends at byte {len(self._data)}, inside its header")
        self.position += count

    def scalar(self, form: str) -> Any:
        start = self.position
        self.skip(struct.calcsize(form))
        return struct.unpack_from(form, self._data, start)[0]

    def string(self) -> str:
        try:
            return self.take(self.scalar("<Q")).decode()
        except UnicodeDecodeError as error:
            raise DamagedError("a name or text is not UTF-8") from error

    def value_type(self) -> GGUFValueType:
        number = self.scalar("<I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise DamagedError(f"value type {number} does not exist") from error


def _value(cursor: _Cursor, kind: GGUFValueType) -> Any:
    if kind == GGUFValueType.STRING:
        return cursor.string()
    if kind == GGUFValueType.ARRAY:
        return _skip_array(cursor)
    return cursor.scalar(_SCALARS[kind])


def _skip_array(cursor: _Cursor) -> str:
    kind, count = cursor.value_type(), cursor.scalar("<Q")
    if kind == GGUFValueType.STRING:
        for _ in range(count):
            cursor.skip(cursor.scalar("<Q"))
    elif kind == GGUFValueType.ARRAY:
        raise DamagedError("an array of arrays is in its metadata")
    else:
        cursor.skip(count * struct.calcsize(_SCALARS[kind]))
    return f"an array of {count}"


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name, num_dimensions = cursor.string(), cursor.scalar("<I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise DamagedError(f"tensor {name} has {num_dimensions} dimensions")
    shape = tuple(cursor.scalar("<Q") for _ in range(num_dimensions))[::-1]
    number = cursor.scalar("<I")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise DamagedError(f"tensor {name} has type {number}, which is not known") from error
    return name, shape, kind, cursor.scalar("<Q")


def _num_bytes(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_size:
        raise DamagedError(f"tensor {name} has rows of {shape[-1]}, not whole blocks of {block_size}")
    count = 1
    for size in shape:
        count *= size
    return count // block_size * block_bytes
