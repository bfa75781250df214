"""Where a model is cut into stages, and which of its modules belongs to which.

A stage begins at the call of a module: what the forward computes before it belongs to the stages
before. Modules belong where they stand in the model, in the order in which they were registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.strategies.modules import find_repeated_blocks


@dataclass(frozen=True)
class StagePlan:
    """``begins`` names the modules at whose call the stages but the first begin.

    ``places`` has the stages of each module, by name: one, or both ends. ``source`` says whose cut
    it is.
    """

    begins: tuple[str, ...]
    places: Mapping[str, frozenset[int]]
    source: str

    @property
    def count(self) -> int:
        """How many stages there are."""
        return len(self.begins) + 1

    def stages_of_parameters(self, model: nn.Module) -> dict[nn.Parameter, frozenset[int]]:
        """In which stages each parameter of ``model`` is: several of one that modules share."""
        found: dict[nn.Parameter, frozenset[int]] = {}
        for name, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    found[parameter] = found.get(parameter, frozenset()) | self.places[name]
        return found

    def list_units(self, model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
        """The largest modules with parameters that are whole in their stages, and can be called."""
        waiting = [("", model)]
        while waiting:
            name, module = waiting.pop()
            if not any(True for _ in module.parameters()):
                continue
            below = [n for n in self.places if n.startswith(f"{name}.")] if name else [*self.places]
            whole = all(self.places[n] == self.places[name] for n in below)
            called = not isinstance(module, nn.ModuleList | nn.ModuleDict)
            if whole and called and name:
                yield name, module
            else:
                waiting += [
                    (f"{name}.{key}" if name else key, child)
                    for key, child in module.named_children()
                ]


def find_stages(
    model: nn.Module, count: int, *, split: Sequence[str], both_ends: Sequence[str], asked: str
) -> StagePlan:
    """Cuts ``model`` into ``count`` stages: at ``split``, or between its repeated blocks.

    ``both_ends`` names modules that the first and the last stage compute. ``asked`` are the knobs
    that ask for so many.

    Raises:
        ConfigError: it has too few blocks; or a name is none of its modules, or out of order.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    own = getattr(model, "pipeline_plan", None)
    given: Mapping[str, Sequence[str]] = own() if callable(own) else {}
    both = tuple(both_ends or given.get("both_ends", ()))
    source = "strategy.split" if split else "balanced by parameters"
    begins = tuple(split) if split else _find_begins(model, count, asked)
    for knob, named in (("strategy.split", begins), ("strategy.both_ends", both)):
        for name in named:
            if name not in names or not name:
                raise ConfigError(
                    f"{knob} names {name!r}, and the model has no such module",
                    fix=nearest(name, names),
                )
    places = [names.index(name) for name in begins]
    if sorted(set(places)) != places:
        raise ConfigError(
            f"strategy.split names {', '.join(begins)}, which is not the order in which the model "
            "has them",
            fix="name the first module of each stage but the first, in their order",
        )
    if len(begins) != count - 1:
        raise ConfigError(
            f"strategy.split names {len(begins)} modules, and {asked} makes {count} stages, of "
            f"which {count - 1} begin at one",
            fix=f"name {count - 1}, or set mesh.pp and strategy.stages_per_rank to make "
            f"{len(begins) + 1}",
        )
    return StagePlan(begins, _place(names, begins, both), source)


def _place(
    names: Sequence[str], begins: Sequence[str], both: Sequence[str]
) -> dict[str, frozenset[int]]:
    places, stage = {}, 0
    for name in names:
        if stage < len(begins) and name == begins[stage]:
            stage += 1
        places[name] = frozenset([stage])
    for name in names:
        if any(name == one or name.startswith(f"{one}.") for one in both):
            places[name] = frozenset([0, len(begins)])
    return places


def _find_begins(model: nn.Module, count: int, asked: str) -> tuple[str, ...]:
    """Of the repeated blocks those at which stages begin whose largest is as small as can be."""
    blocks = find_repeated_blocks(model)
    if len(blocks) < count:
        has = (
            f"has {len(blocks)} blocks in its longest nn.ModuleList or nn.Sequential"
            if blocks
            else "has no nn.ModuleList or nn.Sequential to be cut between"
        )
        raise ConfigError(
            f"{asked} makes {count} stages, and the model ({type(model).__name__}) {has}",
            fix=(f"ask for at most {len(blocks)} stages, or " if blocks else "")
            + "name the modules at which stages begin: strategy.split=[encoder.2, ...]",
            stages=count,
            blocks=len(blocks),
        )
    by_module = {module: name for name, module in model.named_modules()}
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks]
    before, after = _sizes_around(model, blocks)
    sizes[0] += before
    sizes[-1] += after
    return tuple(by_module[blocks[at]] for at in cut_evenly(sizes, count))


def _sizes_around(model: nn.Module, blocks: Sequence[nn.Module]) -> tuple[int, int]:
    """Elements of parameters that stand before the first of ``blocks``, and behind them."""
    within = {module for block in blocks for module in block.modules()}
    sizes, behind = [0, 0], False
    for module in model.modules():
        behind = behind or module in within
        if module not in within:
            own = module._parameters.values()
            sizes[behind] += sum(p.numel() for p in own if p is not None)
    return sizes[0], sizes[1]


def cut_evenly(sizes: Sequence[int], count: int) -> list[int]:
    """Where all but the first of ``count`` runs of ``sizes`` begin; the largest sum is least, and
    of such the sum of squares."""
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    best = {end: (total[end], total[end] ** 2, [0]) for end in range(1, len(sizes) + 1)}
    for runs in range(2, count + 1):
        best = {
            end: min(
                (max(most, part), squares + part**2, [*begins, at])
                for at in range(runs - 1, end)
                for most, squares, begins in [best[at]]
                for part in [total[end] - total[at]]
            )
            for end in range(runs, len(sizes) + 1)
        }
    return best[len(sizes)][2][1:]
