"""The doctor's other end on a host that ``--hosts`` names: one request a line, one answer a line.

``python -m torsh_trainer.doctor.agent``, started over ssh. Its input is its leash: once that ends,
it ends, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torsh_trainer.doctor.checks.disk import find_parent
from torsh_trainer.doctor.examination import examine
from torsh_trainer.doctor.facts import collect_facts
from torsh_trainer.doctor.machine import Machine
from torsh_trainer.errors import TorshError

MARK = "torsh-doctor "
"""Before each answer: what a login prints beside them is none."""


def examine_here(request: dict[str, Any]) -> dict[str, Any]:
    """All checks, and what is held against other hosts."""
    machine = Machine(
        dict(os.environ),
        folder=Path(request["dir"]),
        nodes=request["nodes"],
        processes=request["processes"],
        port=request["port"],
    )
    found = examine(machine, only=request["only"])
    facts = collect_facts(machine, folder=Path(request["folder"]), peers=request["peers"])
    return {"examination": found.as_dict(), "facts": facts}


def tell_time(request: dict[str, Any]) -> dict[str, Any]:
    """The clock, in seconds since 1970."""
    return {"time": time.time()}


def write_marker(request: dict[str, Any]) -> dict[str, Any]:
    """Leaves a small file where other hosts look for it: its ``path``, or why it is ``refused``.

    Where the folder is not there yet, it stands in the nearest that is.
    """
    path = find_parent(Path(request["folder"])) / f".torsh-doctor-{request['text']}"
    try:
        path.write_text(request["text"], "utf-8")
    except OSError as error:
        return {"path": str(path), "refused": f"{path.parent}: {error.strerror}"}
    return {"path": str(path), "refused": ""}


def find_marker(request: dict[str, Any]) -> dict[str, Any]:
    """Waits for the file of another host; ``seen`` is seconds, or None where it does not come."""
    path, started = Path(request["path"]), time.monotonic()
    while time.monotonic() - started < request["patience_s"]:
        try:
            list(path.parent.iterdir())  # has a network file system ask its server anew
            if path.read_text("utf-8") == request["text"]:
                return {"seen": time.monotonic() - started}
        except OSError:
            if not path.parent.is_dir():
                return {"seen": None}
        time.sleep(0.05)
    return {"seen": None}


def remove_marker(request: dict[str, Any]) -> dict[str, Any]:
    """Takes the file away again."""
    Path(request["path"]).unlink(missing_ok=True)
    return {}


def try_network(request: dict[str, Any]) -> dict[str, Any]:
    """All-reduces with other hosts; see ``all_reduce.try_all_reduce``."""
    # Imported late: it loads torch, which the checks do without.
    from torsh_trainer.doctor.all_reduce import try_all_reduce

    return try_all_reduce(**request["trial"])


def load_torch(request: dict[str, Any]) -> dict[str, Any]:
    """Loads what ``try_network`` takes."""
    import torsh_trainer.doctor.all_reduce  # noqa: F401

    return {}


_REQUESTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "examine": examine_here,
    "tell_time": tell_time,
    "write_marker": write_marker,
    "find_marker": find_marker,
    "remove_marker": remove_marker,
    "load_torch": load_torch,
    "try_network": try_network,
}


def serve() -> None:
    """Answers requests until the input ends."""
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    while True:
        request = json.loads(requests.get())
        try:
            answer = _REQUESTS[request["do"]](request)
        except TorshError as error:
            answer = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - told to the other end, which says it
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        print(f"{MARK}{json.dumps(answer)}", flush=True)


def _read_requests(requests: queue.Queue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # the leash: a collective that hangs would keep the process for ever


if __name__ == "__main__":
    serve()
