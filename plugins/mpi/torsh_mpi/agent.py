"""What mpirun starts: a stand-in that hands its place in the MPI job to the process that wants it.

Run as a script without site-packages, so that it costs a few milliseconds. It tells its variables
(and MPICH's descriptor), and stays until the other end goes away, however that happens.
"""

import array
import json
import os
import socket
import sys

DESCRIPTOR = "PMI_FD"
"""Where MPICH's launcher talks to a process: a descriptor that it inherits."""


def main(path: str) -> None:
    """Tells everything to the socket at ``path``, and waits for its end."""
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
        told = {"env": dict(os.environ), "cpus": sorted(os.sched_getaffinity(0))}
        data = json.dumps(told).encode()
        end.sendall(len(data).to_bytes(8, "big") + data)
        number = os.environ.get(DESCRIPTOR)
        if number is not None:
            descriptors = array.array("i", [int(number)])
            end.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        end.recv(1)


if __name__ == "__main__":
    main(sys.argv[1])
