"""Real worker processes on a tiny random model, with the test as their router."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import torch
import zmq
from transformers import LlamaConfig, LlamaForCausalLM

from shared.config import load_deployment
from shared.ids import DispatchId, Incarnation, RequestId, TenantId, TransferId, WorkerId
from shared.messages.fleet import WorkerLoad
from shared.messages.request import Request, Sampling
from shared.messages.router_worker import (
    CancelWork,
    Expect,
    FromWorker,
    KvSource,
    Prefill,
    Report,
    RouterBeat,
    SequenceFailed,
    SequenceFinished,
    StepOutput,
    ToWorker,
    WorkerBye,
    WorkerHello,
    WorkerWelcome,
)
from shared.runtime import router_workers_endpoint
from shared.transport.link import RouterLink
from shared.transport.security import security_for
from tests.nursery import ForkedService

DEADLINE = 60.0
ROOT = Path(__file__).parents[2]
LAYERS, BLOCK = 4, 4


def make_model(directory: Path, *, hidden: int = 32, seed: int = 0) -> Path:
    """Save a random Llama of a few layers; ``hidden`` changes its KV layout."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def make_config(directory: Path, model: Path, *, split: bool, **changes: object) -> Path:
    """Write a deployment file with small pools and short leases."""
    worker = {
        "count": 1,
        "precision": "fp32",
        "kv_memory": "4MiB",
        "max_batch_tokens": 32,
        "threads": 1,
    }
    roles = ("prefill", "decode") if split else ("mixed",)
    tree = {
        "name": "rig",
        "deployment_type": "split" if split else "colocated",
        "model": {"path": str(model), "block_size": BLOCK, "max_model_len": 2048},
        "workers": {role: worker | {"count": 2 if role == "prefill" else 1} for role in roles},
        "transfer": {"notify_layers": 1, "lease": "4s", "heartbeat": "500ms"},
        "router": {"drain_timeout": "5s"},
        "runtime_dir": str(directory),
    } | changes
    path = directory / "rig.yaml"
    path.write_bytes(msgspec.yaml.encode(tree))
    return path


def request(prompt: tuple[int, ...], max_tokens: int = 8, **changes: object) -> Request:
    """Return a greedy request that ignores end tokens."""
    sampling = Sampling(seed=1, max_tokens=max_tokens, temperature=0.0)
    base = Request(
        request_id=RequestId("r"),
        tenant=TenantId(""),
        prompt_ids=prompt,
        sampling=sampling,
        ttl=60.0,
    )
    return msgspec.structs.replace(base, **changes)


class Rig:
    """The scripted router, and what the workers told it."""

    def __init__(self, config: Path, launch: tuple[str, ...] | None = None) -> None:
        self.config = config
        self._launch = launch
        self.launches: dict[str, tuple[str, ...]] = {}
        self.incarnation = Incarnation(71)
        self.hellos: dict[WorkerId, tuple[bytes, WorkerHello]] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, SequenceFinished | SequenceFailed] = {}
        self.prefilled: set[int] = set()
        self.reports: dict[bytes, Report] = {}
        self.messages: list[tuple[bytes, FromWorker]] = []
        self.byes: set[bytes] = set()
        self.logs: dict[str, str] = {}
        self._killed: set[bytes] = set()
        self._changed = asyncio.Event()
        self._last_dispatch = 0
        self._void = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link = self._bind()
        self._beats = asyncio.create_task(self._beat())

    def start(self, name: str, config: Path | None = None) -> None:
        """Start a worker process; it dies with this test."""
        module = f"services.{'prefill' if name.startswith('prefill') else 'decode'}"
        arguments = ["--config", str(config or self.config), "--name", name, "--die-with-parent"]
        launch = self.launches.get(name, self._launch)
        if launch is None:
            process = ForkedService(module, *arguments, stderr=subprocess.PIPE)
        else:
            process = subprocess.Popen(
                [sys.executable, *launch, module, *arguments],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
            )
        self.processes[name] = process

    async def ready(self, *names: str) -> None:
        """Wait until each of these workers has said hello."""
        await self.until(lambda: all(name in self.hellos for name in names))

    def kill(self, name: str) -> None:
        """``kill -9`` and reap."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE)
        assert process.stderr is not None
        process.stderr.close()
        peer, _ = self.hellos.pop(WorkerId(name))
        self._killed.add(peer)

    def send(self, worker: str, message: ToWorker) -> None:
        """Send to a worker that said hello."""
        assert self.link.send(self.hellos[WorkerId(worker)][0], message)

    def next_dispatch(self) -> DispatchId:
        """Return a fresh dispatch id."""
        self._last_dispatch += 1
        return DispatchId(self._last_dispatch)

    def source(self, worker: str, prefill: DispatchId) -> KvSource:
        """Return where the KV of a prefill dispatch is."""
        hello = self.hellos[WorkerId(worker)][1]
        return KvSource(
            transfer=TransferId(prefill),
            worker=hello.worker,
            incarnation=hello.incarnation,
            endpoint=hello.kv_endpoint,
        )

    def split(
        self, work: Request, prefill: str = "prefill-0", decode: str = "decode-0"
    ) -> tuple[DispatchId, DispatchId]:
        """Dispatch to a pair at the same moment; return (prefill, decode) dispatches."""
        first, second = self.next_dispatch(), self.next_dispatch()
        source = self.source(prefill, first)
        self.send(decode, Expect(dispatch=second, request=work, source=source))
        self.send(prefill, self.prefill_message(first, work))
        return first, second

    def cancel(self, first: DispatchId, second: DispatchId, *, decode: str = "decode-0") -> None:
        """Give up what a pair was asked for: neither side waits for the other at its end."""
        self.send(decode, CancelWork(dispatch=second))
        self.send("prefill-0", CancelWork(dispatch=first))

    def prefill_message(self, dispatch: DispatchId, work: Request) -> Prefill:
        """Return the dispatch of a prefill for decode-0."""
        return Prefill(dispatch=dispatch, request=work, decode_worker=WorkerId("decode-0"))

    def counter(self, peer: bytes, name: str) -> int:
        """Return a counter of the last report."""
        report = self.reports.get(peer)
        return 0 if report is None else getattr(report.counters, name)

    def counted(self, peer: bytes, name: str, count: int) -> bool:
        """Whether a counter of the last report has come to this number."""
        return self.counter(peer, name) == count

    def waiting(self, peer: bytes) -> int:
        """Return how many sequences have no KV yet by the last report."""
        report = self.reports.get(peer)
        return 0 if report is None else report.load.waiting

    async def restart(self, incarnation: Incarnation) -> None:
        """Come back as another life of the router that knows nobody."""
        self.link.close()
        self.incarnation = incarnation
        self._void = self._last_dispatch
        self.hellos.clear()
        self.link = self._bind()
        await asyncio.sleep(0)

    async def output(self, dispatch: DispatchId) -> list[int]:
        """Wait for the regular end of a dispatch and return its tokens."""
        await self.until(lambda: dispatch in self.ended)
        ended = self.ended[dispatch]
        assert isinstance(ended, SequenceFinished), ended
        return self.tokens[dispatch]

    async def settled(self, worker: str) -> WorkerLoad:
        """Wait until a worker reports that nothing is open and return that load.

        The last report may be older than what the worker has said since: a new one is waited for.
        """
        last = self.reports.get(self.hellos[WorkerId(worker)][0])

        def idle() -> bool:
            report = self.reports.get(self.hellos[WorkerId(worker)][0])
            if report is None or report is last:
                return False
            load = report.load
            return not (load.waiting + load.receiving + load.running + load.held + load.busy)

        await self.until(idle)
        return self.reports[self.hellos[WorkerId(worker)][0]].load

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for messages until the condition holds; a dead worker ends the wait."""
        async with asyncio.timeout(DEADLINE):
            while not condition():
                for name, process in self.processes.items():
                    if process.poll() not in (None, 0):
                        assert process.stderr is not None
                        raise AssertionError(f"{name} died: {process.stderr.read().decode()}")
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), 0.5)
                except TimeoutError:
                    continue

    async def close(self) -> None:
        """Stop what still runs and check that every worker ends well; ``logs`` has their words."""
        self._beats.cancel()
        await asyncio.gather(self._beats, return_exceptions=True)
        for process in self.processes.values():
            process.terminate()
        codes = {}
        for name, process in self.processes.items():
            _, errors = await asyncio.to_thread(process.communicate, None, DEADLINE)
            self.logs[name] = errors.decode()
            codes[name] = (process.returncode, self.logs[name])
        self.link.close()
        self._context.term()
        for name, (code, errors) in codes.items():
            assert code == 0, f"{name} ended with {code}: {errors}"
            assert "Traceback" not in errors, errors

    def _bind(self) -> RouterLink[FromWorker, ToWorker]:
        deployment = load_deployment(self.config)
        endpoint = router_workers_endpoint(deployment)
        keys = security_for(endpoint, deployment.security, "bind")
        return RouterLink(self._context, endpoint, FromWorker, self._on_message, security=keys)

    def _on_message(self, peer: bytes, message: FromWorker) -> None:
        self.messages.append((peer, message))
        match message:
            case WorkerHello() if peer in self._killed:
                pass  # sent before its end, read after it: nobody waits for this life
            case WorkerHello():
                self.hellos[message.worker] = (peer, message)
                self.link.send(peer, WorkerWelcome(incarnation=self.incarnation))
            case Report():
                self.reports[peer] = message
            case StepOutput():
                self._take(message)
            case WorkerBye():
                self.byes.add(peer)
            case _:
                pass
        if not isinstance(message, WorkerHello) and all(p != peer for p, _ in self.hellos.values()):
            self.link.send(peer, RouterBeat(incarnation=self.incarnation))
        self._changed.set()

    def _take(self, output: StepOutput) -> None:
        for item in output.tokens:
            if item.dispatch <= self._void:  # sent before the worker knew of the restart
                continue
            stream = self.tokens.setdefault(item.dispatch, [])
            assert item.index == len(stream), "a token came twice, late or not at all"
            stream.append(item.token)
        self.prefilled |= {item.dispatch for item in output.prefilled}
        for ended in (*output.finished, *output.failed):
            assert ended.dispatch not in self.ended, "a dispatch ended twice"
            self.ended[ended.dispatch] = ended

    async def _beat(self) -> None:
        while True:
            for peer, _ in self.hellos.values():
                self.link.send(peer, RouterBeat(incarnation=self.incarnation))
            await asyncio.sleep(0.5)


@asynccontextmanager
async def rig(
    config: Path, *names: str, launch: tuple[str, ...] | None = None
) -> AsyncIterator[Rig]:
    """Run these workers under a scripted router, as forks of the nursery.

    With ``launch``, which Python gets before the module, they are processes from the start.
    """
    router = Rig(config, launch)
    async with running(router, *names):
        yield router


@asynccontextmanager
async def running(router: Rig, *names: str) -> AsyncIterator[None]:
    """Start these workers, wait until they said hello, and end them."""
    try:
        for name in names:
            router.start(name)
        await router.ready(*names)
        yield
    except BaseException:
        for process in router.processes.values():
            process.kill()
            process.communicate()
        router.processes.clear()
        raise
    finally:
        await router.close()
