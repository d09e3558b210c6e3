"""Looks into a running engine and shows what its processes and the device do, one lane each, and who waits for whom.

    python scripts/profile_host.py [--run-dir DIR] [--seconds 2] [--out profile_host]

Nothing is switched on for it: every process keeps accounts of itself in a ring that anybody may read
(`asyncengine/wire/accounting.py`). Written are

    OUT.json   a trace for https://ui.perfetto.dev or chrome://tracing
    OUT.png    the last 50 ms as lanes, and a few steps of them enlarged

and printed are the busy share of each process (time in its accounted phases; `cpu` is its processor time, in cores, all
threads), the loop's host time per step by phase, how busy the device was while there was work, how long it idled before
steps and what gpu_runner did meanwhile, and what its time went to: steps by whether they held prompt tokens, and by the
token count they were run at. `--seconds 0` takes what the rings hold now, about the last 4000 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Generic

import numpy as np
from lanes.timeline import Lane, Slice, Timeline, loop_slices, make_timeline, turn_slices
from lanes.trace import trace_events

from asyncengine.run_dir import in_use
from asyncengine.wire.accounting import SUFFIX, Record, RingError, RingReader, StepRecord, TurnRecord

POLL_SECONDS = 0.1
LONGEST_GAPS = 5
ROLES = ("detokenizer_proc", "engine", "tokenizer_proc")
"""Beside gpu_runner, in the order of the lanes."""


class Watched(Generic[Record]):
    """One process's ring, and what was read of it."""

    def __init__(self, path: Path, kind: type[Record]) -> None:
        """Raises RingError and OSError."""
        self._path = path
        self._kind: type[Record] = kind
        self.ring: RingReader[Record] = RingReader(path, kind)
        self.role = self.ring.role
        self.records: list[Record] = []
        self.lost = 0
        self._seen = 0
        self._cpu_begin = cpu_seconds(self.ring.pid)

    def skip(self) -> None:
        """Only what is written from now on counts."""
        self._seen = self.ring.written

    def read(self) -> None:
        self._take_in()
        if self.ring.superseded():
            with contextlib.suppress(FileNotFoundError):  # the successor is gone as well
                successor = RingReader(self._path, self._kind)
                self.ring.close()
                self.ring, self._seen, self._cpu_begin = successor, 0, None
                self._take_in()

    def _take_in(self) -> None:
        found = self.ring.snapshot(self._seen)
        if found:
            self.lost += found[-1].number - self._seen - len(found) if self._seen else 0
            self.records += found
            self._seen = found[-1].number

    def lane(self, slices: list[Slice], *, numbered: bool, seconds: float) -> Lane:
        """seconds: how long it was watched."""
        begin, now = self._cpu_begin, cpu_seconds(self.ring.pid)
        return Lane(
            name=f"{self.role}.{self.ring.index}" if numbered else self.role,
            role=self.role,
            pid=self.ring.pid,
            slices=slices,
            cpu=(now - begin) / seconds if seconds and now is not None and begin is not None else None,
        )


def cpu_seconds(pid: int) -> float | None:
    """Processor time of all its threads so far; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watch(run_dir: Path, seconds: float) -> Timeline:
    """What happens in the next `seconds`, or with 0 what the rings hold; SystemExit with a sentence if that is none."""
    loop, others = open_rings(run_dir)
    processes: list[Watched[Any]] = [loop, *others]
    begin = time.monotonic()
    if seconds:
        for process in processes:
            process.skip()
    while (remaining := seconds - (time.monotonic() - begin)) > 0:
        time.sleep(min(POLL_SECONDS, remaining))
        for process in processes:
            process.read()
    elapsed = time.monotonic() - begin if seconds else 0.0
    if not seconds:
        for process in processes:
            process.read()
    roles = [other.role for other in others]
    lanes = [loop.lane(loop_slices(loop.records), numbered=False, seconds=elapsed)]
    lanes += [
        other.lane(turn_slices(other.records, other.role), numbered=roles.count(other.role) > 1, seconds=elapsed)
        for other in others
    ]
    timeline = make_timeline(loop.records, lanes, lost_records=sum(process.lost for process in processes))
    if not timeline.steps:
        raise SystemExit(f"no step of the engine in {run_dir} ended in this time: send it requests meanwhile")
    return timeline


def open_rings(run_dir: Path) -> tuple[Watched[StepRecord], list[Watched[TurnRecord]]]:
    """gpu_runner's and the others', in the order of the lanes."""
    others = []
    try:
        loop = Watched(run_dir / f"gpu_runner.0{SUFFIX}", StepRecord)
        for path in run_dir.glob(f"*{SUFFIX}"):
            if not path.name.startswith("gpu_runner."):
                with contextlib.suppress(FileNotFoundError):  # the process has ended
                    others.append(Watched(path, TurnRecord))
    except FileNotFoundError as error:
        raise SystemExit(f"{run_dir} has no ring of a living gpu_runner: is it an engine's run directory?") from error
    except (RingError, OSError) as error:
        raise SystemExit(str(error)) from error
    return loop, sorted(others, key=lambda process: (ROLES.index(process.role), process.ring.index))


# --------------------------------------------------------------------------------------------------------------- report


def print_report(timeline: Timeline) -> None:
    window = timeline.end - timeline.begin
    steps = timeline.steps
    print(f"{len(steps)} steps in {window / 1e6:.2f} s, {timeline.lost_records} records lost")
    print(f"\n{'process':<22} {'busy':>7} {'cpu':>6}")
    for lane in timeline.lanes[1:]:
        cpu = f"{lane.cpu:>6.2f}" if lane.cpu is not None else f"{'-':>6}"
        print(f"{lane.name:<22} {100 * lane.busy_share(timeline.begin, timeline.end):>5.1f} % {cpu}")
    if timeline.host_us:
        print(f"\n{'host us/step':<22} {'median':>8} {'p99':>8}")
        for name, (median, p99) in timeline.host_us.items():
            note = "  (of all but wait)" if name == "total" else ""
            print(f"{name:<22} {median:>8.1f} {p99:>8.1f}{note}")
    print_device(timeline)
    print_steps(timeline)


def print_device(timeline: Timeline) -> None:
    lengths = np.array([step.end - step.begin for step in timeline.steps])
    print(
        f"\ndevice busy {100 * timeline.device_busy_share:.1f} % of the time in which there was work; a step ran "
        f"{np.median(lengths):.1f} us (median); the device's clock may be off by {timeline.clock_error:.1f} us here"
    )
    gaps, causes = timeline.gaps, timeline.gap_causes()
    if not gaps:
        return
    idle = np.array([gap.length for gap in gaps])
    quantiles = ", ".join(f"p{q} {np.percentile(idle, q):.1f}" for q in (50, 90, 99))
    print(f"idle gaps before a step, us: {quantiles}, max {idle.max():.1f}")
    total: dict[str, float] = {}
    for cause in causes:
        for name, us in cause.items():
            total[name] = total.get(name, 0.0) + us
    shares = sorted(total.items(), key=lambda item: -item[1])
    if idle.sum():
        print(
            "idle while gpu_runner was in: " + ", ".join(f"{name} {100 * us / idle.sum():.0f} %" for name, us in shares)
        )
    for index in np.argsort(-idle)[:LONGEST_GAPS]:
        doing = ", ".join(f"{name} {us:.1f}" for name, us in causes[index].items())
        print(f"  {idle[index]:>9.1f} us before step {gaps[index].step}: {doing}")


def print_steps(timeline: Timeline) -> None:
    kinds = defaultdict(list)
    for step in timeline.steps:
        if "bucket" in step.args:  # else its launch was not seen
            kinds[bool(step.args["prefill_tokens"]), step.args["bucket"]].append(step)
    if not kinds:
        return
    busy = sum(step.end - step.begin for step in timeline.steps)
    print(f"\n{'steps':<8} {'tokens':>6} {'number':>7} {'rows':>6} {'prompts':>8} {'ms':>8} {'of device':>10}")
    for (prefills, bucket), steps in sorted(kinds.items()):
        lengths = np.array([step.end - step.begin for step in steps])
        rows, prompts = (np.mean([step.args[name] for step in steps]) for name in ("rows", "prefill_tokens"))
        print(
            f"{'prompts' if prefills else 'decode':<8} {bucket:>6} {len(steps):>7} {rows:>6.0f} {prompts:>8.0f} "
            f"{np.median(lengths) / 1e3:>8.3f} {100 * lengths.sum() / busy:>8.1f} %"
        )


def title(timeline: Timeline) -> str:
    parts = [f"device busy {100 * timeline.device_busy_share:.1f} % of the time with work"]
    if timeline.host_us:
        parts.append(f"host {timeline.host_us['total'][0]:.0f} us a step (median)")
    return "   ·   ".join([*parts, f"{len(timeline.steps)} steps"])


def newest_run_dir() -> Path:
    found = in_use(Path(tempfile.gettempdir()))
    if not found:
        raise SystemExit("no engine of this user runs on this machine; --run-dir names one that this could not find")
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, help="the engine's (default: that of the newest running engine)")
    parser.add_argument("--seconds", type=float, default=2.0, help="how long to watch; 0: what the rings hold now")
    parser.add_argument("--window-ms", type=float, default=50.0, help="what the picture shows")
    parser.add_argument("--out", type=Path, default=Path("profile_host"), help="name of the two files, without ending")
    args = parser.parse_args()
    run_dir = args.run_dir or newest_run_dir()
    timeline = watch(run_dir, args.seconds)
    print_report(timeline)
    trace, picture = (args.out.with_name(args.out.name + ending) for ending in (".json", ".png"))
    trace.write_text(json.dumps({"traceEvents": trace_events(timeline), "displayTimeUnit": "ns"}) + "\n")
    print(f"\nwrote {trace}, for https://ui.perfetto.dev")
    try:
        from lanes.plot import plot
    except ModuleNotFoundError as error:
        print(f"no picture: {error}")
        return
    plot(timeline, picture, window_ms=args.window_ms, title=title(timeline))
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
