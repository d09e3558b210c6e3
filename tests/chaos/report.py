"""What a run was, for a person: its figures as tables, and what went wrong with all that is needed to see it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from chaos.processes import SIDECARS
from chaos.run import Outcome
from chaos.samples import Sampler

MOMENTS = 10
"""Lines of the table over time."""


def report(outcome: Outcome) -> str:
    lines = [
        *_figures(outcome),
        *(_over_time(outcome.samples) if outcome.samples else ()),
        *(_growth(outcome.samples) if outcome.samples else ()),
    ]
    return "\n".join(lines)


def failure_report(outcome: Outcome) -> str:
    """All problems, and how to have them again."""
    plan = outcome.plan
    head = f"{len(outcome.problems)} problems with SEED={plan.seed} ({_subject(outcome)}):"
    return "\n".join([head, *(f"  - {problem}" for problem in outcome.problems), "end of its log:", outcome.log_end])


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that so many of them do not exceed; 0 of none."""
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)] if values else 0.0


def _subject(outcome: Outcome) -> str:
    plan = outcome.plan
    runner = "scripted runner" if plan.setup.module == "support.scripted_cli" else "CPU model"
    return f"{runner}, API workers: {plan.setup.api_workers}, load for {plan.seconds:g} s"


def _figures(outcome: Outcome) -> Iterator[str]:
    tally = outcome.tally
    yield f"{_subject(outcome)}, seed {outcome.plan.seed}; {outcome.seconds:.0f} s in all"
    yield ""
    counts: dict[str, int] = {
        "requests": tally["asked"],
        "right": tally["right"],
        "wrong or failed": tally["wrong"],
        "left by the client": tally["left early"],
        "cut off": tally["cut off"],
        "sent again": tally["sent again"],
        "releases": tally["releases"],
        "refused": tally["refused"],
        "kills": len(outcome.kills),
        "stops": outcome.stops,
    }
    yield f"| {' | '.join(counts)} |"
    yield "|---" * len(counts) + "|"
    yield f"| {' | '.join(map(str, counts.values()))} |"
    yield ""
    yield "How long streams were silent across a kill (ms from the last bytes before it to the first ones after):"
    yield ""
    yield "| killed | kills | streams | p50 | p99 | longest |"
    yield "|---|---|---|---|---|---|"
    for role in (*SIDECARS, "api_worker", "any"):
        kills = [kill for kill in outcome.kills if role in (kill.role, "any")]
        silences = [1000 * silence for kill in kills for silence in kill.silences]
        figures = [percentile(silences, 0.5), percentile(silences, 0.99), max(silences, default=0.0)]
        yield f"| {role} | {len(kills)} | {len(silences)} | {' | '.join(f'{figure:.0f}' for figure in figures)} |"


def _over_time(samples: Sampler) -> Iterator[str]:
    roles = list(
        dict.fromkeys(process.role for _, processes in samples.rows for process in processes if process.state != "Z")
    )
    yield ""
    yield "Resident memory in MiB / file descriptors, of the largest process of each role:"
    yield ""
    yield f"| s | {' | '.join(roles)} |"
    yield "|---" * (len(roles) + 1) + "|"
    step = max(1, (len(samples.rows) - 1) // MOMENTS)
    for at, processes in samples.rows[::step]:
        cells = []
        for role in roles:
            found = [process for process in processes if process.role == role]
            rss = max((process.rss_bytes for process in found), default=0)
            cells.append(f"{rss / 2**20:.1f} / {max((process.fds for process in found), default=0)}")
        yield f"| {at:.0f} | {' | '.join(cells)} |"


def _growth(samples: Sampler) -> Iterator[str]:
    judged: dict[str, list[float]] = {}
    for history in samples.histories.values():
        if (growth := history.growth()) is not None:
            judged.setdefault(history.role, []).append(growth)
    if judged:
        yield ""
        yield "Growth after the warm-up, of the process that grew most (KiB a second):"
        yield ""
        yield from (f"- {role}: {max(growths) / 1024:.2f}" for role, growths in judged.items())
