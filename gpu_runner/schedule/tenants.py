"""What each tenant has been served, so that the one that had least is served next."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

OUTPUT_WEIGHT = 2
"""Of a token of output; one of a prompt, if it was computed and not found in the cache, weighs 1."""
MAX_IDLE = 4096
"""Tenants without work whose service is remembered."""


class Tenants:
    """Virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

    A tenant has an account while it has requests that wait or run. One that comes back without any is lifted to the
    least that others have, so that nobody saves up service; of those others, what their last request that started has
    had of its prompt does not count, so that the one that comes back goes before the rest of it. What a tenant had more
    than that is remembered, of the `MAX_IDLE` tenants that left last.
    """

    def __init__(self) -> None:
        self.served = np.zeros(8, np.int64)  # [accounts], weighted tokens
        self._prompt = np.zeros(8, np.int64)  # [accounts], tokens of prompts computed since its last request started
        self._open = np.zeros(8, np.bool_)  # [accounts]
        self._requests = [0] * 8  # of each account, that wait or run
        self._names = [""] * 8
        self._free = list(range(7, -1, -1))
        self._account: dict[str, int] = {}
        self._idle: OrderedDict[str, int] = OrderedDict()  # what tenants without account have been served
        self._floor = 0  # what the last tenant that left had, if nobody has work

    def __len__(self) -> int:
        """Tenants with work."""
        return len(self._account)

    def lifts(self, tenant: str) -> bool:
        """Whether `enter` compares it with others, whose service has to be up to date."""
        return bool(self._account) and tenant not in self._account

    def enter(self, tenant: str) -> int:
        """A request of `tenant` comes; returns its account."""
        account = self._account.get(tenant)
        if account is None:
            least = int((self.served - self._prompt)[self._open].min()) if self._account else self._floor
            if not self._free:
                self._grow()
            account = self._account[tenant] = self._free.pop()
            self.served[account] = max(self._idle.pop(tenant, 0), least)
            self._prompt[account] = 0
            self._open[account] = True
            self._names[account] = tenant
        self._requests[account] += 1
        return account

    def leave(self, account: int) -> None:
        """A request of the account has ended."""
        self._requests[account] -= 1
        if self._requests[account]:
            return
        name = self._names[account]
        self._floor = int(self.served[account])
        self._idle[name] = self._floor
        if len(self._idle) > MAX_IDLE:
            self._idle.popitem(last=False)
        del self._account[name]
        self._open[account] = False
        self._free.append(account)

    def started(self, account: int) -> None:
        """A request of the account starts, for the first time or again."""
        self._prompt[account] = 0

    def charge_prompt(self, account: int, tokens: int) -> None:
        self.served[account] += tokens
        self._prompt[account] += tokens

    def charge_output(self, account: int, tokens: int) -> None:
        self.served[account] += OUTPUT_WEIGHT * tokens

    def charge_outputs(self, accounts: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """accounts, tokens: [R], of R rows."""
        counts = np.bincount(accounts, weights=tokens, minlength=len(self.served))
        self.served += OUTPUT_WEIGHT * counts.astype(np.int64)

    def check_integrity(self, requests: dict[int, int]) -> None:
        """requests: how many there are of each account that has any."""
        accounts = {account: count for account, count in enumerate(self._requests) if count}
        assert accounts == requests, "an account's requests are those that wait or run"
        assert sorted(self._account.values()) == sorted(accounts) == np.flatnonzero(self._open).tolist()
        assert all(self._names[account] == name for name, account in self._account.items())
        assert sorted([*self._free, *accounts]) == list(range(len(self.served)))
        assert not self._account.keys() & self._idle.keys()
        assert len(self._idle) <= MAX_IDLE
        assert ((self._prompt >= 0) & (self._prompt <= self.served))[self._open].all()

    def _grow(self) -> None:
        size = len(self.served)
        self._free.extend(range(2 * size - 1, size - 1, -1))
        self.served = np.concatenate([self.served, np.zeros(size, np.int64)])
        self._prompt = np.concatenate([self._prompt, np.zeros(size, np.int64)])
        self._open = np.concatenate([self._open, np.zeros(size, np.bool_)])
        self._requests += [0] * size
        self._names += [""] * size
