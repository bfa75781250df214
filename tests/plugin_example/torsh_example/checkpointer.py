"""Checkpoints beside which a file says which is the newest, for programs that cannot list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.store.places import StoragePath


class Latest(DcpCheckpointer):
    """As ``dcp``, and the file ``latest`` names the newest checkpoint once it is whole."""

    _saved: StoragePath | None = None

    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> StoragePath:
        self._saved = super().save(step, state, metrics)
        return self._saved

    def wait(self) -> None:
        super().wait()
        if self._saved is not None and self._comm.world.is_rank_zero:
            (self.folder / "latest").write_text(f"{self._saved.name}\n")
        self._saved = None

    def close(self) -> None:
        self.wait()
        super().close()
