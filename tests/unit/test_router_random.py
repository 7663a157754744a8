"""Random fleets: whatever comes, each request ends once, with its tokens in order (11)."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.events import (
    ChangeRole,
    DrainWorkerRequested,
    WorkerMessage,
    WorkerUnreachable,
)
from shared.ids import WorkerId
from shared.messages.router_worker import WorkerBye
from tests.unit.router_fleet_sim import FleetSim

SPLIT = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
COLOCATED = ["mixed-0", "mixed-1"]

ACTIONS = [
    *["generate"] * 4,
    *["deliver"] * 8,
    *["take"] * 6,
    *["work"] * 8,
    "cancel",
    "again",
    "swap",
    "kill",
    "vanish",
    "join",
    "hang",
    "unhang",
    "fail",
    "refuse",
    "report",
    "wait",
    "long",
    "bye",
    "drain",
    "role",
    "gateway",
    "unreachable",
]
STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1000)), max_size=150)


def act(sim: FleetSim, names: list[str], action: str, number: int) -> None:
    """Do one random thing to the router or its surroundings."""
    name = names[number % len(names)]
    worker = sim.workers.get(name)
    pick = number // len(names)
    if action == "generate":
        sim.generate(f"r{number % 50}", 10 + number % 190, 1 + pick % 6, (pick // 6) % 3)
    elif action == "cancel":
        sim.cancel(f"r{number % 50}")
    elif action == "kill":
        sim.kill(name, noticed=True)
    elif action == "vanish":
        sim.kill(name, noticed=False)
    elif action == "join":
        sim.join(name)
    elif action == "wait":
        sim.wait(0.05 + (number % 10) / 10)
    elif action == "long":
        for _ in range(number % 20):
            sim.wait(0.7, silent=number % 7 == 0)
    elif action == "gateway":
        if number % 5 == 0:
            sim.restart_gateway()
    elif action == "drain":
        sim.absorb(sim.world.handle(DrainWorkerRequested(WorkerId(name))))
    elif action == "role":
        role = worker.role if worker is not None else "decode"
        sim.absorb(sim.world.handle(ChangeRole(WorkerId(name), role)))
    elif worker is not None:
        act_on_worker(sim, name, action, pick)


def act_on_worker(sim: FleetSim, name: str, action: str, pick: int) -> None:
    worker = sim.workers[name]
    if action == "deliver":
        sim.deliver(worker)
    elif action == "again":
        sim.deliver(worker, keep=True)
    elif action == "swap" and len(worker.outbox) > 1:
        worker.outbox[0], worker.outbox[1] = worker.outbox[1], worker.outbox[0]
    elif action == "take":
        worker.take()
    elif action == "work":
        worker.work(pick)
    elif action in ("hang", "unhang"):
        worker.hung = action == "hang"
    elif action in ("fail", "refuse"):
        worker.fail(pick, retryable=action == "fail")
    elif action == "report":
        worker.report()
    elif action == "unreachable":
        sim.absorb(sim.world.handle(WorkerUnreachable(worker.peer)))
    elif action == "bye":
        sim.absorb(sim.world.handle(WorkerMessage(worker.peer, WorkerBye())))
        sim.kill(name, noticed=False)


@given(
    steps=STEPS,
    policy=st.sampled_from(["local", "wait", "fail"]),
    colocated=st.booleans(),
    queue=st.sampled_from([2, 256]),
)
@settings(max_examples=400, deadline=None)
def test_11_under_any_churn_each_request_ends_once_and_its_tokens_come_in_order(
    steps: list[tuple[str, int]], policy: str, colocated: bool, queue: int
) -> None:
    """``check()`` runs after every event; at the end everything is over and uncharged."""
    names = COLOCATED if colocated else SPLIT
    sim = FleetSim(
        deployment_type="colocated" if colocated else "split",
        on_no_prefill=policy,
        hung_after=4.0,
        max_queue=queue,
    )
    for name in names[::2]:
        sim.join(name)
    for action, number in steps:
        act(sim, names, action, number)
    sim.settle(names)


def test_11_a_fixed_long_run_of_churn_ends_every_request() -> None:
    """The same with many more steps than a random search tries."""
    source = random.Random(7)
    sim = FleetSim(hung_after=4.0)
    for name in SPLIT:
        sim.join(name)
    for _ in range(20):
        for _ in range(150):
            act(sim, SPLIT, source.choice(ACTIONS), source.randrange(1000))
        sim.settle(SPLIT)
        sim.received.clear()
        sim.ended.clear()
        sim.bases.clear()
