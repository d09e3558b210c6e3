"""Weights on their way from files to tensors: every byte read once, through a few buffers of one size."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_tiny

from asyncengine.errors import StartupError
from gpu_runner.models import weights
from gpu_runner.models.registry import load_model
from gpu_runner.models.staging import Extent, Staging

CPU = torch.device("cpu")
CHUNK = 64


class CountedReads:
    """`os.preadv`, counting; with `most` no read gives more bytes than that."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.total = self.largest = self.at_once = self.most_at_once = 0
        self._most = most
        self._lock = threading.Lock()

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        (buffer,) = buffers
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self.largest = max(self.largest, len(buffer))
        count = os.preadv(fd, [buffer[: self._most]], offset)
        with self._lock:
            self.at_once -= 1
            self.total += count
        return count


def write(path: Path, values: torch.Tensor, *, before: bytes = b"") -> Extent:
    path.write_bytes(before + values.view(torch.uint8).numpy().tobytes())
    return Extent(path, len(before), values.nbytes, values.dtype)


@pytest.mark.parametrize("most", [1 << 30, 5])
def test_a_tensor_is_read_once_in_chunks_however_short_the_reads(tmp_path: Path, most: int) -> None:
    values = torch.arange(1000, dtype=torch.float32)
    source = write(tmp_path / "weights", values, before=b"odd")
    reads = CountedReads(most)
    out = torch.full((10, 100), -1.0)
    done: list[int] = []
    with Staging(CPU, readers=3, chunk_bytes=CHUNK, read=reads) as staging:
        staging.fill(out, source)
        staging.finish(done.append)
    assert torch.equal(out.view(-1), values)
    assert reads.total == sum(done) == values.nbytes
    assert max(done) <= CHUNK
    assert reads.largest <= CHUNK
    assert reads.most_at_once <= 3


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_values_of_another_type_are_converted(tmp_path: Path, stored: torch.dtype) -> None:
    values = torch.randn(333, generator=torch.Generator().manual_seed(1)).to(stored)
    out = torch.empty(333)
    with Staging(CPU, readers=2, chunk_bytes=CHUNK) as staging:
        staging.fill(out, write(tmp_path / "weights", values))
        staging.finish(lambda count: None)
    assert torch.equal(out, values.to(torch.float32))


def test_a_file_cut_short_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    source = write(tmp_path / "weights", torch.zeros(100))
    os.truncate(source.path, 200)
    with Staging(CPU, chunk_bytes=CHUNK) as staging:
        staging.fill(torch.empty(100), source)
        with pytest.raises(StartupError, match="weights ends early"):
            staging.finish(lambda count: None)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    gone = Extent(tmp_path / "gone", 0, 4, torch.float32)
    with pytest.raises(StartupError, match=r"cannot read .*gone"), Staging(CPU) as staging:
        staging.fill(torch.empty(1), gone)


def test_a_sharded_folder_is_read_once_through_buffers_of_one_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama", tmp_path, max_shard_size="50KB")
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    reads = CountedReads()
    monkeypatch.setattr(weights, "Staging", lambda device: Staging(device, readers=2, chunk_bytes=4096, read=reads))
    progress: list[tuple[int, int]] = []
    decoder = load_model(
        str(tmp_path), device=CPU, dtype=torch.float32, progress=lambda done, total: progress.append((done, total))
    )
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert reads.total == stored == decoder.weight_bytes
    assert (reads.largest, progress[-1]) == (4096, (stored, stored))
    assert reads.most_at_once <= 2
    layer = "model.layers.1.self_attn"
    fused = torch.cat([tensors[f"{layer}.{part}_proj.weight"] for part in "qkv"])
    assert torch.equal(decoder._weights.layers[1].qkv, fused)
