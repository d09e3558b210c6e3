"""How many inputs a fuzzer tries, and that it says so: FUZZ_INPUTS of each where that is set, else a slice for CI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings


def slice_of(inputs: int) -> Callable[[Any], Any]:
    """Settings of a fuzzer that tries `inputs` in CI, the same ones each time."""
    longer = os.environ.get("FUZZ_INPUTS")
    return settings(
        max_examples=int(longer or inputs),
        derandomize=longer is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """Prints how many inputs were tried: the sum of what is appended."""
    tried: list[int] = []
    yield tried
    print(f"fuzz {name}: {sum(tried)} inputs")


def mutate(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    """`data` with a few bytes changed, cut, doubled or put in."""
    from hypothesis import strategies as st

    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(out) - 1)))
        match draw(st.sampled_from(("set", "cut", "drop", "insert", "double"))):
            case "set":
                out[at : at + 1] = draw(st.sampled_from((b"\x00", b"\x01", b"\x7f", b"\x80", b"\xff", b"\xc0")))
            case "cut":
                del out[at:]
            case "drop":
                del out[at : at + draw(st.integers(1, 8))]
            case "insert":
                out[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "double":
                out[at:at] = out[at : at + 8]
    return bytes(out)
