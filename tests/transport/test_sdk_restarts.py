"""Gateways that die again and again under load, on real sockets."""

import random
import time
from concurrent.futures import Future
from pathlib import Path

from diptych import Client, Completion
from diptych.wire import ToClient
from tests.transport.sdk_gateway import WAIT, ScriptedGateway, ipc
from tests.unit.sdk_model import ModelGateway, output, text_of


class ModelServer:
    """``ModelGateway`` behind a socket; every restart forgets all it knew."""

    def __init__(self, endpoint: str) -> None:
        self.link = ScriptedGateway(endpoint)
        self.model = ModelGateway(1)

    def turn(self, tokens: int) -> bool:
        """Take what has come, generate ``tokens`` per request and send; say if there was one."""
        self.link.poll(0.01)
        messages, self.link.messages = self.link.messages, []
        for peer, message in messages:
            session = self.link.sessions.get(peer, 0)
            self.model.session = session
            self.model.take(session, message)
        busy = bool(self.model.jobs)
        self.model.step(tokens)
        self.deliver()
        return busy

    def deliver(self) -> None:
        mail: list[ToClient] = self.model.mail
        self.model.mail = []
        for peer in list(self.link.sessions)[-1:]:
            for message in mail:
                self.link.send(peer, message)

    def restart(self) -> None:
        self.link = self.link.restart()
        self.model = ModelGateway(self.link.incarnation, seeds=1000 * self.link.incarnation)


def test_sixteen_streams_survive_ten_killed_gateways(tmp_path: Path) -> None:
    """Guards against tokens lost, doubled or taken from another stream when gateways die."""
    draw = random.Random(3)
    server = ModelServer(ipc(tmp_path))
    with Client(server.link.endpoint) as client:
        sizes = [draw.randint(60, 120) for _ in range(16)]
        futures = [client.submit(f"p{n}", max_tokens=n) for n in sizes]
        for _ in range(10):
            _run(server, futures, turns=draw.randint(1, 12))
            server.restart()
        _run(server, futures, turns=None)
        for future, size in zip(futures, sizes, strict=True):
            _verify(future.result(WAIT), size)
        assert max(f.result(0).resumes for f in futures) >= 3
    server.link.close()


def _run(server: ModelServer, futures: list[Future[Completion]], turns: int | None) -> None:
    """Serve some turns in which requests are there, or until all is done."""
    deadline = time.monotonic() + 3 * WAIT
    while not server.link.sessions:
        assert time.monotonic() < deadline, "the client did not come back"
        server.turn(0)
    while not all(f.done() for f in futures) and turns != 0:
        assert time.monotonic() < deadline, "a stream does not end"
        if server.turn(2) and turns is not None:
            turns -= 1


def _verify(completion: Completion, size: int) -> None:
    expected = output(completion.seed, size)
    assert list(completion.token_ids) == expected
    assert completion.text == text_of(expected)
