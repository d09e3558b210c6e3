"""Whatever is done to the head of a weight file: it opens, or it is one sentence of a StartupError."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing import counted, mutate, slice_of
from test_damaged_models import write_gguf
from tiny_models import save_tiny

from asyncengine.errors import StartupError
from gpu_runner.models.registry import FAMILIES, read_model_config
from gpu_runner.models.safetensors_folder import SafetensorsFolder

MOST_BYTES = 64 * 1024 * 1024
ODD: st.SearchStrategy[Any] = st.sampled_from([-1, 0, 1, 3, 2**31, 2**62, 2**63, 2**64, 10**30, "x", None, 1.5, [], {}])


def open_head(path: Path) -> None:
    if path.is_dir():
        SafetensorsFolder(path, FAMILIES)
    else:
        read_model_config(str(path))


def opens_or_refuses(path: Path) -> None:
    tracemalloc.start()
    message = ""
    try:
        open_head(path)
    except StartupError as error:
        message = error.message
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert "\n" not in message
    assert peak < MOST_BYTES


def test_safetensors_headers(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]

    @slice_of(120)
    @given(st.data())
    def fuzz(drawn: st.DataObject) -> None:
        draw = drawn.draw
        changed = {name: dict(entry) for name, entry in header.items()}
        for _ in range(draw(st.integers(0, 2))):
            entry = changed[draw(st.sampled_from(names))]
            field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
            if field == "dtype":
                entry[field] = draw(st.sampled_from(["F64", "F16", "I8", "", "x" * 1000, 5]))
            else:
                entry[field] = draw(st.one_of(ODD, st.lists(ODD, max_size=5)))
        head = json.dumps(changed).encode()
        if draw(st.booleans()):
            head = mutate(head, draw)
        length = draw(st.sampled_from([len(head), 0, 1, max(0, len(head) - 1), len(head) + 1, 2**31, 2**63, 2**64 - 1]))
        path.write_bytes(length.to_bytes(8, "little") + head + data[8 + size :])
        opens_or_refuses(tmp_path)
        tried.append(1)

    with counted("safetensors headers") as tried:
        fuzz()


def test_gguf_headers(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path)
    data = path.read_bytes()
    end = data.rindex(b".weight") + 64

    @slice_of(200)
    @given(st.data())
    def fuzz(drawn: st.DataObject) -> None:
        head = data[:end]
        if drawn.draw(st.booleans()):
            at = drawn.draw(st.integers(4, end - 8))
            number = drawn.draw(st.sampled_from([0, 1, 7, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]))
            head = head[:at] + number.to_bytes(8, "little") + head[at + 8 :]
        else:
            head = mutate(head, drawn.draw)
        path.write_bytes(head + data[end:])
        opens_or_refuses(path)
        tried.append(1)

    with counted("GGUF headers") as tried:
        fuzz()


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/etc/hostname"), lambda path: path.mkdir()])
def test_a_weight_file_that_is_none_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    save_tiny("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    path.unlink()
    make(path)
    with pytest.raises(StartupError):
        open_head(tmp_path)
