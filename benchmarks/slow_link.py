"""(g) Gradient compression between two processes whose link is slow: namespaces, and tc's tbf.

Each rank runs in a network namespace of its own; a veth pair joins them, with a token bucket filter
at both ends. The namespaces have no names, so that nothing of them outlives the ranks: the kernel
takes them away with the last process in them, however that one ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from unittest import mock

import torch
from torch.nn import functional as F

from benchmarks.comparing import Spread
from benchmarks.contenders import trainer
from benchmarks.work import BATCH, CLASSES, FEATURES, Samples, build_model, table
from torsh_trainer.callbacks.base import Callback, StepReport
from torsh_trainer.comm import compression
from torsh_trainer.comm.base import CommOptions
from torsh_trainer.comm.compression import Compression, GradientReducer
from torsh_trainer.comm.start import create
from torsh_trainer.environments.world import Rendezvous, World
from torsh_trainer.strategies.builtin import Gloo
from torsh_trainer.training.trainer import run_in

TITLE = "gradient compression on a slow link"
HEADING = "### (g) Gradient compression on a slow link, two processes"
WIDTHS = (FEATURES, *[2048] * 7, CLASSES)
RATIO = 0.01
"""Of the sparse methods; the threshold is what so few elements of a first gradient reach."""

Rate = int | None
"""Mbit/s at both ends of the link; None is no limit."""
RATES: tuple[Rate, ...] = (None, 1000, 100)
STEPS: dict[Rate, int] = {None: 11, 1000: 9, 100: 5}
WARM_UP = 2
"""Steps after each change of the rate that do not count: TCP has to find it."""

COMPRESSIONS: dict[str, Compression] = {
    "none": compression.NoCompression(),
    "fp16": compression.FP16(),
    "bf16": compression.BF16(),
    "topk 1%": compression.TopK(RATIO),
    "randomk 1%": compression.RandomK(RATIO),
    "threshold": compression.Threshold(),
    "int8": compression.Int8(),
    "int4": compression.Int4(),
    "signsgd": compression.SignSGD(),
    "onebit": compression.OneBit(),
    "powersgd": compression.PowerSGD(),
}
QUICK = ("none", "fp16", "topk 1%")

ROOT = Path(__file__).parent.parent
PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux"}
TRIAL = (
    "ip link add trial0 type veth peer name trial1 && "
    "tc qdisc add dev trial0 root tbf rate 100mbit burst 16kb latency 200ms"
)
PORTS = {"probe": 29510, "rendezvous": 29511}  # in namespaces that nobody else is in


# -- what measures ---------------------------------------------------------------------------------


def measure(*, quick: bool, device: str) -> dict[str, Any]:
    """The link as it was found to be, and a row for each compression; or what is ``lacking``."""
    lacks = lacking(device=device, root=os.geteuid() == 0, path=PATH)
    if lacks:
        print(f"  not measured: it needs {lacks}", flush=True)
        return {"lacks": lacks}
    if quick:
        return compare(QUICK, dict.fromkeys(RATES, 2))
    return compare(tuple(COMPRESSIONS), STEPS)


def lacking(*, device: str, root: bool, path: str) -> str:
    """What this part needs and does not have here; empty where it can run."""
    if device != "cpu":
        return "--device cpu: gloo between CPUs is what it measures"
    if not root:
        return "root, who may make network namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if missing:
        packages = sorted({TOOLS[tool] for tool in missing})
        return f"{', '.join(missing)} (Debian: {', '.join(packages)})"
    command = [shutil.which("unshare", path=path) or "unshare", "--net", "sh", "-c", TRIAL]
    trial = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False)
    if trial.returncode == 0:
        return ""
    words = trial.stderr.strip().splitlines() or [f"exit status {trial.returncode}"]
    return f"a kernel with network namespaces, veth and tbf ({words[-1]})"


def compare(names: Sequence[str], steps: Mapping[Rate, int]) -> dict[str, Any]:
    """As ``measure``, for some compressions and so many steps at each rate."""
    found: dict[str, Any] = {"link": [], "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        spec = {"names": names, "steps": [steps[rate] for rate in RATES], "folder": folder}
        for row in _messages(spec):
            if "measured_mbit" in row:
                found["link"].append(row)
                print(f"  {_said(row['mbit'])}: {row['measured_mbit']:.0f} Mbit/s", flush=True)
            else:
                found["rows"].append(row)
                seconds = ", ".join(
                    f"{one['step_s']:.3f} s at {_said(one['mbit'])}" for one in row["rates"]
                )
                print(f"  {row['compression']}: {seconds}", flush=True)
    return found


def _messages(spec: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What rank 0 has to say, until both ranks have ended.

    Raises:
        RuntimeError: a rank failed; the words are its last ones.
    """
    inbox: queue.Queue[str | tuple[int, int]] = queue.Queue()
    ranks: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            ranks += [_started(rank, errors) for rank in range(2)]
            for rank, process in enumerate(ranks):
                threading.Thread(target=_relay, args=(rank, process, inbox), daemon=True).start()
            for _ in ranks:
                _take(inbox, errors)  # it has started, and so its namespace is there
            _join(*ranks)
            for process in ranks:
                assert process.stdin is not None
                process.stdin.write(json.dumps(spec) + "\n")
                process.stdin.flush()
            running = len(ranks)
            while running:
                message = _take(inbox, errors)
                if message is None:
                    running -= 1
                else:
                    yield message
        finally:
            for process in ranks:
                process.kill()
                process.wait()


def _started(rank: int, errors: IO[str]) -> subprocess.Popen[str]:
    command = ["unshare", "--net", sys.executable, "-m", "benchmarks.slow_link", str(rank)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": PATH, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,  # Ctrl-C is this process's business
    )


def _relay(rank: int, process: subprocess.Popen[str], inbox: queue.Queue[Any]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        inbox.put(line)
    inbox.put((rank, process.wait()))


def _take(inbox: queue.Queue[Any], errors: IO[str]) -> dict[str, Any] | None:
    """The next message; None is a rank that has ended well."""
    item = inbox.get()
    if isinstance(item, str):
        message: dict[str, Any] = json.loads(item)
        return message
    rank, code = item
    if code:
        errors.seek(0)
        raise RuntimeError(f"rank {rank} ended with {code}: {errors.read()[-4000:]}")
    return None


def _join(one: subprocess.Popen[str], other: subprocess.Popen[str]) -> None:
    """A veth pair with an end in each one's namespace."""
    ends = ["netns", str(one.pid), "type", "veth", "peer", "name", _interface(1)]
    command = ["ip", "link", "add", "name", _interface(0), *ends, "netns", str(other.pid)]
    subprocess.run(command, env={"PATH": PATH}, check=True)


def _interface(rank: int) -> str:
    return f"bench{rank}"


# -- a rank ----------------------------------------------------------------------------------------


def _rank(rank: int) -> None:
    """Runs every compression at every rate, and tells about it in lines of JSON."""
    # What the product prints is not for the reader of these lines.
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"ready": rank}), file=told, flush=True)
    spec = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    link = Link(rank)
    with _connected(link) as peer:
        for rate in RATES:
            link.limit(rate)
            row = {"mbit": rate, "measured_mbit": _probe(peer, rate)}
            if rank == 0:
                print(json.dumps(row), file=told, flush=True)
    link.limit(None)
    meeting = Rendezvous(link.address(0), PORTS["rendezvous"])
    world = World(rank, 2, 0, 1, rank, 2, rendezvous=meeting, source="benchmark")
    options = CommOptions(backend="gloo", network_interface=link.interface)
    comm = create(world, options, torch.device("cpu"))
    for name in spec["names"]:
        row = _row(name, world, link, dict(zip(RATES, spec["steps"], strict=True)), spec["folder"])
        if rank == 0:
            print(json.dumps(row), file=told, flush=True)
    comm.close()


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


class Link:
    """One rank's end of the link."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.interface = _interface(rank)
        self._limited = False
        _do("ip", "addr", "add", f"{self.address(rank)}/24", "dev", self.interface)
        for interface in ("lo", self.interface):
            _do("ip", "link", "set", interface, "up")

    @staticmethod
    def address(rank: int) -> str:
        """Where that rank is."""
        return f"10.0.0.{rank + 1}"

    def limit(self, rate: Rate) -> None:
        """From now on this end sends no faster.

        The bucket holds what the link carries in a millisecond: more would be a gift to those who
        send little. (Packets of TCP that are larger than it are cut by the filter.)
        """
        device = ("dev", self.interface, "root")
        if self._limited:
            # Not changed in place: what waits in a filter may be larger than the new bucket, and
            # would wait for ever. TCP sends it again.
            _do("tc", "qdisc", "del", *device)
        if rate is not None:
            shape = ("rate", f"{rate}mbit", "burst", f"{125 * rate}b", "latency", "200ms")
            _do("tc", "qdisc", "add", *device, "tbf", *shape)
        self._limited = rate is not None

    @property
    def sent_bytes(self) -> int:
        """What the interface says that it has sent, headers included."""
        lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
        (line,) = [line for line in lines if line.strip().startswith(f"{self.interface}:")]
        return int(line.split(":")[1].split()[8])


def _do(*command: str) -> None:
    subprocess.run(command, env={"PATH": PATH}, check=True)


@contextlib.contextmanager
def _connected(link: Link) -> Iterator[socket.socket]:
    """A plain socket to the other rank."""
    place = (link.address(0), PORTS["probe"])
    if link.rank == 0:
        with socket.create_server(place) as server:
            peer, _ = server.accept()
            with peer:
                yield peer
        return
    for _ in range(100):
        with contextlib.suppress(OSError):  # the other end is not up yet, or does not listen
            peer = socket.create_connection(place, timeout=60.0)
            break
        time.sleep(0.1)
    with peer:
        yield peer


def _probe(peer: socket.socket, rate: Rate) -> float:
    """Mbit/s of plain TCP in both directions at once, as an all-reduce uses it."""
    nbytes = 512 * 2**20 if rate is None else rate * 125_000  # a second's worth
    block = bytes(2**20)
    for size in (len(block) // 8, nbytes):  # the first to meet, and to find the rate
        began = time.perf_counter()
        sender = threading.Thread(target=_send, args=(peer, block, size))
        sender.start()
        missing = size
        while missing:
            missing -= len(peer.recv(min(missing, len(block))))
        sender.join()
        seconds = time.perf_counter() - began
    return 8e-6 * nbytes / seconds


def _send(peer: socket.socket, block: bytes, nbytes: int) -> None:
    for begin in range(0, nbytes, len(block)):
        peer.sendall(block[: nbytes - begin])


def _row(
    name: str, world: World, link: Link, steps: Mapping[Rate, int], folder: str
) -> dict[str, Any]:
    """Trains under one compression, at every rate in turn."""
    knobs = COMPRESSIONS[name]
    if isinstance(knobs, compression.Threshold):
        knobs = replace(knobs, threshold=_reached_by(RATIO))
    watch = Stopwatch()
    clock = Clock(steps, link, watch)
    made = trainer(
        Samples(),
        len(clock.plan),
        WIDTHS,
        Path(folder) / name.replace(" ", "-"),
        "cpu",
        ranks=2,
        strategy=Gloo(),
        compression=knobs,
    )
    with watch.watching():
        run_in(world, replace(made, callbacks=[*made.callbacks, clock]))
    link.limit(None)
    rates = [clock.at(rate) for rate in RATES]
    return {"compression": name, "rates": rates}


def _reached_by(share: float) -> float:
    """The magnitude that this share of a first gradient reaches; alike on all ranks."""
    module, data = build_model(WIDTHS), Samples()
    F.cross_entropy(module(data.x[:BATCH]), data.y[:BATCH]).backward()
    gradient = torch.cat([p.grad.view(-1) for p in module.parameters() if p.grad is not None])
    count = max(1, round(share * gradient.numel()))
    return float(gradient.abs().topk(count).values[-1])


class Stopwatch:
    """Seconds that the training thread of a rank has spent on compressing, and bytes counted.

    Handing a bucket over (encoding) by the clock, and taking the mean back (decoding) by the
    processor's time, since the wait for the network lies within it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sent_bytes: int | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Compression is timed within."""
        start = GradientReducer.start

        def timed(reducer: GradientReducer, *bucket: Any) -> _Timed:
            began = time.perf_counter()
            pending = start(reducer, *bucket)
            self.seconds += time.perf_counter() - began
            self.sent_bytes = reducer.traffic.sent_bytes
            return _Timed(pending, self)

        with mock.patch.object(GradientReducer, "start", timed):
            yield


class _Timed:
    def __init__(self, pending: Any, watch: Stopwatch) -> None:
        self._pending = pending
        self._watch = watch

    def wait(self) -> Any:
        began = time.thread_time()
        mean = self._pending.wait()
        self._watch.seconds += time.thread_time() - began
        return mean


class Clock(Callback):
    """Times every step, and turns the rate of the link as ``plan`` says."""

    def __init__(self, steps: Mapping[Rate, int], link: Link, watch: Stopwatch) -> None:
        self.plan = [
            (rate, number >= WARM_UP) for rate in RATES for number in range(WARM_UP + steps[rate])
        ]
        self._link = link
        self._watch = watch
        self._seen: dict[Rate, list[tuple[float, ...]]] = {rate: [] for rate in RATES}
        self._before: tuple[float, ...] = ()

    def on_step(self, report: StepReport) -> None:
        """The step that ends here took so long, moved so much; the next one has its rate."""
        rate, counts = self.plan[report.step - 1]
        if counts:
            now = self._read()
            steps = zip(now, self._before, strict=True)
            self._seen[rate].append(tuple(after - before for after, before in steps))
        following = self.plan[report.step : report.step + 1]
        if following and following[0][0] != rate:
            self._link.limit(following[0][0])
        self._before = self._read()

    def _read(self) -> tuple[float, ...]:
        watch = self._watch
        return time.perf_counter(), watch.seconds, self._link.sent_bytes, watch.sent_bytes or 0

    def at(self, rate: Rate) -> dict[str, Any]:
        """Medians of the steps at a rate, and bytes a step."""
        seconds, compressing, moved, counted = zip(*self._seen[rate], strict=True)
        step = Spread.extremes(seconds)
        return {
            "mbit": rate,
            "steps": len(seconds),
            "step_s": step.value,
            "fastest_s": step.low,
            "slowest_s": step.high,
            "compressing_s": statistics.median(compressing),
            "interface_bytes": statistics.fmean(moved),
            "counted_bytes": None if self._watch.sent_bytes is None else statistics.fmean(counted),
        }


# -- what is written -------------------------------------------------------------------------------


def text(found: dict[str, Any]) -> str:
    """The part of the page, in Markdown."""
    if "lacks" in found:
        return f"{HEADING}\n\nNot measured: it needs {found['lacks']}."
    plain = {one["mbit"]: one["step_s"] for one in found["rows"][0]["rates"]}
    head = ["compression", "MB a step, as counted", "as the interface counts"]
    for rate in RATES:
        head += [f"{_said(rate)}: step (s)", "of none's"]
    head += ["compressing (ms)", "of the step at no limit"]
    rows = [_cells(row, plain) for row in found["rows"]]
    link = ", ".join(f"{_said(o['mbit'])} {o['measured_mbit']:.0f}" for o in found["link"])
    *first, last = (str(one["steps"]) for one in found["rows"][0]["rates"])
    note = (
        f"The link as plain TCP finds it, both ways at once, in Mbit/s: {link}. Medians of "
        f"{', '.join(first)} and {last} steps."
    )
    losers = _losers(found["rows"], plain)
    return "\n\n".join([HEADING, table(tuple(head), rows), note, losers])


def _cells(row: Mapping[str, Any], plain: Mapping[Rate, float]) -> tuple[str, ...]:
    rates = row["rates"]
    counted = [one["counted_bytes"] for one in rates]
    cells = [
        row["compression"],
        "-" if None in counted else _megabytes(counted),
        _megabytes([one["interface_bytes"] for one in rates]),
    ]
    for one in rates:
        cells += [f"{one['step_s']:.3f}", f"{one['step_s'] / plain[one['mbit']]:.2f}"]
    free = rates[0]
    if None in counted:
        return (*cells, "-", "-")
    share = free["compressing_s"] / free["step_s"]
    return (*cells, f"{1e3 * free['compressing_s']:.0f}", f"{share:.0%}")


def _megabytes(values: Sequence[float]) -> str:
    """A mean, or the range where steps at different rates send different amounts."""
    low, high = (f"{1e-6 * value:.2f}" for value in (min(values), max(values)))
    if max(values) < 1.1 * min(values):
        return f"{1e-6 * statistics.fmean(values):.2f}"
    return f"{low} to {high}"


def _losers(rows: Sequence[Mapping[str, Any]], plain: Mapping[Rate, float]) -> str:
    """Where compression costs time instead of saving it, in words."""
    words = []
    for number, rate in enumerate(RATES):
        ratios = {row["compression"]: row["rates"][number]["step_s"] / plain[rate] for row in rows}
        slow = [name for name, ratio in ratios.items() if round(ratio, 2) > 1.0]
        words.append(f"at {_said(rate)} {', '.join(slow) or 'nobody'}")
    return f"Slower than no compression: {'; '.join(words)}."


def _said(rate: Rate) -> str:
    if rate is None:
        return "no limit"
    return f"{rate // 1000} Gbit/s" if rate >= 1000 else f"{rate} Mbit/s"


if __name__ == "__main__":
    _rank(int(sys.argv[1]))
