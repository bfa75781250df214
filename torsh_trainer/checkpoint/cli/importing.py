"""A checkpoint made of what another program left: the verb ``checkpoint import``.

Torch files are read with ``weights_only``: no code in them is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torsh_trainer.checkpoint.base import CheckpointOptions
from torsh_trainer.checkpoint.cli.contents import state_of
from torsh_trainer.checkpoint.cli.imported import Import as Import
from torsh_trainer.checkpoint.cli.imported import Imported, ImportFormat
from torsh_trainer.checkpoint.dcp import DcpCheckpointer
from torsh_trainer.checkpoint.plain import encode
from torsh_trainer.checkpoint.store.places import StoragePath
from torsh_trainer.checkpoint.store.retention import folder_name, is_named
from torsh_trainer.comm.local import LocalCommunicator
from torsh_trainer.errors import ConfigError, ResourceError
from torsh_trainer.optim.schedule.torch_scheduler import SETTINGS
from torsh_trainer.tasks.weights import WRAPPERS
from torsh_trainer.utils import registry
from torsh_trainer.utils.foreign import in_words, shorten

_STEP_KEYS = ("updates", "global_step", "step", "iteration", "iter")
_SAID_BY = {"samples": "samples", **dict.fromkeys(_STEP_KEYS, "step")}


def import_file(wanted: Import) -> tuple[StoragePath, list[str]]:
    """Makes the checkpoint ``wanted``; returns its path, and sentences for the reader.

    Raises:
        ConfigError: there is no such file, it can only be read by running code, it holds no
            weights, its optimizer cannot be matched with them, or the checkpoint exists.
        ResourceError: the disk refused, or safetensors is missing.
    """
    _check_folder(wanted)
    with in_words(wanted.file, "a file of torch.save, DeepSpeed or Hugging Face"):
        read = _read(wanted)
        updates = _step(wanted, read)
        step = _attempts(wanted, read, updates)
        schedule, notes = _schedule(read)
    target = wanted.output / folder_name(step)
    if target.exists():
        raise ConfigError(f"{target} exists", fix="name another folder, or another --step")
    samples = _count(read, "samples") if wanted.samples is None else wanted.samples
    epoch = _count(read, "epoch") or 0
    state = state_of(
        read.weights,
        read.optimizers,
        position={
            "step": step,
            "updates": updates,
            "samples": samples or 0,
            "epoch": epoch,
        },
        schedule=schedule,
    )
    facts = {"imported_from": str(wanted.file), "format": read.kind}
    saver = DcpCheckpointer(wanted.output, LocalCommunicator(), CheckpointOptions(), facts=facts)
    try:
        saver.claim()
        path = saver.save(step, state, {})
        saver.close()
    except ResourceError as error:  # which knows only the knob of a run
        fix = error.fix.replace("checkpoint.dir", "--output")
        raise ResourceError(error.sentence, fix=fix, **error.facts) from error
    finally:
        saver.release()
    return path, [*_notes(wanted, read, path, updates, samples), *read.notes, *notes]


def _check_folder(wanted: Import) -> None:
    output = wanted.output
    if output.exists() and not output.is_dir():
        raise ConfigError(f"{output} is a file", fix="name a folder with --output")
    if is_named(output):
        raise ConfigError(
            f"{output} is a checkpoint",
            fix=f"name the folder that it goes into: --output {output.parent}",
        )


def _notes(
    wanted: Import, read: Imported, path: StoragePath, step: int, samples: int | None
) -> Iterator[str]:
    tensors = sum(tensor.numel() for tensor in read.weights.values())
    yield f"{read.kind}: {len(read.weights)} tensors, {tensors:,} numbers"
    wrapper = next((w for w in WRAPPERS if all(n.startswith(w) for n in read.weights)), None)
    if wrapper and not wanted.strip:
        yield f"every name begins with {wrapper} (--strip {wrapper} leaves it out)"
    if not read.optimizers:
        yield f"weights alone: start from them with trainer.pretrained={wanted.file}"
        return
    groups = sum(len(state["groups"]) for state in read.optimizers.values())
    yield f"optimizer: {', '.join(read.optimizers)}, {groups} groups, after {step} updates"
    if step and not samples:
        yield "no count of samples: the data begins anew (--samples N goes on after N)"
    yield f"go on from it with checkpoint.resume={path}"


def _read(wanted: Import) -> Imported:
    """What the file comes to, by the first format that recognises it; the one that was asked for is
    asked first."""
    file = wanted.file.expanduser()
    formats: list[ImportFormat] = sorted(
        (kind() for kind in registry.IMPORT_FORMATS.load_all(strict=False).values()),
        key=lambda one: -one.priority,
    )
    asked: ImportFormat | None = None
    if wanted.format != "auto":
        asked = registry.IMPORT_FORMATS.load(wanted.format)()
        formats.insert(0, asked)
    read = next(one for one in formats if one.recognises(file)).read(wanted, file)
    if asked is not None and not asked.accepts(read.kind):
        raise ConfigError(
            f"--from {wanted.format}: {file} is not of that kind, but {read.kind}",
            fix=f"leave --from out, or give --from {read.kind.split()[0]}",
        )
    return read


# -- counters and schedules -----------------------------------------------------------------------


def _step(wanted: Import, read: Imported) -> int:
    """Updates made: as asked, as the file says, else as its optimizer counts them."""
    if wanted.step is not None:
        return wanted.step
    for key in _STEP_KEYS:
        count = _count(read, key)
        if count is not None:
            return count
    steps = [
        int(slots["step"])
        for state in read.optimizers.values()
        for slots in state["state"].values()
        if isinstance(slots.get("step"), Tensor)
    ]
    updates = max(steps, default=0)
    if updates < 0:
        raise ConfigError(f"its optimizer counts {updates} steps", fix="give --step N")
    return updates


def _attempts(wanted: Import, read: Imported, updates: int) -> int:
    """Steps, those included that overflowed and were skipped."""
    return updates if wanted.step is not None else int(read.counts.get("steps", updates))


def _count(read: Imported, key: str) -> int | None:
    """The count that the file keeps under ``key``; None where it keeps none.

    Raises:
        ConfigError: what it keeps there counts nothing.
    """
    value = read.counts.get(key)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, bool):
        return None
    if not isinstance(value, int) or not 0 <= value < 2**53:
        raise ConfigError(
            f"{key} in the file is {shorten(str(value), 40)}, which counts nothing",
            fix="save it with a whole number there"
            + (f", or give --{_SAID_BY[key]} N" if key in _SAID_BY else ""),
        )
    return value


def _schedule(read: Imported) -> tuple[dict[str, Any], list[str]]:
    """Base rates, and the state of torch's schedulers where there is one for each optimizer."""
    groups = [group for state in read.optimizers.values() for group in state["groups"]]
    base = read.counts.get("base_lrs")
    if not isinstance(base, list) or len(base) != len(groups):
        base = [group.get("initial_lr", group.get("lr", 0.0)) for group in groups]
    schedule: dict[str, Any] = {"base": [float(rate) for rate in base]}
    if not read.schedulers or len(read.schedulers) != len(read.optimizers):
        return schedule, []
    running = {
        "schedulers": dict(zip(read.optimizers, read.schedulers, strict=True)),
        "groups": {
            name: [_settings(group) for group in state["groups"]]
            for name, state in read.optimizers.items()
        },
    }
    try:
        encode(running)
    except ConfigError as error:
        return schedule, [f"the state of its learning-rate schedule is left out: {error.sentence}"]
    return {**schedule, "running": running}, []


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: list(map(float, value)) if isinstance(value, tuple | list) else float(value)
        for key in SETTINGS
        if (value := group.get(key)) is not None
    }
