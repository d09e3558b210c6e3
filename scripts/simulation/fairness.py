"""How evenly tenants that wait at the same time are served."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from simulation.records import Records

WINDOW_S = 10.0


def fairness(records: Records, window_s: float = WINDOW_S) -> dict[str, Any] | None:
    """Jain's index, (sum x)^2 / (n sum x^2), of the tokens x that n tenants were served in a window: 1 where all have
    the same, 1/n where one has all. Over the windows all through which at least two tenants had a request waiting, and
    among those only: who asks for little has a right to no more. None where there is no such window.

    Served are the prompt's tokens that were computed, counted when the first token comes, and each token of the answer.
    """
    window_ns = round(1e9 * window_s)
    service = served(records, window_ns)
    waiting = backlogged(records, window_ns, service.shape[1])
    contended = waiting.sum(axis=0) >= 2
    if not contended.any():
        return None
    waiting = waiting[:, contended]
    x = np.where(waiting, service[:, contended], 0).astype(np.float64)
    squares = waiting.sum(axis=0) * (x * x).sum(axis=0)
    jain = np.divide(x.sum(axis=0) ** 2, squares, out=np.ones_like(squares), where=squares > 0)
    return {
        "window_s": window_s,
        "windows": int(contended.sum()),
        "jain_mean": float(jain.mean()),
        "jain_min": float(jain.min()),
    }


def served(records: Records, window_ns: int) -> NDArray[np.int64]:
    """Tokens by tenant and window [tenants, windows], windows from time 0."""
    ran = records.ran
    windows = int(records.end.max()) // window_ns + 1
    tenant = records.tenant.astype(np.int64) * windows
    later, at_ns = records.later()
    size = len(records.tenants) * windows
    answers = np.bincount(tenant[later] + at_ns // window_ns, minlength=size)
    first = (records.prompt_tokens - records.cached + 1)[ran]
    prompts = np.bincount(tenant[ran] + records.first[ran] // window_ns, weights=first, minlength=size)
    return (answers + prompts.astype(np.int64)).reshape(-1, windows)


def backlogged(records: Records, window_ns: int, windows: int) -> NDArray[np.bool_]:
    """Which tenants had a request that waited for its start at every moment of a window [tenants, windows]."""
    result = np.zeros((len(records.tenants), windows), np.bool_)
    for tenant in range(len(records.tenants)):
        own = records.ran & (records.tenant == tenant)
        order = np.argsort(records.arrival[own], kind="stable")
        begins = records.arrival[own][order]
        until = np.maximum.accumulate(records.started[own][order])
        # nobody waits from one of `idle` to its `busy`
        idle = np.concatenate([[0], until])
        busy = np.concatenate([begins, [windows * window_ns]])
        there = busy > idle
        change = np.zeros(windows + 1, np.int64)
        np.add.at(change, idle[there] // window_ns, 1)
        np.add.at(change, (busy[there] - 1) // window_ns + 1, -1)
        result[tenant] = np.cumsum(change[:-1]) == 0
    return result
