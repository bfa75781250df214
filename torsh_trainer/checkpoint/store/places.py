"""Where checkpoints lie: folders of this machine, or of any store that fsspec knows.

A local place is a ``Path``. A ``RemotePath`` answers to the same names, as far as they are needed
to read a checkpoint, so that what reads one does not ask which it is. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torsh_trainer.errors import ConfigError, ResourceError, TorshError, TrainingError, nearest
from torsh_trainer.utils.files import explain_error, write_file

_READ_AHEAD_BYTES = 1 << 22
_OBJECT_STORES = frozenset(
    {"abfs", "abfss", "adl", "az", "gcs", "gs", "obs", "oci", "oss", "r2", "s3", "s3a", "tos"}
)
"""They have no folders to make, and to ask for one may make a bucket."""


class Unreachable(ResourceError):
    """A remote store did not answer, or did not let us in; says nothing about what lies there."""


class _Stat(NamedTuple):
    st_size: int


@dataclass(frozen=True)
class RemotePath:
    """A file or a folder under a URL, as ``Path`` is one of this machine.

    ``options`` go to the fsspec file system as they are. Nothing is remembered between calls:
    another process may have written in the meantime.

    Raises (every method that asks the store):
        FileNotFoundError: there is nothing of that name.
        Unreachable: the store did not answer, or refused.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}", self.options)

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that it lies in."""
        return RemotePath(self.url.rpartition("/")[0], self.options)

    def resolve(self) -> RemotePath:
        """Itself: a URL has one spelling here."""
        return self

    def expanduser(self) -> RemotePath:
        """Itself: a URL has no home."""
        return self

    # -- asking ---------------------------------------------------------------------------------

    def exists(self) -> bool:
        """True for a file, and for a folder with something in it."""
        with self._asking("look at") as (fs, path):
            return bool(fs.exists(path))

    def is_dir(self) -> bool:
        """True for a folder with something in it."""
        with self._asking("look at") as (fs, path):
            return bool(fs.isdir(path))

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies in the folder; nothing where there is none."""
        return iter(self / name for name in self.listing())

    def listing(self) -> dict[str, int | None]:
        """Name -> size in bytes of all that lies in the folder, None for a folder, by one call."""
        with self._asking("list") as (fs, path):
            try:
                entries = fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        found: dict[str, int | None] = {}
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            # An object store may hold an object that stands for the folder itself.
            if name and entry["name"].rstrip("/") != path.rstrip("/"):
                found[name] = None if entry["type"] == "directory" else int(entry["size"])
        return found

    def stat(self) -> _Stat:
        """The size of a file."""
        with self._asking("look at") as (fs, path):
            return _Stat(int(fs.info(path)["size"]))

    # -- reading --------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        """The content of a file."""
        with self._asking("read") as (fs, path):
            content: bytes = fs.cat_file(path)
        return content

    def read_text(self, encoding: str = "utf-8") -> str:
        """The content of a file."""
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """A stream of bytes; what is read comes in ranges, with little beyond what was asked.

        Its own methods raise what the library of the store raises.
        """
        assert mode in ("rb", "wb"), mode
        reading = {"block_size": _READ_AHEAD_BYTES, "cache_type": "readahead"}
        with self._asking("read" if mode == "rb" else "write") as (fs, path):
            return fs.open(path, mode, **(reading if mode == "rb" else {}))

    # -- writing --------------------------------------------------------------------------------

    def write_bytes(self, content: bytes) -> None:
        """Writes a file; others see the old one or the new one."""
        with self._asking("write") as (fs, path):
            fs.pipe_file(path, content)

    def create(self, content: bytes) -> None:
        """Writes a file that must not be there yet.

        Raises:
            FileExistsError: it is there.
        """
        with self._asking("write") as (fs, path):
            fs.pipe_file(path, content, mode="create")  # S3 and its like do it in one

    def mkdir(self) -> None:
        """Makes the folder and those above it, where the store has such a thing."""
        with self._asking("write") as (fs, path):
            protocols = {fs.protocol} if isinstance(fs.protocol, str) else {*fs.protocol}
            if not protocols & _OBJECT_STORES:
                fs.makedirs(path, exist_ok=True)

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes a file."""
        with self._asking("delete") as (fs, path):
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def remove(self, *, last: str = "") -> None:
        """Removes the folder with all that is in it; the file ``last`` after all others."""
        names = self.listing()
        with self._asking("delete") as (fs, path):
            if last in names and len(names) > 1:
                fs.rm([f"{path}/{name}" for name in names if name != last], recursive=True)
            if names:
                fs.rm(path, recursive=True)

    @contextmanager
    def _asking(self, doing: str) -> Iterator[tuple[Any, str]]:
        """The file system and what it calls this path; its errors are told as ours."""
        try:
            fs, path = _file_system(self.url, self.options)
            fs.invalidate_cache()  # another process may have written
            yield fs, path
        except (FileNotFoundError, FileExistsError, TorshError):
            raise
        except Exception as error:  # every library has errors of its own
            raise _unreachable(error, doing, self) from error


StoragePath: TypeAlias = Path | RemotePath


def parse_storage_path(text: str, storage_options: Mapping[str, Any] | None = None) -> StoragePath:
    """The place that a user names: a path, or a URL such as ``s3://bucket/prefix``.

    Raises:
        ConfigError: nobody knows such a kind of URL.
        ResourceError: the library for it is not installed.
    """
    if "://" not in text:
        return Path(text).expanduser()
    if text.startswith(("file://", "local://")):
        return Path(text.partition("://")[2])
    place = RemotePath(text.rstrip("/"), dict(storage_options or {}))
    with place._asking("use"):
        pass
    return place


def subfolders(folder: StoragePath) -> list[StoragePath]:
    """The folders in ``folder``; none where it is not there."""
    if isinstance(folder, RemotePath):
        return [folder / name for name, size in folder.listing().items() if size is None]
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir()]


def sizes(folder: StoragePath) -> Mapping[str, int | None]:
    """Name -> size in bytes of what lies in ``folder``; None for what is no file.

    Raises:
        OSError: the disk refused.
    """
    if isinstance(folder, RemotePath):
        return folder.listing()
    return {p.name: p.stat().st_size if p.is_file() else None for p in folder.iterdir()}


def names(folder: StoragePath) -> set[str]:
    """What lies in ``folder``.

    Raises:
        OSError: the disk refused.
        Unreachable: a remote store did not answer.
    """
    if isinstance(folder, RemotePath):
        return set(folder.listing())
    return {path.name for path in folder.iterdir()}


def write(place: StoragePath, content: bytes) -> None:
    """Writes a file and returns once it is safe; others see the old one or the new one.

    Raises:
        OSError: the disk refused.
        Unreachable: a remote store did.
    """
    if isinstance(place, RemotePath):
        place.write_bytes(content)
    else:
        write_file(place, content)


def explain_store_error(
    error: Exception, doing: str, place: StoragePath, *, rank: int
) -> TorshError:
    """An error that befell ``place`` as the user reads it, with its cause attached."""
    if isinstance(place, Path):
        return explain_error(error, doing, place, rank=rank)
    if isinstance(error, TorshError):
        return error
    ours = type(error).__module__.partition(".")[0] in ("builtins", "torch", "torsh_trainer")
    if isinstance(error, OSError) or not ours:  # every library of a store has errors of its own
        return _unreachable(error, doing, place)
    mistake = TrainingError(
        f"rank {rank} could not {doing} {place}: {type(error).__name__}: {error}",
        fix="debug=true shows the traceback",
        rank=rank,
    )
    mistake.__cause__ = error
    return mistake


def _file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    # Not before there is a URL: most runs have none, and it takes 60 ms.
    from fsspec.core import url_to_fs
    from fsspec.registry import available_protocols, known_implementations

    protocol = url.partition("://")[0].rpartition("::")[2]
    if protocol not in available_protocols():
        raise ConfigError(
            f"{url}: nothing is known that reads {protocol}://",
            fix=nearest(protocol, available_protocols()),
        )
    try:
        return url_to_fs(url, **options)
    except ImportError as error:
        library = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
        package = "'torsh-trainer[s3]'" if library == "s3fs" else library
        raise ResourceError(
            f"{url} needs the library {library or protocol}, which is not installed ({error})",
            fix=f"pip install {package}",
        ) from error


def _unreachable(error: Exception, doing: str, place: RemotePath) -> Unreachable:
    said = str(error) or type(error).__name__
    told = Unreachable(
        f"cannot {doing} {place}: {said}",
        fix="check that it exists, the network, the credentials, and checkpoint.storage_options "
        "(endpoint_url)",
        path=str(place),
    )
    told.__cause__ = error
    return told
