"""Random faults between client and gateway: each token exactly once, each call ends once."""

import random
from collections import defaultdict

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.events import (
    Abort,
    Ask,
    Dial,
    Emit,
    Event,
    Fleet,
    HangUp,
    LinkDown,
    LinkUp,
    Open,
    Ready,
    Received,
    Send,
    Tick,
    Update,
)
from diptych.open_request import Failed, Finished, Output, Started
from diptych.state import ClientLimits, ClientState
from diptych.wire import Delta, FromClient, Goodbye, SamplingParams, Submit, ToClient
from tests.unit.sdk_model import ModelGateway, output, text_of

ACTIONS = (

        "open", "open", "step", "step", "step", "step", "step", "ask", "abort", "cut", "restart",
        "lose", "lose", "double", "double", "swap", "swap", "goodbye", "wait", "stale", "forget",
)  # fmt: skip
STEP = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 100), st.integers(0, 5))


class World:
    """Client, gateway and the unreliable link between them, under a virtual clock."""

    def __init__(self) -> None:
        self.now = 0.0
        limits = ClientLimits(max_stalls=10_000, reconnect_timeout=1e9, connect_timeout=1e9)
        self.state = ClientState(1, "ipc://x", None, limits)
        self.gateway = ModelGateway(1)
        self.link: int | None = None
        self.connected = False
        self.to_gateway: list[FromClient] = []
        self.updates: dict[int, list[Update]] = defaultdict(list)
        self.sizes: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.old: list[tuple[int, ToClient]] = []
        self.keys = 0
        self.feed(Tick())

    def feed(self, event: Event) -> None:
        for effect in self.state.handle(event, self.now):
            match effect:
                case Emit():
                    assert effect.key not in self.aborted, "an aborted call was told something"
                    self.updates[effect.key].append(effect.update)
                case Dial():
                    self.link, self.connected, self.to_gateway = effect.session, False, []
                case HangUp():
                    self.link, self.connected, self.to_gateway = None, False, []
                    self.gateway.mail = []
                case Send():
                    assert self.connected, "sent without a connection"
                    copy = msgspec.msgpack.encode(effect.message)
                    self.to_gateway.append(msgspec.msgpack.decode(copy, type=FromClient))
        self.state.check()

    def act(self, action: str, pick: int, flow: int) -> None:
        """Do something, then let traffic flow, holding back the last ``flow`` messages."""
        getattr(self, f"do_{action}")(pick)
        if flow == 5:
            return
        self.connect()
        self.exchange(flow)

    def do_open(self, pick: int) -> None:
        self.keys += 1
        self.sizes[self.keys] = pick % 30
        params = SamplingParams(max_tokens=pick % 30)
        self.feed(Open(self.keys, Submit(id=0, prompt="p", params=params), 1e9))

    def do_ask(self, pick: int) -> None:
        self.keys += 1
        self.feed(Ask(self.keys, "ready" if pick % 2 else "status", 1e9))

    def do_abort(self, pick: int) -> None:
        alive = list(self.state.requests)
        if alive:
            self.aborted.add(alive[pick % len(alive)])
            self.feed(Abort(alive[pick % len(alive)]))

    def connect(self) -> None:
        self.now += 0.2
        self.feed(Tick())
        if self.link is not None and not self.connected:
            self.connected = True
            self.feed(LinkUp(self.link))

    def exchange(self, hold: int) -> None:
        if self.link is None or not self.connected:
            return
        sent, self.to_gateway = self.to_gateway, []
        for request in sent:
            self.gateway.take(self.link, request)
        while len(self.gateway.mail) > hold and self.link is not None:
            message = self.gateway.mail.pop(0)
            self.old.append((self.link, message))
            self.feed(Received(self.link, message))

    def do_step(self, pick: int) -> None:
        self.gateway.step(1 + pick % 3)

    def do_cut(self, pick: int) -> None:
        if self.link is not None and self.connected:
            self.feed(LinkDown(self.link, "cut"))

    def do_restart(self, pick: int) -> None:
        self.gateway = ModelGateway(self.gateway.incarnation + 1, seeds=pick)
        self.do_cut(pick)

    def do_lose(self, pick: int) -> None:
        """Deltas may be lost (a full queue); hello and accepted travel with a live session."""
        deltas = [m for m in self.gateway.mail if isinstance(m, Delta)]
        if deltas:
            self.gateway.mail.remove(deltas[pick % len(deltas)])

    def do_double(self, pick: int) -> None:
        if self.gateway.mail:
            at = pick % len(self.gateway.mail)
            self.gateway.mail.insert(at, self.gateway.mail[at])

    def do_swap(self, pick: int) -> None:
        mail = self.gateway.mail
        if len(mail) > 1:
            at = pick % (len(mail) - 1)
            mail[at], mail[at + 1] = mail[at + 1], mail[at]

    def do_goodbye(self, pick: int) -> None:
        self.gateway.mail.append(Goodbye())

    def do_wait(self, pick: int) -> None:
        self.now += pick % 8
        self.feed(Tick())

    def do_stale(self, pick: int) -> None:
        if self.old:
            session, message = self.old[pick % len(self.old)]
            late = pick % 2 and self.link is not None and self.connected
            self.feed(Received(self.link if late and self.link else session, message))

    def do_forget(self, pick: int) -> None:
        self.gateway.session, self.gateway.jobs, self.gateway.mail = 0, {}, []

    def settle(self) -> None:
        """Without further faults every call must end."""
        for _ in range(60):
            self.do_step(2)
            self.connect()
            self.exchange(0)

    def verify(self) -> None:
        assert not self.state.requests and not self.state.asks
        for key in range(1, self.keys + 1):
            if key in self.sizes:
                self.verify_request(key)
            elif key not in self.aborted:
                assert [type(u) for u in self.updates[key]] in ([Ready], [Fleet])

    def verify_request(self, key: int) -> None:
        updates = self.updates[key]
        starts = [u for u in updates if isinstance(u, Started)]
        got = [u for u in updates if isinstance(u, Output)]
        tokens = [t for u in got for t in u.tokens]
        text = "".join(u.text for u in got)
        for update, at in zip(got, _starts(got), strict=True):
            assert update.index == at
        if key in self.aborted:
            return
        ends = [u for u in updates if isinstance(u, Finished | Failed)]
        assert len(ends) == 1 and updates[-1] is ends[0] and len(starts) == 1
        assert isinstance(ends[0], Finished), ends[0]
        assert tokens == output(starts[0].seed, self.sizes[key])
        assert text + ends[0].text == text_of(tokens)


def _starts(outputs: list[Output]) -> list[int]:
    starts, at = [], 0
    for update in outputs:
        starts.append(at)
        at += len(update.tokens)
    return starts


@given(st.lists(STEP, min_size=20, max_size=80))
@settings(max_examples=200, deadline=None)
def test_streams_stay_whole_whatever_the_link_does(steps: list[tuple[str, int, int]]) -> None:
    """Guards against lost or doubled tokens and calls that never end or end twice."""
    world = World()
    for action, pick, flow in steps:
        world.act(action, pick, flow)
    world.settle()
    world.verify()


def test_thousand_long_random_lives() -> None:
    """The same, on sequences longer than hypothesis likes to draw."""
    for seed in range(1000):
        draw = random.Random(seed)
        world = World()
        for _ in range(draw.randint(20, 80)):
            world.act(draw.choice(ACTIONS), draw.randint(0, 100), draw.randint(0, 5))
        world.settle()
        world.verify()
