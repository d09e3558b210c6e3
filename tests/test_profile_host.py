"""The host profiler: clocks, gaps and phases by hand-made records, and the whole script over hand-made rings."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import profile_host
import pytest
from lanes.gaps import Gap
from lanes.timeline import NOTICE_US, ClockFit, Lane, Slice, Timeline, fit_clock, phases
from lanes.trace import trace_events
from support.recorded_rings import (
    COMMIT_US,
    DEVICE_CLOCK_NS,
    DRAIN_US,
    GAP_US,
    LATE_GAP_US,
    LATE_STEP,
    LAUNCH_US,
    PLAN_US,
    SEND_US,
    STEP_US,
    TO_IDLE_DEVICE_US,
    WAKE_UP_US,
    write_rings,
)

from asyncengine.wire.accounting import RingWriter, StepRecord

STEPS = 400
LATE_US = WAKE_UP_US - NOTICE_US
"""How far behind the truth the device's steps are placed."""
NOTHING = StepRecord(*[0] * len(StepRecord._fields))


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    with ExitStack() as keep:
        write_rings(tmp_path, STEPS, keep)
        yield tmp_path


@pytest.fixture
def timeline(run_dir: Path) -> Timeline:
    return profile_host.watch(run_dir, 0)


def lane(timeline: Timeline, role: str) -> Lane:
    (found,) = (lane for lane in timeline.lanes if lane.role == role)
    return found


def test_a_turns_phases_end_where_the_next_begins() -> None:
    record = NOTHING._replace(drain=1, plan=3, wait=7, commit=20, send=24, end=30)
    assert phases(record) == [
        ("drain", 1, 3),
        ("plan", 3, 7),
        ("wait", 7, 20),
        ("commit", 20, 24),
        ("send", 24, 30),
    ]


def test_the_devices_idle_time_is_seen_before_each_step_and_what_the_host_did_in_it(timeline: Timeline) -> None:
    assert [step.step for step in timeline.steps] == list(range(1, STEPS + 1))
    gaps = timeline.gaps
    assert [gap.step for gap in gaps] == list(range(2, STEPS + 1))
    lengths = [pytest.approx(LATE_GAP_US if step == LATE_STEP else GAP_US) for step in range(2, STEPS + 1)]
    assert [gap.length for gap in gaps] == lengths
    idle = LATE_GAP_US + (STEPS - 2) * GAP_US
    assert timeline.device_busy_share == pytest.approx(STEPS * STEP_US / (STEPS * STEP_US + idle))
    in_launch = TO_IDLE_DEVICE_US + LATE_US
    causes = timeline.gap_causes()
    assert causes[LATE_STEP - 2] == pytest.approx({"plan": LATE_GAP_US - in_launch, "launch": in_launch}, abs=0.1)
    assert causes[LATE_STEP + 1] == pytest.approx({"wait": GAP_US})


def test_the_devices_clock_is_known_between_launches_and_wake_ups(timeline: Timeline) -> None:
    # the launches of the first and of the late step found the device idle; between others and those the clocks drift
    assert (
        WAKE_UP_US + TO_IDLE_DEVICE_US <= timeline.clock_error < WAKE_UP_US + TO_IDLE_DEVICE_US + STEPS * STEP_US / 1e4
    )
    first = timeline.steps[0]
    launch = next(s for s in lane(timeline, "gpu_runner").slices if s.name == "launch")
    assert first.begin - launch.begin == pytest.approx(TO_IDLE_DEVICE_US + LATE_US, abs=0.1)
    assert first.args == {"step": 1, "rows": 64, "prefill_tokens": 50, "bucket": 64}


def test_a_device_that_uses_the_hosts_clock_is_not_shifted() -> None:
    records = [
        NOTHING._replace(step=1, launch=100, end=120),
        NOTHING._replace(launch=0, wait=130, commit=400, end=420, collected=1, device_begin=115, device_end=390),
    ]
    assert fit_clock(records) == ClockFit({1: 0}, 0.0)


def test_where_the_host_never_waits_the_launches_place_the_steps() -> None:
    records = [
        NOTHING._replace(step=1, launch=100_000, end=120_000),
        NOTHING._replace(
            wait=900_000,
            commit=901_000,
            end=920_000,
            collected=1,
            device_begin=DEVICE_CLOCK_NS + 110_000,
            device_end=DEVICE_CLOCK_NS + 300_000,
        ),
    ]
    fit = fit_clock(records)
    assert fit.shift_ns == {1: -DEVICE_CLOCK_NS - 10_000}
    assert fit.error == 611.0


def test_host_times_are_of_the_turns_that_both_launched_and_collected(timeline: Timeline) -> None:
    medians = {name: median for name, (median, _) in timeline.host_us.items()}
    wait = medians.pop("wait")
    assert medians == {
        "drain": DRAIN_US,
        "plan": PLAN_US,
        "launch": LAUNCH_US,
        "report": 0,
        "commit": COMMIT_US,
        "send": SEND_US,
        "total": DRAIN_US + PLAN_US + LAUNCH_US + COMMIT_US + SEND_US,
    }
    assert wait == STEP_US + GAP_US - medians["total"]


def test_a_process_is_busy_in_all_its_phases_but_the_wait(timeline: Timeline) -> None:
    slices = [Slice(0, 10, "plan", {}), Slice(10, 60, "wait", {}), Slice(60, 80, "send", {})]
    assert Lane("x", "gpu_runner", 1, slices).busy_share(5, 105) == 0.25
    assert [s.name for s in lane(timeline, "tokenizer_proc").slices] == ["encode", "pass on"]
    assert lane(timeline, "engine").slices[0].args == {"messages": 1, "items": 64, "open": 64, "waiting": 0}


def test_a_gap_after_a_rest_is_no_idle_time(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path, "gpu_runner", 0, StepRecord)
    for step, after_rest in ((1, 1), (2, 0), (3, 1)):
        begin = 1_000_000 * step
        ring.write((step, 1, 1, 0, 1, 0, begin, begin + 10, begin + 20, *[0] * 4, begin + 30, 0, 0, 0, after_rest, 0))
        borders = (begin + 40, begin + 50, 0, 0, begin + 60, begin + 900, begin + 910, begin + 920)
        ring.write((*[0] * 6, *borders, step, begin + 100, begin + 800, 0, 0))
    timeline = profile_host.watch(tmp_path, 0)
    ring.close()
    assert timeline.gaps == [Gap(2, 1000.8, 2000.1)]


def test_every_lane_is_in_the_trace_and_launches_point_at_their_steps(timeline: Timeline) -> None:
    events = trace_events(timeline)
    names = [event["args"] for event in events if event["name"] == "process_name"]
    assert names == [
        {"name": name} for name in ("device", "gpu_runner", "detokenizer_proc", "engine", "tokenizer_proc")
    ]
    arrows = {kind: [event["id"] for event in events if event["ph"] == kind] for kind in "sf"}
    assert arrows == {"s": list(range(1, STEPS + 1)), "f": list(range(1, STEPS + 1))}
    assert all(event["ts"] >= 0 and event.get("dur", 0) >= 0 for event in events if event["ph"] != "M")  # type: ignore[operator]


def test_the_script_writes_a_trace_and_a_picture_and_prints_what_it_saw(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile"
    arguments = ["profile_host.py", "--run-dir", str(run_dir), "--seconds", "0", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    profile_host.main()
    trace = json.loads((tmp_path / "profile.json").read_text())
    assert sum(event["name"] == "decode" for event in trace["traceEvents"]) == STEPS - 1
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"{STEPS} steps in 0.28 s, 0 records lost" in printed
    assert "device busy 99.1 % of the time in which there was work" in printed
    assert f"p50 {GAP_US:.1f}, p90 {GAP_US:.1f}, p99 {GAP_US:.1f}, max {LATE_GAP_US:.1f}" in printed
    assert f"{LATE_GAP_US:.1f} us before step {LATE_STEP}: plan" in printed


def test_an_idle_engine_and_a_folder_that_is_none_are_said_to_be_that(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no step of the engine in .* ended in this time"):
        profile_host.watch(run_dir, 0.01)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(SystemExit, match="no ring of a living gpu_runner"):
        profile_host.watch(empty, 0)
    (empty / "gpu_runner.0.ring").write_bytes(bytes(300))
    with pytest.raises(SystemExit, match="is no ring of StepRecords"):
        profile_host.watch(empty, 0)
