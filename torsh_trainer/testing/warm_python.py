"""``python`` for tests, warm: a program starts in a fork of a process that has imported torch.

A test of whole programs pays two to four seconds of a processor for each interpreter, nearly all of
it for importing torch. ``WarmPython.path`` is the path of a stand-in for ``sys.executable``:

- the stand-in, a small Python without libraries, hands its arguments, variables, folder and open
  descriptors to a server, and waits; beside it stand the commands of this environment (torchrun and
  the others), which it runs too;
- the server, which has imported what is asked for, forks, and the fork runs the program as
  ``python`` would: a file, ``-m`` or ``-c``;
- signals go through, the exit code or the signal that ended the program comes back, and who kills
  the stand-in kills the program.

The fork is no child of who started it, its number is another one, and modules that the server has
imported are there already. So what is about these takes ``sys.executable`` itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

MODULES = (
    "torch",
    "torch._dynamo",  # the first step of any optimizer imports it
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.checkpoint",
    "torsh_trainer.assemble",
    "torsh_trainer.checkpoint.saving",
    "torsh_trainer.config.training",
    "torsh_trainer.training.trainer",
)
"""What is imported once; none of it starts a thread."""

_STAND_IN = """\
#!{python} -ISE
import array, json, os, signal, socket, sys

REAL, SERVER, FORWARDED = {python!r}, {server!r}, {signals!r}
words, k = sys.argv[1:], 0
while k < len(words) and words[k] in ("-u", "-s"):
    k += 1
if k == len(words) or (words[k].startswith("-") and words[k] not in ("-m", "-c")):
    os.execv(REAL, [REAL, *words])

held, server = [], socket.socket(socket.AF_UNIX)
server.connect(SERVER)
for name in os.listdir("/proc/self/fd"):
    if int(name) <= 2 or int(name) != server.fileno():
        try:
            if os.get_inheritable(int(name)):
                held.append(int(name))
        except OSError:
            pass  # that of the listing itself, and what was closed at the start
order = json.dumps({{
    "words": words[k:], "unbuffered": "-u" in words[:k], "descriptors": held,
    "cwd": os.getcwd(), "env": dict(os.environ), "umask": os.umask(0o22), "pid": os.getpid(),
    "ignored": [n for n in FORWARDED if signal.getsignal(n) is signal.SIG_IGN],
    "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "cpus": sorted(os.sched_getaffinity(0)),
}}, ensure_ascii=True).encode()
server.sendmsg(
    [len(order).to_bytes(8, "little")],
    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", held))],
)
server.sendall(order)
pid = int.from_bytes(server.recv(8), "little", signed=True)

def forward(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass

for number in FORWARDED:
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, forward)
for number in held:
    os.close(number)  # a pipe ends with the program
answer = server.recv(8)
status = int.from_bytes(answer, "little", signed=True) if answer else 1
if status >= 0:
    os._exit(status)
signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
os.kill(os.getpid(), -status)
"""
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGQUIT", "SIGABRT")
_MOST_DESCRIPTORS = 250
"""As many go with one message."""


class WarmPython:
    """A server and its stand-in; ``path`` is what a test puts in the place of ``sys.executable``.

    ``modules`` are imported beforehand, ``env`` is added to the variables of the server while it
    imports. Use it as a context manager, or ``close`` it: then all its programs are killed.
    """

    def __init__(
        self, modules: Sequence[str] = MODULES, *, env: dict[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        folder = Path(self._folder.name)
        self.path = str(folder / "python")
        server = str(folder / "socket")
        numbers = [int(getattr(signal, name)) for name in _FORWARDED]
        Path(self.path).write_text(
            _STAND_IN.format(python=sys.executable, server=server, signals=numbers)
        )
        Path(self.path).chmod(0o755)
        _copy_commands(folder, self.path)
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, server, self.path, *modules],
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,  # its end is this process's
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._server.stdout is not None
        if self._server.stdout.readline() != b"ready\n":
            raise RuntimeError("the warm process ended while it imported; see above")

    def close(self) -> None:
        """Kills the server and all programs that run in forks of it."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _copy_commands(folder: Path, stand_in: str) -> None:
    """What stands beside ``sys.executable``; the stand-in runs the scripts of Python."""
    for command in Path(sys.executable).parent.iterdir():
        copy = folder / command.name
        if not command.is_file() or command.name.startswith("python"):
            continue
        first, _, rest = command.read_bytes().partition(b"\n")
        if first == b"#!" + os.fsencode(sys.executable):
            copy.write_bytes(b"#!" + os.fsencode(stand_in) + b"\n" + rest)
            copy.chmod(0o755)
        else:
            copy.symlink_to(command)


# -- the server ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Order:
    """What a stand-in was asked to run, and its descriptors, as this process has them."""

    words: list[str]
    unbuffered: bool
    descriptors: list[int]
    cwd: str
    env: dict[str, str]
    umask: int
    pid: int
    ignored: list[int]
    blocked: list[int]
    cpus: list[int]
    received: tuple[int, ...] = ()


def main(argv: Sequence[str]) -> None:
    """Serves until its standard input ends; in a fork, runs a program and returns after it."""
    path, stand_in, *modules = argv
    base = _base_path()
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what a fork inherits is never garbage; walking it would copy every page
    order = _serve(path)
    if order is not None:
        _set_up(order, stand_in, base)
        _run(order.words)


def _serve(path: str) -> _Order | None:
    """Forks for every stand-in that comes; returns its order in the fork, None at the end."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(128)
    wakes, wake = socket.socketpair()
    wake.setblocking(False)
    wakes.setblocking(False)
    previous = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    programs: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for readable in (listener, wakes, sys.stdin):
            selector.register(readable, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    stand_in, _ = listener.accept()
                    order = _receive(stand_in)
                    pid = os.fork()
                    if not pid:
                        signal.set_wakeup_fd(previous)
                        signal.signal(signal.SIGCHLD, handler)
                        for one in (listener, wakes, wake, stand_in, *programs.values()):
                            one.close()
                        return order
                    for number in order.received:
                        os.close(number)
                    stand_in.sendall(pid.to_bytes(8, "little", signed=True))
                    programs[pid] = stand_in
                    selector.register(stand_in, selectors.EVENT_READ, pid)
                elif key.fileobj is wakes:
                    with contextlib.suppress(BlockingIOError):
                        wakes.recv(4096)
                elif key.fileobj is sys.stdin:
                    for pid in programs:
                        _kill(pid)
                    return None
                else:  # the stand-in was killed
                    selector.unregister(key.fileobj)
                    _kill(key.data)
            for pid, status in _reap():
                stand_in = programs.pop(pid)
                with contextlib.suppress(KeyError):
                    selector.unregister(stand_in)
                with contextlib.suppress(OSError):
                    stand_in.sendall(status.to_bytes(8, "little", signed=True))
                stand_in.close()


def _receive(stand_in: socket.socket) -> _Order:
    head, received, _, _ = socket.recv_fds(stand_in, 8, _MOST_DESCRIPTORS)
    left = int.from_bytes(head, "little")
    parts = []
    while left:
        parts.append(stand_in.recv(left))
        left -= len(parts[-1])
    return _Order(**json.loads(b"".join(parts)), received=tuple(received))


def _reap() -> Iterator[tuple[int, int]]:
    """Programs that have ended: number, and exit code or minus the signal."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _kill(pid: int) -> None:
    """A program and what it has started in its session's first group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


# -- in the fork ---------------------------------------------------------------------------------


def _set_up(order: _Order, stand_in: str, base: list[str]) -> None:
    """Makes this process what ``python`` would be at the first line of the program."""
    os.setsid()
    _set_signals(order)
    _take_descriptors(order)
    os.sched_setaffinity(0, order.cpus)
    os.umask(order.umask)
    os.chdir(order.cwd)
    parent = f"/proc/{order.pid}/stat"
    os.environ.clear()
    os.environ.update(order.env)
    os.getppid = lambda: int(Path(parent).read_text().rpartition(")")[2].split()[1])
    unbuffered = order.unbuffered or bool(order.env.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, _open_stream(number, unbuffered=unbuffered))
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.executable = stand_in
    sys.dont_write_bytecode = bool(order.env.get("PYTHONDONTWRITEBYTECODE"))
    if order.env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.path[:] = [*_read_path(order.env), *base]
    importlib.invalidate_caches()
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):  # which Python imports before any program
        importlib.import_module("sitecustomize")
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    threads = order.env.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdigit():
        sys.modules["torch"].set_num_threads(int(threads))


def _set_signals(order: _Order) -> None:
    """Those of the program, not those that the server was started with."""
    for name in _FORWARDED:
        number = int(getattr(signal, name))
        default = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in order.ignored else default)
    signal.pthread_sigmask(signal.SIG_SETMASK, order.blocked)


def _take_descriptors(order: _Order) -> None:
    """Puts what was received under the numbers that it had; nothing else stays open."""
    above = max([*order.descriptors, *order.received, 2]) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, above) for number in order.received]
    os.closerange(0, above)
    for number, there in zip(order.descriptors, moved, strict=True):
        os.dup2(there, number, inheritable=True)
        os.close(there)
    for number in {0, 1, 2} - set(order.descriptors):
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)


def _open_stream(number: int, *, unbuffered: bool) -> io.TextIOWrapper:
    is_input = number == 0
    raw: Any = io.FileIO(number, "r" if is_input else "w", closefd=False)
    buffer: Any = io.BufferedReader(raw) if is_input else raw if unbuffered else None
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if buffer is None else buffer,
        encoding="utf-8",
        errors="backslashreplace" if number == 2 else "strict",
        line_buffering=number == 2 or raw.isatty(),
        write_through=unbuffered and not is_input,
    )


def _base_path() -> list[str]:
    """Where modules are found without PYTHONPATH, and without the folder of the program."""
    given = set(_read_path(os.environ))
    return [entry for entry in sys.path[1:] if str(Path(entry).absolute()) not in given]


def _read_path(env: Mapping[str, str]) -> list[str]:
    return [str(Path(p).absolute()) for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]


def _run(words: list[str]) -> None:
    """Runs the program as ``__main__``; its own end is that of this process."""
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            sys.path.insert(0, str(Path.cwd()))
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # what -m calls
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.path.insert(0, "")
            exec(compile(words[1], "<string>", "exec"), module.__dict__)
        else:
            sys.argv = list(words)
            path = Path(words[0]).absolute()
            sys.path.insert(0, str(path.resolve().parent))
            module.__file__ = str(path)
            exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as Python itself does with it at the end
        _fail(error)


def _fail(error: BaseException) -> NoReturn:
    """Prints an error without the frames of this file, and ends."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        frames = frames.tb_next
    if sys.excepthook is sys.__excepthook__:
        traceback.print_exception(type(error), error, frames)
    else:
        sys.excepthook(type(error), error, frames)
    if isinstance(error, KeyboardInterrupt):
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
