"""What must be the same for a run to go on exactly, and what may differ and how that shows.

A run's setup is a flat dict of plain facts under the names that a user sets them by; it goes into
every checkpoint. A run that resumes compares it with its own. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torsh_trainer.errors import ConfigError, nearest

Setup = Mapping[str, Any]

WORDS = {
    "seed": "the order of samples and all random numbers from here on are those of the new seed",
    "data": "it goes on after as many samples, in the order of the data as they are now",
    "batch": "it goes on after as many samples, in steps of the new size",
    "optimizer": "its settings are the new ones; state is kept where class and shapes allow it",
    "schedule": "it starts afresh, with the learning rates of the configuration",
    "ema": "an average that was kept is dropped; a new one begins at the weights that were loaded",
    "task": "the weights stay, and are trained for another task",
}
"""What ``checkpoint.allow`` may name -> what then happens."""

REFUSED = {
    "trainer.seed": "seed",
    "data.samples": "data",
    "data.iterable": "data",
    "data.shuffle": "data",
    "data.weighted": "data",
    "data.drop_last": "data",
    "data.num_workers": "data",
    "trainer.overfit_batches": "data",
    "data.batch_size": "batch",
    "task": "task",
    "task.order": "data",
    "task.sample_weight": "task",
}
"""Facts that must be the same -> the word that lets them differ."""

APPLIED = (
    "trainer.max_grad_norm",
    "trainer.max_grad_value",
    "trainer.on_nonfinite",
    "trainer.sync_batchnorm",
    "trainer.ema_decay",
    "compression",
)
"""Knobs that a user turns on purpose: today's hold from here on, and the log says so."""

INEXACT = {
    "world_size": "sums over ranks are taken in another order",
    "strategy": "sums are taken in another order",
    "data.micro_batch_size": "sums are taken in another order, and by micro-batch a dropout "
    "draws other units",
    "trainer.randomness": "a dropout draws other units",
    "data.seed_samples": "augmentation draws other numbers",
    "precision": "numbers are rounded otherwise",
    "precision.matmul": "products are rounded otherwise",
    "trainer.attention": "attention is rounded otherwise",
    "trainer.compile": "other kernels round otherwise",
    "device": "other kernels round otherwise",
    "threads": "sums within a process are taken in another order",
    "torch": "its kernels may round otherwise",
}
"""Facts that change the result within rounding, or the random numbers of a forward -> how."""

_OPTIMIZER_SKIPS = frozenset(
    {"params", "param_names", "lr", "initial_lr", "fused", "foreach", "capturable"}
)
"""Settings of a group that say nothing about the update, or are told on their own."""

_SHOWN = 5


class SetupDifference(NamedTuple):
    """Something that must be the same and is not; ``word`` lets it differ (empty: nothing does)."""

    text: str
    word: str = ""


@dataclass(frozen=True)
class SetupComparison:
    """What a run that resumes has to say about the checkpoint, as sentences without a full stop.

    ``refused`` stops it, ``allowed`` differs and was let pass, ``applied`` follows today's
    configuration, ``inexact`` makes the continuation differ from the undisturbed run's.
    """

    refused: tuple[SetupDifference, ...] = ()
    allowed: tuple[SetupDifference, ...] = ()
    applied: tuple[str, ...] = ()
    inexact: tuple[str, ...] = field(default=())

    def check(self, checkpoint: str) -> None:
        """Refuses to go on where something must not differ.

        Raises:
            ConfigError: names all of it, and what would allow it.
        """
        if self.refused:
            raise ConfigError(
                f"the checkpoint {checkpoint} does not fit this run: "
                + ". ".join(one.text for one in self.refused),
                fix=self.way_on,
                differences=[one.text for one in self.refused],
                allow=self.words,
            )

    @property
    def words(self) -> list[str]:
        """What ``checkpoint.allow`` would have to name, with what it names already."""
        named = {one.word for one in (*self.refused, *self.allowed)}
        return [word for word in WORDS if word in named]

    @property
    def way_on(self) -> str:
        """The user's next move."""
        allow = f"checkpoint.allow=[{','.join(self.words)}]"
        if all(one.word for one in self.refused):
            return f"set them as they were, or write {allow} to go on all the same"
        model = (
            "resume with the model that was saved; or start with checkpoint.resume=never, "
            "and its weights by trainer.pretrained"
        )
        return f"{model}. The rest may differ with {allow}" if self.words else model


def check_allow(words: Sequence[str]) -> None:
    """Refuses words that ``checkpoint.allow`` does not know.

    Raises:
        ConfigError: names the nearest word.
    """
    if isinstance(words, str):
        raise ConfigError(
            f"checkpoint.allow={words} is not a list", fix=f"write checkpoint.allow=[{words}]"
        )
    for word in words:
        if word in WORDS:
            continue
        if word == "model":
            raise ConfigError(
                "checkpoint.allow=[model]: a model that differs is not resumed",
                fix="start with checkpoint.resume=never, and its weights by trainer.pretrained",
            )
        raise ConfigError(f"checkpoint.allow={word} is unknown", fix=nearest(word, WORDS))


def compare(
    saved: Setup, now: Setup, *, tensors: Iterable[SetupDifference] = (), allow: Iterable[str] = ()
) -> SetupComparison:
    """Holds the setup of today against that of a checkpoint.

    ``tensors`` are what names and shapes say (see ``fit``). Facts that the checkpoint does not have
    are not compared.
    """
    found = [*_find_refusals(saved, now), *_optimizers(saved, now), *_schedule(saved, now)]
    known = {one.word for one in found}
    # An optimizer of another class has other tensors: to say so once is enough.
    found += [one for one in tensors if not one.word or one.word not in known]
    let = set(allow)
    return SetupComparison(
        refused=tuple(one for one in found if one.word not in let),
        allowed=tuple(one for one in found if one.word in let),
        applied=(*_describe_applied(saved, now), *_rates(saved, now), *_new_knobs(saved, now)),
        inexact=tuple(
            f"{why}: {_describe_change(name, saved, now)}"
            for name, why in INEXACT.items()
            if _differs(name, saved, now)
        ),
    )


def _differs(name: str, saved: Setup, now: Setup) -> bool:
    return name in saved and name in now and saved[name] != now[name]


def _describe_change(name: str, saved: Setup, now: Setup) -> str:
    return f"{name} was {as_typed(saved[name])} and is {as_typed(now[name])}"


def as_typed(value: Any) -> str:
    """A plain value as a user would write it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_typed, value))}]"
    return str(value)


def _find_refusals(saved: Setup, now: Setup) -> Iterator[SetupDifference]:
    for name, word in REFUSED.items():
        if _differs(name, saved, now):
            yield SetupDifference(_describe_change(name, saved, now), word)
    if _switches_ema(saved, now):
        yield SetupDifference(_describe_change("trainer.ema_decay", saved, now), "ema")


def _switches_ema(saved: Setup, now: Setup) -> bool:
    name = "trainer.ema_decay"
    return _differs(name, saved, now) and None in (saved[name], now[name])


def _describe_applied(saved: Setup, now: Setup) -> Iterator[str]:
    for name in APPLIED:
        switched = name == "trainer.ema_decay" and _switches_ema(saved, now)
        if _differs(name, saved, now) and not switched:
            yield f"{_describe_change(name, saved, now)} from here on"


# -- optimizers -----------------------------------------------------------------------------------


def _optimizers(saved: Setup, now: Setup) -> Iterator[SetupDifference]:
    """Other classes, other settings of a parameter, other parameters that train."""
    before, after = saved.get("optimizer"), now.get("optimizer")
    if before is None or after is None:
        return
    for name in sorted({*before} ^ {*after}):
        where = "the checkpoint" if name in before else "this run"
        yield SetupDifference(f"only {where} has an optimizer {name}", "optimizer")
    for name in before:
        if name in after:
            for text in _one_optimizer(name, before[name], after[name]):
                yield SetupDifference(text, "optimizer")


def _one_optimizer(name: str, before: Setup, after: Setup) -> Iterator[str]:
    if before["class"] != after["class"]:
        yield f"optimizer {name} was {before['class']} and is {after['class']}"
        return
    then, today = by_parameter(before), by_parameter(after)
    trained = [parameter for parameter in then if parameter not in today]
    if trained:
        yield f"optimizer {name} no longer trains {_few(trained)}"
    trains = [parameter for parameter in today if parameter not in then]
    if trains:
        yield f"optimizer {name} did not train {_few(trains)}"
    changes: dict[str, list[str]] = {}
    for parameter in then:
        if parameter in today:
            for text in _settings(then[parameter], today[parameter]):
                changes.setdefault(text, []).append(parameter)
    for text, parameters in changes.items():
        part = "" if len(parameters) == len(then) else f" for {_few(parameters)}"
        yield f"optimizer.{text}{part}" if name == "main" else f"{text} of optimizer {name}{part}"


def _settings(then: Setup, today: Setup) -> Iterator[str]:
    for key in then:
        if key not in _OPTIMIZER_SKIPS and _differs(key, then, today):
            yield _describe_change(key, then, today)


def _rates(saved: Setup, now: Setup) -> Iterator[str]:
    """Base learning rates: a pure schedule multiplies today's, so they just apply."""
    if _same_stateful(saved, now):
        return  # _schedule tells them
    yield from dict.fromkeys(f"{text} from here on" for text in _new_rates(saved, now))


def _new_rates(saved: Setup, now: Setup) -> Iterator[str]:
    before, after = saved.get("optimizer") or {}, now.get("optimizer") or {}
    for name in before:
        then = by_parameter(before[name])
        today = by_parameter(after[name]) if name in after else {}
        for parameter in then:
            if parameter in today and _differs("lr", then[parameter], today[parameter]):
                yield (
                    "optimizer." * (name == "main")
                    + _describe_change("lr", then[parameter], today[parameter])
                    + f" in optimizer {name}" * (name != "main")
                )


def by_parameter(optimizer: Setup) -> dict[str, Setup]:
    """Parameter name -> settings of its group."""
    return {name: group for group in optimizer["groups"] for name in group["params"]}


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


# -- schedules ------------------------------------------------------------------------------------


def _same_stateful(saved: Setup, now: Setup) -> bool:
    before, after = saved.get("schedule"), now.get("schedule")
    return bool(before and after and after["stateful"] and before["name"] == after["name"])


def _schedule(saved: Setup, now: Setup) -> Iterator[SetupDifference]:
    """A schedule that remembers has made its rates of the knobs and base rates of then."""
    if not _same_stateful(saved, now):
        return
    before, after = saved["schedule"], now["schedule"]
    if not after["takes_new_knobs"]:
        for text in _knobs(before, after):
            yield SetupDifference(text, "schedule")
    for text in dict.fromkeys(_new_rates(saved, now)):
        yield SetupDifference(f"{text}, and schedule={after['name']} keeps its own", "schedule")


def _new_knobs(saved: Setup, now: Setup) -> Iterator[str]:
    before, after = saved.get("schedule"), now.get("schedule")
    if before and after and before["name"] != after["name"]:
        begins = ", which begins here" if after["stateful"] else ""
        yield f"schedule was {before['name']} and is {after['name']}{begins}"
    elif before and after and (not after["stateful"] or after["takes_new_knobs"]):
        for text in _knobs(before, after):
            yield f"{text} from here on"
    if after and after["needs_total"] and _differs("total_steps", saved, now):
        yield (
            f"the schedule was made for {as_typed(saved['total_steps'])} steps and is for "
            f"{as_typed(now['total_steps'])} from here on"
        )


def _knobs(before: Setup, after: Setup) -> Iterator[str]:
    """Only knobs that are not at their defaults are kept, so one may be there on one side alone."""
    for key in sorted({*before["knobs"], *after["knobs"]}):
        then = as_typed(before["knobs"][key]) if key in before["knobs"] else "at its default"
        today = as_typed(after["knobs"][key]) if key in after["knobs"] else "at its default"
        if then != today:
            yield f"schedule.{key} was {then} and is {today}"
