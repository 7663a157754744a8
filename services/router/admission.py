"""The bounded queue in front of the workers, fair between tenants.

Requests that lost their worker wait in a line of their own, ahead of everybody and outside the
bounds: they were admitted before.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import islice

from services.router.placement import Local, Pair, Placement, Refuse, Wait
from services.router.records import OpenRequest
from shared.ids import TenantId

Place = Callable[[OpenRequest], Placement]
Start = Callable[[OpenRequest, Pair | Local | Refuse], None]

SCAN = 8
"""How far behind a request without a suitable worker others of the tenant are looked at."""

PATIENCE = 2.0
"""Seconds after which nobody may overtake a request that waits for room."""


class AdmissionQueue:
    """``max_requests`` and ``max_tokens`` bound what waits without ever having run."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.num_requests = 0
        self._tenants: OrderedDict[TenantId, deque[OpenRequest]] = OrderedDict()
        self._resumed: deque[OpenRequest] = deque()
        self._left: deque[float] = deque(maxlen=64)

    def __len__(self) -> int:
        return self.num_requests + len(self._resumed)

    def is_full(self, tokens: int, factor: int = 1) -> bool:
        """Whether a request of so many tokens exceeds ``factor`` times the bounds."""
        if self.num_requests >= self.max_requests * factor:
            return True
        return self.num_requests > 0 and self.num_tokens + tokens > self.max_tokens * factor

    def push(self, request: OpenRequest) -> None:
        """Append to its tenant's line."""
        self._tenants.setdefault(request.request.tenant, deque()).append(request)
        self.num_requests += 1
        self.num_tokens += request.num_tokens
        request.phase = "queued"

    def resume(self, request: OpenRequest) -> None:
        """Put a request that was running before in the line ahead of everybody."""
        self._resumed.append(request)
        request.phase = "queued"

    def remove(self, request: OpenRequest) -> None:
        """Take a request out wherever it waits."""
        request.phase = "admitted"
        if request in self._resumed:
            self._resumed.remove(request)
            return
        line = self._tenants[request.request.tenant]
        line.remove(request)
        self.num_requests -= 1
        self.num_tokens -= request.num_tokens
        if not line:
            del self._tenants[request.request.tenant]

    def displace(self, tenant: TenantId) -> OpenRequest | None:
        """Name the youngest request of the longest line if ``tenant`` has a much shorter one.

        A tenant that filled the queue thereby makes room for the others.
        """
        longest = max(self._tenants.values(), key=len, default=None)
        mine = len(self._tenants.get(tenant, ()))
        if longest is None or len(longest) <= mine + 1:
            return None
        return longest[-1]

    def drain(self, place: Place, start: Start, now: float) -> None:
        """Hand over all that ``place`` finds room for: resumed ones, then tenant by tenant.

        A request has left the queue when ``start`` is called with it.
        """
        while True:
            due = (request for request in self._resumed if request.not_before <= now)
            found = _first(due, place)
            if found is None:
                break
            if isinstance(found[1], Wait):
                return
            self.remove(found[0])
            start(found[0], found[1])
        progress = True
        while progress:
            progress = False
            for tenant, line in list(self._tenants.items()):
                found = _first(line, place)
                if found is None:
                    continue
                request, placement = found
                if isinstance(placement, Wait):
                    if now - request.received > PATIENCE:
                        return
                    continue
                progress = True
                self.remove(request)
                if line:
                    self._tenants.move_to_end(tenant)
                self._left.append(now)
                start(request, placement)

    def waiting(self) -> list[OpenRequest]:
        """Return all that wait, first those that were running before."""
        return [*self._resumed, *(r for line in self._tenants.values() for r in line)]

    def held_until(self, now: float) -> float:
        """Return when the next request that is held back may run; infinity without one."""
        held = (r.not_before for r in self._resumed if r.not_before > now)
        return min(held, default=math.inf)

    def retry_after(self, now: float) -> float:
        """Estimate in seconds when the queue will have emptied, from how it emptied lately."""
        if len(self._left) < 2 or now <= self._left[0]:
            return 1.0
        rate = (len(self._left) - 1) / (now - self._left[0])
        return float(min(60, max(1, math.ceil(self.num_requests / rate))))

    def check(self) -> None:
        """Raise ``AssertionError`` unless the totals agree with the lines."""
        waiting = [request for line in self._tenants.values() for request in line]
        assert all(self._tenants.values()), "an empty line was kept"
        assert self.num_requests == len(waiting)
        assert self.num_tokens == sum(request.num_tokens for request in waiting)
        everybody = [*waiting, *self._resumed]
        assert len({id(request) for request in everybody}) == len(everybody)
        assert all(request.phase == "queued" for request in everybody)


def _first(waiting: Iterable[OpenRequest], place: Place) -> tuple[OpenRequest, Placement] | None:
    """Return the first request that has suitable workers, whether with room or without."""
    for request in islice(waiting, SCAN):
        placement = place(request)
        if not isinstance(placement, Wait) or not placement.absent:
            return request, placement
    return None
