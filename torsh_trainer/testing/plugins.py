"""A distribution with entry points, as pip leaves it, for as long as a test wants it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torsh_trainer.utils import registry


@contextmanager
def install_plugin(
    folder: Path,
    *,
    name: str = "torsh-of-a-test",
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Within the block ``name`` is installed in ``folder``: real entry points, and real files.

    ``entry_points`` are by group and name; ``modules`` are names of modules and their text. A
    process that is started meanwhile finds it where ``folder`` is on its ``PYTHONPATH``.
    """
    write_distribution(folder, name=name, entry_points=entry_points, modules=modules)
    sys.path.insert(0, str(folder))
    registry.refresh()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for module in modules or {}:
            sys.modules.pop(module, None)
        registry.refresh()


def write_distribution(
    folder: Path,
    *,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None = None,
) -> None:
    """Writes what pip writes when it installs such a distribution."""
    about = folder / f"{name.replace('-', '_')}-0.1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items()), ""]
    (about / "entry_points.txt").write_text("\n".join(lines))
    for module, text in (modules or {}).items():
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
