"""How requests reach rank 0 and decisions every rank: sockets, one thread on each side."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torsh_trainer.dropin.negotiation.coordinator import Coordinator
from torsh_trainer.dropin.negotiation.requests import Decision, Request, decode, encode

_CHECK_S = 1.0


@dataclass(frozen=True)
class StallCheck:
    """After how many seconds a collective that some ranks wait for is told; 0 is never.

    After ``shutdown_s`` the job is given up.
    """

    warning_s: float = 60.0
    shutdown_s: float = 0.0


class Server:
    """Rank 0's end: it hears every rank, and tells all of them the same in the same order."""

    def __init__(self, size: int, *, stalls: StallCheck = StallCheck()) -> None:
        self._coordinator = Coordinator(size)
        self._size = size
        self._stalls = stalls
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, int] = {}
        self._closed = False
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._serve, name="horovod-server", daemon=True)

    def start(self, own: socket.socket, listener: socket.socket, token: bytes) -> None:
        """Waits for every other rank to come, and serves all of them from then on.

        ``own`` leads to rank 0 itself. Whoever does not know ``token`` is sent away.
        """
        self._peers[own] = 0
        while len(self._peers) < self._size:
            peer, _ = listener.accept()
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello = receive_exactly(peer, len(token) + 4)
            if hello is None or not hmac.compare_digest(hello[: len(token)], token):
                peer.close()
                continue
            self._peers[peer] = int.from_bytes(hello[len(token) :], "big")
        listener.close()
        self._thread.start()

    def add_members(self, number: int, ranks: Sequence[int]) -> None:
        """Makes a process set known."""
        with self._lock:
            self._coordinator.add_members(number, ranks)

    def submit(self, rank: int, requests: Sequence[Request]) -> None:
        """As if ``rank`` had sent them."""
        self._tell(lambda: self._coordinator.submit(rank, requests))

    def join(self, rank: int) -> None:
        """As if ``rank`` had sent that it joins."""
        self._tell(lambda: self._coordinator.join(rank))

    def close(self) -> None:
        """Ends every collective that still waits, and hangs up."""
        self._tell(self._coordinator.leave)
        self._closed = True
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)

    def _tell(self, decide: Callable[[], list[Decision]]) -> None:
        with self._lock:
            decisions = decide()
            if not decisions:
                return
            message = encode("decisions", decisions)
            for peer in self._peers:
                with contextlib.suppress(OSError):  # one that is gone is heard of by its silence
                    peer.sendall(message)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer, rank in self._peers.items():
                if rank:
                    selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map() and not self._closed:
                for key, _ in selector.select(_CHECK_S):
                    assert isinstance(key.fileobj, socket.socket)
                    if not self._hear(key.fileobj, key.data):
                        selector.unregister(key.fileobj)
                self._look_for_stalls()

    def _hear(self, peer: socket.socket, rank: int) -> bool:
        """Takes one message; False where there will be no more."""
        message = receive(peer)
        if message is None:
            self._tell(self._coordinator.leave)
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)  # it waits for the last decision
            return False
        kind, requests = message
        if kind == "join":
            self.join(rank)
        else:
            self.submit(rank, requests)
        return True

    def _look_for_stalls(self) -> None:
        if not self._stalls.warning_s:
            return
        with self._lock:
            stalled = list(self._coordinator.find_stalled(self._stalls.warning_s))
        for name, missing, age_s in stalled:
            if name not in self._told:
                self._told.add(name)
                print(
                    f"drop-in: {name} has waited {age_s:.0f} s for rank "
                    f"{', '.join(map(str, missing))}, which has not asked for it; ranks may do "
                    "different things, or one of them is slow",
                    file=sys.stderr,
                    flush=True,
                )
            if 0 < self._stalls.shutdown_s <= age_s:
                self._tell(self._coordinator.leave)
                return


class Client:
    """A rank's end: sends what it asks for, and hands on every decision in order, on its thread."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        *,
        server: Server | None,
        on_decisions: Callable[[list[Decision]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._connection = connection
        self._server = server
        self._on_decisions = on_decisions
        self._on_end = on_end
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="horovod-client", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Asks for collectives."""
        if self._server is not None:
            self._server.submit(self._rank, requests)
        else:
            self._send(encode("requests", requests))

    def join(self) -> None:
        """Says that this rank has no more to reduce."""
        if self._server is not None:
            self._server.join(self._rank)
        else:
            self._send(encode("join"))

    def close(self) -> None:
        """Hangs up, and waits until the last decision has been carried out."""
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def _send(self, message: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # the listener hears of a rank 0 that left
            self._connection.sendall(message)

    def _listen(self) -> None:
        while (message := receive(self._connection)) is not None:
            self._on_decisions(message[1])
        self._on_end()


def receive(connection: socket.socket) -> tuple[str, list[Any]] | None:
    """The next message; None where the other side has ended."""
    length = receive_exactly(connection, 4)
    if length is None:
        return None
    text = receive_exactly(connection, int.from_bytes(length, "big"))
    return None if text is None else decode(text)


def receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    """So many bytes; None where the other side ends before."""
    taken = bytearray()
    while len(taken) < count:
        try:
            piece = connection.recv(count - len(taken))
        except OSError:
            return None
        if not piece:
            return None
        taken += piece
    return bytes(taken)
