"""NumPy's .npz, written by ``checkpoint export`` and read by ``checkpoint import``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from torsh_trainer.checkpoint.cli.contents import Contents, TensorEntry
from torsh_trainer.checkpoint.cli.exporting import Export, ExportFormat, read_weights
from torsh_trainer.checkpoint.cli.imported import Import, Imported, ImportFormat


class WriteNpz(ExportFormat):
    """Weights as arrays, by name."""

    file_name = "model.npz"

    def write(
        self, contents: Contents, chosen: Mapping[str, TensorEntry], wanted: Export, path: Path
    ) -> list[str]:
        weights = read_weights(contents, chosen, wanted)
        with path.open("wb") as file:
            np.savez(file, **{name: tensor.numpy() for name, tensor in weights.items()})
        return []


class ReadNpz(ImportFormat):
    """The same back again; arrays of objects, which would run code, are refused by NumPy."""

    name = "npz"

    def recognises(self, file: Path) -> bool:
        return file.suffix == ".npz" and file.is_file()

    def read(self, wanted: Import, file: Path) -> Imported:
        with np.load(file, allow_pickle=False) as arrays:
            weights = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        return Imported(self.name, weights, {}, [], {})
