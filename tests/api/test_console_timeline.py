"""What the console is told of the engine: the rings' records, each once, never too many, and nobody is held up."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_server import Server
from fake_backend import FakeBackend
from support.recorded_rings import DEVICE_CLOCK_NS, GAP_US, STEP_US, WAKE_UP_US, write_rings

from asyncengine.api.console_routes import MAX_ANSWERS_A_SECOND, Allowance
from asyncengine.console.timeline import (
    FIRST_NS,
    HISTORY_NS,
    MAX_RECORDS,
    NOTICE_NS,
    LaneJson,
    LiveLanes,
    device_shift,
    parse_cursor,
)
from asyncengine.errors import InvalidRequestError
from asyncengine.wire.accounting import CAPACITY, RingWriter, TurnRecord

NS = 1_000_000


@pytest.fixture
def keep() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ring(keep: ExitStack, run_dir: Path, role: str = "engine", index: int = 0) -> RingWriter[TurnRecord]:
    writer = RingWriter(run_dir, role, index, TurnRecord)
    keep.callback(writer.close)
    return writer


def opened(keep: ExitStack, run_dir: Path) -> LiveLanes:
    lanes = LiveLanes(run_dir)
    keep.callback(lanes.close)
    return lanes


def turn(number: int) -> tuple[int, ...]:
    """Record `number` of a process whose turns end every ms, and have as many items as their number is."""
    end = number * NS
    return end - 600_000, end - 500_000, end, 1, number, 0, 0


def numbers(lane: LaneJson) -> list[int | None]:
    return lane.columns.get("items", [])


# ------------------------------------------------------------------------------------------------------------- reading


def test_lanes_go_on_with_the_rings_of_processes_that_came_later_or_in_the_place_of_lost_ones(
    keep: ExitStack, tmp_path: Path
) -> None:
    ring(keep, tmp_path).write(turn(1))
    lanes = opened(keep, tmp_path)
    (lane,) = lanes.read({}, 3 * NS)
    assert numbers(lane) == [1]
    ring(keep, tmp_path, "detokenizer_proc").write(turn(2))
    successor = ring(keep, tmp_path)
    for number in (3, 4):
        successor.write(turn(number))
    later, lane = lanes.read({"engine.0": 1 + CAPACITY}, 5 * NS)
    assert (later.role, numbers(later)) == ("detokenizer_proc", [2])
    assert (numbers(lane), lane.next, lane.lost) == ([3, 4], 2, 0)


def test_a_viewer_first_gets_the_last_second_and_then_each_record_once(keep: ExitStack, tmp_path: Path) -> None:
    writer = ring(keep, tmp_path)
    for number in range(1, 3001):
        writer.write(turn(number))
    lanes = opened(keep, tmp_path)
    (lane,) = lanes.read({}, 3000 * NS)
    assert numbers(lane) == list(range(3000 - FIRST_NS // NS, 3001))
    assert (lane.role, lane.index, lane.next, lane.lost, lane.more) == ("engine", 0, 3000, 0, False)
    assert lane.origin_ms == 2000 - 0.6
    assert [lane.columns[name][:2] for name in ("begin", "middle", "end")] == [
        [0, 1_000_000],
        [100_000, 1_100_000],
        [600_000, 1_600_000],
    ]
    writer.write(turn(3001))
    (lane,) = lanes.read({"engine.0": lane.next}, 3001 * NS)
    assert (numbers(lane), lane.next, lane.more) == ([3001], 3001, False)
    (lane,) = lanes.read({"engine.0": lane.next}, 3001 * NS)
    assert (lane.columns, lane.next, lane.lost, lane.more) == ({}, 3001, 0, False)


def test_nothing_is_lost_while_the_ring_holds_it_however_little_an_answer_may_hold(
    keep: ExitStack, tmp_path: Path
) -> None:
    writers = [ring(keep, tmp_path, index=index) for index in range(3)]
    for writer in writers:
        for number in range(1, CAPACITY + 1):
            writer.write(turn(number))
    lanes = opened(keep, tmp_path)
    cursor = {"engine.0": 0, "engine.1": 0, "engine.2": 0}
    seen: list[list[int | None]] = [[], [], []]
    more = True
    while more:
        answer = lanes.read(cursor, CAPACITY * NS)
        assert sum(len(numbers(lane)) for lane in answer) <= MAX_RECORDS
        assert [lane.lost for lane in answer] == [0, 0, 0]
        for lane in answer:
            seen[lane.index] += numbers(lane)
            cursor[f"engine.{lane.index}"] = lane.next
        more = any(lane.more for lane in answer)
    assert seen == [list(range(1, CAPACITY + 1))] * 3


def test_what_was_overwritten_is_counted_as_lost_and_what_is_too_old_too(keep: ExitStack, tmp_path: Path) -> None:
    writer = ring(keep, tmp_path)
    for number in range(1, CAPACITY + 101):
        writer.write(turn(number))
    lanes = opened(keep, tmp_path)
    (lane,) = lanes.read({"engine.0": 40}, 1000 * NS)
    assert (numbers(lane)[0], lane.lost, lane.more) == (101, 60, True)
    (lane,) = lanes.read({"engine.0": 200}, HISTORY_NS + 1000 * NS)
    assert (numbers(lane)[0], lane.lost) == (1000, 799)


def test_a_number_of_an_engine_that_was_here_before_begins_anew(keep: ExitStack, tmp_path: Path) -> None:
    writer = ring(keep, tmp_path)
    for number in range(1, 11):
        writer.write(turn(number))
    (lane,) = opened(keep, tmp_path).read({"engine.0": 123_456}, 10 * NS)
    assert (numbers(lane), lane.next, lane.lost) == (list(range(1, 11)), 10, 0)


def test_any_api_process_can_go_on_where_another_stopped(keep: ExitStack, tmp_path: Path) -> None:
    writer = ring(keep, tmp_path)
    writer.write(turn(1))
    here, there = opened(keep, tmp_path), opened(keep, tmp_path)
    (lane,) = here.read({}, 1 * NS)
    writer.write(turn(2))
    (lane,) = there.read({"engine.0": lane.next}, 2 * NS)
    assert numbers(lane) == [2]


def test_lanes_are_in_the_order_of_the_ring_and_other_files_are_none(keep: ExitStack, tmp_path: Path) -> None:
    write_rings(tmp_path, 3, keep)
    ring(keep, tmp_path, index=10)
    ring(keep, tmp_path, index=2)
    (tmp_path / "engine.4.ring").write_bytes(b"no ring")
    (tmp_path / "engine.5.ring").symlink_to("/proc/0/fd/3")
    assert [(lane.role, lane.index) for lane in opened(keep, tmp_path).read({}, 0)] == [
        ("gpu_runner", 0),
        ("tokenizer_proc", 0),
        ("detokenizer_proc", 0),
        *(("engine", 0), ("engine", 2), ("engine", 10)),
    ]


def test_the_device_runs_a_step_after_its_launch_and_before_its_results(keep: ExitStack, tmp_path: Path) -> None:
    write_rings(tmp_path, 20, keep)
    loop = opened(keep, tmp_path).read({}, 0)[0]
    columns = loop.columns
    assert columns["step"] == [*range(1, 21), 0]
    assert columns["prefill_tokens"][:3] == [50, 0, 0]
    assert columns["collected"] == [*range(21)]
    assert (columns["device_begin"][0], columns["wait"][0], columns["report"]) == (None, None, [None] * 21)
    assert columns["device_ns"][1:] == [1000 * STEP_US] * 20
    begins, lengths, commits = (np.array(columns[name][1:]) for name in ("device_begin", "device_ns", "commit"))
    ends = begins + lengths
    assert set(commits - ends) == {NOTICE_NS}  # in truth it was WAKE_UP_US
    assert NOTICE_NS // 1000 == WAKE_UP_US - 1
    assert set(begins[1:] - ends[:-1]) == {1000 * GAP_US}


def test_a_device_with_the_hosts_clock_is_believed() -> None:
    assert device_shift([(0, 0), (5000, 4000)]) == 0
    assert device_shift([(5000, 0)]) == 0
    assert device_shift([(5000, DEVICE_CLOCK_NS)]) == 5000 - DEVICE_CLOCK_NS - NOTICE_NS


@pytest.mark.parametrize(
    "text",
    ["engine", "engine.0", "engine.0:", "engine.0:-1", "engine.0:1,", "../x.0:1", "engine.0:" + "9" * 30, "é.0:1"],
)
def test_a_cursor_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"since must be role\.index:number"):
        parse_cursor(text)


def test_a_cursor_names_lanes_and_may_be_empty_or_too_long() -> None:
    assert parse_cursor("") == {}
    assert parse_cursor("engine.0:12,gpu_runner.0:7") == {"engine.0": 12, "gpu_runner.0": 7}
    with pytest.raises(InvalidRequestError):
        parse_cursor(",".join(["engine.0:1"] * 1000))


# -------------------------------------------------------------------------------------------------------- over HTTP


async def answer(server: Server, cursor: str = "") -> tuple[int, Any]:
    async with server.session.get(f"{server.url}/console/timeline?since={cursor}") as response:
        return response.status, json.loads(await response.read())


async def test_an_answer_has_the_engine_its_figures_and_its_lanes(
    server: Server, backend: FakeBackend, keep: ExitStack, tmp_path: Path
) -> None:
    status, body = await answer(server)
    assert (status, body["lanes"]) == (200, [])
    backend.run_dir = tmp_path
    writer = ring(keep, tmp_path)
    begin = time.monotonic_ns()
    writer.write((begin, begin + 1000, begin + 3000, 1, 8, 2, 0))
    status, body = await answer(server)
    assert status == 200
    assert time.monotonic_ns() / 1e6 - 60_000 < body.pop("now_ms") <= time.monotonic_ns() / 1e6
    assert body == {
        "model": "org/fake-model",
        "device": "cpu",
        "state": "ready",
        "detail": "",
        "gauges": {"running": 2, "waiting": 3, "open_streams": 0},
        "generated": 7,
        "prompted": 7,
        "lanes": [
            {
                "role": "engine",
                "index": 0,
                "next": 1,
                "lost": 0,
                "more": False,
                "origin_ms": begin / 1e6,
                "columns": {"begin": [0], "middle": [1000], "end": [3000], "messages": [1], "items": [8]},
            }
        ],
    }
    assert (await answer(server, "engine.0:1"))[1]["lanes"][0]["columns"] == {}


async def test_viewers_do_not_take_anything_from_each_other(
    server: Server, backend: FakeBackend, keep: ExitStack, tmp_path: Path
) -> None:
    backend.run_dir = tmp_path
    writer = ring(keep, tmp_path)
    now = time.monotonic_ns()
    for number in range(20):
        writer.write((now, now, now + number, 1, number, 0, 0))
    answers = await asyncio.gather(*(answer(server, f"engine.0:{seen}") for seen in range(20)))
    assert [body["lanes"][0]["columns"]["items"] for _, body in answers] == [list(range(n, 20)) for n in range(20)]


async def test_whoever_asks_too_often_is_told_to_wait(server: Server) -> None:
    async def ask() -> tuple[int, str | None]:
        async with server.session.get(f"{server.url}/console/timeline") as response:
            return response.status, response.headers.get("Retry-After")

    answers = await asyncio.gather(*(ask() for _ in range(8 * MAX_ANSWERS_A_SECOND)))
    assert set(answers) == {(200, None), (503, "1")}
    async with server.session.get(f"{server.url}/health") as response:
        assert response.status == 200


def test_so_many_answers_a_second_are_allowed_and_as_many_at_once_after_a_rest() -> None:
    allowance = Allowance(4)
    assert [allowance.take(100.0) for _ in range(6)] == [True] * 4 + [False] * 2
    assert [allowance.take(100.25) for _ in range(2)] == [True, False]
    assert [allowance.take(1000.0) for _ in range(6)] == [True] * 4 + [False] * 2


async def test_a_cursor_that_is_none_is_a_bad_request(server: Server) -> None:
    status, body = await answer(server, "engine.x:1")
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "invalid_cursor", "since")
