"""What is done to a user's module before it is wrapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from torsh_trainer.comm.base import Communicator
from torsh_trainer.comm.model_check import check_alike
from torsh_trainer.comm.reducer import share as share
from torsh_trainer.deferred.seen import storage_key
from torsh_trainer.errors import ConfigError, Unsupported, nearest
from torsh_trainer.randomness import Randomness
from torsh_trainer.randomness.kernels import hide_from_compiler
from torsh_trainer.strategies.base import Job, Strategy
from torsh_trainer.strategies.compiling import (
    records_graphs,
    refuse_overwritten_gradients,
    tell_of_compilations,
)
from torsh_trainer.strategies.placing import move_all_but_parameters
from torsh_trainer.strategies.recompute import recompute_in_backward
from torsh_trainer.strategies.sync_batchnorm import synchronise
from torsh_trainer.strategies.writes import refuse_bounded_rows


def build(
    job: Job, comm: Communicator, *, leaves_parameters: bool = False, recomputes: bool = True
) -> nn.Module:
    """The job's model on the communicator's device, in training mode.

    ``leaves_parameters`` leaves them where ``build_model`` has put them; ``recomputes`` False
    leaves ``recompute`` to the caller.

    Raises:
        Unsupported: torch.compile would lose gradients of micro-batches, or an embedding would be
            shortened otherwise on every process.
        ConfigError: parameters would be left without values, on the device ``meta``.
        MismatchError: another process has built another model.
    """
    refuse_overwritten_gradients(job, comm.device)
    model = job.build_model()
    if comm.size > 1:
        refuse_bounded_rows(model)
    if job.sync_batchnorm and comm.world.is_distributed:
        synchronise(model, comm)
    job.precision.emulation.change_model(model)
    move = move_all_but_parameters if leaves_parameters else nn.Module.to
    model = move(model, comm.device)
    if recomputes:
        recompute(find_recomputed(model, job), job)
    check_alike(model, comm)
    return model.train()


def find_recomputed(model: nn.Module, job: Job) -> list[nn.Module]:
    """The modules whose forwards ``job`` has run again in the backward.

    Raises:
        ConfigError: there are none of those that it names.
    """
    if not job.activation_checkpointing:
        return []
    return choose_blocks(model, job.checkpoint_modules, "trainer.checkpoint_modules")


def recompute(blocks: Sequence[nn.Module], job: Job) -> None:
    """Has the forwards of ``blocks`` run again in the backward, as ``job`` asks."""
    for module in blocks:
        recompute_in_backward(
            module,
            compiles=job.compile is not None,
            keeps_products=job.activation_checkpointing == "selective",
        )


def choose_blocks(model: nn.Module, class_names: Sequence[str], knob: str) -> list[nn.Module]:
    """The modules of the classes named, or the repeated blocks when none is named.

    The repeated blocks are the children of the longest nn.ModuleList or nn.Sequential.

    Raises:
        ConfigError: no module is of such a class, or there are no repeated blocks; names ``knob``.
    """
    if class_names:
        known = {type(module).__name__ for module in model.modules()}
        for name in class_names:
            if name not in known:
                raise ConfigError(
                    f"{knob} names {name!r}, but the model has no module of that class",
                    fix=nearest(name, known),
                )
        return [m for m in model.modules() if type(m).__name__ in class_names]
    blocks = find_repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            "the model has no nn.ModuleList or nn.Sequential whose children could be taken",
            fix=f"name module classes: {knob}=[Block]",
        )
    return blocks


def sparse_embeddings(model: nn.Module) -> list[str]:
    """Names of the embeddings whose weight gets a sparse gradient."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [name for name, m in model.named_modules() if isinstance(m, kinds) and m.sparse]


def refuse_sparse(model: nn.Module, asked_by: str, *, use: str) -> None:
    """Makes sure that no embedding of ``model`` gets a sparse gradient.

    Raises:
        Unsupported: names the embedding, what cannot have it, and ``use`` as the next move.
    """
    found = sparse_embeddings(model)
    if found:
        raise Unsupported(
            f"{asked_by} cannot take a sparse gradient, and the embedding {found[0]!r} was built "
            "with sparse=True",
            fix=f"{use}, or build it with sparse=False",
        )


def refuse_several_dtypes(model: nn.Module, asked_by: str, *, use: str) -> None:
    """Makes sure that all parameters of ``model`` that train are of one dtype.

    Raises:
        Unsupported: names the dtypes, what cannot have them, and ``use`` as the next move.
    """
    kinds = sorted({str(p.dtype) for p in model.parameters() if p.requires_grad})
    if len(kinds) > 1:
        raise Unsupported(
            f"{asked_by} takes parameters of one dtype, and the model has {', '.join(kinds)}",
            fix=f"set {use}",
        )


def step_sparse(optimizer: Optimizer, sparse: Collection[nn.Parameter]) -> None:
    """Has an optimizer of torch's step ``sparse`` parameters, whose gradients are sparse.

    Raises:
        Unsupported: it has no step for them.
    """
    kind = type(optimizer)
    ours = [g for g in optimizer.param_groups if any(p in sparse for p in g["params"])]
    if not ours or kind.__module__.partition(".")[0] != "torch":
        return  # a class of the user's own knows best
    if not issubclass(kind, _STEP_SPARSE):
        raise Unsupported(
            f"optimizer {kind.__name__} cannot step a sparse gradient, and an embedding was built "
            "with sparse=True",
            fix="set optimizer=sgd, have task.build_optimizers give it a SparseAdam or an Adagrad, "
            "or build it with sparse=False",
        )
    for group in ours:
        if group.get("fused"):
            group["fused"] = False


_STEP_SPARSE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)


def refuse_kinds(
    model: nn.Module,
    knobs: Strategy,
    *,
    complex_numbers: bool = False,
    float64: bool = False,
    without_dimensions: bool = False,
) -> None:
    """Refuses parameters of kinds that ``knobs``'s engine cannot take; those that are True, it can.

    Raises:
        Unsupported: names the first one.
    """
    for name, p in model.named_parameters():
        odd = {
            "complex": p.is_complex() and not complex_numbers,
            "of float64": p.dtype == torch.float64 and not float64,
            "without dimensions": p.dim() == 0 and not without_dimensions,
        }
        for why, wrong in odd.items():
            if wrong:
                raise knobs.refuse(f"the parameter {name!r}, {why}", use="use strategy=ddp")


def refuse_accumulated(model: nn.Module, knobs: Strategy) -> None:
    """Refuses hooks on accumulated gradients, where a process has only its part of a gradient.

    Raises:
        Unsupported: names the first parameter that has one.
    """
    for name, p in model.named_parameters():
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise knobs.refuse(
                f"the parameter {name!r} with a hook on its accumulated gradient "
                "(register_post_accumulate_grad_hook), which is a part of the gradient on each "
                "process",
                use="put it on the gradients of backward (register_hook), or do it in a callback "
                "after the step, or use strategy=single",
            )


def overlapping(model: nn.Module) -> tuple[str, str] | None:
    """Two parameters, by name, that have elements in the same place of memory, if there are any."""
    by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, p in model.named_parameters():
        if p.numel() and not p.is_meta:
            by_storage.setdefault(storage_key(p), []).append((name, p))
    for sharing in by_storage.values():
        if len(sharing) > 1:
            held = torch.zeros(max(_end(p) for _, p in sharing), dtype=torch.int32)
            for number, (name, p) in enumerate(sharing, 1):
                # The first byte of every element; a view of another dtype is close enough.
                size = p.element_size()
                strides = [size * stride for stride in p.stride()]
                places = held.as_strided(p.shape, strides, size * p.storage_offset())
                if places.any():
                    return sharing[int(places.max()) - 1][0], name
                places.fill_(number)
    return None


def _end(p: nn.Parameter) -> int:
    """The byte after its last element, in its storage."""
    reach = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
    return p.element_size() * (int(p.storage_offset()) + reach + 1)


def refuse_overlapping(model: nn.Module, knobs: Strategy, *, where: str = "") -> None:
    """Refuses parameters that share a part of their memory, for an engine that takes them apart.

    ``where`` is the knob by which it does, if it is one.

    Raises:
        Unsupported: names two of them.
    """
    found = overlapping(model)
    if found is not None:
        raise knobs.refuse(
            f"{where + ': ' if where else ''}the parameters {found[0]!r} and {found[1]!r}, which "
            "lie in the same memory, so that a step of one moves the other",
            use="make them one parameter, or use strategy=ddp without zero1",
        )


@torch.no_grad()
def fill_holes(model: nn.Module) -> None:
    """Copies parameters with gaps between their elements, which no backend can send as they are.

    They must not overlap: see ``refuse_overlapping``.
    """
    for p in model.parameters():
        if torch.empty_like(p, device="meta").stride() != p.stride():
            p.data = p.data.contiguous()


def find_repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The children, with parameters, of the longest nn.ModuleList or nn.Sequential."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    longest: nn.Module | None = max(lists, key=len, default=None)
    if longest is None:
        return []
    return [child for child in longest.children() if any(True for _ in child.parameters())]


def shares_parameters(model: nn.Module, unit: nn.Module) -> bool:
    """Whether a parameter of ``unit`` is tied to one outside it: FSDP2 wants both in one unit."""
    inside = Counter(id(p) for _, p in unit.named_parameters(remove_duplicate=False))
    everywhere = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return any(everywhere[key] > count for key, count in inside.items())


def find_called(module: nn.Module) -> Iterator[nn.Module]:
    """The nearest submodules with parameters that have a forward of their own."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from find_called(child)
        elif any(True for _ in child.parameters()):
            yield child


def by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """The smallest modules whose subtree has at least ``least`` parameters, root excluded."""
    chosen: list[nn.Module] = []
    for module in list(model.modules())[1:]:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        if sum(p.numel() for p in module.parameters()) < least:
            continue
        below = list(module.modules())[1:]
        if not any(sum(p.numel() for p in m.parameters()) >= least for m in below):
            chosen.append(module)
    if not chosen:
        raise ConfigError(
            f"strategy.wrap_min_parameters={least} is more than any part of the model has",
            fix="lower it, or give null for the repeated blocks",
        )
    return chosen


class ComputeIn(nn.Module):
    """Runs a module in a lower dtype while its own parameters stay the fp32 master.

    Every forward casts the parameters; gradients come back through the cast in fp32. Inputs are
    cast on the way in, and outputs to ``output_dtype`` on the way out (None: they stay as they
    are): the same as FSDP2's MixedPrecisionPolicy(param_dtype, cast_forward_inputs, output_dtype).
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        *,
        output_dtype: torch.dtype | None = torch.float32,
    ) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype
        self.output_dtype = output_dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cast = {
            name: p.to(self.dtype) if p.is_floating_point() else p
            for name, p in self.module.named_parameters()
        }
        args, kwargs = cast_floats((args, kwargs), self.dtype)
        outputs = torch.func.functional_call(self.module, cast, args, kwargs, tie_weights=True)
        return outputs if self.output_dtype is None else cast_floats(outputs, self.output_dtype)


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of a nested structure in ``dtype``; all else as it is."""

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.to(dtype)
        return leaf

    return tree_map(cast, tree)


def compile_modules(job: Job, modules: Iterator[nn.Module] | Sequence[nn.Module]) -> None:
    """torch.compile in place, when the job asks for it; names and state stay as they are."""
    if job.compile is not None:
        if randomness_of(job) == "by_sample":
            # Inductor's own random numbers have no keys: it calls torch's operations instead.
            torch._inductor.config.fallback_random = True
            hide_from_compiler()
        for module in modules:
            module.compile(**job.compile)
        tell_of_compilations()


def randomness_of(job: Job) -> Randomness:
    """What the random numbers of forwards depend on, where torch.compile has a say.

    A CUDA graph would repeat the numbers of the step that it was captured in; a backend that we do
    not know may have a generator of its own.
    """
    if job.compile is None:
        return job.randomness
    options = job.compile.get("options") or {}
    knows = (
        job.compile.get("backend", "inductor") in ("inductor", "aot_eager", "eager")
        and job.compile.get("mode") in (None, "default", "max-autotune-no-cudagraphs")
        and options.get("fallback_random", True)
        and not records_graphs(job.compile)
    )
    return job.randomness if knows else "by_micro_batch"


def unused_parameters(names: Sequence[str]) -> ConfigError:
    """The error for parameters that no loss has reached."""
    return ConfigError(
        f"{len(names)} parameters got no gradient: {', '.join(names[:8])}"
        + (", ..." if len(names) > 8 else ""),
        fix="set strategy.find_unused_parameters=true, or freeze them (trainer.frozen)",
        unused=list(names),
    )
