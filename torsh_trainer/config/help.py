"""The help page: what there is to choose from, without composing anything."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from torsh_trainer.config.roots import Roots
from torsh_trainer.utils.registry import GROUPS

WIDTH = 100

USAGE = """\
Train a model:     python -m torsh_trainer +recipe=NAME [OVERRIDE ...]
Sweep:             python -m torsh_trainer -m +recipe=NAME strategy=ddp,fsdp optimizer.lr=1e-2,1e-3
Submit it:         python -m torsh_trainer +recipe=NAME launcher=slurm; then: jobs list
Repeat a run:      python -m torsh_trainer rerun RUN_DIRECTORY [OVERRIDE ...]
"""
KNOBS = (
    ("launcher.num_processes=2", "one command, so many processes on this machine"),
    ("trainer.max_steps=200", "or trainer.max_epochs=5, trainer.max_time=1h30m"),
    ("data.batch_size=256", "samples a step, over all processes"),
    ("optimizer.lr=3e-3", "the learning rate"),
    ("precision=bf16_mixed", "how numbers are held"),
    ("checkpoint.every_steps=500", "save on the way; checkpoint.resume=auto|best|never|PATH"),
    ("hydra.run.dir=runs/mine", "where the run goes; the same again goes on from its checkpoints"),
    ("strategy=my/ddp.yaml", "a file of your own, for any group; +recipe=my/recipe.yaml too"),
    ("debug=true", "a failure shows its traceback"),
)
FLAGS = (
    ("-m, --multirun", "run every combination of comma-separated values"),
    ("--cfg job", "print the configuration and stop; --resolve fills in ${...}"),
    ("--cfg job --package strategy", "print a part of it"),
    ("--config-dir DIR", "a folder with groups and recipes of your own"),
    ("--hydra-help", "what of Hydra there is: its settings, sweepers and launchers"),
    ("--info searchpath", "where configuration is read from; also defaults, plugins"),
    ("--version", "print the version"),
)
HYDRA = (
    ("--cfg hydra", "print Hydra's own settings; --info all: what it composes, and from where"),
    ("hydra.run.dir=runs/mine", "where a run goes; hydra.sweep.dir, hydra.sweep.subdir for -m"),
    ("-m hydra/launcher=joblib", "jobs side by side (pip install hydra-joblib-launcher)"),
    (
        "-m hydra/launcher=submitit_slurm",
        "jobs through Slurm (pip install hydra-submitit-launcher)",
    ),
    ("-m hydra/sweeper=optuna", "a search (pip install hydra-optuna-sweeper)"),
    ("--config-dir DIR", "for --config-path; +recipe=FILE.yaml for --config-name"),
    ("--shell-completion", "for a shell: see the pages of Hydra"),
)
EXIT_CODES = (
    "Exit code: 0 done, 1 disk, network or a missing library, 2 your configuration or input,\n"
    "           3 training failed, 130 or 143 interrupted."
)


def page(roots: Roots, verbs: Iterable[str]) -> str:
    """What ``--help`` prints."""
    groups = roots.groups()
    mine = [(name, options) for name, options in groups.items() if name in GROUPS]
    mine.sort(key=lambda item: GROUPS.index(item[0]))
    other = [(name, options) for name, options in groups.items() if name not in GROUPS]
    sections = [
        USAGE.rstrip(),
        _format_list("Names", [("verbs", sorted(verbs)), ("+recipe=", list(roots.recipes()))]),
        _format_list("Groups and their options (GROUP=OPTION)", mine + other),
        _table("Knobs, most used first (all of them: --cfg job)", KNOBS),
        _table("Flags", FLAGS),
        EXIT_CODES,
    ]
    return "\n\n".join(sections)


def hydra_page() -> str:
    """What ``--hydra-help`` prints."""
    said = "This is a Hydra application (https://hydra.cc): every knob is an override."
    return "\n\n".join([said, _table("Of Hydra", HYDRA), _table("Flags", FLAGS)])


def recipes_wanted(roots: Roots) -> str:
    """What a bare ``python -m torsh_trainer`` prints."""
    first = next(iter(roots.recipes()), "NAME")
    return "\n".join(
        [
            "Nothing to train was named. Choose a recipe:",
            "",
            *(f"  +recipe={name}" for name in roots.recipes()),
            "",
            f"For example:  python -m torsh_trainer +recipe={first} launcher.num_processes=2",
            "Everything else: python -m torsh_trainer --help",
        ]
    )


def _format_list(title: str, rows: list[tuple[str, list[str]]]) -> str:
    column = max(len(name) for name, _ in rows) + 2
    lines = [f"{title}:"]
    for name, options in rows:
        indent = " " * (2 + column)
        text = textwrap.fill(
            ", ".join(options) or "(none)",
            WIDTH,
            initial_indent=f"  {name:<{column}}",
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
        lines.append(text)
    return "\n".join(lines)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    rows = list(rows)
    column = max(len(left) for left, _ in rows) + 2
    return "\n".join([f"{title}:", *(f"  {left:<{column}}{right}" for left, right in rows)])
