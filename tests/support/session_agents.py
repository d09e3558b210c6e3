"""Requests that are turns of sessions, on the scheduler with a made-up model."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.engine_core import EngineCore

from asyncengine.terms import Terms

SECOND = 10**9


class Clock:
    now = SECOND

    def __call__(self) -> int:
        return self.now


class Agents:
    """A core whose requests are turns of sessions, each run to its end at once unless it is told otherwise."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        self.core = EngineCore(clock=self.clock, **options)
        self._rid = 0

    def add(
        self,
        prompt: np.ndarray,
        max_tokens: int = 3,
        *,
        session: str = "s",
        tenant: str = "",
        ttl: float = 60.0,
        n: int = 1,
        namespace: str = "",
    ) -> int:
        rid = self._rid + 1
        self._rid += n
        terms = Terms(tenant=tenant, session=session, session_ttl_seconds=ttl)
        self.core.add(rid, prompt, max_tokens, ignore_eos=True, n=n, terms=terms, namespace=namespace)
        return rid

    def turn(self, prompt: np.ndarray, *max_tokens: int, **terms: Any) -> int:
        """A request from its begin to its end, and until what it left is stored."""
        rid = self.add(prompt, *max_tokens, **terms)
        self.core.run()
        return rid

    def told(self, rid: int) -> tuple[int, int, int]:
        """cached_tokens, session_tokens, session_common."""
        row = self.core.opens[rid]
        return row.cached_tokens, row.session_tokens, row.session_common

    def history(self, rid: int) -> np.ndarray:
        """The request's prompt and its answer."""
        return np.concatenate([self.core.prompts[rid], np.array(self.core.outputs[rid], np.int32)])

    def flood(self, count: int, *, seed: int = 1) -> None:
        """Random requests of nobody's session, eight every two seconds."""
        rng = np.random.default_rng(seed)
        for number in range(count):
            self.add(rng.integers(0, 50, int(rng.integers(16, 64)), dtype=np.int32), 2, session="")
            if number % 8 != 7:
                continue
            self.clock.now += 2 * SECOND
            self.core.turn()
            if number % 256 == 255:
                self.core.scheduler.check_integrity()
                self.core.plans.clear()
            sessions = self.core.scheduler.rows.sessions
            assert sessions.num_pages <= sessions._pins.tenant_quota
        self.core.run()

    @property
    def pinned(self) -> int:
        return self.core.scheduler.gauges()["pinned_pages"]
