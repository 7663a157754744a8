"""Rows, slots and block tables of a packed step, against the definition."""

import random

import numpy as np

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
    return PackedStep(sequences, arrays, BLOCK), tables


def slot(table: list[int], position: int) -> int:
    return table[position // BLOCK] * BLOCK + position % BLOCK


SPANS = [(0, 5), (16, 17), (3, 11), (0, 1), (40, 41), (63, 64), (7, 8), (20, 28)]


def test_rows_carry_their_own_token_position_and_slot() -> None:
    """A row that writes to another's slot corrupts it."""
    step, tables = build(SPANS)
    seen = set()
    for original, (start, end) in enumerate(SPANS):
        rows = slice(step.rows[original], step.rows[original + 1])
        assert step.token_ids[0, rows].tolist() == list(range(start, end))
        assert step.positions[0, rows].tolist() == list(range(start, end))
        assert step.slots[rows].tolist() == [slot(tables[original], p) for p in range(start, end)]
        seen.add(original)
    assert seen == set(range(len(SPANS)))
    assert len(set(step.slots.tolist())) == step.slots.numel()


def test_attention_is_told_rows_contexts_and_tables_of_each_sequence() -> None:
    """A context one too long would show a sequence a slot that it has not written."""
    step, tables = build(SPANS)
    batch = step.batch
    assert batch.query_start.tolist() == step.rows.tolist()
    assert batch.context.tolist() == [end for _, end in SPANS]
    for row, table in zip(batch.tables.tolist(), tables, strict=True):
        assert row[: len(table)] == table
    assert batch.positions().tolist() == step.positions[0].tolist()
