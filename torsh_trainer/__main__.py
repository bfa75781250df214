"""The door: ``python -m torsh_trainer``. Routes verbs, words errors, sets exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torsh_trainer import __version__
from torsh_trainer.config import command_line, help, tracebacks
from torsh_trainer.config.roots import find_roots
from torsh_trainer.errors import ConfigError, DryRun, Interrupted, TorshError
from torsh_trainer.utils import registry
from torsh_trainer.utils.foreign import readable
from torsh_trainer.utils.masking import mask_text


def main(argv: Sequence[str] | None = None) -> int:
    """Does what ``argv`` (default: the process's arguments) says; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return report_failure(lambda: _route(arguments), debug=_debug(arguments))


def _route(arguments: list[str]) -> int:
    try:
        Path.cwd()
    except FileNotFoundError as error:
        fix = "cd to a folder that exists"
        raise ConfigError("the current directory is gone", fix=fix) from error
    if arguments and arguments[0] in registry.VERBS:
        return int(registry.VERBS.load(arguments[0])(arguments[1:]))
    return _train(command_line.parse(arguments))


def rerun(argv: Sequence[str]) -> int:
    """The verb ``rerun RUN [overrides]``."""
    line = command_line.parse(argv, verb="rerun")
    # Imported late, as Hydra is below: --help needs neither.
    from torsh_trainer.config import rerun as again

    if line.help:
        print(again.HELP)
        return 0
    with again.explain_unknown_knob(line):
        if not line.dry_run:
            return _train(again.command_line(line))
        from torsh_trainer import assemble

        return again.dry_run(line, preview=assemble.preview, env=dict(os.environ))


def verify(argv: Sequence[str]) -> int:
    """The verb ``verify``: of a recipe, or with ``--source``, ``--command`` or ``--launch``."""
    if any(word.partition("=")[0] == "--source" for word in argv):
        return _prove(argv)
    if any(word.partition("=")[0] in ("--command", "--launch") for word in argv):
        from torsh_trainer.dropin.verifying import main as verify_command

        return verify_command(argv)
    line = command_line.parse(argv, verb="verify")
    # Imported late, as Hydra is below: --help needs neither.
    from torsh_trainer.config import verifying

    if line.help or not argv:
        print(verifying.HELP, file=sys.stdout if line.help else sys.stderr)
        return 0 if line.help else ConfigError.exit_code
    asked = verifying.verification(line)
    from torsh_trainer.assemble.verifying import verify as verified
    from torsh_trainer.config.wording import as_failure

    return verified(
        asked.node,
        asked.config,
        recipe=asked.recipe,
        env=dict(os.environ),
        import_paths=asked.import_paths,
        in_words=as_failure,
    )


def report(argv: Sequence[str]) -> int:
    """The verb ``report RUN...``."""
    # Imported late, as all verbs are.
    from torsh_trainer.report import main as drawn

    return drawn(argv, conf=[root.conf for root in find_roots().all])


def translate(argv: Sequence[str]) -> int:
    """The verb ``translate FILE``, or ``translate RECIPE --to ENGINE``."""
    # Imported late: each direction needs its own, and only this one needs Hydra.
    if not any(word.partition("=")[0] == "--to" for word in argv):
        from torsh_trainer.translate.command import main as inward

        return inward(argv)
    from torsh_trainer.config.outward import parse_request
    from torsh_trainer.translate.outward.command import write

    order = parse_request(argv)
    return write(order.native, order.to, output=order.output, report_file=order.report)


def _prove(argv: Sequence[str]) -> int:
    """A translation, tried against the original."""
    # Imported late, as Hydra is below: --help needs neither.
    from torsh_trainer.config import proving

    asked = proving.proof(argv)
    from torsh_trainer.assemble.proving import prove
    from torsh_trainer.config.wording import as_failure

    return prove(
        asked.source,
        asked.asked,
        asked.config,
        recipe=asked.recipe if asked.has_task else None,
        env=dict(os.environ),
        import_paths=asked.import_paths,
        in_words=as_failure,
    )


def report_failure(work: Callable[[], int], *, debug: bool) -> int:
    """The exit code of ``work``, whose failure is told in one sentence and the next move.

    With ``debug`` the traceback comes before it.
    """
    try:
        return work()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Interrupted("interrupted").cause_exit_code
    except BrokenPipeError:  # the reader has seen enough (`--help | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except DryRun:  # whoever planned has printed it
        return DryRun.exit_code
    except TorshError as error:
        return _print_error(error, debug=debug)
    except Exception as error:  # noqa: BLE001 - the last door: everything gets words here
        # Imported late: Hydra's own exceptions are known only where Hydra is loaded.
        from torsh_trainer.config.wording import as_failure

        failure = as_failure(error)
        failure.__cause__ = error
        return _print_error(failure, debug=debug)


def _train(line: command_line.CommandLine) -> int:
    if line.hydra_help:
        print(help.hydra_page())
        return 0
    roots = find_roots(line.config_dir)
    if line.help:
        print(help.page(roots, registry.VERBS.names()))
        return 0
    if line.version:
        print(f"torsh-trainer {__version__}")
        return 0
    if line == command_line.CommandLine(config_dir=line.config_dir):
        print(help.recipes_wanted(roots), file=sys.stderr)
        return ConfigError.exit_code
    if line.dry_run:
        raise ConfigError("--dry-run looks at a run", fix="write rerun RUN_DIRECTORY --dry-run")
    _refuse_a_misspelt_verb(line)
    # Imported late, so that every answer waits only for what it needs.
    if not line.trains:
        from torsh_trainer.config import app

        return app.show(line, roots)
    from torsh_trainer import assemble
    from torsh_trainer.config import training

    return training.train(line, roots, run=assemble.run, env=dict(os.environ))


def _refuse_a_misspelt_verb(line: command_line.CommandLine) -> None:
    first = next(iter(line.overrides), "=")
    if "=" in first or first.startswith("~"):
        return
    verbs = registry.VERBS.names()
    raise ConfigError(
        f"{first!r} is {'a verb' if first in verbs else 'neither a verb nor an override'}",
        fix=f"write the verb first: python -m torsh_trainer {first} ..."
        if first in verbs
        else f"verbs are {', '.join(verbs)}; an override is NAME=VALUE",
    )


def _print_error(error: TorshError, *, debug: bool) -> int:
    if debug:
        tracebacks.show(error)
    print(f"error: {readable(mask_text(str(error)))}", file=sys.stderr)
    return int(getattr(error, "cause_exit_code", error.exit_code))


def _debug(arguments: Sequence[str]) -> bool:
    """Read before anything can fail; ``debug`` in a recipe is known to the run alone."""
    return any(text.lower() in ("debug=true", "++debug=true") for text in arguments)


if __name__ == "__main__":
    sys.exit(main())
