"""Knobs of the launcher for Kubernetes: checked, and turned into parts of a manifest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from torsh_trainer.errors import ConfigError
from torsh_trainer.utils.masking import is_secret, mask_url

SHM = "/dev/shm"
_QUANTITY = re.compile(r"\d+(\.\d+)?([kKMGTPE]i?)?")
_CPUS = re.compile(r"\d+(\.\d+)?|\d+m")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?")
_TOLERATION = re.compile(r"(?P<key>[^=:]+)(=(?P<value>[^=:]*))?(:(?P<effect>\w+))?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_OURS = ("NNODES", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX")
_PLACES = (*_OURS, "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")
_KINDS = ("pvc", "nfs", "host", "secret")


def check_quantity(knob: str, value: int | str | None) -> None:
    """Refuses what is no amount of bytes to Kubernetes; 32m would be thousandths of a byte."""
    if value is not None and _QUANTITY.fullmatch(str(value)) is None:
        raise ConfigError(
            f"launcher.{knob}={value} is no amount of memory", fix="write 32Gi, or 32G, or null"
        )


def check_cpus(value: float | str | None) -> None:
    """Refuses what is no number of cores."""
    if value is not None and (_CPUS.fullmatch(str(value)) is None or not str(value).strip("0.m")):
        raise ConfigError(
            f"launcher.cpus_per_node={value} is no number of cores", fix="write 8, 0.5, or 500m"
        )


def check_name(knob: str, value: str | None) -> None:
    """Refuses what cannot be the name of an object of the cluster."""
    if value is not None and (len(value) > 253 or _NAME.fullmatch(value) is None):
        raise ConfigError(
            f"launcher.{knob}={value!r} is no name in Kubernetes",
            fix="small letters, digits, - and . are all that it may hold",
        )


def check_number(knob: str, value: int | None, *, least: int = 0, most: int = 2**31 - 1) -> None:
    """Refuses what is no whole number from ``least`` to ``most``; None is left to the cluster."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(
            f"launcher.{knob}={value} is out of range", fix=f"give {least} to {most}, or leave it"
        )


def read_pairs(knob: str, items: Sequence[str]) -> dict[str, str]:
    """``[KEY=VALUE, ...]`` as a mapping.

    Raises:
        ConfigError: an item is none, or a key comes twice.
    """
    pairs: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or _KEY.fullmatch(key) is None or key in pairs:
            raise ConfigError(
                f"launcher.{knob}: {item!r} is not KEY=VALUE, or its key comes twice",
                fix=f"launcher.{knob}=['KEY=VALUE']",
            )
        pairs[key] = value
    return pairs


def read_resources(items: Sequence[str]) -> dict[str, str]:
    """``[rdma/hca=1]`` as extended resources of a pod."""
    found = read_pairs("resources", items)
    for key, value in found.items():
        if "/" not in key and key != "ephemeral-storage":
            raise ConfigError(
                f"launcher.resources: {key} is not yours to set here",
                fix="launcher.cpus_per_node, mem and gpus_per_node; others are VENDOR/NAME=NUMBER",
            )
        if key != "ephemeral-storage" and not value.isdigit():
            raise ConfigError(
                f"launcher.resources: {key}={value} is no whole number", fix=f"{key}=1"
            )
    return found


def read_environment(plain: Sequence[str], references: Sequence[str]) -> list[dict[str, Any]]:
    """Variables of the pods: ``NAME=VALUE``, and ``NAME=SECRET/KEY`` by reference.

    Raises:
        ConfigError: a value would be a secret's, or the variable is the launcher's own.
    """
    entries: dict[str, dict[str, Any]] = {}
    for knob, items in (("env", plain), ("env_from_secrets", references)):
        for name, value in read_pairs(knob, items).items():
            if _VARIABLE.fullmatch(name) is None or name in entries:
                raise ConfigError(
                    f"launcher.{knob}: {name} is no name of a variable, or comes twice",
                    fix=f"launcher.{knob}=['NAME=...']",
                )
            if name in _PLACES:
                raise ConfigError(
                    f"launcher.{knob}: {name} is set by the launcher", fix="leave it out"
                )
            if knob == "env":
                _check_open(name, value)
                entries[name] = {"name": name, "value": escape_references(value)}
            else:
                entries[name] = {"name": name, "valueFrom": {"secretKeyRef": _read_key(value)}}
    return list(entries.values())


def escape_references(text: str) -> str:
    """``text`` as Kubernetes leaves it: it puts variables in the place of ``$(NAME)``."""
    return text.replace("$", "$$")


def read_toleration(item: str) -> dict[str, str]:
    """``KEY=VALUE:EFFECT`` as ``kubectl taint`` writes it; without a value any, without effect all.

    Raises:
        ConfigError: it is not of that form.
    """
    found = _TOLERATION.fullmatch(item)
    effect = None if found is None else found["effect"]
    if found is None or (effect is not None and effect not in _EFFECTS):
        raise ConfigError(
            f"launcher.tolerations: {item!r} is not KEY[=VALUE][:EFFECT]",
            fix=f"'nvidia.com/gpu:NoSchedule'; effects are {', '.join(_EFFECTS)}",
        )
    told = {"key": found["key"], "operator": "Exists" if found["value"] is None else "Equal"}
    if found["value"] is not None:
        told["value"] = found["value"]
    return told if effect is None else {**told, "effect": effect}


@dataclass(frozen=True)
class PodVolume:
    """A folder of the pods: ``kind`` says what ``source`` names, ``path`` where it lies."""

    kind: str
    source: str
    path: PurePosixPath
    read_only: bool

    @classmethod
    def parse(cls, item: str) -> PodVolume:
        """``KIND:SOURCE:PATH[:ro]``.

        Raises:
            ConfigError: it is not of that form.
        """
        words = item.split(":")
        ro = len(words) == 4 and words[3] in ("ro", "rw")
        if not (len(words) == 3 or ro) or words[0] not in _KINDS or not words[1]:
            raise ConfigError(
                f"launcher.volumes: {item!r} is not KIND:SOURCE:PATH[:ro]",
                fix="pvc:CLAIM[/FOLDER]:/data, nfs:SERVER/EXPORT:/data, host:/data:/data, "
                "secret:NAME:/keys",
            )
        path = PurePosixPath(words[2])
        if not path.is_absolute() or ".." in path.parts or path in (PurePosixPath("/"),):
            raise ConfigError(
                f"launcher.volumes: {item!r} has no absolute path below /", fix="pvc:CLAIM:/data"
            )
        if path == PurePosixPath(SHM):
            raise ConfigError(
                f"launcher.volumes: {SHM} is the launcher's own", fix="set launcher.shm_size"
            )
        if words[0] == "host" and not words[1].startswith("/"):
            raise ConfigError(
                f"launcher.volumes: {item!r} names no absolute folder of the nodes",
                fix="host:/data:/data",
            )
        if words[0] == "nfs" and "/" not in words[1]:
            raise ConfigError(
                f"launcher.volumes: {item!r} names no export", fix="nfs:SERVER/EXPORT:/data"
            )
        if words[0] in ("pvc", "secret"):
            check_name("volumes", words[1].split("/")[0])
        return cls(words[0], words[1], path, words[-1] == "ro" or words[0] == "secret")

    def covers(self, folder: PurePosixPath) -> bool:
        """Whether ``folder`` lies in it, and pods may write there."""
        return not self.read_only and folder.is_relative_to(self.path)

    def write_source(self) -> dict[str, Any]:
        """The volume of a pod's spec, without its name."""
        head, _, rest = self.source.partition("/")
        if self.kind == "pvc":
            return {"persistentVolumeClaim": {"claimName": head}}
        if self.kind == "nfs":
            return {"nfs": {"server": head, "path": f"/{rest}"}}
        if self.kind == "host":  # Directory: a folder that is not there is refused, and not made
            return {"hostPath": {"path": self.source, "type": "Directory"}}
        return {"secret": {"secretName": self.source}}

    def write_mount(self, name: str) -> dict[str, Any]:
        """The mount of a container's spec."""
        mount: dict[str, Any] = {"name": name, "mountPath": str(self.path)}
        head, _, rest = self.source.partition("/")
        if self.kind == "pvc" and head and rest:
            mount["subPath"] = rest
        return {**mount, "readOnly": True} if self.read_only else mount


def read_volumes(items: Sequence[str]) -> tuple[PodVolume, ...]:
    """The volumes of ``items``, each at a path of its own."""
    found = tuple(map(PodVolume.parse, items))
    paths = [volume.path for volume in found]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"launcher.volumes: two of them lie at {twice}", fix="give each a path of its own"
        )
    return found


def read_user(value: str | None) -> dict[str, int]:
    """``UID[:GID]`` as a pod's security context."""
    if value is None:
        return {}
    found = re.fullmatch(r"(\d+)(?::(\d+))?", str(value))
    if found is None:
        raise ConfigError(f"launcher.run_as={value} is not UID:GID", fix="write '1000:1000'")
    user = {"runAsUser": int(found[1])}
    return user if found[2] is None else {**user, "runAsGroup": int(found[2])}


def _check_open(name: str, value: str) -> None:
    if is_secret(name) or mask_url(value) != value:
        raise ConfigError(
            f"launcher.env: {name} is a secret, which the manifest would show",
            fix="make a secret of the cluster (kubectl create secret generic), and name it and its "
            "key in launcher.env_from_secrets",
        )


def _read_key(value: str) -> dict[str, str]:
    name, slash, key = value.partition("/")
    if not slash or not key or _NAME.fullmatch(name) is None:
        raise ConfigError(
            "launcher.env_from_secrets: an item names no secret of the cluster and its key",
            fix="write VARIABLE=SECRET/KEY, names and no value",
        )
    return {"name": name, "key": key}
