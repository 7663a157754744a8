"""Workers in memory: a fake engine whose tokens betray any wrong KV, and a network that errs.

A tape of numbers decides everything, so a failing run is replayed exactly.
"""

from collections import Counter, deque
from collections.abc import Callable
from functools import cache

from shared.engine.batch import Sampled, SequenceInput, StepResult
from shared.errors import ErrorPayload
from shared.ids import HostId, Incarnation, TenantId, WorkerId
from shared.kv.block_pool import BlockPool
from shared.messages.fleet import Role
from shared.messages.hello import Compatibility
from shared.messages.prefill_decode import ArenaDescriptor, FromDecode, ToDecode
from shared.messages.router_worker import FromWorker
from shared.worker.effects import (
    CloseSource,
    ConnectSource,
    Copy,
    Effect,
    Exit,
    MapArena,
    RunStep,
    ToReader,
    ToRouter,
    ToSource,
)
from shared.worker.events import (
    Copied,
    CopyFailed,
    Event,
    LayersWritten,
    PathChosen,
    ReaderLost,
    ReaderSaid,
    SourceKey,
    SourceLost,
    SourceSaid,
    StepDone,
    StepFailed,
)
from shared.worker.limits import WorkerIdentity, WorkerLimits
from shared.worker.state import WorkerState

Windows = tuple[int | None, ...]

LAYERS = 3
VOCAB = 40
STOP = 7
TENANT = TenantId("t")
COMPATIBILITY = Compatibility(model="m", kv_dtype="fp32", block_size=4, layout="l")
LOST = ErrorPayload(code="transfer_failed", message="the process ended", retryable=True)
BROKEN = ErrorPayload(code="internal", message="the engine broke")


@cache
def kv_value(layer: int, tokens: tuple[int, ...]) -> int:
    """What a correct engine stores for the last of ``tokens`` in ``layer``."""
    before = kv_value(layer, tokens[:-1]) if len(tokens) > 1 else 0
    return hash((layer, before, tokens[-1]))


def reach(windows: Windows, layer: int, tokens: int) -> range:
    """Return the positions that the last of ``tokens`` attends to in ``layer``."""
    window = windows[layer] if windows else None
    return range(0 if window is None else max(0, tokens - window), tokens)


@cache
def next_token(tokens: tuple[int, ...], seed: int, windows: Windows) -> int:
    """What a correct engine samples after ``tokens``."""
    seen = tuple(
        kv_value(layer, tokens[: i + 1])
        for layer in range(LAYERS)
        for i in reach(windows, layer, len(tokens))
    )
    return hash((seed, seen)) % VOCAB


def undisturbed(
    prompt: tuple[int, ...], seed: int, max_tokens: int, windows: Windows = ()
) -> list[int]:
    """Return the output of a request that nothing ever happened to."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tuple(tokens), seed, windows))
        if tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]


class Memory:
    """The KV of one process; a reader may still look at it after the process died."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.generations = [0] * blocks
        self.values = [[[0] * block_size for _ in range(blocks)] for _ in range(LAYERS)]

    def read(self, layer: int, table: tuple[int, ...], position: int) -> int:
        return self.values[layer][table[position // self.block_size]][position % self.block_size]

    def write(self, layer: int, table: tuple[int, ...], position: int, value: int) -> None:
        block = table[position // self.block_size]
        self.values[layer][block][position % self.block_size] = value


class Node:
    """One life of one worker and the work its service has in hand."""

    def __init__(
        self, name: str, role: Role, incarnation: int, blocks: int, limits: WorkerLimits
    ) -> None:
        self.name = WorkerId(name)
        self.role = role
        self.windows = limits.windows
        self.key = SourceKey(self.name, Incarnation(incarnation))
        self.peer = f"{name}#{incarnation}".encode()
        self.memory = Memory(blocks, 4)
        self.pool = BlockPool(blocks, 4, generations=self.memory.generations)
        self.alive = True
        self.running: RunStep | None = None
        self.blocks_copied = 0
        self.layer = 0
        self.seeds: dict[int, int] = {}
        self.jobs: deque[Copy] = deque()
        self.copied: deque[Copy] = deque()
        self.links: dict[WorkerId, SourceKey] = {}
        self.arenas: dict[SourceKey, Memory] = {}
        self.posted: deque[Event] = deque()
        identity = WorkerIdentity(
            worker=self.name,
            incarnation=self.key.incarnation,
            role=role,
            host=HostId("here"),
            pid=incarnation,
            kv_endpoint=f"ipc://{name}",
            compatibility=COMPATIBILITY,
            arena=ArenaDescriptor(
                pid=incarnation, fd=3, size=1, num_blocks=blocks, arena_id=incarnation
            ),
        )
        self.state = WorkerState(identity, limits, self.pool)


class World:
    """All nodes, the wires between them and the hand of fate."""

    def __init__(self, tape: list[int], to_router: Callable[[Node, FromWorker], None]) -> None:
        self._tape = deque(tape)
        self._to_router = to_router
        self.now = 100.0
        self.nodes: dict[WorkerId, Node] = {}
        self.memories: dict[SourceKey, Memory] = {}
        self.wires: dict[tuple[bytes, WorkerId], deque[FromDecode]] = {}
        self.back: dict[tuple[WorkerId, bytes], deque[ToDecode]] = {}
        self.harm: Counter[str] = Counter()

    @property
    def ended(self) -> bool:
        """True when the tape is used up: from now on nothing goes wrong any more."""
        return not self._tape

    def choose(self, options: int) -> int:
        """Let fate decide; after the tape's end always option 0, the harmless one."""
        return self._tape.popleft() % options if self._tape else 0

    def add(self, node: Node) -> None:
        """Start a node, in place of the dead one of its name."""
        self.nodes[node.name] = node
        self.memories[node.key] = node.memory

    def kill(self, node: Node) -> None:
        """``kill -9``: only its memory remains, for those who mapped it."""
        node.alive = False
        for other in self.nodes.values():
            if node.key in other.arenas:
                other.posted.append(SourceLost(node.key, LOST))

    def handle(self, node: Node, event: Event) -> None:
        """Feed one event and carry out its effects."""
        for effect in node.state.handle(event, self.now):
            self._perform(node, effect)
        node.state.check()

    def moves(self) -> list[Callable[[], None]]:
        """Return everything that could happen next."""
        moves: list[Callable[[], None]] = []
        for node in [n for n in self.nodes.values() if n.alive]:
            if node.posted:
                moves.append(lambda n=node: self.handle(n, n.posted.popleft()))  # type: ignore[misc]
            if node.running is not None:
                proceed = self._run_layer if node.layer < LAYERS else self._end_step
                moves.append(lambda n=node, go=proceed: go(n))  # type: ignore[misc]
            if node.jobs:
                moves.append(lambda n=node: self._copy(n))  # type: ignore[misc]
            if node.copied:
                moves.append(lambda n=node: self._verify(n))  # type: ignore[misc]
        for wire, messages in self.wires.items():
            if messages:
                moves.append(lambda w=wire: self._deliver(w))  # type: ignore[misc]
        for wire_back, answers in self.back.items():
            if answers:
                moves.append(lambda w=wire_back: self._deliver_back(w))  # type: ignore[misc]
        return moves

    def _perform(self, node: Node, effect: Effect) -> None:
        match effect:
            case RunStep():
                assert node.running is None, "two steps in flight"
                node.running, node.layer = effect, 0
                for opened in effect.batch.opened:
                    assert opened.key not in node.seeds, "opened twice"
                    node.seeds[opened.key] = opened.sampling.seed
                for key in effect.batch.closed:
                    node.seeds.pop(key, None)
            case ToRouter():
                self._to_router(node, effect.message)
            case ToReader():
                self.back.setdefault((node.name, effect.peer), deque()).append(effect.message)
            case ConnectSource():
                node.links[effect.source.worker] = effect.source
            case ToSource():
                wire = (node.peer, effect.source.worker)
                self.wires.setdefault(wire, deque()).append(effect.message)
            case MapArena():
                memory = self.memories.get(
                    SourceKey(effect.source.worker, Incarnation(effect.arena.pid))
                )
                owner = self.nodes[effect.source.worker]
                if memory is None or not owner.alive or owner.memory is not memory:
                    node.posted.append(SourceLost(effect.source, LOST))
                else:
                    node.arenas[effect.source] = memory
                    node.posted.append(PathChosen(effect.source, "ipc", "self_test"))
            case CloseSource():
                if node.links.get(effect.source.worker) == effect.source:
                    del node.links[effect.source.worker]
                    self.wires.pop((node.peer, effect.source.worker), None)
            case Copy():
                node.jobs.append(effect)
            case Exit():
                node.alive = False

    def _run_layer(self, node: Node) -> None:
        step = node.running
        assert step is not None
        if self.choose(700) == 1:
            node.running = None
            self.handle(node, StepFailed(step.step, BROKEN))
            return
        for item in step.batch.sequences:
            self._write(node, item)
        node.layer += 1
        if step.announce and self.choose(2) == 0:
            self.handle(node, LayersWritten(step.step, node.layer))

    def _end_step(self, node: Node) -> None:
        step = node.running
        assert step is not None
        node.running = None
        self.handle(node, StepDone(step.step, self._result(node, step), self.now))

    def _write(self, node: Node, item: SequenceInput) -> None:
        for offset, token in enumerate(item.tokens):
            position = item.start + offset
            before = 0
            if position:
                before = node.memory.read(node.layer, item.block_table, position - 1)
            value = hash((node.layer, before, token))
            node.memory.write(node.layer, item.block_table, position, value)

    def _result(self, node: Node, step: RunStep) -> StepResult:
        sampled: list[Sampled] = []
        failed: list[tuple[int, ErrorPayload]] = []
        for item in step.batch.sequences:
            if self.choose(700) == 1:
                failed.append((item.key, ErrorPayload(code="numerical", message="NaN")))
                del node.seeds[item.key]
                continue
            if item.sample:
                end = item.start + len(item.tokens)
                seen = tuple(
                    node.memory.read(layer, item.block_table, position)
                    for layer in range(LAYERS)
                    for position in reach(node.windows, layer, end)
                )
                token = hash((node.seeds[item.key], seen)) % VOCAB
                sampled.append(Sampled(item.key, token))
        return StepResult(sampled=tuple(sampled), failed=tuple(failed))

    def _copy(self, node: Node) -> None:
        job = node.jobs.popleft()
        source = node.arenas.get(job.source)
        if source is None:
            self.handle(node, CopyFailed(job.job, LOST))
            return
        for layer in range(job.first_layer, job.end_layer):
            for index, (theirs, ours) in enumerate(
                zip(job.source_blocks, job.target_blocks, strict=True)
            ):
                count = min(4, job.tokens - 4 * index)
                assert count > 0, "a block without tokens is asked for"
                node.memory.values[layer][ours][:count] = source.values[layer][theirs][:count]
            node.blocks_copied += len(job.source_blocks)
        node.copied.append(job)

    def _verify(self, node: Node) -> None:
        job = node.copied.popleft()
        source = node.arenas[job.source]
        now = tuple(source.generations[block] for block in job.source_blocks)
        reused = sum(a != b for a, b in zip(now, job.generations, strict=True))
        if reused or self.choose(80) == 1:
            self.handle(node, CopyFailed(job.job, LOST, reused))
        else:
            self.handle(node, Copied(job.job, 1, 0.0))

    def _deliver(self, wire: tuple[bytes, WorkerId]) -> None:
        message = self._next(self.wires[wire])
        node = self.nodes[wire[1]]
        if message is not None and node.alive:
            self.handle(node, ReaderSaid(wire[0], message))

    def _deliver_back(self, wire: tuple[WorkerId, bytes]) -> None:
        message = self._next(self.back[wire])
        name, peer = wire
        reader = next((n for n in self.nodes.values() if n.peer == peer and n.alive), None)
        if reader is None or name not in reader.links:
            if self.nodes[name].alive:
                self.handle(self.nodes[name], ReaderLost(peer))
        elif message is not None:
            self.handle(reader, SourceSaid(reader.links[name], message))

    def _next(self, messages: "deque[Message]") -> "Message | None":
        """Take the next message off a wire, if it does not get lost, doubled or overtaken."""
        fate = self.choose(80)
        if fate == 1:
            self.harm["lost"] += 1
            messages.popleft()
            return None
        if fate == 2:
            self.harm["doubled"] += 1
            return messages[0]
        if fate == 3 and len(messages) > 1:
            self.harm["overtaken"] += 1
            messages.rotate(-1)
        return messages.popleft()


Message = FromDecode | ToDecode
