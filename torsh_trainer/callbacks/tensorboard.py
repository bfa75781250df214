"""TensorBoard event files."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from torsh_trainer.callbacks.base import RunInfo
from torsh_trainer.callbacks.logger import Logger, Row, Sink, require
from torsh_trainer.callbacks.places import in_run_directory
from torsh_trainer.utils.files import disk_error


class TensorBoard(Logger):
    """Writes scalars under ``split/metric`` to event files in ``dir`` of the run directory.

    Raises:
        ConfigError: ``dir`` is no name in the run directory.
        ResourceError: tensorboard is not installed.
    """

    requires: ClassVar[str | None] = "tensorboard"

    def __init__(self, *, dir: str = "tensorboard") -> None:
        super().__init__()
        require("tensorboard", knob="logger.tensorboard")
        self.dir = in_run_directory(dir, knob="logger.tensorboard.dir")

    def open(self, info: RunInfo) -> Sink:
        if info.run_dir is None:
            return Sink()
        begins_at = info.first_step + 1 if info.trains and info.first_step else None
        _messages()  # now, and not within the step that reports first
        return _Unopened(info.run_dir / self.dir, begins_at)


def _messages() -> tuple[Any, Any, Any]:
    """What of tensorboard is needed: ``Event, SessionLog, Summary``."""
    # Imported late: only a run that logs pays for it.
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event, SessionLog, Summary


class _Unopened(Sink):
    """Opens the file at the first row: a run that reports nothing leaves none."""

    def __init__(self, folder: Path, begins_at: int | None) -> None:
        self._folder = folder
        self._begins_at = begins_at
        self._file: _EventFile | None = None

    def write(self, row: Row) -> None:
        if self._file is None:
            self._file = _EventFile(self._folder, self._begins_at)
        self._file.write(row)

    def close(self, *, failed: bool) -> None:
        if self._file is not None:
            self._file.close(failed=failed)


class _EventFile(Sink):
    """TensorBoard's own records, written here and now.

    torch.utils.tensorboard takes over a second to import, and loads TensorFlow where it finds it;
    TensorBoard's writer of records takes 0.3 s, and loads boto3. Its messages are all that scalars
    need. One event holds a whole row. ``begins_at`` is
    the step that a resumed run makes first: TensorBoard shows nothing of earlier files from there.
    """

    def __init__(self, folder: Path, begins_at: int | None) -> None:
        event, session_log, summary = _messages()
        self._event, self._summary = event, summary
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
            self._put(event(wall_time=time.time(), file_version="brain.Event:2"))
            if begins_at is not None:
                start = session_log(status=session_log.START)
                self._put(event(wall_time=time.time(), step=begins_at, session_log=start))
        except OSError as error:
            raise disk_error(error, "write", self._path) from error

    def write(self, row: Row) -> None:
        try:
            self._put(
                self._event(
                    wall_time=time.time(),
                    step=row.step,
                    summary=self._values(row.prefixed_metrics()),
                )
            )
        except OSError as error:
            raise disk_error(error, "write", self._path) from error

    def _values(self, metrics: Mapping[str, float]) -> object:
        value = self._summary.Value
        return self._summary(
            value=[value(tag=name, simple_value=number) for name, number in metrics.items()]
        )

    def _put(self, event: object) -> None:
        self._file.write(record(event.SerializeToString()))  # type: ignore[attr-defined]
        self._file.flush()

    def close(self, *, failed: bool) -> None:
        self._file.close()


def record(data: bytes) -> bytes:
    """``data`` as it lies in a file of records: its length, and both with their checksums.

    The format of TensorFlow's ``tsl/lib/io/record_writer.h``.
    """
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, masked as there, since data may hold checksums itself; little-endian."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<I", masked)


@cache
def _crc_table() -> tuple[int, ...]:
    """The remainder of every byte, by Castagnoli's polynomial with its bits reversed."""
    table = []
    for remainder in range(256):
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x82F63B78 if remainder & 1 else 0)
        table.append(remainder)
    return tuple(table)
