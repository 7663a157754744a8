"""Transformers' layers on a device: prompts launched eagerly, decodes as recorded graphs."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from shared.device.device import Device, Event
from shared.engine.attention import Kernels, LayerPool, PagedForward
from shared.engine.batch import SequenceInput
from shared.engine.device.announcer import Announcer
from shared.engine.device.buffers import StepTensors, pack, shape_of, tensors
from shared.engine.device.graphs import DecodeGraphs, buckets_up_to
from shared.engine.loading import HfModel
from shared.engine.runner import Logits
from shared.engine.step import OnLayer, PackedStep
from shared.errors import ResourceMissing
from shared.kernels.gpu.plan import Plan, work_of
from shared.kv.layout import KvLayout


class DeviceRunner:
    """See ``ModelRunner``. Pools are on the device; steps and logits are in ordinary memory."""

    def __init__(
        self, model: HfModel, layout: KvLayout, device: Device, kernels: Kernels[Plan], name: str
    ) -> None:
        self.name = f"transformers layers, {name}"
        self._model = model
        self._layout = layout
        self._device = device
        self._kernels = kernels
        self._writes = [layout.owner(i) == i for i in range(len(layout.layers))]
        self._pools: list[LayerPool] = []
        self._host = device.host_buffer(1)
        self._flat = self._host.to(device.place)
        self._uploaded: Event = device.event()
        self._graphs: DecodeGraphs | None = None

    def attach(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        """Use these pools, or copies where they are not on the device; recorded graphs are gone.

        Small ones that only a check writes to come from ordinary memory.
        """
        self._device.synchronise()
        self._graphs = None
        there = {id(pool): pool.to(self._device.place) for pool in (*k, *v)}  # shared stay shared
        self._pools = [
            LayerPool(there[id(k_pool)], there[id(v_pool)], writes=writes)
            for k_pool, v_pool, writes in zip(k, v, self._writes, strict=True)
        ]

    def rehearse(self, rows: int, max_model_len: int) -> None:
        """Run a step of prompts of ``rows`` tokens in all, the most there will be, in scratch.

        Kernels are compiled and memory is found to be short now, and not in a request.

        Raises:
            ResourceMissing: the step does not fit into the device's memory.
        """
        block_size, scratch = self._layout.block_size, self._pools[0].k.shape[0] - 1
        lengths = [min(max_model_len, rows - low) for low in range(0, rows, max_model_len)]
        sequences = [SequenceInput(i, (0,) * n, 0, (), False) for i, n in enumerate(lengths)]
        tables = [np.full(-(-n // block_size), scratch, dtype=np.int64) for n in lengths]
        try:
            with torch.inference_mode():
                self.logits(PackedStep(sequences, tables, block_size), torch.tensor([rows - 1]))
        except torch.OutOfMemoryError as error:
            raise ResourceMissing(
                f"a step of {rows} tokens does not fit into the memory of {self._device.place} "
                "beside weights and KV; lower `kv_memory` or `max_batch_tokens`"
            ) from error

    def record(self, most: int, max_model_len: int) -> tuple[int, ...]:
        """Record decodes of up to ``most`` sequences; return the batch sizes that have a graph.

        To be called once, after ``attach``, before the first step: the last block of the pools
        must be nobody's.
        """
        block_size = self._layout.block_size
        graphs = DecodeGraphs(
            self._device,
            buckets_up_to(most),
            columns=-(-max_model_len // block_size),
            block_size=block_size,
            scratch=self._pools[0].k.shape[0] - 1,
        )
        self._reserve(graphs.buffer_size())
        with torch.inference_mode():
            done = graphs.record(
                lambda step: self._forward(step, None),
                lambda count: torch.zeros(count, dtype=torch.int32, device=self._device.place),
            )
        self._graphs = graphs if done else None
        return graphs.sizes

    def logits(
        self, step: PackedStep, keep: torch.Tensor, on_layer: OnLayer | None = None
    ) -> Logits:
        """Run the model once; fp32 logits in ordinary memory."""
        work = work_of(step.batch, self._pools[0].k.shape[0], self._layout.block_size)
        self._uploaded.synchronize()  # the last step's inputs have left the host buffer
        size = None if self._graphs is None else self._graphs.size_for(step, work)
        if self._graphs is not None and size is not None:
            rows = self._graphs.run(size, step, self._host)
            self._uploaded = self._device.event()
            return Logits(self._of_graph(rows, keep, on_layer))
        shape = shape_of(step, work)
        self._reserve(shape.size)
        used = pack(self._host.numpy(), shape, step, work)
        self._device.upload(self._host[:used], self._flat[:used])
        self._uploaded = self._device.event()
        announcer = None if on_layer is None else Announcer(on_layer, self._device.event)
        written = None if announcer is None else announcer.written
        there = tensors(self._flat, shape, work.longest, step.batch)
        logits = self._forward(there, written, keep.to(self._device.place))
        if announcer is not None:
            announcer.finish()
        return Logits(self._device.download(logits.float()))

    def _of_graph(
        self, rows: torch.Tensor, keep: torch.Tensor, on_layer: OnLayer | None
    ) -> torch.Tensor:
        """Return the rows asked for. A graph says nothing until all of it is done."""
        if not torch.equal(keep, torch.arange(len(rows))):
            rows = rows[keep.to(self._device.place)]
        logits = self._device.download(rows.float())
        if on_layer is not None:
            for layer in range(len(self._pools)):
                on_layer(layer)
        return logits

    def _forward(
        self,
        step: StepTensors,
        written: Callable[[int], None] | None,
        keep: torch.Tensor | int = 0,
    ) -> torch.Tensor:
        """Launch the model; ``keep`` 0 are all rows."""
        logits: torch.Tensor = self._model(
            input_ids=step.token_ids.long(),
            position_ids=step.positions.long(),
            use_cache=False,
            logits_to_keep=keep,
            paged_forward=PagedForward(self._kernels, step.plan, step.slots, self._pools, written),
        ).logits[0]
        return logits

    def _reserve(self, count: int) -> None:
        if self._host.shape[0] < count:
            self._host = self._device.host_buffer(count)
            self._flat = torch.zeros(count, dtype=torch.int32, device=self._device.place)
