"""Steps that count as long by less context than those of a real model do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_runner.kernels import decode_way


def make_long_from(monkeypatch: pytest.MonkeyPatch, long_bytes: int) -> None:
    """Long steps of the fewest tokens take the kernel of more then, too. long_bytes: of a layer's keys and values."""
    ways = tuple(
        (tokens, way if way.long_bytes is None else replace(way, long_bytes=long_bytes))
        for tokens, way in decode_way._FUSED
    )
    monkeypatch.setattr(decode_way, "_FUSED", ways)
    monkeypatch.setattr(decode_way, "_LONG", decode_way._LONG[1:])
