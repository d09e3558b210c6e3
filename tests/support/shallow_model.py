"""SmolLM2 without its upper layers: the real file's tokenizer, template and weights, at a fraction of the work.

For what must hold of any model but needs real weights' shapes and vocabulary: its answers make no sense."""

from __future__ import annotations

import re
import struct
import tempfile
from functools import cache
from pathlib import Path

from support.tokenizers_cache import default_model_file

from gpu_runner.models.gguf_header import DEFAULT_ALIGNMENT, TensorInfo, read_header

NAME = "SmolLM2-shallow"
NUM_LAYERS = 3


@cache
def shallow_model_file() -> Path:
    """A GGUF file with the first layers of SmolLM2's 30, in the temporary folder of whoever runs the tests."""
    data = default_model_file().read_bytes()
    tensors = read_header(memoryview(data)).tensors
    kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < NUM_LAYERS}
    head = bytearray(data[: data.index(_string(next(iter(tensors))))])  # all metadata
    struct.pack_into("<Q", head, 8, len(kept))
    count = b"llama.block_count" + struct.pack("<I", 4)  # of type uint32
    struct.pack_into("<I", head, head.index(count) + len(count), NUM_LAYERS)
    body = bytearray()
    for name, tensor in kept.items():
        head += _string(name) + _place(tensor, len(body))
        body += _padded(data[tensor.start : tensor.start + tensor.num_bytes])
    path = Path(tempfile.mkdtemp()) / f"{NAME}.gguf"
    path.write_bytes(_padded(bytes(head)) + body)
    return path


def _layer(name: str) -> int:
    """-1 for what is in no layer."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _place(tensor: TensorInfo, offset: int) -> bytes:
    shape = tensor.shape[::-1]
    return struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.kind, offset)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % DEFAULT_ALIGNMENT)
