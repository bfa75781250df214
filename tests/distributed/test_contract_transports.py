"""The built-in transport keeps the contract of transports; that over ssh: test_launchers_ssh.py."""

from torsh_trainer.launchers.inside import Payload
from torsh_trainer.launchers.local_transport import LocalTransport
from torsh_trainer.launchers.transport import Transport
from torsh_trainer.testing import TransportContract


class TestLocal(TransportContract):
    def transport(self, payload: Payload) -> Transport:
        return LocalTransport(payload)
