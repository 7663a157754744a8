"""Decides which sequences hold blocks and which tokens the next engine step computes.

Decodes go first, one token each; prompt chunks fill the rest of the token budget, so long
prompts never stall running streams (Sarathi-Serve). Admission keeps blocks for the growth of
what runs already, and when blocks run out all the same the youngest is preempted and computed
again later. The oldest always progresses.
"""

from bisect import insort
from collections.abc import Callable

from msgspec import Struct

from shared.worker.ledger import BlockLedger
from shared.worker.limits import Tally, WorkerLimits
from shared.worker.sequence import Sequence

GROWTH_TOKENS = 64
"""Output tokens per running sequence for which admission keeps blocks."""


class Chunk(Struct, frozen=True):
    """Tokens [``start``, ``start + count``) of a sequence; ``sample`` the token after them."""

    sequence: Sequence
    start: int
    count: int
    sample: bool


class Scheduler:
    """Queue, running and receiving sequences, each list oldest first.

    ``drop_pull`` takes the blocks of a receiving sequence back; its KV stays with the source.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        limits: WorkerLimits,
        tally: Tally,
        drop_pull: Callable[[Sequence], None],
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._tally = tally
        self._drop_pull = drop_pull
        self.waiting: list[Sequence] = []
        self.receiving: list[Sequence] = []
        self.running: list[Sequence] = []
        self.exhausted: list[Sequence] = []
        self.preempted: list[Sequence] = []

    def enqueue(self, sequence: Sequence) -> None:
        """Queue by seniority for blocks and a place."""
        sequence.phase = "waiting"
        insort(self.waiting, sequence, key=_order)

    def start(self, sequence: Sequence) -> None:
        """Let a sequence whose KV has arrived decode."""
        self.receiving.remove(sequence)
        sequence.phase = "running"
        insort(self.running, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; its blocks are the caller's business."""
        for group in (self.waiting, self.receiving, self.running):
            if sequence in group:
                group.remove(sequence)

    def admit(self, *, compute: bool) -> list[Sequence]:
        """Give blocks to queued sequences; return those that may receive KV now.

        ``compute`` False leaves those that need the engine for the next planning, where they
        find what the running step adds to the prefix cache.
        """
        receiving: list[Sequence] = []
        backlog = sum(s.pending for s in self.running if s.pending > 1)
        for sequence in list(self.waiting):
            if len(self.running) + len(self.receiving) >= self._limits.max_sequences:
                break
            pulls = sequence.kind == "expect"
            if not pulls and (not compute or backlog >= self._limits.max_batch_tokens):
                continue
            if not self._ledger.place(sequence, self._spare(sequence)):
                break
            self.waiting.remove(sequence)
            if pulls:
                sequence.phase = "receiving"
                insort(self.receiving, sequence, key=_order)
                receiving.append(sequence)
                continue
            sequence.phase = "running"
            insort(self.running, sequence, key=_order)
            backlog += sequence.pending
        return receiving

    def compose(self) -> list[Chunk]:
        """Return the work of the next step.

        ``exhausted`` then holds what can never go on, ``preempted`` what gave its blocks up.
        """
        budget = self._limits.max_batch_tokens
        chunks: list[Chunk] = []
        for sequence in list(self.running):
            if budget == 0:
                break
            if sequence.phase == "running" and sequence.pending == 1 and self._grow(sequence):
                chunks.append(Chunk(sequence, sequence.computed, 1, True))
                budget -= 1
        for sequence in self.running:
            if budget == 0:
                break
            if sequence.pending > 1:
                count = min(budget, sequence.pending)
                chunks.append(Chunk(sequence, sequence.computed, count, count == sequence.pending))
                budget -= count
        return chunks

    def pending_prefill(self) -> int:
        """Return the prompt tokens that are still to be computed here."""
        queued = sum(len(s.tokens) for s in self.waiting if s.kind != "expect")
        return queued + sum(s.pending for s in self.running if s.pending > 1)

    def check(self, sequences: list[Sequence]) -> None:
        """Each open sequence is queued where its phase says. Raises ``AssertionError``."""
        for phase, group in (
            ("waiting", self.waiting),
            ("receiving", self.receiving),
            ("running", self.running),
        ):
            orders = [s.order for s in group]
            assert orders == sorted(set(orders)), f"the {phase} ones are not oldest first"
            assert set(orders) == {s.order for s in sequences if s.phase == phase}, (
                f"the {phase} ones are not those in that phase"
            )
        places = len(self.running) + len(self.receiving)
        assert places <= self._limits.max_sequences, "more sequences are placed than allowed"

    def _spare(self, candidate: Sequence) -> int:
        """Blocks to leave for growth: all when alone would only mean never to start."""
        others = self.running + self.receiving
        if not others:
            return 0
        growth = sum(self._growth(s) for s in others) + self._growth(candidate)
        return min(growth, self._ledger.pool.num_blocks // 2)

    def _growth(self, sequence: Sequence) -> int:
        if sequence.kind == "prefill":
            return 0
        end = min(
            len(sequence.tokens) + GROWTH_TOKENS,
            sequence.prompt_tokens + sequence.request.sampling.max_tokens,
            self._limits.max_model_len,
        )
        held = len(sequence.blocks) or self._ledger.needed(len(sequence.tokens))
        return max(0, self._ledger.needed(end) - held)

    def _grow(self, sequence: Sequence) -> bool:
        """Get the block its next token needs; False leaves it out of this step."""
        while not self._ledger.grow(sequence):
            if self._ledger.held:  # a finished copy gives blocks back in a moment
                return False
            victim = self._youngest_after(sequence)
            if victim is None:
                if len(self.running) + len(self.receiving) == 1 and not self._others_hold():
                    self.exhausted.append(sequence)
                return False
            self._preempt(victim)
        return True

    def _others_hold(self) -> bool:
        return self._ledger.pool.stats().leased > 0

    def _youngest_after(self, sequence: Sequence) -> Sequence | None:
        """A prefill is no victim: its reader copies from these very blocks, and it ends soon."""
        for group in (self.receiving, self.running):
            group_youngest = [s for s in group if s.kind != "prefill" and s.order > sequence.order]
            if group_youngest:
                return group_youngest[-1]
        return None

    def _preempt(self, victim: Sequence) -> None:
        self._tally.preemptions += 1
        self.preempted.append(victim)
        if victim.phase == "receiving":
            self.receiving.remove(victim)
            self._drop_pull(victim)
        else:
            self.running.remove(victim)
            self._ledger.release(victim)
            victim.kind = "run"
        if self._ledger.needed(len(victim.tokens)) > self._ledger.pool.num_blocks:
            self.exhausted.append(victim)
        self.enqueue(victim)


def _order(sequence: Sequence) -> int:
    return sequence.order
