"""After a load: are model, optimizer and average what was saved?

The checkpoint has a hash of every tensor. Here the engine is asked once more for its state, as it
is after it has loaded, and what all ranks hold of it is hashed. What was read from the disk proves
nothing: it is the copy into the model that goes wrong unseen.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from torsh_trainer.checkpoint.base import Checkpointer, Hashed, Sum
from torsh_trainer.checkpoint.fit import is_below, shape_of
from torsh_trainer.checkpoint.plain import Path as Key
from torsh_trainer.checkpoint.plain import dotted_name, split
from torsh_trainer.checkpoint.store.places import StoragePath
from torsh_trainer.comm.base import Communicator
from torsh_trainer.errors import ConfigError
from torsh_trainer.strategies.base import Engine

log = logging.getLogger(__name__)

ENGINE, MODEL = "engine", ("engine", "model")
COMPARED = (MODEL, ("engine", "optimizer"), ("engine", "ema"))
"""What a load puts back to the bit; the rest belongs to single ranks, and may begin afresh."""

_PLAIN = ("optimizer", "ema", "loss_scale")
_SHOWN = 5


class Trust:
    """Compares what a run holds after a load with what was saved; every method is collective.

    ``template`` is the state that is to be filled, before it is; ``leave`` is not loaded.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        path: StoragePath,
        comm: Communicator,
        engine: Engine,
        template: Mapping[str, Any],
        *,
        leave: Iterable[Key],
    ) -> None:
        self._checkpointer = checkpointer
        self._path = path
        self._comm = comm
        self._engine = engine
        saved: Mapping[Key, Hashed] = checkpointer.hashes(path) or {}
        left = list(leave)
        self._saved = {
            dotted_name(p): hashed
            for p, hashed in saved.items()
            if is_below(p, COMPARED) and not is_below(p, left) and hashed.sum.elements
        }
        if not saved and comm.world.is_rank_zero:
            log.info("%s has no hashes: what was loaded is not compared with what was saved", path)
        self._own = _with_own_loading(engine.model, self._saved)
        # What such a module had before it was to load shows whether it has loaded anything.
        self._before = checkpointer.sum_held(template, sorted(self._own)) if self._own else {}
        self._read: dict[str, Sum] = {}
        self._plain: dict[str, Any] = {}
        self._loaded: Mapping[str, Sum] = {}

    def note(self, loaded: Mapping[str, Any]) -> None:
        """Notes what was read, before the engine takes it: plain values, and what was converted."""
        if not self._saved:
            return
        parts = split({ENGINE: loaded[ENGINE]})
        self._plain = _plain_of(parts.plain[ENGINE])
        mine = {
            name
            for path, leaf in parts.tensors.items()
            if (name := dotted_name(path)) in self._saved
            and shape_of(leaf).dtype != self._saved[name].dtype
        }
        names = sorted(set().union(*self._comm.all_gather_object(mine)))
        if names:
            self._read = dict(self._checkpointer.sum_held({ENGINE: loaded[ENGINE]}, names))

    def check(self) -> None:
        """Compares what the engine holds now.

        Raises:
            ConfigError: it holds something else; names the first, the same on every rank.
        """
        if not self._saved:
            return
        state = self._engine.state_dict()
        names = sorted(self._saved)
        self._loaded = held = self._checkpointer.sum_held({ENGINE: state}, names)
        differing = [name for name in names if not self._is_saved(name, held[name])]
        own = [name for name in differing if name in self._own]
        idle = {self._own[name] for name in own if self._took_nothing(self._own[name])}
        refused = [n for n in differing if n not in self._own or self._own[n] in idle]
        refused += self._differing_plain(state)
        if refused:
            raise self._refusal(refused, [name for name in refused if name in self._own])
        if own and self._comm.world.is_rank_zero:
            kinds = sorted({type(_module(self._engine.model, self._own[n])).__name__ for n in own})
            log.warning(
                "%s changes what it loads: %s is not what was saved",
                " and ".join(kinds),
                _list_names(own),
            )

    def tell_changes(self, who: str) -> None:
        """Says which weights are no longer those that the engine has loaded, after ``who`` ran."""
        if not self._saved:
            return
        names = sorted(name for name in self._saved if name.startswith(f"{dotted_name(MODEL)}."))
        held = self._checkpointer.sum_held({ENGINE: self._engine.state_dict()}, names)
        changed = [name for name in names if held[name] != self._loaded[name]]
        if changed and self._comm.world.is_rank_zero:
            log.warning("%s changes what was loaded: %s", who, _list_names(changed))

    def _is_saved(self, name: str, held: Sum) -> bool:
        if name in self._read:
            return held == self._read[name]
        return held.covers(self._saved[name].sum)

    def _took_nothing(self, module: str) -> bool:
        """Whether a module with loading of its own is still what it was, with nothing as saved."""
        names = [name for name in self._own if self._own[name] == module]
        other = [name for name in names if not self._is_saved(name, self._before[name])]
        return bool(other) and all(self._loaded[name] == self._before[name] for name in other)

    def _differing_plain(self, state: Mapping[str, Any]) -> list[str]:
        now = _plain_of(split({ENGINE: state}).plain[ENGINE])
        mine = [name for name in self._plain if name in now and now[name] != self._plain[name]]
        return sorted(set().union(*map(set, self._comm.all_gather_object(mine))))

    def _refusal(self, names: Sequence[str], own: Sequence[str]) -> ConfigError:
        gone = [name for name in names if name in self._loaded and not self._loaded[name].elements]
        what = f"{_list_names(names)} {'is' if len(names) == 1 else 'are'} not what was saved"
        if len(gone) == len(names):
            what = f"{_list_names(names)} {'is' if len(names) == 1 else 'are'} not there"
        kinds = sorted({type(_module(self._engine.model, self._own[n])).__name__ for n in own})
        look = (
            f"look at how {' and '.join(kinds)} loads (load_state_dict, _load_from_state_dict "
            "and hooks)"
            if kinds
            else "report it, with the model and the optimizer"
        )
        return ConfigError(
            f"after loading {self._path}, {what}",
            fix=f"{look}; checkpoint.check_loaded=false goes on all the same",
            keys=list(names),
        )


def _plain_of(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values by dotted name; settings of groups are matched by parameter, and told apart."""
    found: dict[str, Any] = {}

    def walk(value: Any, at: Key) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                if not (at[1:2] == ("optimizer",) and len(at) == 3 and key == "groups"):
                    walk(item, (*at, str(key)))
        else:
            found[dotted_name(at)] = copy.deepcopy(value)

    for part in _PLAIN:
        walk(engine.get(part, {}), (ENGINE, part))
    return found


def _list_names(names: Sequence[str]) -> str:
    shown = [name.removeprefix(f"{ENGINE}.") for name in names[:_SHOWN]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more


# -- modules that load in a way of their own ------------------------------------------------------

_METHODS = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "load_state_dict",
    "_load_from_state_dict",
    "set_extra_state",
)
_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _with_own_loading(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names in a state -> the outermost module around it whose code changes what is loaded."""
    prefixes = [prefix for prefix, module in model.named_modules() if _loads_itself(module)]
    owned: dict[str, str] = {}
    for name in names if prefixes else ():
        within = name.removeprefix(f"{dotted_name(MODEL)}.")
        for prefix in prefixes if within != name else ():
            if not prefix or within.startswith(f"{prefix}."):
                owned[name] = prefix
                break
    return owned


def _loads_itself(module: nn.Module) -> bool:
    methods = (getattr(type(module), name, None) for name in _METHODS)
    hooks = (hook for name in _HOOKS for hook in getattr(module, name, {}).values())
    return any(not _is_known(one) for one in (*methods, *hooks))


def _is_known(code: Callable[..., Any] | None) -> bool:
    """Whether it is torch's or ours: those keep what they load."""
    for wrapped in ("hook", "func", "__func__"):
        code = getattr(code, wrapped, code)
    module = getattr(code, "__module__", None) or type(code).__module__
    return code is None or module.split(".")[0] in ("torch", "torsh_trainer")


def _module(model: nn.Module, prefix: str) -> nn.Module:
    return model.get_submodule(prefix)
