"""How often the requests of a class that have waited longest were overtaken: nobody waits for ever."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from gpu_runner.schedule.orders import Order, by_arrival
from gpu_runner.schedule.request import Request

MAX_OVERTAKES = 16
"""Requests of its class that may start before the oldest one that waits."""
MAX_OVERTAKES_OF_BACKGROUND = 64
"""Interactive requests that may start before the oldest one of the background. More would not make these wait less
where they are more than the engine can take; fewer is what they feel there."""
_DUE = MAX_OVERTAKES_OF_BACKGROUND
"""What makes the oldest one next: each interactive start counts 1 for the background, one of the own class `_OWN`."""
_OWN = _DUE // MAX_OVERTAKES


class Ageing:
    """The oldest of the requests of a class that wait for the first time, and of those that have run. Each is next when
    `MAX_OVERTAKES` others of the class have started for the first time before it, or `MAX_OVERTAKES_OF_BACKGROUND`
    interactive ones before one of the background."""

    def __init__(self, waiting: Mapping[int, Request]) -> None:
        """waiting: all that wait, by rid."""
        self._fresh: OrderedDict[int, Request] = OrderedDict()  # by arrival, which is the order they are pushed in
        self._again = Order(by_arrival, waiting)  # those that have run
        self._overtakes = 0  # of the oldest that has not run
        self._passes = 0  # of the oldest that has run

    @property
    def oldest(self) -> Request | None:
        """Of those that have not run."""
        return next(iter(self._fresh.values()), None)

    @property
    def any_due(self) -> bool:
        """Whether one of the two below may be there."""
        return self._overtakes >= _DUE or self._passes >= _DUE

    @property
    def due(self) -> Request | None:
        """The oldest that has not run, if it was overtaken as often as may be."""
        return self.oldest if self._overtakes >= _DUE else None

    @property
    def due_again(self) -> Request | None:
        """The oldest that has run, if it was."""
        return self._again.first() if self._passes >= _DUE else None

    def push(self, request: Request) -> None:
        if request.fresh:
            self._fresh[request.rid] = request
        else:
            self._again.push(request)

    def started(self, request: Request, *, resumed: bool) -> None:
        """One of the class starts, for the first time or again; it is to be forgotten next."""
        again = self._again.first()
        if resumed:
            self._passes = 0 if request is again else self._passes
        else:
            self._overtakes = 0 if request is self.oldest else self._overtakes + _OWN
            self._passes += _OWN if again is not None else 0

    def passed(self) -> None:
        """An interactive one starts for the first time; of the background."""
        self._overtakes += bool(self._fresh)
        self._passes += self._again.first() is not None

    def forget(self, request: Request) -> None:
        """It waits no longer."""
        self._fresh.pop(request.rid, None)
        if not self._fresh:
            self._overtakes = 0
        if self._again.first() is None:
            self._passes = 0

    def check_integrity(self, members: list[Request]) -> None:
        """members: all of the class that wait."""
        fresh = [request.rid for request in members if request.fresh]
        assert sorted(self._fresh) == sorted(fresh)
        assert sorted([*fresh, *self._again.live()]) == sorted(request.rid for request in members)
        arrivals = [request.arrival for request in self._fresh.values()]
        assert arrivals == sorted(arrivals)
        assert self._overtakes < (_DUE + _OWN if fresh else 1)
        assert self._passes < (_DUE + _OWN if self._again.first() is not None else 1)
