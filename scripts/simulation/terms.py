"""Classes and tenants of a trace that has none: dealt by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
from simulation.traces import TraceRequest

from asyncengine.bench.workload import background_requests


def with_terms(
    requests: Sequence[TraceRequest], *, background: float = 0.0, tenants: int = 0, seed: int = 0
) -> list[TraceRequest]:
    """A share of `background` is of that class. tenants: they are dealt to "t0", "t1", ..., of which the i-th has 1 / i
    as many as the first; 0: each stays with the tenant it has. Neither changes what the other draws."""
    is_background = background_requests(len(requests), background, seed)
    names = [request.terms.tenant for request in requests]
    if tenants:
        weights = 1 / np.arange(1, tenants + 1)
        drawn = np.random.default_rng((seed, 2)).choice(tenants, len(requests), p=weights / weights.sum())
        names = [f"t{number}" for number in drawn.tolist()]
    return [
        replace(
            request,
            terms=msgspec.structs.replace(
                request.terms, tenant=name, service_class="background" if late else "interactive"
            ),
        )
        for request, name, late in zip(requests, names, is_background, strict=True)
    ]


def of_tenant(requests: Sequence[TraceRequest], tenant: str) -> list[TraceRequest]:
    """Its requests alone, at their times."""
    own = [request for request in requests if request.terms.tenant == tenant]
    return [replace(request, index=index) for index, request in enumerate(own)]
