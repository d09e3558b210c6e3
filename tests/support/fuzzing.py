"""How many inputs a fuzzer tries, and that it says so: FUZZ_INPUTS of each where that is set, else a slice for CI."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from asyncengine.wire.checks import check


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


def read_frame(raw: bytes, types: Any) -> Any:
    """The message that a pipe's reader makes of a frame; None where it counts it as malformed."""
    try:
        message = msgspec.msgpack.decode(raw, type=types)
        check(message)
    except Exception:  # noqa: BLE001 - as in `Receiver.drain`
        return None
    return message


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """Prints how many inputs were tried: the sum of what is appended."""
    tried: list[int] = []
    yield tried
    print(f"fuzz {name}: {sum(tried)} inputs")


def mutate(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    """`data` with a few bytes changed, cut, doubled or put in."""
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


ODD = (-1, 0, 1, 2, 7, 127, 2**31 - 1, 2**31, 2**32, 2**56, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63))


def strange_frame(valid: list[msgspec.Struct], draw: Callable[[Any], Any]) -> bytes:
    """What may come out of a pipe: random bytes, a message with bytes changed, or one with another value in some place,
    which often is a message still."""
    raw = msgspec.msgpack.encode(draw(st.sampled_from(valid)))
    match draw(st.sampled_from(("random", "bytes", "value", "value"))):
        case "random":
            return bytes(draw(st.binary(max_size=64)))
        case "bytes":
            return mutate(raw, draw)
    tree = msgspec.msgpack.decode(raw)
    for _ in range(draw(st.integers(1, 3))):
        tree = _changed(tree, draw)
    return msgspec.msgpack.encode(tree)


def _changed(tree: Any, draw: Callable[[Any], Any]) -> Any:
    if isinstance(tree, list) and tree:
        at = draw(st.integers(0, len(tree) - 1))
        return [*tree[:at], _changed(tree[at], draw), *tree[at + 1 :]]
    if isinstance(tree, bytes) and len(tree) >= 4 and draw(st.booleans()):  # one number of a column
        at = 4 * draw(st.integers(0, len(tree) // 4 - 1))
        number = draw(st.sampled_from([odd for odd in ODD if -(2**31) <= odd < 2**31]))
        return tree[:at] + number.to_bytes(4, "little", signed=True) + tree[at + 4 :]
    return draw(
        st.sampled_from(
            (
                *ODD,
                None,
                True,
                0.5,
                -0.5,
                1e300,
                math.inf,
                math.nan,
                "",
                "x",
                b"",
                b"\xff" * 4,
                bytes(8),
                [],
                [1],
                tree,
                tree,
            )
        )
    )
