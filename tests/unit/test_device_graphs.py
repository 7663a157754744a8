"""Decode graphs without a GPU: sizes, filling up, fixed memory, and what cannot be recorded."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from shared.device.cpu import CpuDevice
from shared.device.cuda import CudaDevice
from shared.device.cuda_memory import CupyMemory
from shared.device.device import Graph
from shared.engine.batch import SequenceInput
from shared.engine.device.announcer import Announcer
from shared.engine.device.buffers import StepTensors, graph_shape, pack, shape_of, tensors
from shared.engine.device.graphs import DecodeGraphs, buckets_up_to
from shared.engine.step import PackedStep
from shared.kernels.gpu.plan import TILE_ROWS, plan_of, work_of
from tests.unit.fake_cupy import FakeCupy, FakeRuntime, view

BLOCK, BLOCKS, COLUMNS = 4, 40, 6
SCRATCH = BLOCKS - 1


class FakeGraph:
    """Does the recorded work again, with what its memory holds by then."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class FakeRecorder(CpuDevice):
    """A device that records; ``fails`` is what it says instead."""

    fails: str | None = None

    def record(self, work: Callable[[], None]) -> Graph | None:
        if self.fails is not None:
            raise RuntimeError(self.fails)
        return FakeGraph(work)


def step_of(*parts: tuple[int, int, tuple[int, ...]]) -> PackedStep:
    """Return a step of (first position, tokens, block table) per sequence."""
    sequences = [
        SequenceInput(i, tuple(range(10 * i + 1, 10 * i + 1 + count)), start, table, sample=True)
        for i, (start, count, table) in enumerate(parts)
    ]
    tables = [np.array(table, dtype=np.int64) for _, _, table in parts]
    return PackedStep(sequences, tables, BLOCK)


DECODES = step_of((0, 1, (3,)), (7, 1, (5, 6)), (21, 1, (9, 8, 7, 10, 11, 12)))


def graphs_over(
    recorder: FakeRecorder, sizes: tuple[int, ...] = (1, 2, 4)
) -> tuple[DecodeGraphs, list[StepTensors]]:
    """Return recorded graphs and the steps they have seen; a row's logits name its inputs."""
    seen: list[StepTensors] = []

    def forward(step: StepTensors) -> torch.Tensor:
        seen.append(step)
        plan = step.plan
        first = plan.tables[0, plan.decodes.long()]
        return torch.stack((step.token_ids[0], step.positions[0], step.slots, first), 1).float()

    graphs = DecodeGraphs(recorder, sizes, columns=COLUMNS, block_size=BLOCK, scratch=SCRATCH)
    graphs.record(forward, lambda n: torch.full((n,), -1, dtype=torch.int32))
    return graphs, seen


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (5, (1, 2, 4, 5)),
        (32, (1, 2, 4, 8, 16, 32)),
        (64, (1, 2, 4, 8, 16, 32, 64)),
        (100, (1, 2, 4, 8, 16, 32, 64, 100)),
    ],
)
def test_sizes_double_and_end_with_the_most(most: int, sizes: tuple[int, ...]) -> None:
    assert buckets_up_to(most) == sizes


def test_a_step_runs_in_the_smallest_graph_that_holds_it() -> None:
    graphs, _ = graphs_over(FakeRecorder())
    sizes = []
    for count in range(1, 6):
        step = step_of(*((3, 1, (i,)) for i in range(count)))
        sizes.append(graphs.size_for(step, work_of(step.batch, BLOCKS, BLOCK)))
    assert sizes == [1, 2, 4, 4, None]


def test_chunks_and_long_tables_run_without_a_graph() -> None:
    """A graph's shapes are fixed: a step of any other shape must not reach it."""
    graphs, _ = graphs_over(FakeRecorder())
    mixed = step_of((3, 1, (1,)), (0, 2, (2,)))
    assert graphs.size_for(mixed, work_of(mixed.batch, BLOCKS, BLOCK)) is None
    wide = step_of((3, 1, tuple(range(COLUMNS + 1))))
    assert graphs.size_for(wide, work_of(wide.batch, BLOCKS, BLOCK)) is None


def test_rows_that_fill_up_touch_the_scratch_block_only() -> None:
    """A filler row that wrote to slot 0 would corrupt the sequence that owns block 0."""
    graphs, seen = graphs_over(FakeRecorder())
    host = torch.full((graphs.buffer_size(),), 99, dtype=torch.int32)
    logits = graphs.run(4, DECODES, host)
    assert logits.tolist() == [[1, 0, 12, 3], [11, 7, 27, 5], [21, 21, 49, 9]]
    step = seen[-1]
    assert step.slots[3:].tolist() == [SCRATCH * BLOCK]
    assert step.plan.tables[:, 3].tolist() == [SCRATCH] * COLUMNS
    assert step.plan.context.tolist() == [1, 8, 22, 1]
    assert step.plan.query_start.tolist() == [0, 1, 2, 3, 4]
    assert step.plan.decodes.tolist() == [0, 1, 2, 3]
    assert step.plan.longest == COLUMNS * BLOCK


def test_a_smaller_step_leaves_nothing_of_the_one_before() -> None:
    """A row of the last step still in the buffer would write over its sequence's newest KV."""
    graphs, seen = graphs_over(FakeRecorder())
    host = torch.zeros(graphs.buffer_size(), dtype=torch.int32)
    graphs.run(4, DECODES, host)
    graphs.run(4, step_of((2, 1, (30,)), (3, 1, (31,)), (4, 1, (32, 33))), host)
    step = seen[-1]
    assert step.slots.tolist() == [122, 127, 132, SCRATCH * BLOCK]
    assert step.plan.tables[:2, 2:].tolist() == [[32, SCRATCH], [33, SCRATCH]]


def test_recording_itself_writes_to_the_scratch_block_only() -> None:
    _, seen = graphs_over(FakeRecorder())
    for step in seen:
        assert set(step.slots.tolist()) == {SCRATCH * BLOCK}
        assert set(step.plan.tables.reshape(-1).tolist()) == {SCRATCH}


def test_a_graph_reads_and_writes_the_memory_it_was_recorded_with() -> None:
    """Replay knows addresses only: inputs copied elsewhere would decode the last step again."""
    graphs, seen = graphs_over(FakeRecorder(), (2,))
    host = torch.zeros(graphs.buffer_size(), dtype=torch.int32)
    first = graphs.run(2, step_of((3, 1, (1,))), host)
    second = graphs.run(2, step_of((3, 1, (2,))), host)
    assert len({step.slots.data_ptr() for step in seen}) == 1
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("device", [CpuDevice(), FakeRecorder()])
def test_without_recording_steps_run_without_graphs(
    device: FakeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that asks the device a question in every step cannot be recorded, but runs."""
    if isinstance(device, FakeRecorder):
        device.fails = "operation not permitted when stream is capturing"
    graphs, _ = graphs_over(device)
    assert graphs.sizes == ()
    assert graphs.size_for(DECODES, work_of(DECODES.batch, BLOCKS, BLOCK)) is None
    assert ("kernel by kernel" in caplog.text) is isinstance(device, FakeRecorder)


def test_one_buffer_holds_all_of_a_step() -> None:
    """Every part where the views look for it, for chunks, decodes and unequal tables."""
    step = step_of((5, 1, (1, 2)), (0, TILE_ROWS + 1, tuple(range(3, 20))), (2, 3, (20, 21)))
    work = work_of(step.batch, BLOCKS, BLOCK)
    shape = shape_of(step, work)
    buffer = np.full(shape.size + 5, 77, dtype=np.int32)
    assert pack(buffer, shape, step, work) == shape.size
    assert (buffer[shape.size :] == 77).all()
    found = tensors(torch.from_numpy(buffer), shape, work.longest)
    expected = plan_of(step.batch, BLOCKS, BLOCK)
    assert torch.equal(found.token_ids, step.token_ids)
    assert torch.equal(found.positions, step.positions)
    assert torch.equal(found.slots, step.slots)
    for name in ("tables", "query_start", "context", "decodes", "tiles"):
        assert torch.equal(getattr(found.plan, name), getattr(expected, name)), name
    parts = (found.token_ids, found.positions, found.slots, found.plan.tables, found.plan.tiles)
    assert {(part.data_ptr() - buffer.ctypes.data) % 16 for part in parts} == {0}
    assert expected.decodes.tolist() == [0]
    assert expected.tiles.tolist() == [[1, 0], [1, TILE_ROWS], [2, 0]]
    assert expected.longest == 6


@pytest.mark.parametrize(
    ("table", "sentence"),
    [((BLOCKS,), "outside the pool"), ((-1,), "outside the pool"), ((1,), "shorter than")],
)
def test_batches_that_would_leave_the_pool_are_refused(
    table: tuple[int, ...], sentence: str
) -> None:
    """On a GPU a wrong block is another request's memory, and no signal."""
    start = 4 if sentence == "shorter than" else 3
    step = step_of((start, 1, table))
    with pytest.raises(RuntimeError, match=sentence):
        work_of(step.batch, BLOCKS, BLOCK)


def test_the_graphs_buffer_fits_the_largest_step() -> None:
    graphs, _ = graphs_over(FakeRecorder())
    assert graphs.buffer_size() == graph_shape(4, COLUMNS).size == 12 + 4 + 8 + 4 + 24


class FakeEvent:
    def __init__(self) -> None:
        self.done = False
        self.waited = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited = self.done = True


def test_layers_are_told_in_order_and_only_once_written() -> None:
    """A peer that copies a layer told too early gets what was there before."""
    events = [FakeEvent() for _ in range(4)]
    marks = iter(events)
    told: list[int] = []
    announcer = Announcer(told.append, lambda: next(marks))
    announcer.written(0)
    announcer.written(1)
    assert told == []
    events[1].done = True  # layer 0 is still on its way
    announcer.written(2)
    assert told == []
    events[0].done = True
    announcer.written(3)
    assert told == [0, 1]
    announcer.finish()
    assert told == [0, 1, 2, 3]
    assert [event.waited for event in events] == [False, False, True, True]


def test_a_failed_recording_leaves_the_current_stream_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards steps on the capture's stream ever after: torch throws before it leaves it."""
    streams = ["default"]

    class Capture:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> None:
            streams.append("capture")

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    stand_ins = {
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": object,
        "synchronize": lambda place: None,
        "current_stream": lambda place: streams[-1],
        "set_stream": streams.append,
        "graph": Capture,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    memory = CupyMemory(FakeCupy(FakeRuntime()), 0, view, sliced=False)
    with pytest.raises(RuntimeError, match="previous error"):
        CudaDevice(0, memory, "fake", "unit").record(lambda: None)
    assert streams == ["default", "capture", "default"]
