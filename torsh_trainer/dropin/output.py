"""What the other ranks print, shown beside rank 0's as it comes."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.1


@contextlib.contextmanager
def show_logs(folder: Path) -> Iterator[None]:
    """Prints what is written to ``rank-N.log`` in ``folder``, each line after ``[N]``."""
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(folder, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(folder: Path, ended: threading.Event) -> None:
    places: dict[Path, int] = {}
    while not ended.wait(_POLL_S):
        _print_new(folder, places, is_last=False)
    _print_new(folder, places, is_last=True)


def _print_new(folder: Path, places: dict[Path, int], *, is_last: bool) -> None:
    for file in sorted(folder.glob("rank-*.log")):
        rank = file.stem.removeprefix("rank-")
        if rank == "0":  # it prints by itself
            continue
        with contextlib.suppress(OSError), file.open("rb") as stream:
            stream.seek(places.get(file, 0))
            text = stream.read()
            whole = len(text) if is_last else text.rfind(b"\n") + 1
            places[file] = places.get(file, 0) + whole
            for line in text[:whole].decode(errors="replace").splitlines():
                print(f"[{rank}] {line}", file=sys.stdout, flush=True)
