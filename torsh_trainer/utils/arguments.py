"""The arguments of a verb: a mistake in them is the user's input, told as all of it is."""

from __future__ import annotations

import argparse
from typing import NoReturn

from torsh_trainer.errors import ConfigError


class VerbParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` for a verb; ``prog`` is ``python -m torsh_trainer VERB``."""

    def error(self, message: str) -> NoReturn:
        """Refuses the command line.

        Raises:
            ConfigError: always; the exit code is the door's business.
        """
        words = self.prog.partition("torsh_trainer ")[2]
        raise ConfigError(f"{words}: {message}", fix=f"{words} --help shows what there is")
