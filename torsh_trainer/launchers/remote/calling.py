"""An agent that another program starts (mpirun), and that calls its launcher over TCP.

The two prove to each other that they know the job's token before either takes anything from the
other (HMAC, ``multiprocessing.connection``).
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from torsh_trainer.launchers.local_transport import ProcessSlot
from torsh_trainer.launchers.messages import Inbox, Sender
from torsh_trainer.launchers.remote.agent import HostAgent

HOME, TOKEN = "TORSH_LAUNCHER_AT", "TORSH_LAUNCHER_TOKEN"
"""Where the launcher listens (``address,...:port``), and the secret of the job."""
MODULE = "torsh_trainer.launchers.remote.calling"
_CONNECT_S = 5.0
_CALL_S = 30.0
_DESCRIPTOR = "PMI_FD"
"""Where MPICH's launcher talks to a process: a descriptor that it inherits."""


def prove(end: socket.socket, token: bytes, *, called: bool) -> bool:
    """Whether both ends of a connection know the token; who was called asks first."""
    wait = struct.pack("ll", int(_CONNECT_S), 0)
    end.setblocking(True)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    connection = Connection(os.dup(end.fileno()))
    steps: Sequence[Callable[[Connection, bytes], None]] = (deliver_challenge, answer_challenge)
    try:
        for step in steps if called else reversed(steps):
            step(connection, token)
    except Exception:  # noqa: BLE001  # a stranger may say anything
        return False
    finally:
        connection.close()
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return True


def call(places: str, token: bytes, *, patience_s: float = _CALL_S) -> socket.socket:
    """A connection to the launcher.

    Raises:
        OSError: it is reached at none of its addresses.
    """
    addresses, _, port = places.rpartition(":")
    until_s, last = time.monotonic() + patience_s, OSError("no address is given")
    while time.monotonic() < until_s:
        for address in addresses.split(","):
            try:
                end = socket.create_connection((address, int(port)), timeout=_CONNECT_S)
            except OSError as error:
                last = error
                continue
            if prove(end, token, called=False):
                return end
            end.close()
            last = OSError(f"{address}:{port} is not this job's launcher")
        time.sleep(0.2)
    raise last


def main() -> int:
    """Serves the launcher that the variables name; returns where it is not reached."""
    places, token = os.environ.pop(HOME, ""), os.environ.pop(TOKEN, "")
    try:
        end = call(places, token.encode())
    except (OSError, ValueError) as error:
        print(f"{socket.gethostname()} does not reach the launcher at {places}: {error}")
        return 1
    descriptor = os.environ.get(_DESCRIPTOR, "")
    held = (int(descriptor),) if descriptor.isdigit() else ()
    descriptors = os.dup(end.fileno())
    HostAgent(Inbox(end.detach()), Sender(descriptors), slot=ProcessSlot({}, held)).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
