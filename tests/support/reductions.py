"""Reductions that Triton 3.6 compiles to code which reduces over other values than it is told to, without an error.

A layout says where a tensor's values are: each bit of a lane's number, and of a warp's, stands for a step along one
axis, or for none where several hold the same value. The compiler takes it for granted that the bits of the reduced axis
are next to each other: of lanes' bits 0, 1 and 4 it makes shuffles by 1, 2 and 4. Where warps are reduced over too, it
takes apart the numbers of both, as if each axis had its bits for itself, to find who leaves what in shared memory.

Layouts by name, `blocked` and those of tensor cores' results, are always so. A `linear` one is what reshapes and
permutations of such a tensor make.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

Base = list[int]
"""A bit's step along each axis; at most one is not 0."""

REMEDY = (
    "Triton 3.6 makes of it code that reduces over other values, without an error. Reshape and permute so that the "
    "bits of this axis are next to each other, or do not launch the kernel for this type and shape"
)

_LAYOUT = re.compile(r"^(#\w+) = (#ttg\..+)$", re.MULTILINE)
_REDUCTION = re.compile(r'"tt\.reduce"\(.*?\) <\{axis = (\d+) : i32.*?\n *\}\) : \((tensor<.*?)\) -> ', re.DOTALL)
_TENSOR = re.compile(r"tensor<((?:\d+x)+)[^,<>]+, (.+?)>(?:, tensor<|$)")
_SLICE = re.compile(r"#ttg\.slice<\{dim = (\d+), parent = (.+)\}>$")
_ALWAYS_RIGHT = ("#ttg.blocked<", "#ttg.nvidia_mma<")


def wrong_reductions(ttgir: str) -> list[str]:
    """A line for each, what is wrong first. ttgir: a kernel's, as Triton keeps it beside what it compiles."""
    layouts = dict(_LAYOUT.findall(ttgir))
    reductions = _REDUCTION.findall(ttgir)
    assert len(reductions) == ttgir.count('"tt.reduce"'), "a reduction is written in another way than these are read"
    return [
        f"{wrong} along axis {axis} of {types}: {REMEDY}"
        for axis, types in reductions
        for wrong in _wrongs(int(axis), types, layouts)
    ]


def _wrongs(axis: int, types: str, layouts: dict[str, str]) -> Iterator[str]:
    tensor = _TENSOR.match(types)
    assert tensor, types
    shape = [int(size) for size in tensor[1].split("x")[:-1]]
    bases = _lanes_and_warps(tensor[2], layouts)
    if bases is None:
        return
    lanes, warps = (_within(shape, bits) for bits in bases)
    if not _adjacent(lanes, axis):
        yield f"lanes {lanes} are not next to each other"
    if any(base[axis] for base in warps):
        for name, bits in (("lanes", lanes), ("warps", warps)):
            held = [base for base in bits if any(base)]
            if not _adjacent(held, axis) or _astride(held, axis):
                yield f"{name} {bits}, over several warps, are mixed with another axis's"


def _lanes_and_warps(layout: str, layouts: dict[str, str]) -> tuple[list[Base], list[Base]] | None:
    """None for a layout that is always right."""
    layout = layouts.get(layout, layout)
    if sliced := _SLICE.match(layout):
        parent = _lanes_and_warps(sliced[2], layouts)
        if parent is None:
            return None
        axis = int(sliced[1])
        lanes, warps = ([base[:axis] + base[axis + 1 :] for base in bits] for bits in parent)
        return lanes, warps
    if layout.startswith(_ALWAYS_RIGHT):
        return None
    assert layout.startswith("#ttg.linear<"), f"of {layout} it is not known how reductions are compiled"
    found = [re.search(rf"\b{name} = (\[\[.*?\]\]|\[\])", layout) for name in ("lane", "warp")]
    lanes, warps = (ast.literal_eval(bits[1]) if bits else [] for bits in found)
    return lanes, warps


def _within(shape: list[int], bits: list[Base]) -> list[Base]:
    """Without steps that are longer than the tensor: such bits hold what others do."""
    return [[step if step < size else 0 for step, size in zip(base, shape, strict=True)] for base in bits]


def _adjacent(bits: list[Base], axis: int) -> bool:
    places = [place for place, base in enumerate(bits) if base[axis]]
    return not places or places[-1] - places[0] < len(places)


def _astride(bits: list[Base], axis: int) -> bool:
    """Whether some other axis has bits below this one's and above."""
    places = [place for place, base in enumerate(bits) if base[axis]]
    if not places:
        return False
    return any(
        any(base[other] for base in bits[: places[0]]) and any(base[other] for base in bits[places[-1] :])
        for other in range(len(bits[0]))
        if other != axis
    )
