"""Every rule for Horovod, by what it says of one job."""

from __future__ import annotations

from functools import partial

import pytest
from horovod_job import DECAY, RUN, SCRIPT, SLICED, changed, made
from horovod_launch_cases import LAUNCH_CASES
from horovod_script_cases import SCRIPT_CASES
from torch.utils.data import BatchSampler, DistributedSampler

from torsh_trainer.data.sampler import BatchPartition, GlobalSampler
from torsh_trainer.translate.horovod.job import Options
from torsh_trainer.translate.horovod.rules import RULES
from torsh_trainer.translate.horovod.translator import translate
from torsh_trainer.translate.plan import Finding, Plan

CASES = [*LAUNCH_CASES, *SCRIPT_CASES]


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
def test_a_script_that_starts_its_processes_says_how_many(write):
    path = write(f"import horovod\n{SCRIPT}horovod.run(train, np=2)\n", "train.py")
    assert translate(path).values["launcher.num_processes"] == 2
    assert found(translate(path), "script.run", "horovod.run").verdict == "exact"
    other = found(translate(path, Options(world_size=4)), "script.run", "horovod.run")
    assert "starts 2 processes; this plan is for 4" in other.why
    twice = "horovod.run(train, np=2)\nhorovod.run(train, np=4)\n"
    plan = translate(write(f"import horovod\n{SCRIPT}{twice}", "train.py"))
    ways = [finding.why for finding in plan.findings if finding.rule == "script.run"]
    assert len(ways) == 2
    assert all("state --world-size" in why for why in ways)


@proves("length")
@pytest.mark.parametrize(
    ("loops", "setting", "each"),
    [
        ("for epoch in range(2, 5):\n  for batch in loader:\n    S", "max_epochs", 5),
        ("for a in range(2):\n  for b in range(3):\n   for c in loader:\n    S", "max_epochs", 5),
        ("for step in range(7):\n  S", "max_steps", 1),
    ],
)
def test_a_job_trains_for_as_many_steps_as_the_scripts_loops_run(write, loops, setting, each):
    """``each``: steps of one round. The loops themselves are run and counted."""
    counted: dict = {"n": 0, "loader": range(5)}
    exec(loops.replace("S", "n += 1"), counted)
    begin = "for epoch in range(1, 4):\n    train(epoch)\n"
    loops = loops.replace("loader", "train_loader").replace("S", "train_step()")
    lines = "F.nll_loss(model(x), y).backward()\n    optimizer.step()\n"
    text = changed((begin, loops), ("hvd.init()", f"def train_step():\n    {lines}\nhvd.init()"))
    values = translate(write(text, "train.py"), Options(world_size=2)).values
    assert values[f"trainer.{setting}"] * each == counted["n"]


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
