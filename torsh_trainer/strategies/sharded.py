"""What FSDP2 has made of a model, and of its gradients: parts of the engine of ``fsdp``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.compression.scatter import CompressedScatter
from torsh_trainer.errors import Unsupported
from torsh_trainer.strategies import modules
from torsh_trainer.strategies.clipping import HeldGradients, local_norm
from torsh_trainer.strategies.outputs import hook_hidden_outputs
from torsh_trainer.strategies.units import find_merged_states, forget_forward, units_of


def find_roots(model: nn.Module, refuse: Callable[..., Unsupported]) -> list[nn.Module]:
    """For a task that steps within a forward of ``model``: the modules that it calls there.

    Raises:
        Unsupported: a parameter is in none of them, or in several.
    """
    roots = list(modules.find_called(model))
    for name, _ in model.named_parameters(recurse=False):
        raise refuse(
            f"the parameter {name!r} of a module that steps its optimizers itself, within its own "
            "forward",
            use="put it into a submodule, or use strategy=ddp",
        )
    for root in roots:
        if modules.shares_parameters(model, root):
            raise refuse(
                "parameters that submodules share, in a module that steps its optimizers itself",
                use="use strategy=ddp",
            )
    return roots


class ShardedModel:
    """The units of ``model``, below ``roots``, and when they reduce, gather and let go.

    ``ranks`` reduce gradients together. ``resharding`` False keeps units whole from forward to
    backward. ``reduces_itself`` says that a ``WholePass`` reduces gradients, and no backward.
    """

    def __init__(
        self,
        model: nn.Module,
        roots: Sequence[nn.Module],
        *,
        ranks: int,
        resharding: bool,
        reduces_itself: bool,
    ) -> None:
        self._model = model
        self.roots: list[Any] = list(roots)
        self.units = units_of(model)
        self._merged = find_merged_states(model)
        self._ranks = ranks
        self._resharding = resharding
        self._reduces_itself = reduces_itself
        self._averages = True
        self.parts = self._find_parts()
        """What FSDP2 has of each parameter, and whether that trained when last looked at."""

    def ready(self, scatter: CompressedScatter | None) -> None:
        """Before the first forward: who comes first would be the root, a unit that a hook calls
        before any step. ``scatter`` reduces gradients in FSDP2's place."""
        for module in self._model.modules() if scatter is not None else ():
            if hasattr(module, "set_custom_reduce_scatter"):
                cast(Any, module).set_custom_reduce_scatter(scatter)
        for root in self.roots:
            hook_hidden_outputs(root)
            root._get_fsdp_state()._lazy_init()

    def reduce_to(self, *, mean: bool) -> None:
        """Gradients are averaged over ranks from here on, or summed."""
        if mean is not self._averages and self._ranks > 1:
            self._averages = mean
            for unit in self.units:
                unit.gradient_divide_factor = None if mean else 1.0
                # Else it is a product before the sum, which no backend but NCCL has.
                unit.force_sum_reduction_for_comms = not mean

    def set_sync(self, syncs: bool) -> None:
        """Whether a backward reduces gradients."""
        for root in self.roots if not self._reduces_itself else ():
            root.set_requires_gradient_sync(syncs)
            if not self._resharding:
                # The next forward needs them whole, and at its end they would be there anyway.
                root.set_reshard_after_backward(syncs)

    def let_go(self) -> None:
        """Of what a forward has gathered and no backward came to (``resharding`` False).

        The next one would use that instead of parameters that have changed since, or do not train.
        """
        for state in self._merged:
            forget_forward(state)
        for unit in self.units:
            unit.reshard()

    def carry_over(self) -> None:
        """Within a forward a module has whole parameters in the place of its shards, which alone
        FSDP2 looks at: what was freed or frozen there is carried over."""
        for part, trained in self.parts:
            if trained is not getattr(part, "_unsharded_param", part.sharded_param).requires_grad:
                part.sharded_param.requires_grad_(not trained)

    def look_again(self) -> None:
        """Which parameters train now, and has whole ones train with their shards."""
        self.parts = self._find_parts()
        for part, trained in self.parts:
            if hasattr(part, "_unsharded_param"):
                part.unsharded_param.requires_grad_(trained)

    def _find_parts(self) -> list[tuple[Any, bool]]:
        parts = [part for unit in self.units for part in unit.fsdp_params]
        return [(part, part.sharded_param.requires_grad) for part in parts]


class ShardedGradients(HeldGradients):
    """Shards of gradients, and those of parameters that are whole on every rank.

    ``norm_group`` holds each shard once; its ``process_group`` is None where a shard is a whole.
    Of a layer that is not cut over ``tp`` it holds a shard several times: ``counts`` says whether
    this process's is the one that counts. ``counts_whole`` says the same of those that are whole,
    where processes of the group hold other ones (None: all hold the same). ``uncounted`` are
    parameters that another process counts. Collective.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        norm_group: Communicator,
        counts: bool = True,
        counts_whole: bool | None = None,
        uncounted: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__(model, device)
        is_wide = any(p.dtype in _WIDE and p.requires_grad for p in model.parameters())
        if norm_group.process_group is not None:  # who holds which parameters may differ
            is_wide = any(norm_group.all_gather_object(is_wide))
        self._dtype = torch.float64 if is_wide else torch.float32
        self._counts_whole = counts_whole
        self._uncounted = uncounted
        self.norm_group = norm_group.process_group
        self._counts = counts
        self._whole: list[bool] = []
        self._counted: list[bool] = []

    def storage(self, gradients: list[Tensor]) -> list[Tensor]:
        others = {id(p.grad) for p in self._uncounted}
        self._counted = [
            (self._counts or _is_cut_over_tp(gradient)) and id(gradient) not in others
            for gradient in gradients
        ]
        self._whole = [not hasattr(gradient, "placements") for gradient in gradients]
        parts = zip(gradients, self._whole, strict=True)
        with torch.no_grad():  # else each part is a view of its own, for autograd
            local = [g if whole else cast(Any, g).to_local() for g, whole in parts]
        return super().storage(local)

    def norm(self, storage: list[Tensor]) -> Tensor:
        # Shards of one group hold the whole gradient once; replicas hold it again.
        known = zip(storage, self._whole, self._counted, strict=True)
        parts = [g for g, whole, counted in known if counted and (not whole or self._counts_whole)]
        square = local_norm(parts, self.device, dtype=self._dtype).square()
        if self.norm_group is not None:
            torch.distributed.all_reduce(square, group=self.norm_group)
        if any(self._whole) and self._counts_whole is None:
            uncut = [g for g, whole in zip(storage, self._whole, strict=True) if whole]
            square = square + local_norm(uncut, self.device, dtype=self._dtype).square()
        return square.sqrt()


_WIDE = (torch.float64, torch.complex128)


def _is_cut_over_tp(gradient: Any) -> bool:
    mesh = getattr(gradient, "device_mesh", None)
    return mesh is not None and "tp" in mesh.mesh_dim_names
