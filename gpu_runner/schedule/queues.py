"""Requests that wait to run: interactive ones first, then the tenant that was served least, then a policy's order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from asyncengine.config import SchedulingPolicy, ServiceClass
from gpu_runner.schedule.ageing import Ageing
from gpu_runner.schedule.limits import Backlog
from gpu_runner.schedule.orders import KEYS, Lane, Order, by_length
from gpu_runner.schedule.request import Request
from gpu_runner.schedule.tenants import Tenants


class WaitingQueue:
    """Requests in the order in which they start, with removal by rid.

    Interactive requests go before those of the background. Among those of a class the tenant that was served least is
    next, and of its requests the first by policy:

    fcfs: arrival; priority: smaller number, then arrival; shortest / longest: prompt length, then arrival.
    What has run, a retracted request or one that came with output, goes before all that have not (of its tenant and its
    own priority). With fcfs and priority, prompts that begin like the last one that started come next; see `Lane`.

    Whatever the order, nobody waits for ever (`Ageing`): of `MAX_OVERTAKES + 1` requests of a class that start for the
    first time, one is the oldest of those that have not run, and of `MAX_OVERTAKES_OF_BACKGROUND + 1` of any class one
    is the background's. So a request before which `m` others of its class came starts at the latest as number
    `(m + 1) * (MAX_OVERTAKES + 1)` of its class, and one of the background as number
    `(m + 1) * (MAX_OVERTAKES_OF_BACKGROUND + 1)` of all, however many come after it. The oldest that has run and waits
    again starts behind as many.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.tenants = Tenants()
        self._policy = policy
        self._waiting: dict[int, Request] = {}
        self.withheld: dict[int, Request] = {}  # by rid, what is set aside
        self._classes = (_Class(self._waiting), _Class(self._waiting))
        self.pushes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, rid: int) -> bool:
        return rid in self._waiting

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def push(self, request: Request) -> None:
        """A request that comes for the first time is entered in its tenant's account; who ends it has it `leave`."""
        if request.account < 0:
            request.account = self.tenants.enter(request.terms.tenant)
        self.pushes += 1
        request.ticket = self.pushes
        self._waiting[request.rid] = request
        own_class = self._classes[request.background]
        own_class.num_requests += 1
        own_class.num_tokens += len(request.tokens)
        lane = own_class.lanes.get(request.account)
        if lane is None:
            lane = own_class.add(request.account, Lane(self._policy))
        lane.push(request)
        own_class.ageing.push(request)
        if request.fresh:
            own_class.shortest.push(request)

    @property
    def num_tokens(self) -> int:
        """Of all that wait, output they came with included."""
        return sum(each.num_tokens for each in self._classes)

    def backlog(self, service_class: ServiceClass) -> Backlog:
        """What waits of that class, set aside or not."""
        own_class = self._classes[service_class == "background"]
        aside = own_class.aside
        return Backlog(own_class.num_requests + aside.requests, own_class.num_tokens + aside.tokens)

    def head(self) -> Request | None:
        """The request that runs next; it stays in the queue."""
        wanted = self.wanted()
        if wanted is None:
            return None
        due = self._due(wanted)
        if due is None:
            return wanted
        due.aged = due.aged or due is not wanted
        return due

    def wanted(self) -> Request | None:
        """The first by class, tenant and policy alone."""
        for each in self._classes:
            if each.lanes:
                return each.least_served(self.tenants).first()
        return None

    def filler(self, head: Request) -> Request | None:
        """A request that may start though `head`, which lacks pages, cannot: the shortest of its class, if that is
        shorter, and none while `head` has been overtaken as often as it may, or has run before."""
        if not head.fresh or self._due(head) is not None:
            return None
        shortest = self._classes[head.background].shortest.first()
        return shortest if shortest is not None and shortest.prompt_len < head.prompt_len else None

    def first_with_slot(self) -> Request | None:
        """The first by class, tenant and policy of those that were retracted. Looks at all that wait."""
        retracted = (request for request in self if request.slot >= 0)
        key, served = KEYS[self._policy], self.tenants.served
        return min(retracted, key=lambda each: (each.background, served[each.account], *key(each)), default=None)

    def take(self, request: Request, *, resumed: bool) -> None:
        """Take out a request that starts, for the first time or again."""
        own_class = self._classes[request.background]
        own_class.ageing.started(request, resumed=resumed)
        if not (resumed or request.background):
            self._classes[True].ageing.passed()
        own_class.started(request)
        self.tenants.started(request.account)
        self._forget(request)

    def remove(self, rid: int) -> Request | None:
        """Take `rid` out wherever it stands, or from what is set aside; None if it does not wait."""
        request = self._waiting.get(rid)
        if request is None:
            return self._let_go(rid) if rid in self.withheld else None
        self._forget(request)
        return request

    def withhold(self) -> None:
        """Set all aside: until `release` nothing of it is next, nor found in here."""
        for request in list(self):
            self._forget(request)
            self.withheld[request.rid] = request
            self._classes[request.background].withheld(request, 1)

    def release(self) -> None:
        """What was set aside waits again."""
        for rid in list(self.withheld):
            self.push(self._let_go(rid))

    def check_integrity(self) -> None:
        lanes = [(place, account, lane) for place in (0, 1) for account, lane in self._classes[place].lanes.items()]
        for place, account, lane in lanes:
            assert all((each.background, each.account) == (place, account) for each in lane.waiting.values())
            assert lane.waiting, "a tenant that nothing waits of has no lane"
            lane.check_integrity()
        assert sorted(rid for _, _, lane in lanes for rid in lane.waiting) == sorted(self._waiting)
        for place, each in enumerate(self._classes):
            own = [request for request in self._waiting.values() if request.background == place]
            each.ageing.check_integrity(own)
            assert each.shortest.live() == sorted(request.rid for request in own if request.fresh)
            aside = [request for request in self.withheld.values() if request.background == place]
            for count, of in ((Backlog(each.num_requests, each.num_tokens), own), (each.aside, aside)):
                assert count == Backlog(len(of), sum(len(request.tokens) for request in of))
        assert self.withheld.keys().isdisjoint(self._waiting)

    def _let_go(self, rid: int) -> Request:
        request = self.withheld.pop(rid)
        self._classes[request.background].withheld(request, -1)
        return request

    def _due(self, wanted: Request) -> Request | None:
        """Whose turn has come by its age; among those that have not run only where `wanted` has not, either."""
        interactive, background = self._classes[False].ageing, self._classes[True].ageing
        if not (background.any_due or interactive.any_due):
            return None
        due = background.due_again or interactive.due_again
        if due is None and wanted.fresh:
            due = background.due or interactive.due
        return due

    def _forget(self, request: Request) -> None:
        del self._waiting[request.rid]
        self._classes[request.background].forget(request)


class _Class:
    """The waiting requests of a service class. lanes: by account, in the order in which tenants came to wait or had
    their last start, which decides between equals. shortest: first, of those that have not run."""

    def __init__(self, waiting: dict[int, Request]) -> None:
        self.lanes: dict[int, Lane] = {}
        self.ageing = Ageing(waiting)
        self.shortest = Order(by_length, waiting)
        self.num_requests = 0
        self.num_tokens = 0
        self.aside = Backlog(0, 0)  # of what is set aside
        self._accounts: NDArray[np.intp] | None = None  # of `lanes`; None = to be made

    def add(self, account: int, lane: Lane) -> Lane:
        self.lanes[account] = lane
        self._accounts = None
        return lane

    def least_served(self, tenants: Tenants) -> Lane:
        if len(self.lanes) == 1:
            return next(iter(self.lanes.values()))
        if self._accounts is None:
            self._accounts = np.fromiter(self.lanes, np.intp, len(self.lanes))
        return self.lanes[int(self._accounts[tenants.served[self._accounts].argmin()])]

    def started(self, request: Request) -> None:
        lane = self.lanes[request.account]
        lane.started(request)
        if len(self.lanes) > 1:
            self.add(request.account, self.lanes.pop(request.account))

    def withheld(self, request: Request, count: int) -> None:
        """`count`: 1 when it is set aside, -1 when it is not any more."""
        aside = self.aside
        self.aside = Backlog(aside.requests + count, aside.tokens + count * len(request.tokens))

    def forget(self, request: Request) -> None:
        self.num_requests -= 1
        self.num_tokens -= len(request.tokens)
        self.ageing.forget(request)
        lane = self.lanes[request.account]
        lane.forget(request)
        if not lane.waiting:
            del self.lanes[request.account]
            self._accounts = None
