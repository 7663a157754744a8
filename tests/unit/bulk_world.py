"""Two `host` machines and a pool each, joined by a wire that errs; a tape decides everything."""

import random
from collections import deque

import numpy as np

from shared.errors import ErrorPayload
from shared.kv.layout import KvLayout, LayerKv
from shared.messages.bulk import (
    CancelFetch,
    Chunk,
    Credit,
    Fetch,
    FetchRefused,
    ToReader,
)
from shared.transport.bulk.fetches import Done, Failed, Fetches, FetchLimits, Send
from shared.transport.bulk.payload import Bytes, checksum, land, lift
from shared.transport.bulk.plan import plan_chunks
from shared.transport.bulk.servings import Servings

LAYOUT = KvLayout(
    dtype="bf16",
    block_size=2,
    layers=(LayerKv(1, 4, 4), LayerKv(1, 4, 4), LayerKv(1, 4, 4, shares=0), LayerKv(2, 4, 2)),
)
CHUNK = 64
PEERS = tuple(b"decode-0#1/%d" % lane for lane in range(16))
PEER = PEERS[0]
LOST = ErrorPayload(code="transfer_failed", message="the process ended", retryable=True)


class MemoryPool:
    """A pool in plain memory; ``stamp`` fills a block with bytes only this life of it has."""

    def __init__(self, blocks: int) -> None:
        self.generations = [0] * blocks
        self._raw: list[tuple[Bytes, Bytes]] = []
        for layer in range(len(LAYOUT.layers)):
            if LAYOUT.owner(layer) != layer:
                self._raw.append(self._raw[LAYOUT.owner(layer)])
                continue
            sizes = LAYOUT.k_block_bytes(layer), LAYOUT.v_block_bytes(layer)
            k, v = (np.zeros((blocks, size), dtype=np.uint8) for size in sizes)
            self._raw.append((k, v))

    def raw(self, layer: int) -> tuple[Bytes, Bytes]:
        return self._raw[layer]

    def stamp(self, block: int) -> None:
        self.generations[block] += 1
        canary = random.Random(block << 32 | self.generations[block])
        for k, v in self._raw:
            for part in (k, v):
                part[block] = np.frombuffer(canary.randbytes(part.shape[1]), dtype=np.uint8)

    def content(self, block: int) -> bytes:
        return b"".join(part[block].tobytes() for pair in self._raw for part in pair)


class Wire:
    """One reader and one source at a time; the source may be replaced by its next life.

    What travels over a connection that is ``cut`` is lost.
    """

    def __init__(self, tape: list[int], limits: FetchLimits, blocks: int = 24) -> None:
        self._tape = deque(tape)
        self.limits = limits
        self.now = 10.0
        self.life = 1
        self.blocks = blocks
        self.theirs = MemoryPool(blocks)
        self.ours = MemoryPool(blocks)
        self.reader: Fetches[int] = Fetches(limits)
        self.server = Servings(LAYOUT, blocks, self.life)
        self.up: deque[Send[int]] = deque()
        self.down: deque[tuple[bytes, ToReader, list[memoryview]]] = deque()
        self.cut: set[bytes] = set()
        self.wanted: dict[int, tuple[Fetch, tuple[int, ...], list[bytes]]] = {}
        self.outcomes: dict[int, Done | Failed] = {}
        self.most_down = 0
        self._job = 0

    @property
    def ended(self) -> bool:
        return not self._tape

    def choose(self, options: int) -> int:
        return self._tape.popleft() % options if self._tape else 0

    def begin(self, source: list[int], target: list[int], layers: range) -> int:
        """Ask for fresh blocks and remember what they hold at this moment."""
        self._job += 1
        for block in source:
            self.theirs.stamp(block)
        fetch = Fetch(
            job=self._job,
            attempt=0,
            arena=self.life,
            first_layer=layers.start,
            end_layer=layers.stop,
            blocks=tuple(source),
            generations=tuple(self.theirs.generations[b] for b in source),
            chunk_bytes=CHUNK,
            need=(),
            credit=0,
        )
        plan = plan_chunks(LAYOUT, layers, len(source), CHUNK)
        told = [self.theirs.content(block) for block in source]
        self.wanted[self._job] = (fetch, tuple(target), told)
        self.reader.begin(self.life, fetch, len(plan), self.now)
        self._carry_out()
        return self._job

    def restart(self) -> None:
        """The source dies and comes back at the same address with another pool."""
        former, self.life = self.life, self.life + 1
        self.theirs = MemoryPool(self.blocks)
        self.server = Servings(LAYOUT, self.blocks, self.life)
        if self.choose(2):
            self.down.clear()
        if self.choose(2):
            self.reader.lost(former, LOST, self.now)
        self._carry_out()

    def step(self) -> bool:
        """Let one thing on the wire happen; False when nothing can."""
        moves = []
        if self.up:
            moves.append(self._deliver_up)
        if self.down:
            moves.append(self._deliver_down)
        if self.server.sendable:
            moves.append(self._send)
        if moves:
            moves[self.choose(len(moves))]()
            self.reader.check()
        return bool(moves)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.server.expire(self.now)
        self.reader.tick(self.now)
        self._carry_out()
        self.reader.check()

    def _deliver_up(self) -> None:
        sent = self.up.popleft()
        message, peer = sent.message, PEERS[sent.lane]
        fate = self.choose(40)
        if fate == 1 or peer in self.cut:
            return
        if fate == 2:
            self.up.appendleft(sent)
        match message:
            case Fetch():
                refusal = self.server.fetch(peer, message, self.now)
                if refusal is not None:
                    self.down.append((peer, refusal, []))
            case Credit():
                self.server.credit(peer, message, self.now)
            case CancelFetch():
                self.server.cancel(peer, message)

    def _send(self) -> None:
        item = self.server.next()
        if item is None:
            return
        fetch = item.fetch
        # Views: as with libzmq, the bytes may change between the checksum and the wire.
        frames = lift(self.theirs, item.chunk, fetch.blocks, zero_copy=1)
        digest = checksum(frames)
        pairs = zip(item.blocks, item.told, strict=True)
        reused = sum(self.theirs.generations[block] != told for block, told in pairs)
        if reused:
            self.server.drop(item.peer, fetch.job)
            refusal = FetchRefused(
                job=fetch.job,
                attempt=fetch.attempt,
                reason="generation",
                message="used anew",
                reused=reused,
            )
            self.down.append((item.peer, refusal, []))
            return
        header = Chunk(
            job=fetch.job,
            attempt=fetch.attempt,
            index=item.index,
            size=item.chunk.size,
            checksum=digest,
        )
        self.down.append((item.peer, header, frames))
        self.most_down = max(self.most_down, len(self.down))

    def _deliver_down(self) -> None:
        peer, message, frames = self.down.popleft()
        if peer in self.cut:
            return
        match self.choose(60):
            case 1:
                return
            case 2:
                self.down.appendleft((peer, message, frames))
            case 3 if self.down:
                self.down.append((peer, message, frames))
                return
            case 4 if frames:
                spoiled = bytearray(frames[0])
                spoiled[self.choose(len(spoiled))] ^= 1
                frames = [memoryview(spoiled), *frames[1:]]
            case 5 if frames:
                frames = [frames[0][:-1], *frames[1:]]
            case _:
                pass
        if isinstance(message, Chunk):
            self._take(message, frames)
        elif isinstance(message, FetchRefused):
            self.reader.refused(self._life_of(message.job), message, self.now)
        self._carry_out()

    def _life_of(self, job: int) -> int:
        return self.wanted[self.reader.job_of(job)][0].arena

    def _take(self, header: Chunk, frames: list[memoryview]) -> None:
        job, attempt, index = header.job, header.attempt, header.index
        if not self.reader.wants(self._life_of(job), job, index):
            self.reader.arrived(self._life_of(job), job, attempt, self.now)
            return
        fetch, target, _ = self.wanted[self.reader.job_of(job)]
        layers = range(fetch.first_layer, fetch.end_layer)
        chunk = plan_chunks(LAYOUT, layers, len(target), CHUNK)[index]
        if sum(map(len, frames)) != chunk.size:
            self.reader.bad(job, attempt, index, "came short", self.now)
        elif checksum(frames) != header.checksum:
            self.reader.bad(job, attempt, index, "came with a wrong checksum", self.now)
        else:
            land(self.ours, chunk, target, frames)
            self.reader.landed(job, attempt, index, self.now)

    def _carry_out(self) -> None:
        for effect in self.reader.take():
            if isinstance(effect, Done | Failed):
                assert effect.job not in self.outcomes, "a job ended twice"
                self.outcomes[effect.job] = effect
                if isinstance(effect, Done):
                    self._compare(effect.job)
            elif effect.source == self.life:
                self.up.append(effect)

    def _compare(self, job: int) -> None:
        fetch, target, told = self.wanted[job]
        whole = fetch.first_layer == 0 and fetch.end_layer == len(LAYOUT.layers)
        assert not whole or [self.ours.content(block) for block in target] == told, "stale bytes"


def live(seed: int, jobs: int, limits: FetchLimits) -> Wire:
    """Run so many jobs through a bad time, then to their end in peace."""
    dice = random.Random(seed)
    wire = Wire([dice.randrange(2**20) for _ in range(jobs * 24)], limits)
    all_layers = range(len(LAYOUT.layers))
    while wire._job < jobs:
        busy = {b for j, w in wire.wanted.items() if j not in wire.outcomes for b in w[1]}
        free = [block for block in range(wire.blocks) if block not in busy]
        count = min(1 + wire.choose(4), len(free))
        if count:
            source = [wire.choose(wire.blocks)]
            source = [(source[0] + i) % wire.blocks for i in range(count)]
            wire.begin(source, free[:count], all_layers)
        for _ in range(wire.choose(24)):
            wire.step()
        fate = wire.choose(60)
        if fate < 6:
            wire.tick(limits.stall * (0.3, 1.1)[fate % 2])
        elif fate == 6:
            wire.theirs.stamp(wire.choose(wire.blocks))
        elif fate == 7:
            wire.restart()
        elif fate == 8 and limits.sockets > 1:
            wire.cut = {PEERS[wire.choose(limits.sockets)]}
        elif fate < 16:
            wire.cut.clear()
    wire._tape.clear()
    for _ in range(100 * limits.attempts):
        while wire.step():
            pass
        wire.tick(limits.stall)
        if not len(wire.reader):
            break
    return wire
