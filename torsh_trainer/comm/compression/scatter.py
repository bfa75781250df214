"""Compression where gradients are scattered instead of averaged everywhere: FSDP2's seam."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.base import Compressing
from torsh_trainer.comm.compression.elementwise import BF16, FP16
from torsh_trainer.comm.compression.method import Draw
from torsh_trainer.comm.compression.quantised import Int8
from torsh_trainer.comm.compression.wire import Traffic, Wire
from torsh_trainer.errors import Unsupported


class CompressedScatter:
    """Averages gradients of which every rank keeps its part: FSDP2's custom reduce-scatter.

    Values are rounded one by one and sent to the rank that keeps them: in fp16 and bf16 by a
    reduce-scatter in that type, in int8 and int4 by an all-to-all, summed in fp32 where they
    arrive. A unit with fewer than ``min_size`` gradients sends them as they are. Hybrid sharding
    then averages over replicas in fp32, which is counted too.

    Raises:
        Unsupported: the method is not elementwise, or a knob needs whole gradients by name.
    """

    def __init__(self, knobs: Compressing, comm: Communicator, *, seed: int = 0) -> None:
        refuse_whole(knobs)
        self.knobs = knobs
        self._draw = Draw(seed)
        self._wire = Wire(comm)
        self._calls = 0  # within the step

    def advance(self) -> None:
        """An optimizer step has ended."""
        self._draw.step += 1
        self._calls = 0

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent and received to scatter gradients, all told."""
        return self._wire.traffic

    def begin(self, unit: float) -> None:
        """Before a backward; without residuals, the scale of gradients is all one."""

    def expect(self, saved: Mapping[str, Any]) -> None:
        """Before ``template``; there are no tensors, whatever a checkpoint holds."""

    def template(self) -> dict[str, Any]:
        """``state_dict`` for a checkpoint to fill."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """How far it is, in plain values."""
        return {"name": self.knobs.name, "step": self._draw.step}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave, of any method."""
        self._draw.step = int(state.get("step", 0))

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for FSDP2 to put gradients in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """``output_tensor`` becomes this rank's part of the mean (or sum) of ``input_tensor``."""
        assert not async_op, "FSDP2 reduces on a stream of its own"
        self._calls += 1
        self._count_replicas(output_tensor, group)
        small = input_tensor.numel() < self.knobs.min_size
        if self._draw.step < self.knobs.warmup_steps or small:
            self._count(input_tensor.numel() * input_tensor.element_size(), group)
            dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)
            return
        divisor = group.size() if op == dist.ReduceOp.AVG else 1
        if isinstance(self.knobs, Int8):
            self._exchange(output_tensor, input_tensor, group, divisor)
        else:
            self._sum(output_tensor, input_tensor, group, divisor)

    def _sum(self, output: Tensor, value: Tensor, group: Any, divisor: int) -> None:
        dtype = torch.float16 if isinstance(self.knobs, FP16) else torch.bfloat16
        sent = (value / divisor).to(dtype)
        mine = sent.new_empty(output.shape)
        self._count(sent.numel() * 2, group)
        dist.reduce_scatter_single(mine, sent, group=group)
        output.copy_(mine)

    def _exchange(self, output: Tensor, value: Tensor, group: Any, divisor: int) -> None:
        assert isinstance(self.knobs, Int8)
        form, part = self.knobs.format, output.numel()
        size = -(-form.payload_bytes(part) // 8) * 8
        sent = torch.zeros(group.size() * size, dtype=torch.uint8, device=value.device)
        generator = self._draw.generator(value.device, "scatter", self._calls, self._wire.rank)
        for payload, piece in zip(sent.split(size), value.float().split(part), strict=True):
            form.encode(piece, payload[: form.payload_bytes(part)], generator)
        arrived = torch.empty_like(sent)
        self._count(sent.numel(), group)
        dist.all_to_all_single(arrived, sent, group=group)
        total = torch.zeros(part, dtype=torch.float32, device=value.device)
        for payload in arrived.split(size):
            total.add_(form.decode(payload[: form.payload_bytes(part)], part))
        output.copy_(total.div_(divisor).view(output.shape))

    def _count_replicas(self, output: Tensor, group: Any) -> None:
        replicas = self._wire.size // group.size()
        if replicas > 1:
            self._wire.count_sum(output.numel() * output.element_size(), size=replicas)

    def _count(self, nbytes: int, group: Any) -> None:
        self._wire.count_exchange(nbytes, size=group.size())


def refuse_whole(knobs: Compressing) -> None:
    """Refuses what cannot be done to the parts of a sharded gradient.

    Raises:
        Unsupported: names the knob, and what could be done instead.
    """
    if not isinstance(knobs, FP16 | BF16 | Int8):
        raise Unsupported(
            f"strategy=fsdp cannot honour compression={knobs.name}: it scatters gradients in "
            "parts, and that method needs them whole",
            fix="use compression=fp16 or bf16, int8 or int4 with compression.memory=none, or "
            "strategy=ddp",
        )
    if knobs.keeps_residual:
        raise Unsupported(
            "strategy=fsdp cannot honour compression.memory=residual: it would keep a whole "
            "gradient on every rank, which sharding is there to avoid",
            fix="set compression.memory=none, or strategy=ddp",
        )
    if knobs.exclude:
        raise Unsupported(
            "strategy=fsdp cannot honour compression.exclude: a unit's gradients travel as one",
            fix="set compression.exclude=[], or strategy=ddp",
        )
