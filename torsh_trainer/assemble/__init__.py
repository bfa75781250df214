"""The only room that knows both configuration and classes: a resolved configuration, run.

The process that starts a job loads no torch: it builds the launcher alone. Each process of the
job receives the same frozen configuration and assembles its own trainer from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_type_hints

from torsh_trainer import environments
from torsh_trainer.assemble.plan import (
    TARGET,
    Buildable,
    ObjectPlan,
    Signature,
    name_of,
    plan,
    plan_call,
    target_of,
)
from torsh_trainer.assemble.values import fill_marks, fit_value
from torsh_trainer.data.loading import Loading
from torsh_trainer.environments.world import World
from torsh_trainer.errors import ConfigError, TorshError, nearest
from torsh_trainer.launchers.base import LaunchContext, Launcher
from torsh_trainer.launchers.local import Local
from torsh_trainer.utils.importing import load_for_good
from torsh_trainer.utils.masking import mask_tree
from torsh_trainer.utils.registry import CALLBACKS, GROUPS, LOGGERS, SETTINGS, PluginKind

if TYPE_CHECKING:  # the launching process never loads torch
    from torsh_trainer.callbacks.base import Callback
    from torsh_trainer.optim.optimizers import OptimizerSpec
    from torsh_trainer.tasks.base import Task
    from torsh_trainer.training.program import ProgramTask
    from torsh_trainer.training.run_spec import RunSpec

OBJECTS = (
    "schedule",
    "strategy",
    "precision",
    "compression",
    "comm",
    "mesh",
    "checkpoint",
    "launcher",
)
"""Groups that are one object each, handed to the trainer under their own name."""

KINDS_OF_LISTENERS = {"callbacks": CALLBACKS, "logger": LOGGERS}
"""Groups of several nodes, and the plugins that may go by the name of one."""

NO_KNOBS = ("loading", "run_dir", "config", "command", "log_level")
"""What a trainer is given beside the groups, and the ``trainer`` group cannot set."""


@dataclass(frozen=True)
class RunRequest:
    """All that a process of the job needs: plain values, which cross processes.

    ``config`` is the resolved configuration, ``command`` what would start this run again,
    ``import_paths`` where user code is found. ``said`` is what rank 0 alone knows of it, by place;
    elsewhere the marks that stand there instead. ``written`` is the configuration as files show it,
    without secrets; empty: ``config``, masked.
    """

    config: Mapping[str, Any]
    run_dir: Path | None
    command: tuple[str, ...]
    import_paths: tuple[str, ...]
    said: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)


Ordered = TypeVar("Ordered", bound=RunRequest)


def run(
    config: dict[str, Any],
    *,
    run_dir: Path | None,
    command: Sequence[str],
    env: Mapping[str, str],
    import_paths: Sequence[str],
    said: Mapping[str, Any] | None = None,
    written: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs a resolved configuration in the processes that its launcher starts.

    Returns the content of result.json; of a run that was submitted, its handle under ``job``; of
    one that is only planned (``launcher.dry_run``), nothing. ``run_dir`` None leaves its name to
    rank 0.

    Raises:
        TorshError: see errors.py.
    """
    order = RunRequest(
        config, run_dir, tuple(command), tuple(import_paths), said or {}, written or {}
    )
    _check_names(config)
    launcher = launcher_of(config)
    if launcher.submits or launcher.dry_run:
        # Imported late: a run in processes of its own needs none of it.
        from torsh_trainer.assemble import submitting

        todo = submitting.show_plan if launcher.dry_run else submitting.hand_over
        return todo(order, launcher, env)
    return launch(work, order, env)


def wait_for_result(run_dir: Path) -> dict[str, Any]:
    """The content of result.json, once the job that was submitted from ``run_dir`` has ended.

    Raises:
        TrainingError: it has not succeeded.
    """
    from torsh_trainer.assemble import submitting  # see run

    return submitting.wait_for_result(run_dir)


def launch(
    entry: Callable[[World, Ordered], dict[str, Any]], order: Ordered, env: Mapping[str, str]
) -> dict[str, Any]:
    """What ``entry`` gives on rank 0, called in the processes that the launcher starts."""
    _check_names(order.config)
    import_from(order.import_paths)
    context = LaunchContext(
        env=env,
        found=environments.detect(env),
        log_dir=None if order.run_dir is None else order.run_dir / "logs",
    )
    result: dict[str, Any] = launcher_of(order.config).launch(entry, order, context=context)
    return result


def work(world: World, order: RunRequest) -> dict[str, Any]:
    """One process of the job: assembles the trainer and runs it in its place."""
    # torch loads here, in the processes that train; the first optimizer imports torch._dynamo.
    load_for_good("torsh_trainer.training.trainer", "torch._dynamo")
    from torsh_trainer.training.trainer import run_in

    import_from(order.import_paths)
    return dict(run_in(world, plan_run(_agree_on_answers(world, order))).content)


def _agree_on_answers(world: World, order: RunRequest) -> RunRequest:
    """The order with what rank 0 says in it, on every process.

    Raises:
        ConfigError: nothing says where the processes can ask it.
    """
    if not order.said or world.size == 1:
        return order
    place = next(iter(order.said))
    if world.rendezvous is None or world.elastic:
        raise ConfigError(
            f"{place} asks Hydra or the clock, which only one of the processes that {world.source} "
            "has started can tell, and they have no place where they could ask it",
            fix=f"give {place} a value that asks neither",
        )
    from torsh_trainer.comm.start import share_from_rank_zero  # torch loads here: see work

    comm = order.config.get("comm")
    options = {} if comm is None else {"options": plan(comm, key="comm").build()}
    said = share_from_rank_zero(world, order.said, **options)
    marks = {f"\0{name}\0": value for name, value in said.items()}
    config, written = fill_marks(order.config, marks), fill_marks(order.written, marks)
    return replace(order, config=config, written=written, said={})


def preview(
    config: dict[str, Any], *, run_dir: Path, env: Mapping[str, str], import_paths: Sequence[str]
) -> tuple[str, bool]:
    """What a resolved configuration would take from its checkpoint, in words; nothing is trained.

    Returns the text, and whether the run would refuse to go on from there. ``run_dir`` is where
    ``checkpoint.resume=auto`` looks; nothing is written into it.

    Raises:
        TorshError: see errors.py.
    """
    # torch loads here: this process looks at the model itself.
    from torsh_trainer.training.preview import preview as told

    _check_names(config)
    import_from(import_paths)
    context = LaunchContext(env=env, found=environments.detect(env))
    size = launcher_of(config).size(context)
    world = World(size=size, local_size=size)
    found = told(plan_run(RunRequest(config, run_dir, (), ())), world, run_dir=run_dir)
    return found.text, found.refused


def launcher_of(config: Mapping[str, Any]) -> Launcher:
    """The launcher that ``config`` names; the default one when the group was left out."""
    node = config.get("launcher")
    return Local() if node is None else plan(node, key="launcher").build()


def plan_run(order: RunRequest, *, task: Task | None = None) -> RunSpec:
    """The run that a resolved configuration describes; everything is checked before it is made.

    ``task`` takes the place of the one that is described, which is checked and not made then.

    Raises:
        ConfigError: names the dotted key, and the nearest names where one is mistyped.
        ResourceError: something needs a library that is not installed.
    """
    from torsh_trainer.training.run_spec import RunSpec  # see work

    config = order.config
    _check_names(config)
    knobs = dict(config.get("trainer") or {})
    for name in knobs:
        if name in GROUPS:
            fix = f"{name} is a group of its own: {name}=NAME"
            raise ConfigError(f"unknown knob trainer.{name}", fix=fix)
    source, loading = plan_data(config)
    planned = _PlannedTask.of(config, source)
    if not isinstance(config["log_level"], str):
        fit_value(
            config["log_level"],
            Literal["debug", "info", "warning", "error"],
            key="log_level",
            default="info",
        )
    given = {
        **{name: _object(config[name], name) for name in OBJECTS if config.get(name)},
        "loading": loading,
        "callbacks": [
            *_plan_enabled(config, "callbacks"),
            *_plan_enabled(config, "logger"),
            *_looking_at_objective(knobs, planned),
        ],
        "run_dir": order.run_dir,
        "config": order.written or mask_tree(config),
        "command": order.command,
        "log_level": config["log_level"],
    }
    given = {**dict.fromkeys(NO_KNOBS), **given, "task": task or planned}
    spec: RunSpec = plan_call(RunSpec, knobs, key="trainer", given=given).build()
    return spec


def _object(node: Mapping[str, Any], group: str) -> ObjectPlan:
    """The plan of a group that is one object, which has to be of the kind that a trainer takes."""
    from torsh_trainer.training.run_spec import RunSpec  # torch loads here: see work

    factory = target_of(node, key=group)
    wanted = get_type_hints(RunSpec)[group]
    kinds = tuple(kind for kind in get_args(wanted) or (wanted,) if isinstance(kind, type))
    if isinstance(factory, type) and not issubclass(factory, kinds):
        names = " or ".join(kind.__name__ for kind in kinds if kind not in (str, type(None)))
        raise ConfigError(
            f"{group}._target_={name_of(factory)} is no {names}",
            fix=f"choose {group}=NAME, or inherit from {names}",
        )
    return plan(node, key=group)


@dataclass(frozen=True)
class _PlannedTask(Buildable):
    """A task with what it is given: a factory of models, the data source, the optimizer.

    A task that does not take ``data`` or ``optimizer`` in its constructor has them as attributes.
    What the constructors draw follows from ``seed``, so that every process makes the same data.
    """

    task: ObjectPlan
    source: ObjectPlan | None
    optimizer: OptimizerSpec | None
    seed: int

    @classmethod
    def of(cls, config: Mapping[str, Any], source: ObjectPlan | None) -> _PlannedTask:
        # torch loads here: see work.
        from torsh_trainer.optim.optimizers import OptimizerSpec
        from torsh_trainer.training.run_spec import RunSpec

        model = plan(config["model"], key="model") if config.get("model") else None
        node = config.get("optimizer")
        optimizer = None if node is None else OptimizerSpec.from_config(_fit_optimizer(node))
        given = {"model": model and model.build, "data": source, "optimizer": optimizer}
        given = {name: value for name, value in given.items() if value is not None}
        _check_parts(config, given)
        seed = (config.get("trainer") or {}).get("seed", RunSpec.seed)
        return cls(plan(config["task"], key="task", given=given), source, optimizer, seed)

    def build(self) -> Task:
        from torsh_trainer.data.splits import making_data  # torch loads here: see work

        with making_data(int(self.seed)):
            return self._make_task()

    def _make_task(self) -> Task:
        from torsh_trainer.tasks.base import Task  # torch loads here: see work

        task = self.task.build()
        if not isinstance(task, Task):
            raise ConfigError(
                f"task._target_ makes a {type(task).__name__}, which is no Task",
                fix="inherit from torsh_trainer.Task",
            )
        if self.source is not None and "data" not in self.task.arguments:
            task.data = self.source.build()
        if self.optimizer is not None and "optimizer" not in self.task.arguments:
            task.optimizer = self.optimizer
        return task


def _fit_optimizer(node: Any, key: str = "optimizer") -> dict[str, Any]:
    """The ``optimizer`` node, its values held against the annotations of its class and of ours."""
    from torsh_trainer.optim.optimizers import OptimizerSpec  # torch loads here: see work

    if not isinstance(node, Mapping):
        raise ConfigError(f"{key}: expected a mapping, got {node!r}", fix=f"choose {key}=NAME")
    ours, theirs = Signature.of(OptimizerSpec), Signature.of(target_of(node, key=key))
    values = dict(node)
    for name, value in node.items():
        at = f"{key}.{name}"
        if name == "others":
            values[name] = None if value is None else _fit_optimizer(value, at)
        elif name in ("groups", "others_match") and value is None:
            continue
        elif name != "lr" and not name.startswith("_"):
            owner = theirs if name in theirs.parameters else ours
            values[name] = owner.fit(name, value, key=at)
    return values


def _check_parts(config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses a model that the task has no use for, and a task without the parts that it needs."""
    if not config.get("task"):
        raise ConfigError("nothing says what to train", fix="add +recipe=NAME, or task=NAME")
    target = target_of(config["task"], key="task")
    signature = Signature.of(target)
    if "model" in given and not signature.takes("model"):
        raise ConfigError(
            f"model is chosen, and {name_of(target)} builds its own",
            fix="write ~model, or let the task take a model in its constructor",
        )
    for part in ("model", "data"):
        if part in signature.required and part not in given:
            raise ConfigError(
                f"{name_of(target)} needs {part}, and none is chosen", fix=f"add {part}=NAME"
            )


def own_loop(config: Mapping[str, Any]) -> ProgramTask | None:
    """The task of a configuration, where it brings its own loop; None for any other.

    Raises:
        ConfigError: nothing says what to train, or the task's arguments do not fit.
    """
    source, _ = plan_data(config)
    planned = _PlannedTask.of(config, source)
    return cast("ProgramTask", planned.build()) if _brings_its_loop(planned) else None


def _brings_its_loop(planned: _PlannedTask) -> bool:
    return bool(getattr(planned.task.factory, "brings_program", False))


def plan_data(config: Mapping[str, Any]) -> tuple[ObjectPlan | None, ObjectPlan]:
    """The source of the ``data`` group, and the knobs of loading that stand beside its own."""
    node = config.get("data") or {}
    shared = {field.name for field in fields(Loading)}
    loading = {name: value for name, value in node.items() if name in shared}
    own = {name: value for name, value in node.items() if name not in shared}
    source = plan(own, key="data", also=shared) if own else None
    return source, plan_call(Loading, loading, key="data")


def _plan_enabled(config: Mapping[str, Any], group: str) -> list[ObjectPlan]:
    """The callbacks or loggers that are switched on, in the order of the configuration."""
    plans = []
    for name, node in (config.get(group) or {}).items():
        key = f"{group}.{name}"
        if node is None:
            continue
        switch = node.get("enabled", True) if isinstance(node, Mapping) else node
        fit_value(switch, bool | Literal["auto"], key=f"{key}.enabled", default=True)
        if switch is False:
            _check_disabled(node, key)
            continue
        node = _add_class(node, KINDS_OF_LISTENERS[group], name, key=key)
        if switch == "auto" and not _has_library(target_of(node, key=key)):
            continue
        plans.append(plan({k: v for k, v in node.items() if k != "enabled"}, key=key))
    return plans


def _add_class(node: Any, kind: PluginKind, name: str, *, key: str) -> Any:
    """``node`` with the class that is registered under its name, where it names none itself."""
    bare = {} if node is True else node
    if not isinstance(bare, Mapping) or TARGET in bare or name not in kind:
        return node
    return {TARGET: name_of(kind.load(name, option=key)), **bare}


def _has_library(factory: Any) -> bool:
    library = getattr(factory, "requires", None)
    return library is None or find_spec(library) is not None


def _check_disabled(node: Any, key: str) -> None:
    """Refuses knobs that would be refused of an enabled one.

    One that cannot be imported here is left alone: to disable it is how to go without. And only
    our own are made, to be asked about the values: who knows what another does in its constructor.
    """
    try:
        factory = target_of(node, key=key)
    except TorshError:
        return
    planned = plan({k: v for k, v in node.items() if k != "enabled"}, key=key)
    if factory.__module__.startswith("torsh_trainer.") and _has_library(factory):
        planned.build()


def _looking_at_objective(knobs: Mapping[str, Any], planned: _PlannedTask) -> list[Callback]:
    """What refuses an objective that is no metric; a task's own loop says itself."""
    from torsh_trainer.callbacks.objective import ObjectiveIsKnown  # torch loads here: see work

    name = knobs.get("objective")
    if not isinstance(name, str) or _brings_its_loop(planned):
        return []
    return [ObjectiveIsKnown(name, tests="test" in (knobs.get("stages") or ()))]


def _check_names(config: Mapping[str, Any]) -> None:
    for name in config:
        if name not in (*GROUPS, *SETTINGS):
            raise ConfigError(
                f"there is no group or setting {name!r}",
                fix=f"{nearest(name, (*GROUPS, *SETTINGS))} (values of your own go under vars)",
                name=name,
            )


def import_from(paths: Sequence[str]) -> None:
    """Makes user code be found in ``paths``, after everything that is installed."""
    sys.path += [path for path in paths if path not in sys.path]
