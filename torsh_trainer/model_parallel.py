"""Layers cut over the processes of a group, as modules for plain scripts; see docs/parallel.md.

A run of the trainer needs none of them: ``strategy=parallel mesh.tp=2`` cuts the layers of a model
as it is. These are the same layers (``strategies.tensor_parallel``) with names of their own.

Every process of the group makes the same layers, and gives them the same inputs. A layer begins
with the values that the uncut one of torch would draw on the group's first process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.distributed.process_group import Group, resolve
from torsh_trainer.errors import ConfigError
from torsh_trainer.mesh import MeshOptions
from torsh_trainer.strategies.pipeline.orders import check_schedule
from torsh_trainer.strategies.tensor_parallel.functions import own_part
from torsh_trainer.strategies.tensor_parallel.layers import cuts_of, make_forward
from torsh_trainer.strategies.tensor_parallel.plan import Style


class _PartOf(nn.Module):
    """A layer of which this process has a part.

    ``whole`` is the uncut one, whose values the group's first process decides.
    """

    def __init__(self, whole: nn.Module, style: Style, group: Group) -> None:
        super().__init__()
        self._comm: Communicator = resolve(group).communicator()
        self._style = style
        name = type(self).__name__
        self._cuts = cuts_of(whole, style)
        for key, value in whole._parameters.items():
            self.register_parameter(key, None)
            if value is not None:
                self._check_divides(key, value)
        state = {}
        for key, value in whole.state_dict().items():
            sent = self._comm.to_device(value).contiguous()
            self._comm.broadcast(sent)
            state[key] = sent
        self.load_whole(state)
        for key in ("in_features", "out_features", "num_embeddings", "padding_idx"):
            if hasattr(whole, key):  # of the whole layer, as what computes with a part takes them
                setattr(self, key, getattr(whole, key))
        self._compute = make_forward(self, name, style, self._comm, like=whole)

    def forward(self, input: Tensor) -> Tensor:
        """As the uncut layer; see the class."""
        output: Tensor = self._compute(input)
        return output

    @torch.no_grad()
    def load_whole(self, state: Mapping[str, Tensor]) -> None:
        """Takes this process's part of an uncut layer's ``state_dict``."""
        for key, value in state.items():
            cut = self._cuts.get(key)
            own = value if cut is None else own_part(value, self._comm, cut.dim, cut.parts)
            held = self._parameters[key]
            if held is None:
                held = nn.Parameter(own.clone(memory_format=torch.contiguous_format))
                self._parameters[key] = held
            else:
                held.copy_(own)

    @torch.no_grad()
    def gather_whole(self) -> dict[str, Tensor]:
        """The ``state_dict`` of the uncut layer, on every process; collective."""
        return {
            key: self._join(key, held) for key, held in self._parameters.items() if held is not None
        }

    def _check_divides(self, key: str, value: Tensor) -> None:
        cut, size = self._cuts.get(key), self._comm.size
        if cut is None or value.shape[cut.dim] % (size * cut.parts) == 0:
            return
        step = size * cut.parts
        below = value.shape[cut.dim] // step * step
        near = " or ".join(str(n) for n in (below, below + step) if n)
        raise ConfigError(
            f"{type(self).__name__}: dimension {cut.dim} of its {key}, {list(value.shape)}, does "
            f"not divide over {size} processes" + (f" in {cut.parts} parts" * (cut.parts > 1)),
            fix=f"give {near} in the place of {value.shape[cut.dim]}, or a smaller group",
        )

    def _join(self, key: str, held: Tensor) -> Tensor:
        cut = self._cuts.get(key)
        if cut is None:
            return held.detach().clone()
        parts = [
            part.chunk(cut.parts, cut.dim)
            for part in self._comm.all_gather(held.detach().contiguous())
        ]
        return torch.cat([one[i] for i in range(cut.parts) for one in parts], cut.dim)


class ColumnParallelLinear(_PartOf):
    """``nn.Linear``, of whose outputs each process computes its share.

    (..., ``in_features``), the same on all, -> (..., ``out_features``) on each with
    ``gather_output``, else (..., ``out_features`` / processes), for a ``RowParallelLinear``.
    ``parts`` says that the outputs are so many projections of one size, each cut by itself.
    Parameters are ``weight`` (``out_features`` / processes, ``in_features``) and ``bias``.

    Raises:
        BackendNotInitialized: there is no process group.
        ConfigError: ``out_features`` does not divide.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        gather_output: bool = True,
        *,
        parts: int = 1,
        group: Group = None,
    ) -> None:
        kind = "colwise_gather" if gather_output else "colwise"
        super().__init__(nn.Linear(in_features, out_features, bias), Style(kind, parts), group)


class RowParallelLinear(_PartOf):
    """``nn.Linear``, of whose inputs each process multiplies its share; the products are summed.

    (..., ``in_features``) the same on all, or (..., ``in_features`` / processes) from a
    ``ColumnParallelLinear``, -> (..., ``out_features``) on each. Parameters are ``weight``
    (``out_features``, ``in_features`` / processes) and ``bias``, whole.

    Raises:
        BackendNotInitialized: there is no process group.
        ConfigError: ``in_features`` does not divide.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: Group = None
    ) -> None:
        super().__init__(nn.Linear(in_features, out_features, bias), Style("rowwise"), group)


class VocabParallelEmbedding(_PartOf):
    """``nn.Embedding``, of which each process has its share of the words.

    Numbers (...) int64, the same on all, -> (..., ``embedding_dim``) on each.

    Raises:
        BackendNotInitialized: there is no process group.
        ConfigError: ``num_embeddings`` does not divide.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        group: Group = None,
    ) -> None:
        whole = nn.Embedding(num_embeddings, embedding_dim, padding_idx)
        super().__init__(whole, Style("rowwise"), group)


class ParallelAttention(nn.Module):
    """Self-attention, of which each process computes its share of the heads.

    (batch, tokens, ``embed_dim``), the same on all, -> the same shape on each: what
    ``nn.MultiheadAttention(embed_dim, num_heads, dropout, bias, batch_first=True)`` gives for it.
    With ``dropout``, and in training, attention weights are dropped as that one drops them, if the
    generators of all processes are where its would be; scores of all heads are drawn for then, in
    memory too.

    Raises:
        BackendNotInitialized: there is no process group.
        ConfigError: heads do not divide, or ``embed_dim`` does not divide into them.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        group: Group = None,
    ) -> None:
        super().__init__()
        self._comm: Communicator = resolve(group).communicator()
        if num_heads < 1 or embed_dim % num_heads:
            raise ConfigError(
                f"embed_dim={embed_dim} does not divide into num_heads={num_heads}",
                fix="give a multiple of num_heads",
            )
        if num_heads % self._comm.size:
            raise ConfigError(
                f"num_heads={num_heads} does not divide over {self._comm.size} processes",
                fix=f"give a multiple of {self._comm.size}, or a smaller group",
            )
        if not 0 <= dropout < 1:
            raise ConfigError(
                f"dropout={dropout} is not a part of the weights", fix="give 0 or more, below 1"
            )
        self.num_heads, self.dropout = num_heads, dropout
        whole = nn.MultiheadAttention(embed_dim, num_heads, dropout, bias, batch_first=True)
        self.qkv = ColumnParallelLinear(
            embed_dim, 3 * embed_dim, bias, gather_output=False, parts=3, group=group
        )
        self.out = RowParallelLinear(embed_dim, embed_dim, bias, group=group)
        state = whole.state_dict()
        for value in state.values():  # as the first process draws them
            self._comm.broadcast(value)
        self.load_whole(state)

    def load_whole(self, state: Mapping[str, Tensor]) -> None:
        """Takes this process's part of a ``nn.MultiheadAttention``'s ``state_dict``."""
        self.qkv.load_whole(
            {key.removeprefix("in_proj_"): v for key, v in state.items() if "in_proj_" in key}
        )
        self.out.load_whole(
            {key.removeprefix("out_proj."): v for key, v in state.items() if "out_proj." in key}
        )

    def gather_whole(self) -> dict[str, Tensor]:
        """The ``state_dict`` of that module, on every process; collective."""
        return {
            **{f"in_proj_{key}": value for key, value in self.qkv.gather_whole().items()},
            **{f"out_proj.{key}": value for key, value in self.out.gather_whole().items()},
        }

    def forward(
        self, input: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """``attn_mask`` (tokens, tokens) or (batch, 1, tokens, tokens): bool, true where a key is
        seen, or numbers that are added to scores, as ``F.scaled_dot_product_attention`` has it."""
        own = self.num_heads // self._comm.size
        projected = self.qkv(input).unflatten(-1, (3, own, -1))
        query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)
        if self.dropout and self.training:
            attended = self._attend_dropping(query, key, value, attn_mask, is_causal)
        else:
            attended = F.scaled_dot_product_attention(
                query, key, value, attn_mask, is_causal=is_causal
            )
        return self.out(attended.transpose(1, 2).flatten(2))

    def _attend_dropping(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~seen, -math.inf)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        batch, _, rows, columns = scores.shape
        drawn = F.dropout(scores.new_ones(batch, self.num_heads, rows, columns), self.dropout)
        kept = drawn.chunk(self._comm.size, 1)[self._comm.rank]
        return scores.softmax(-1) * kept @ value


@dataclass(frozen=True)
class ThreeDParallelismConfig:
    """How many processes divide samples, layers and the model, and how micro-batches go through it.

    ``mesh_options`` and ``overrides`` say it to the trainer. The rank of a process follows from its
    places: stages are outermost, and the processes that share a layer are neighbours.

    Raises:
        ConfigError: a size is below 1, there are fewer layers than stages, or no such schedule.
    """

    dp_size: int = 1
    tp_size: int = 1
    pp_size: int = 1
    num_layers: int = 24
    micro_batch_size: int = 1
    num_microbatches: int = 1
    pipeline_schedule: str = "1f1b"

    def __post_init__(self) -> None:
        for name in ("dp_size", "tp_size", "pp_size", "num_layers", "micro_batch_size",
                     "num_microbatches"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is below 1", fix="give 1 or more")
        if self.num_layers < self.pp_size:
            raise ConfigError(
                f"pp_size={self.pp_size} makes more stages than there are layers "
                f"({self.num_layers})",
                fix=f"set pp_size to at most {self.num_layers}",
            )
        check_schedule(self.pipeline_schedule, self.stages_per_rank)

    @property
    def stages_per_rank(self) -> int:
        """Two for a schedule that interleaves."""
        return 2 if self.pipeline_schedule in ("interleaved_1f1b", "looped_bfs") else 1

    @property
    def world_size(self) -> int:
        """How many processes there are in all."""
        return self.dp_size * self.tp_size * self.pp_size

    def validate(self, world_size: int) -> None:
        """Makes sure that a job of so many processes is divided without rest.

        Raises:
            ConfigError: it is not.
        """
        if world_size != self.world_size:
            raise ConfigError(
                f"dp_size={self.dp_size} x tp_size={self.tp_size} x pp_size={self.pp_size} = "
                f"{self.world_size} is not the {world_size} processes of this job",
                fix=f"let the sizes multiply to {world_size}",
            )

    def mesh_options(self) -> MeshOptions:
        """The same as a mesh, with the parameters cut over ``dp_size``."""
        return MeshOptions(dp_shard=self.dp_size, dp_replicate=1, tp=self.tp_size, pp=self.pp_size)

    def overrides(self) -> list[str]:
        """The same for ``python -m torsh_trainer``."""
        said: dict[str, Any] = {
            "strategy": "parallel",
            "mesh.dp_replicate": 1,
            "mesh.dp_shard": self.dp_size,
            "mesh.tp": self.tp_size,
            "mesh.pp": self.pp_size,
            "launcher.num_processes": self.world_size,
            "data.micro_batch_size": self.micro_batch_size,
            "trainer.accumulate": self.num_microbatches,
            "strategy.schedule": self.pipeline_schedule,
            "strategy.stages_per_rank": self.stages_per_rank,
        }
        return [f"{key}={value}" for key, value in said.items()]
