"""A timeline in the Trace Event Format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from lanes.timeline import Timeline


def trace_events(timeline: Timeline) -> list[dict[str, object]]:
    """Slices by lane, the requests that run and wait as a counter, and an arrow from each launch to its step."""
    events: list[dict[str, object]] = []
    launches: dict[int, float] = {}
    for order, lane in enumerate(timeline.lanes):
        where = {"pid": lane.pid, "tid": lane.pid}
        events.append({"ph": "M", "name": "process_name", **where, "args": {"name": lane.name}})
        events.append({"ph": "M", "name": "process_sort_index", **where, "args": {"sort_index": order}})
        for s in lane.slices:
            at = {"ts": round(s.begin - timeline.begin, 3), **where}
            events.append({"ph": "X", "name": s.name, **at, "dur": round(s.end - s.begin, 3), "args": s.args})
            if s.name == "launch":
                launches[s.args["step"]] = s.begin
                events.append({"ph": "s", "name": "launch", "cat": "step", "id": s.args["step"], **at})
            elif s.name == "plan":
                queued = {name: s.args[name] for name in ("running", "waiting")}
                events.append({"ph": "C", "name": "requests", **at, "args": queued})
    for step in timeline.steps:
        if step.step in launches:
            at = {"ts": round(step.begin - timeline.begin, 3), "pid": 0, "tid": 0}
            events.append({"ph": "f", "bp": "e", "name": "launch", "cat": "step", "id": step.step, **at})
    return events
