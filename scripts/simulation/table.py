"""Figures as lines of a table: of a run, and below it of its classes and tenants."""

from __future__ import annotations

from typing import Any

COLUMNS = (
    *("TTFT p50", "p99", "urgent p99", "TPOT p50", "p99", "gap p50", "p99", "good %", "good/s", "out tok/s"),
    *("hit %", "preempt", "busy %"),
)
TENANTS_SHOWN = 8
_BEGIN = 27


def heading() -> str:
    return " " * _BEGIN + "".join(f"{name:>11}" for name in COLUMNS)


def lines(row: dict[str, Any]) -> list[str]:
    """Of a run; of its tenants those that were served the most tokens."""
    begin = f"{row['load']:<17} {row['policy']:<9}"
    if not row["ended"]:
        return [f"{begin} none of {row['requests']} requests can run here: they are too long"]
    result = [begin + _cells(row)]
    for name, figures in row.get("classes", {}).items():
        result.append(f"  {name} {figures['requests']}".ljust(_BEGIN) + _cells(figures))
    tenants = row.get("tenants", {})
    most = sorted(tenants, key=lambda name: -tenants[name]["prompt_tokens"] - tenants[name]["output_tokens"])
    for name in most[:TENANTS_SHOWN]:
        result.append(f"  tenant {name} {tenants[name]['requests']}".ljust(_BEGIN) + _cells(tenants[name]))
        if alone := tenants[name].get("alone"):
            result.append("    alone".ljust(_BEGIN) + _cells(alone))
    if len(most) > TENANTS_SHOWN:
        result.append(f"  and {len(most) - TENANTS_SHOWN} more tenants")
    if fair := row.get("fairness"):
        result.append(
            f"  fairness of tenants (Jain's index): mean {fair['jain_mean']:.3f}, least {fair['jain_min']:.3f} in "
            f"{fair['windows']} times {fair['window_s']:g} s in which several waited"
        )
    return result


def _cells(row: dict[str, Any]) -> str:
    """- where a class or a tenant has no such figure of its own."""
    ttft, tpot, gap, urgent = (row.get(name) or {} for name in ("ttft_ms", "tpot_ms", "gap_ms", "urgent_ttft_ms"))
    cells = (
        *(_number(ttft.get("p50")), _number(ttft.get("p99")), _number(urgent.get("p99"))),
        *(_number(tpot.get("p50")), _number(tpot.get("p99")), _number(gap.get("p50")), _number(gap.get("p99"))),
        f"{100 * row['good_share']:.1f}",
        f"{row['goodput_per_s']:.2f}",
        f"{row['output_tokens_per_s']:.0f}",
        f"{100 * row['hit_rate']:.1f}",
        f"{row['preemptions']}" if "preemptions" in row else "-",
        f"{100 * row['device_busy']:.1f}" if "device_busy" in row else "-",
    )
    return "".join(f"{cell:>11}" for cell in cells)


def _number(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"
