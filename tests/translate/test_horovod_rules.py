"""Every rule for Horovod, by what it says of one job."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DistributedSampler

from torsh_trainer.data.sampler import BatchPartition, GlobalSampler
from torsh_trainer.translate.horovod.job import Options
from torsh_trainer.translate.horovod.rules import RULES
from torsh_trainer.translate.horovod.translator import translate
from torsh_trainer.translate.plan import Finding, Plan

SCRIPT = """\
import argparse

import torch
import torch.nn.functional as F
import torch.optim as optim
import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
args = parser.parse_args()


def train(epoch):
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()


hvd.init()
train_sampler = torch.utils.data.distributed.DistributedSampler(
    train_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
)
train_loader = torch.utils.data.DataLoader(
    train_dataset, batch_size=args.batch_size, sampler=train_sampler
)
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression
)
for epoch in range(1, 4):
    train(epoch)
"""


def changed(*pairs: tuple[str, str]) -> str:
    """The script with each first text replaced by the second, which has to stand there."""
    text = SCRIPT
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def wrapped(arguments: str) -> str:
    """The script with more arguments for ``DistributedOptimizer``."""
    return changed(("compression=compression", f"compression=compression, {arguments}"))


def stepped(before: str = "", after: str = "") -> str:
    """The script with lines around the optimizer's step."""
    pad = "        "
    lines = [*(before.splitlines()), "optimizer.step()", *(after.splitlines())]
    return changed((f"{pad}optimizer.step()\n", "".join(f"{pad}{line}\n" for line in lines)))


def made(optimizer: str) -> str:
    """The script with another optimizer."""
    return changed(
        ("optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)", optimizer)
    )


RUN = "horovodrun -np 4 {} python train.py"
SCHEDULED = (
    "hvd.broadcast_parameters",
    "scheduler = optim.lr_scheduler.{}\nhvd.broadcast_parameters",
)


def run(options: str) -> tuple[str, str]:
    return "run.sh", RUN.format(options)


def scheduled(scheduler: str, step: str = "scheduler.step()") -> tuple[str, str]:
    text = stepped(after=step)
    return "train.py", text.replace(SCHEDULED[0], SCHEDULED[1].format(scheduler))


def script(text: str) -> tuple[str, str]:
    return "train.py", text


def config(text: str) -> tuple[str, str]:
    return "config.yaml", text


def wrapper(text: str) -> tuple[str, str]:
    return "wrapper.yaml", text


def environment(text: str) -> tuple[str, str]:
    return "job.env", f"HOROVOD_CYCLE_TIME=1\n{text}"


DECAY = ("momentum=0.9", "momentum=0.9, weight_decay=0.1")
LATER = changed(
    ("hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n", ""),
    ("for epoch", "hvd.broadcast_optimizer_state(optimizer, root_rank=0)\nfor epoch"),
)
SLICED = changed(
    ("        loss = F", "        for i in range(0, len(data), 8):\n          loss = F"),
    ("        loss.backward()", "          loss.backward()"),
    ("compression=compression", "compression=compression, backward_passes_per_step=4"),
)
AMP = changed(
    ("        loss = F", "        with torch.autocast('cpu', dtype=torch.{}):\n          loss = F")
)

# rule: (file, key, verdict, settings) -- settings are the values that it becomes
CASES: list[tuple[str, tuple[str, str], str, str, dict[str, Any]]] = [
    ("engine", config("params: {}"), "strategy", "exact", {"strategy": "ddp"}),
    ("launch.processes", run(""), "-np", "exact", {"launcher.num_processes": 4}),
    ("launch.processes", run("-H a:2,b:2"), "-np", "exact", {}),
    ("launch.processes", run("--min-np 2"), "-np", "refused", {}),
    ("launch.hosts", run("-H localhost:4"), "-H", "exact", {}),
    ("launch.hosts", run("-H node1:4"), "-H", "approximate", {}),
    ("launch.hosts", run("-H a:2,b:2"), "-H", "refused", {}),
    ("launch.ssh", run("-p 2222"), "-p", "dead", {}),
    ("launch.ssh", run("-p 2222 -H a:2,b:2"), "-p", "refused", {}),
    ("launch.command", run(""), "command", "approximate", {}),
    (
        "launch.start-timeout",
        run("--start-timeout 90"),
        "--start-timeout",
        "exact",
        {"launcher.startup_timeout_s": 90.0, "comm.startup_timeout_s": 90.0},
    ),
    ("launch.start-timeout", run("--start-timeout 0"), "--start-timeout", "dead", {}),
    (
        "launch.interface",
        run("--network-interface eth0 --network-interface eth1"),
        "--network-interface",
        "performance-only",
        {"comm.network_interface": "eth0,eth1"},
    ),
    ("launch.output", run("--output-filename out"), "--output-filename", "performance-only", {}),
    (
        "launch.verbose",
        run("--verbose"),
        "--verbose",
        "performance-only",
        {"launcher.explain": True},
    ),
    ("launch.checks", run("--disable-cache"), "--disable-cache", "dead", {}),
    ("launch.no-run", ("run.sh", "horovodrun --check-build"), "--check-build", "dead", {}),
    ("launch.controller", run("--gloo"), "--gloo", "performance-only", {}),
    ("launch.controller", run("--mpi"), "--mpi", "performance-only", {}),
    ("launch.controller", run("--jsrun"), "--jsrun", "approximate", {}),
    ("launch.controller", config("controller: MPI"), "controller", "performance-only", {}),
    ("launch.mpi", run('--mpi-args="--map-by node"'), "--mpi-args", "refused", {}),
    ("launch.tcp", run("--tcp"), "--tcp", "performance-only", {}),
    ("elastic.range", run("--min-np 2 --max-np 8"), "--min-np", "refused", {}),
    (
        "elastic.range",
        run("--host-discovery-script d.sh"),
        "--host-discovery-script",
        "refused",
        {},
    ),
    ("elastic.knob", run("--reset-limit 3 --min-np 2"), "--reset-limit", "refused", {}),
    ("elastic.knob", run("--reset-limit 3"), "--reset-limit", "dead", {}),
    ("elastic.switch", environment("HOROVOD_ELASTIC=1"), "HOROVOD_ELASTIC", "refused", {}),
    ("elastic.switch", environment("HOROVOD_ELASTIC=0"), "HOROVOD_ELASTIC", "dead", {}),
    (
        "elastic.script",
        script(changed(("def train(epoch)", "@hvd.elastic.run\ndef train(epoch)"))),
        "hvd.elastic.run",
        "refused",
        {},
    ),
    (
        "fusion",
        run("--fusion-threshold-mb 32"),
        "--fusion-threshold-mb",
        "performance-only",
        {"strategy.bucket_cap_mb": 32.0},
    ),
    (
        "fusion",
        environment("HOROVOD_FUSION_THRESHOLD=67108864"),
        "HOROVOD_FUSION_THRESHOLD",
        "performance-only",
        {"strategy.bucket_cap_mb": 64.0},
    ),
    (
        "fusion",
        config("params: {fusion_threshold_mb: 0}"),
        "params.fusion_threshold_mb",
        "performance-only",
        {"strategy.bucket_cap_mb": 2.0**-20},
    ),
    ("cycle", run("--cycle-time-ms 3.5"), "--cycle-time-ms", "performance-only", {}),
    ("cache", run("--cache-capacity 7"), "--cache-capacity", "performance-only", {}),
    (
        "hierarchical",
        run("--no-hierarchical-allreduce"),
        "--no-hierarchical-allreduce",
        "performance-only",
        {},
    ),
    ("autotune", run("--autotune"), "--autotune", "performance-only", {}),
    ("autotune", config("autotune: {enabled: false}"), "autotune.enabled", "performance-only", {}),
    (
        "autotune.knob",
        config("autotune: {warmup_samples: 3}"),
        "autotune.warmup_samples",
        "performance-only",
        {},
    ),
    (
        "timeline",
        run("--timeline-filename t.json"),
        "--timeline-filename",
        "approximate",
        {"callbacks.profiler.enabled": True},
    ),
    (
        "timeline.cycles",
        run("--timeline-mark-cycles"),
        "--timeline-mark-cycles",
        "performance-only",
        {},
    ),
    (
        "timeline.script",
        script(changed(("hvd.init()", "hvd.init()\nhvd.start_timeline('t.json')"))),
        "hvd.start_timeline",
        "approximate",
        {},
    ),
    ("stall", run("--no-stall-check"), "--no-stall-check", "approximate", {}),
    ("stall", config("stall_check: {enabled: true}"), "stall_check.enabled", "approximate", {}),
    (
        "stall.warning",
        config("stall_check: {warning_time_seconds: 9}"),
        "stall_check.warning_time_seconds",
        "approximate",
        {},
    ),
    (
        "stall.shutdown",
        config("stall_check: {shutdown_time_seconds: 90}"),
        "stall_check.shutdown_time_seconds",
        "approximate",
        {"comm.timeout_s": 90.0},
    ),
    (
        "stall.shutdown",
        config("stall_check: {shutdown_time_seconds: 9}"),
        "stall_check.shutdown_time_seconds",
        "dead",
        {},
    ),
    (
        "stall.shutdown",
        config("stall_check: {shutdown_time_seconds: 0}"),
        "stall_check.shutdown_time_seconds",
        "approximate",
        {},
    ),
    (
        "gloo-timeout",
        run("--gloo-timeout-seconds 75"),
        "--gloo-timeout-seconds",
        "exact",
        {"comm.timeout_s": 75.0},
    ),
    (
        "gloo-timeout",
        run("--gloo-timeout-seconds 75 --stall-check-shutdown-time-seconds 99"),
        "--gloo-timeout-seconds",
        "approximate",
        {"comm.timeout_s": 99.0},
    ),
    ("library.tuning", run("--num-nccl-streams 2"), "--num-nccl-streams", "performance-only", {}),
    (
        "log.level",
        run("--log-level TRACE"),
        "--log-level",
        "performance-only",
        {"log_level": "debug"},
    ),
    ("log.time", run("--log-without-timestamp"), "--log-without-timestamp", "performance-only", {}),
    ("env.place", environment("HOROVOD_RANK=0"), "HOROVOD_RANK", "dead", {}),
    ("env.elsewhere", environment("HOROVOD_WITH_MPI=1"), "HOROVOD_WITH_MPI", "dead", {}),
    ("env.others", environment("NCCL_DEBUG=INFO"), "NCCL_DEBUG", "dead", {}),
    ("block.empty", config("params: {}"), "params", "exact", {}),
    ("older", config("timeline: {enabled: false}"), "timeline.enabled", "dead", {}),
    (
        "process-sets.permission",
        environment("HOROVOD_DYNAMIC_PROCESS_SETS=1"),
        "HOROVOD_DYNAMIC_PROCESS_SETS",
        "dead",
        {},
    ),
    ("op", wrapper("op: Average"), "op", "exact", {}),
    ("op", wrapper("op: hvd.Sum"), "op", "exact", {"strategy.op": "sum"}),
    ("op", wrapper("op: Adasum"), "op", "refused", {}),
    ("op", wrapper("op: Max"), "op", "refused", {}),
    (
        "op",
        script(wrapped("op=hvd.Sum")),
        "DistributedOptimizer.op",
        "exact",
        {"strategy.op": "sum"},
    ),
    ("compression", wrapper("compression: none"), "compression", "exact", {}),
    (
        "compression",
        wrapper("compression: fp16"),
        "compression",
        "emulated",
        {"precision.reduce": "fp16", "strategy.overlap": False},
    ),
    (
        "passes",
        wrapper("backward_passes_per_step: 3"),
        "backward_passes_per_step",
        "exact",
        {"trainer.accumulate": 3, "strategy.backward_passes_per_step": 3},
    ),
    (
        "passes",
        script(
            wrapped("backward_passes_per_step=4").replace(
                "loss.backward()", "(loss / 4).backward()"
            )
        ),
        "DistributedOptimizer.backward_passes_per_step",
        "exact",
        {"trainer.accumulate": 4},
    ),
    (
        "passes",
        script(
            wrapped("backward_passes_per_step=4").replace(
                "        loss.backward()", "        loss /= 2\n        loss.backward()"
            )
        ),
        "DistributedOptimizer.backward_passes_per_step",
        "exact",
        {"trainer.accumulate": 4, "strategy.backward_passes_per_step": 2},
    ),
    (
        "passes",
        script(
            wrapped("backward_passes_per_step=4").replace(
                "        loss.backward()", "        loss.div_(3)\n        loss.backward()"
            )
        ),
        "DistributedOptimizer.backward_passes_per_step",
        "refused",
        {},
    ),
    (
        "passes.changed",
        script(stepped(after="optimizer.set_backward_passes_per_step(2)")),
        "optimizer.set_backward_passes_per_step",
        "refused",
        {},
    ),
    (
        "loss.division",
        script(changed(("loss.backward()", "(loss / 2).backward()"))),
        "loss.divided_by",
        "refused",
        {},
    ),
    (
        "predivide",
        wrapper("op: Average\ngradient_predivide_factor: 2.0"),
        "gradient_predivide_factor",
        "exact",
        {},
    ),
    (
        "predivide",
        wrapper("op: Average\ngradient_predivide_factor: 3.0"),
        "gradient_predivide_factor",
        "approximate",
        {},
    ),
    (
        "predivide",
        wrapper("groups: 2\ngradient_predivide_factor: 3.0"),
        "gradient_predivide_factor",
        "dead",
        {},
    ),
    ("groups", wrapper("num_groups: 2"), "num_groups", "performance-only", {}),
    ("sparse", wrapper("sparse_as_dense: true"), "sparse_as_dense", "exact", {}),
    (
        "process-sets",
        script(wrapped("process_set=even")),
        "DistributedOptimizer.process_set",
        "refused",
        {},
    ),
    (
        "process-sets",
        script(wrapped("process_set=hvd.global_process_set")),
        "DistributedOptimizer.process_set",
        "exact",
        {},
    ),
    ("wrapper.names", script(SCRIPT), "DistributedOptimizer.named_parameters", "exact", {}),
    ("script.init", script(SCRIPT), "hvd.init", "exact", {}),
    (
        "script.run",
        script(f"import horovod\n{SCRIPT}horovod.run(train, np=2)\n"),
        "horovod.run",
        "exact",
        {},
    ),
    (
        "script.run",
        script(f"import horovod\n{SCRIPT}horovod.run(train, np=4)\n"),
        "horovod.run",
        "approximate",
        {},
    ),
    (
        "script.communication",
        script(stepped(after="hvd.allreduce(loss, name='loss')")),
        "hvd.allreduce",
        "approximate",
        {},
    ),
    ("script.join", script(SCRIPT + "hvd.join()\n"), "hvd.join", "approximate", {}),
    (
        "script.sync-batchnorm",
        script(changed(("hvd.init()", "hvd.init()\nnorm = hvd.SyncBatchNorm(8)"))),
        "hvd.SyncBatchNorm",
        "approximate",
        {"trainer.sync_batchnorm": True},
    ),
    ("start.parameters", script(SCRIPT), "broadcast_parameters", "exact", {}),
    (
        "start.parameters",
        script(changed(("hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n", ""))),
        "broadcast_parameters",
        "approximate",
        {},
    ),
    ("start.optimizer", script(SCRIPT), "broadcast_optimizer_state", "exact", {}),
    (
        "start.optimizer",
        script(changed(DECAY)),
        "broadcast_optimizer_state",
        "emulated",
        {"trainer.phantom_lr": 0.02, "trainer.phantom_state": False},
    ),
    (
        "start.optimizer",
        script(LATER.replace("SGD", "Adam").replace("momentum=0.9", "eps=1e-6")),
        "broadcast_optimizer_state",
        "emulated",
        {"trainer.phantom_lr": 0.02},
    ),
    ("start.buffers", script(SCRIPT), "buffers", "exact", {"strategy.broadcast_buffers": False}),
    (
        "start.unused",
        script(SCRIPT),
        "unused parameters",
        "emulated",
        {"strategy.find_unused_parameters": True, "strategy.zero_unused": True},
    ),
    (
        "optimizer.type",
        script(SCRIPT),
        "optimizer",
        "exact",
        {"optimizer": "sgd", "optimizer.no_decay": False, "optimizer.fused": False},
    ),
    ("optimizer.type", script(made("optim.LBFGS(model.parameters())")), "optimizer", "refused", {}),
    ("optimizer.lr", script(SCRIPT), "optimizer.lr", "exact", {"optimizer.lr": 0.02}),
    (
        "optimizer.option",
        script(SCRIPT),
        "optimizer.momentum",
        "exact",
        {"optimizer.momentum": 0.9},
    ),
    (
        "optimizer.option",
        script(made("optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)")),
        "optimizer.initial_accumulator_value",
        "dead",
        {},
    ),
    (
        "optimizer.option",
        script(made("optim.Adam(model.parameters(), 1e-3, capturable=True)")),
        "optimizer.capturable",
        "refused",
        {},
    ),
    (
        "optimizer.groups",
        script(made("optim.SGD([{'params': a}, {'params': b}], lr=0.1)")),
        "optimizer.params",
        "refused",
        {},
    ),
    (
        "optimizer.several",
        script(SCRIPT + "other = optim.SGD(other.parameters(), lr=0.1)\n"),
        "optimizer SGD",
        "refused",
        {},
    ),
    ("data.batch", script(SCRIPT), "DataLoader.batch_size", "exact", {"data.micro_batch_size": 32}),
    ("data.batch", script(SLICED), "DataLoader.batch_size", "exact", {"data.micro_batch_size": 8}),
    (
        "data.batch",
        script(SLICED.replace("per_step=4", "per_step=2")),
        "DataLoader.batch_size",
        "refused",
        {},
    ),
    ("data.slices", script(SLICED), "loop.slices", "exact", {"data.micro_batch_size": 8}),
    (
        "data.sampler",
        script(SCRIPT),
        "DistributedSampler.shuffle",
        "approximate",
        {"data.shuffle": False},
    ),
    (
        "data.sampler",
        script(changed((", shuffle=False", ""))),
        "DistributedSampler.shuffle",
        "approximate",
        {"data.shuffle": True},
    ),
    (
        "data.own-sampler",
        script(changed(("sampler=train_sampler", "shuffle=True"))),
        "DataLoader.shuffle",
        "approximate",
        {},
    ),
    (
        "data.drop-last",
        script(changed(("sampler=train_sampler", "sampler=train_sampler, drop_last=True"))),
        "DataLoader.drop_last",
        "approximate",
        {"data.drop_last": True},
    ),
    (
        "data.workers",
        script(changed(("sampler=train_sampler", "sampler=train_sampler, num_workers=3"))),
        "DataLoader.num_workers",
        "performance-only",
        {"data.num_workers": 3},
    ),
    (
        "data.pinned",
        script(changed(("sampler=train_sampler", "sampler=train_sampler, pin_memory=True"))),
        "DataLoader.pin_memory",
        "performance-only",
        {"data.pin_memory": True},
    ),
    (
        "clip",
        script(
            stepped(
                "optimizer.synchronize()\ntorch.nn.utils.clip_grad_norm_(model.parameters(), 2)"
            )
        ),
        "clip_grad_norm_",
        "exact",
        {"trainer.max_grad_norm": 2.0},
    ),
    (
        "clip",
        script(
            stepped(
                "optimizer.synchronize()\ntorch.nn.utils.clip_grad_value_(model.parameters(), 2)"
            )
        ),
        "clip_grad_value_",
        "exact",
        {"trainer.max_grad_value": 2},
    ),
    (
        "clip.norm-type",
        script(
            stepped(
                "optimizer.synchronize()\n"
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 2, norm_type=1)"
            )
        ),
        "clip_grad_norm_.norm_type",
        "refused",
        {},
    ),
    (
        "clip.early",
        script(stepped("torch.nn.utils.clip_grad_norm_(model.parameters(), 2)")),
        "clip_grad_norm_",
        "refused",
        {},
    ),
    (
        "precision.autocast",
        script(AMP.format("bfloat16")),
        "autocast.enabled",
        "approximate",
        {"precision": "bf16_mixed"},
    ),
    ("precision.dtype", script(AMP.format("float16")), "autocast.dtype", "exact", {}),
    (
        "precision.autocast",
        script(AMP.format("float16")),
        "autocast.enabled",
        "approximate",
        {"precision": "fp16_mixed", "precision.loss_scaling.scale": 1.0},
    ),
    (
        "precision.scaler",
        script(AMP.format("float16") + "scaler = torch.cuda.amp.GradScaler()\n"),
        "GradScaler",
        "approximate",
        {"precision": "fp16_mixed"},
    ),
    (
        "schedule.type",
        scheduled("StepLR(optimizer, 10, gamma=0.5)"),
        "scheduler",
        "exact",
        {"schedule": "torch", "schedule.scheduler": "StepLR"},
    ),
    ("schedule.type", scheduled("LambdaLR(optimizer, lambda e: 1)"), "scheduler", "refused", {}),
    (
        "schedule.option",
        scheduled("StepLR(optimizer, 10, gamma=0.5)"),
        "scheduler.step_size",
        "exact",
        {"schedule.options.step_size": 10, "schedule.options.gamma": 0.5},
    ),
    (
        "schedule.interval",
        scheduled("StepLR(optimizer, 10)"),
        "scheduler.step",
        "exact",
        {"schedule.interval": "step"},
    ),
    (
        "schedule.interval",
        script(
            scheduled("StepLR(optimizer, 10)", "pass")[1].replace(
                "    train(epoch)", "    train(epoch)\n    scheduler.step()"
            )
        ),
        "scheduler.step",
        "exact",
        {"schedule.interval": "epoch"},
    ),
    ("schedule.interval", scheduled("StepLR(optimizer, 10)", "pass"), "scheduler.step", "dead", {}),
    (
        "schedule.several",
        script(
            scheduled("StepLR(optimizer, 10)")[1] + "s = optim.lr_scheduler.StepLR(optimizer, 3)\n"
        ),
        "scheduler StepLR",
        "refused",
        {},
    ),
    (
        "schedule.by-hand",
        script(
            changed(
                (
                    "    train(epoch)",
                    "    optimizer.param_groups[0]['lr'] = 0.1\n    train(epoch)",
                )
            )
        ),
        "param_group['lr']",
        "refused",
        {},
    ),
]


def found(plan: Plan, rule: str, key: str) -> Finding:
    [finding] = [f for f in plan.findings if f.rule == rule and f.key == key]
    return finding


@pytest.mark.parametrize(
    ("rule", "source", "key", "verdict", "settings"),
    CASES,
    ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)],
)
def test_a_rule_says_what_becomes_of_a_key(write, rule, source, key, verdict, settings):
    name, text = source
    path = write(text, name)
    world = 2 if name == "train.py" else None
    plan = translate(path, Options(world_size=world))
    finding = found(plan, rule, key)
    assert finding.verdict == verdict
    assert finding.why
    for setting, value in settings.items():
        assert (plan.values | plan.choices)[setting] == value
    if not settings:
        assert finding.becomes == ""
    same = [f for f in plan.findings if f.verdict in ("exact", "emulated")]
    assert not {f.rule for f in same if not f.proved_by}


def test_no_rule_is_without_a_case():
    # in test_horovod_reading
    elsewhere = {"launch.config-file", "launch.hostfile", "overridden", "unknown"}
    assert set(RULES) == {case[0] for case in CASES} | elsewhere
    assert all(rule.doc for rule in RULES.values())


proves = partial(pytest.mark.proves, engine="horovod")


@proves("block.empty", "launch.command", "launch.config-file", "launch.hostfile", "launch.hosts")
@proves("launch.processes")
def test_a_line_that_starts_as_many_processes_here_says_no_more_than_that(write):
    """Definitions: the same processes on this machine, and the files that the line names."""
    write(SCRIPT, "train.py")
    write("params: {}\n", "c.yaml")
    write("localhost slots=4\n", "hosts.txt")
    for hosts in ("-H localhost:4", "--hostfile hosts.txt"):
        path = write(f"horovodrun -np 3 {hosts} --config-file c.yaml python train.py", "run.sh")
        plan = translate(path)
        assert plan.values["launcher.num_processes"] == 3
        bare = translate(path.with_name("train.py"), Options(world_size=3))
        assert (plan.choices, plan.values) == (bare.choices, bare.values)
    elsewhere = write("horovodrun -np 4 -H a:2,b:2 python train.py", "run.sh")
    assert "launcher.num_processes" not in translate(elsewhere).values  # torchrun starts them


@proves("launch.start-timeout")
def test_a_timeout_of_the_start_is_the_launchers_and_the_meetings(write):
    for text in (RUN.format("--start-timeout 90"), f"HOROVOD_START_TIMEOUT=90 {RUN.format('')}"):
        values = translate(write(text, "run.sh")).values
        assert values["launcher.startup_timeout_s"] == values["comm.startup_timeout_s"] == 90.0


@proves("script.run")
def test_a_script_that_starts_its_processes_has_as_many_as_are_stated(write):
    path = write(f"import horovod\n{SCRIPT}horovod.run(train, np=2)\n", "train.py")
    plan = translate(path, Options(world_size=2))
    assert plan.values["launcher.num_processes"] == 2
    assert "state --world-size" in found(translate(path), "script.run", "horovod.run").why


@proves("data.batch", "data.drop-last", "data.sampler", "data.slices")
def test_samples_of_a_step_are_those_of_the_script(write):
    """Of one process they are the same in the same order; of several the same in a step."""
    for text, batch, passes in ((SCRIPT, 32, 1), (SLICED, 8, 4)):
        for processes in (1, 3):
            plan = translate(write(text, "train.py"), Options(world_size=processes))
            assert plan.values["data.micro_batch_size"] == batch
            assert plan.values["trainer.accumulate"] == passes
            theirs = torchs_steps(processes, batch * passes)
            mine = native_steps(processes, batch, passes)
            assert len(theirs) == len(mine) > 2
            for one, other in zip(theirs, mine, strict=True):
                assert (one == other) if processes == 1 else (sorted(one) == sorted(other))


SIZE = 32 * 3 * 8  # whole batches for each number of processes


def torchs_steps(processes: int, batch: int) -> list[list[int]]:
    """The samples of each step of a DistributedSampler in order, whatever the process."""
    shares = []
    for rank in range(processes):
        sampler = DistributedSampler(range(SIZE), processes, rank, shuffle=False)
        shares.append(list(BatchSampler(sampler, batch, drop_last=True)))
    return [[place for share in step for place in share] for step in zip(*shares, strict=True)]


def native_steps(processes: int, micro: int, passes: int) -> list[list[int]]:
    steps: list[list[int]] = [[] for _ in range(SIZE // (micro * passes * processes))]
    for rank in range(processes):
        cut = BatchPartition(micro * passes * processes, micro, processes, rank)
        sampler = GlobalSampler(SIZE, cut, seed=0, shuffle=False, drop_last=True)
        for step, planned in zip(steps, sampler.plans(0), strict=False):
            step += [place for share in planned.shares for place in share.ids]
    return steps


def test_several_hosts_name_the_torchrun_line_that_starts_them(write):
    path = write("horovodrun -np 6 -H first:4,second:4 python train.py", "run.sh")
    why = found(translate(path), "launch.hosts", "-H").why
    assert "torchrun --nnodes=2 --nproc-per-node=THE_SLOTS_OF_THIS_HOST" in why
    assert "--rdzv-endpoint=first:29500 -m torsh_trainer +recipe=RECIPE.yaml" in why
    even = write("horovodrun -np 8 -H first:4,second:4 python train.py", "even.sh")
    plan = translate(even)
    assert "--nproc-per-node=4" in found(plan, "launch.hosts", "-H").why
    assert "launcher.num_processes" not in plan.values  # torchrun starts them


def test_elastic_processes_become_nodes_of_so_many_processes(write):
    line = "horovodrun -np 8 --min-np 6 --max-np 16 --slots-per-host 4 --reset-limit 3 {}"
    path = write(line.format("--host-discovery-script d.sh python train.py"), "run.sh")
    why = found(translate(path), "elastic.range", "--min-np").why
    assert "torchrun --nnodes=2:4 --nproc-per-node=4 --max-restarts=3" in why


def test_in_clean_mode_quirks_are_left_out_and_named(write):
    text = changed(DECAY, ("compression=compression", "compression=hvd.Compression.fp16"))
    plan = translate(write(text, "train.py"), Options(world_size=2, mode="clean"))
    assert not {"trainer.phantom_lr", "strategy.overlap"} & set(plan.values)
    for rule in ("start.optimizer", "compression"):
        assert [f.verdict for f in plan.findings if f.rule == rule] == ["approximate"]
    lost = made("optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)")
    plan_lost = translate(write(lost, "train.py"), Options(world_size=2, mode="clean"))
    assert plan_lost.values["optimizer.initial_accumulator_value"] == 0.1
    # What the optimizer does with every parameter is no quirk of the start.
    assert plan.values["strategy.zero_unused"]
    assert [f.verdict for f in plan.findings if f.rule == "start.unused"] == ["emulated"]
