"""Slots, groups and masks of a packed step, against the definition."""

import random

import numpy as np
import pytest
import torch

from shared.engine.batch import SequenceInput
from shared.engine.step import PackedStep

BLOCK = 4


def build(spans: list[tuple[int, int]], seed: int = 0) -> tuple[PackedStep, list[list[int]]]:
    """Pack sequences that run positions [start, end); tables are disjoint and shuffled."""
    blocks = list(range(400))
    random.Random(seed).shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-end // BLOCK))] for _, end in spans]
    sequences = [
        SequenceInput(i, tuple(range(start, end)), start, tuple(tables[i]), False)
        for i, (start, end) in enumerate(spans)
    ]
    arrays = [np.array(table, dtype=np.int64) for table in tables]
    return PackedStep(sequences, arrays, BLOCK, torch.float32), tables


def slot(table: list[int], position: int) -> int:
    return table[position // BLOCK] * BLOCK + position % BLOCK


SPANS = [(0, 5), (16, 17), (3, 11), (0, 1), (40, 41), (63, 64), (7, 8), (20, 28)]


def test_rows_carry_their_own_token_position_and_slot() -> None:
    """A row that writes to another's slot corrupts it."""
    step, tables = build(SPANS)
    seen = set()
    for packed, original in enumerate(step.order):
        start, end = SPANS[original]
        rows = slice(step.rows[packed], step.rows[packed + 1])
        assert step.token_ids[0, rows].tolist() == list(range(start, end))
        assert step.positions[0, rows].tolist() == list(range(start, end))
        assert step.slots[rows].tolist() == [slot(tables[original], p) for p in range(start, end)]
        seen.add(original)
    assert seen == set(range(len(SPANS)))
    assert len(set(step.slots.tolist())) == step.slots.numel()


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 17, 64, 1000])
def test_every_query_sees_exactly_its_context(window: int | None) -> None:
    """A window counts the query itself: position p sees (p - window, p]."""
    step, tables = build(SPANS)
    plan = step.plan(window)
    assert step.plan(window) is plan
    visible: dict[int, list[int]] = {}
    for group in plan.decodes:
        slots = group.slots.view(group.last - group.first, group.length)
        for row in range(group.first, group.last):
            line = slots[row - group.first]
            mask = (
                torch.zeros(group.length) if group.mask is None else group.mask[row - group.first]
            )
            visible[row] = line[mask.view(-1) == 0].tolist()
            own = {slot(tables[step.order[row]], p) for p in range(SPANS[step.order[row]][1])}
            assert set(line.tolist()) <= own, "padding stays inside the sequence"
    for chunk in plan.chunks:
        count = chunk.last - chunk.first
        slots = step.slots[chunk.first : chunk.last] if chunk.slots is None else chunk.slots
        mask = torch.full((count, len(slots)), -torch.inf).triu(1)
        if chunk.mask is not None:
            mask = chunk.mask
        for i in range(count):
            visible[chunk.first + i] = slots[mask[i] == 0].tolist()
    for packed, original in enumerate(step.order):
        start, end = SPANS[original]
        for i, position in enumerate(range(start, end)):
            low = 0 if window is None else max(0, position - window + 1)
            expected = [slot(tables[original], p) for p in range(low, position + 1)]
            assert visible[int(step.rows[packed]) + i] == expected


def test_short_contexts_are_not_padded_to_a_long_one() -> None:
    """One long sequence would make every decode gather its length."""
    step, _ = build([(n - 1, n) for n in (1000, 5, 6, 300, 9, 7, 200)])
    groups = step.plan(None).decodes
    gathered = sum(group.slots.numel() for group in groups)
    assert gathered <= 2 * (1000 + 5 + 6 + 300 + 9 + 7 + 200)
    assert [group.first for group in groups[1:]] == [group.last for group in groups[:-1]]
