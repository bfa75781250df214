"""What a script reads of its environment, as far as a launch line, ``--set`` or a default says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torsh_trainer.translate.python.values import Unknown
from torsh_trainer.translate.shell.words import Word

GET = ("os.environ.get", "os.getenv", "os.environ.setdefault")
"""Functions that read a variable, with a default."""

_OF_OTHERS = re.compile(
    r"(LOCAL_|GROUP_|NODE_|ROLE_)?RANK|\w*WORLD_SIZE|MASTER_\w+|NODE_?ID|HOST(NAME)?|HOME|USER|PATH|"
    r"PWD|SHELL|TMPDIR|LOGNAME|\w*_VISIBLE_DEVICES|(SLURM|PBS|LSB|OMPI|PMI|PMIX|MPI|HOROVOD|TORCHELASTIC|"
    r"AMLT|AZUREML|SM|AWS|CI|PET|RDZV|LSF|SGE|JOB|COLAB|KAGGLE|PYTHON)_\w+"
)
"""Variables that launchers, schedulers and shells set: a default says nothing of them."""


def read_environment(variables: Mapping[str, Word]) -> dict[str, Any]:
    """Variables of a shell as a script finds them."""
    return {
        name: Unknown(f"os.environ[{name!r}]", word.place) if word.holes else word.text
        for name, word in variables.items()
    }


@dataclass
class ScriptVariables:
    """Variables by name. ``given`` are those that the line or the file that starts the script sets,
    ``stated`` what ``--set`` states; ``here`` are set by the script itself. ``assumed`` are those
    that were taken for unset, and ``used`` those of ``stated`` that were asked for."""

    given: Mapping[str, Any]
    stated: Mapping[str, Any]
    here: dict[str, Any] = field(default_factory=dict)
    assumed: dict[str, None] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def knows(self, name: Any) -> bool:
        """Whether somebody sets it."""
        return isinstance(name, str) and any(
            name in one for one in (self.here, self.stated, self.given)
        )

    def read(self, name: str) -> Any:
        """The value of a variable that somebody sets; what the script sets itself counts."""
        if name in self.here:
            return self.here[name]
        if name in self.stated:
            self.used.add(name)
            return str(self.stated[name])
        return self.given[name]

    def is_free(self, name: Any) -> bool:
        """Whether nobody but the user would set it, who has not: its default counts, and
        ``assumed`` has it then."""
        if not isinstance(name, str) or self.knows(name) or _OF_OTHERS.fullmatch(name):
            return False
        self.assumed[name] = None
        return True


def note_assumed(names: tuple[str, ...]) -> list[str]:
    """Words on variables of which a default of the script's counts; none where there is none."""
    if not names:
        return []
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    listed = f"{', '.join(names[:6])}{more} (--set {names[0]}=VALUE says otherwise)"
    return [f"taken for unset in the environment, so that the script's defaults count: {listed}"]
