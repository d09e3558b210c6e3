"""Which reductions are found in a compiled kernel that do not reduce over what they are told to."""

from __future__ import annotations

import pytest
from support.reductions import wrong_reductions

LINEAR = "#linear = #ttg.linear<{{register = [[0, 0, 1], [0, 1, 0]], lane = {lane}, warp = {warp}, block = []}}>"
KERNEL = """{layout}
    %top = "tt.reduce"(%score) <{{axis = {axis} : i32}}> ({{
    ^bb0(%left: f32 loc(unknown), %right: f32 loc(unknown)):
      %largest = arith.maxnumf %left, %right : f32 loc(#loc)
      tt.reduce.return %largest : f32 loc(#loc)
    }}) : (tensor<4x8x16xf32, {name}>) -> tensor<4x8xf32, #ttg.slice<{{dim = {axis}, parent = {name}}}>> loc(#loc)
"""


def reduction(*, lane: str, warp: str, axis: int = 2, name: str = "#linear") -> str:
    return KERNEL.format(layout=LINEAR.format(lane=lane, warp=warp), axis=axis, name=name)


def test_lanes_that_are_not_adjacent_are_reduced_wrong() -> None:
    # Of the fused attention's scores in float32: they missed the reference on an H200.
    lane, warp = "[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [0, 0, 8]]", "[[0, 2, 0], [0, 4, 0]]"
    [wrong] = wrong_reductions(reduction(lane=lane, warp=warp))
    assert wrong.startswith(f"lanes {lane} are not next to each other along axis 2 of tensor<4x8x16xf32, #linear>: ")
    assert not wrong_reductions(reduction(lane=lane, warp=warp, axis=0))


def test_adjacent_lanes_are_reduced_right() -> None:
    # The same scores in bfloat16.
    lane, warp = "[[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]", "[[1, 0, 0], [2, 0, 0]]"
    assert not wrong_reductions(reduction(lane=lane, warp=warp))


@pytest.mark.parametrize(
    ("lane", "warp", "mixed"),
    [
        # Adjacent, but another axis has lanes on both sides; right within a warp.
        ("[[0, 1, 0], [0, 0, 2], [0, 0, 4], [0, 2, 0], [1, 0, 0]]", "[[0, 0, 8], [2, 0, 0]]", "lanes"),
        ("[[0, 1, 0], [0, 0, 2], [0, 0, 4], [0, 2, 0], [1, 0, 0]]", "[[0, 4, 0], [2, 0, 0]]", None),
        ("[[0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0]]", "[[0, 0, 4], [2, 0, 0], [0, 0, 8]]", "warps"),
        # A bit that stands for no step is not another axis's, except between lanes.
        ("[[0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0]]", "[[0, 0, 4], [0, 0, 0], [0, 0, 8]]", None),
    ],
)
def test_several_warps_are_reduced_right_where_no_other_axis_is_between(
    lane: str, warp: str, mixed: str | None
) -> None:
    wrongs = wrong_reductions(reduction(lane=lane, warp=warp))
    assert [wrong.split()[0] for wrong in wrongs] == ([mixed] if mixed else [])


def test_lanes_are_those_of_what_a_slice_leaves() -> None:
    lane, warp = "[[0, 0, 2], [0, 4, 0], [0, 0, 4], [1, 0, 0], [2, 0, 0]]", "[[0, 2, 0]]"
    kernel = reduction(lane=lane, warp=warp)
    sliced = kernel.replace("4x8x16xf32, #linear>", "4x16xf32, #ttg.slice<{dim = 1, parent = #linear}>>")
    [wrong] = wrong_reductions(sliced.replace("axis = 2", "axis = 1"))
    assert wrong.startswith("lanes [[0, 2], [0, 0], [0, 4], [1, 0], [2, 0]] are not next to each other along axis 1")


def test_a_layout_that_is_not_known_is_no_right_one() -> None:
    kernel = reduction(lane="[]", warp="[]", name="#other").replace("#linear =", "#other = #ttg.other<{}>\n#linear =")
    with pytest.raises(AssertionError, match="it is not known how reductions are compiled"):
        wrong_reductions(kernel)
