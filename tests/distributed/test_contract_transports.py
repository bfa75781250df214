"""The built-in transport keeps the contract of transports, and so does one over a stream.

The second shows that a job needs no more of its workers than the contract says.
"""

import importlib.util
import sys
from pathlib import Path

from torsh_trainer.launchers.inside import Payload
from torsh_trainer.launchers.local_transport import LocalTransport
from torsh_trainer.launchers.transport import Transport
from torsh_trainer.testing import LauncherContract, TransportContract

_SPEC = importlib.util.spec_from_file_location(
    "stream_transport", Path(__file__).with_name("stream_transport.py")
)
assert _SPEC is not None
assert _SPEC.loader is not None
stream_transport = importlib.util.module_from_spec(_SPEC)
sys.modules["stream_transport"] = stream_transport
_SPEC.loader.exec_module(stream_transport)


class TestLocal(TransportContract):
    def transport(self, payload: Payload) -> Transport:
        return LocalTransport(payload)


class TestOverAStream(TransportContract):
    def transport(self, payload: Payload) -> Transport:
        return stream_transport.StreamTransport(payload)


class TestAJobOverAStream(LauncherContract):
    launcher = stream_transport.Streamed()
