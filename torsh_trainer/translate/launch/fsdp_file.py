"""``--fsdp_config`` of Hugging Face's Trainer: a JSON file, or JSON in the line, with a verdict for
every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torsh_trainer.translate import yaml_places
from torsh_trainer.translate.launch import accelerate_flags, trainer_arguments
from torsh_trainer.translate.launch.configuration import (
    FileFinder,
    holds_json,
    read_flags,
    text_of_file,
)
from torsh_trainer.translate.launch.flags import FlagTable, StatedFlag, judge_row
from torsh_trainer.translate.launch.job import LaunchJob
from torsh_trainer.translate.outcomes import Outcome, dead, exact, faster, refuse

FLAG = "fsdp_config"


def read_fsdp_file(job: LaunchJob, finder: FileFinder) -> tuple[StatedFlag, ...]:
    """The keys of the file, or of the text, that the line gives; none where it gives none.

    Raises:
        Asked: the file is not where the line says.
        ConfigError: it is not JSON.
    """
    said = job.argument(FLAG)
    if said is None or not said.values or job.family != "hugging-face":
        return ()
    inline = holds_json(said)
    name, text = (job.source, said.text) if inline else text_of_file(job, said, finder)
    found = read_flags(yaml_places.parse(text, name=name), "" if inline else Path(name).name)
    return tuple(replace(flag, place=said.place) if inline else flag for flag in found)


def _judge_smallest(job: LaunchJob, said: StatedFlag) -> Outcome:
    count = job.whole(said, least=0)
    if not count:
        return exact("0 leaves it off")
    return exact(
        "modules of so many parameters are sharded as units", strategy__wrap_min_parameters=count
    )


def _judge_reshard(job: LaunchJob, said: StatedFlag) -> Outcome:
    why = "free gathered parameters after forward"
    return exact(why, strategy__reshard_after_forward=said.is_on)


def _judge_xla(job: LaunchJob, said: StatedFlag) -> Outcome:
    return refuse("torch_xla is not driven here") if said.is_on else exact("off")


def _same(why: str) -> object:
    return lambda job, said: exact(why)


def _faster(why: str) -> object:
    return lambda job, said: faster(why)


_ROWS: Mapping[str, object] = {
    "version": _same("the same shards; here FSDP2 makes them"),
    "transformer_layer_cls_to_wrap": trainer_arguments.judge_units,
    "min_num_params": _judge_smallest,
    "backward_prefetch": _faster("FSDP2 gathers ahead in backward"),
    "forward_prefetch": accelerate_flags.judge_prefetch,
    "reshard_after_forward": _judge_reshard,
    "limit_all_gathers": _faster("FSDP2 bounds what is gathered by itself"),
    "use_orig_params": _same("FSDP2 keeps the model's own parameters"),
    "sync_module_states": _same("every process begins with the same parameters"),
    "cpu_ram_efficient_loading": _same("weights are read shard by shard"),
    "activation_checkpointing": accelerate_flags.judge_recompute,
    "state_dict_type": _same("a checkpoint holds shards and loads on any number of processes"),
    "xla": _judge_xla,
    "xla_fsdp_v2": _judge_xla,
    "xla_fsdp_settings": lambda job, said: dead("xla alone reads it"),
    "xla_fsdp_grad_ckpt": lambda job, said: dead("xla alone reads it"),
}
TABLE: FlagTable = {
    f"--{prefix}{name}": judge_row(f"--{prefix}{name}", judge, rule="fsdp")  # type: ignore[arg-type]
    for name, judge in _ROWS.items()
    for prefix in ("", "fsdp_")
}
"""The keys that the Trainer knows, each also with the older ``fsdp_`` before it."""
