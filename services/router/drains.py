"""Emptying a worker on order, and the change of role that may follow."""

from collections.abc import Mapping

from services.router.effects import Outbox
from services.router.records import Worker
from services.router.recovery import Recovery
from shared.errors import ErrorPayload, NotFound, WorkerLost
from shared.ids import WorkerId
from shared.messages.fleet import Role
from shared.messages.router_worker import DrainWorker, SetRole


class Drains:
    """A draining worker gets nothing new; what runs there finishes."""

    def __init__(self, workers: Mapping[bytes, Worker], recovery: Recovery, outbox: Outbox) -> None:
        self._workers = workers
        self._recovery = recovery
        self._outbox = outbox

    def order(self, name: WorkerId, role: Role | None) -> ErrorPayload | None:
        """Drain a worker. With ``role``, which may be its own, it is ready again afterwards.

        Returns why the order was not taken, None if it was.
        """
        here = {w.hello.worker: w for w in self._workers.values() if _takes_orders(w)}
        worker = here.get(name)
        if worker is None:
            names = ", ".join(sorted(here)) or "none"
            text = f"{name} cannot be drained: only workers can, and those here now are: {names}"
            error = NotFound(text, param="worker")
            self._outbox.note(error.message, warning=True)
            return error.payload()
        worker.next_role = role
        if worker.drained:
            self._change_role(worker)
        elif not worker.drain_ordered:
            worker.drain_ordered = True
            if worker.health == "ready":
                worker.health = "draining"
            self._outbox.worker(worker, DrainWorker())
            self._outbox.note(f"worker {name} drains")
        return None

    def drained(self, worker: Worker, now: float) -> None:
        """The worker says that it is empty."""
        if not worker.drain_ordered or worker.drained:
            return
        error = WorkerLost(f"worker {worker.hello.worker} does not have the request").payload()
        self._recovery.worker_failed(worker, error, now, tell=True)
        worker.drained = True
        self._outbox.note(f"worker {worker.hello.worker} is drained")
        self._change_role(worker)

    def _change_role(self, worker: Worker) -> None:
        if worker.next_role is None:
            return
        worker.role, worker.next_role = worker.next_role, None
        worker.drain_ordered = worker.drained = False
        if worker.health == "draining" and not worker.stopping:
            worker.health = "ready"
        self._outbox.worker(worker, SetRole(role=worker.role))
        self._outbox.note(f"worker {worker.hello.worker} is now {worker.role}")


def _takes_orders(worker: Worker) -> bool:
    return worker.health != "lost" and not worker.stopping
