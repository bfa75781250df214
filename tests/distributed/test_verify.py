"""``verify`` on real processes: strategies that agree, and wrong ones that it must find out."""

from __future__ import annotations

import json
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from torsh_trainer.config.roots import find_roots

pytestmark = pytest.mark.usefixtures("warm_interpreters")

WRONG = '''
"""Strategies with one mistake each."""

from dataclasses import dataclass, replace

import torch

from torsh_trainer.strategies.base import Clip
from torsh_trainer.strategies.ddp import DDP
from torsh_trainer.strategies.parallel import Parallel
from torsh_trainer.strategies.single import Single


def gradients_times(engine, factor):
    right = engine.forward_backward

    def wrong(*args):
        report = right(*args)
        for parameter in engine.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return report

    engine.forward_backward = wrong
    return engine


@dataclass(frozen=True)
class AveragesTwice(DDP):
    name = "averages_twice"

    def prepare(self, job, comm):
        return gradients_times(super().prepare(job, comm), 1 / comm.world.size)


@dataclass(frozen=True)
class NeverShards(DDP):
    """Every rank takes the samples of rank 0."""

    name = "never_shards"

    def mesh(self, world):
        return replace(super().mesh(world), rank=0)


@dataclass(frozen=True)
class NeverCommunicates(DDP):
    name = "never_communicates"

    def prepare(self, job, comm):
        return Single.prepare(Single(), job, comm)


@dataclass(frozen=True)
class OtherRate(Single):
    """Scales the learning rate, as Horovod's examples do."""

    name = "other_rate"

    def prepare(self, job, comm):
        engine = super().prepare(job, comm)
        for optimizer in engine.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] *= 2
        return engine


@dataclass(frozen=True)
class OtherWeights(Single):
    name = "other_weights"

    def prepare(self, job, comm):
        engine = super().prepare(job, comm)
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.copy_(parameter.bfloat16())
        return engine


@dataclass(frozen=True)
class NeverClips(Single):
    name = "never_clips"

    def prepare(self, job, comm):
        engine = super().prepare(job, comm)
        step = engine.step
        engine.step = lambda clip, **options: step(Clip(), **options)
        return engine


@dataclass(frozen=True)
class Refuses(Single):
    name = "refuses"

    def prepare(self, job, comm):
        raise self.refuse("trainer.max_grad_norm", use="set it to null")


@dataclass(frozen=True)
class Measures(Single):
    """Fails where operations may add in an order of their own."""

    name = "measures"

    def prepare(self, job, comm):
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.benchmark
        return super().prepare(job, comm)


@dataclass(frozen=True)
class Doubles(Parallel):
    """The processes of a layer count for its gradient twice."""

    name = "doubles"

    def prepare(self, job, comm):
        return gradients_times(super().prepare(job, comm), job.groups.mesh.tp)


@dataclass(frozen=True)
class Fails(Single):
    name = "fails"

    def prepare(self, job, comm):
        raise RuntimeError("out of luck")
'''
STRATEGIES = {
    "averages_twice": "AveragesTwice",
    "never_shards": "NeverShards",
    "never_communicates": "NeverCommunicates",
    "other_rate": "OtherRate",
    "other_weights": "OtherWeights",
    "never_clips": "NeverClips",
    "refuses": "Refuses",
    "fails": "Fails",
    "measures": "Measures",
    "doubles": "Doubles",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wrong strategies as options."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "wrong_strategies.py").write_text(WRONG)
    options = folder / "conf" / "strategy"
    options.mkdir(parents=True)
    for name, cls in STRATEGIES.items():
        node = {"_target_": f"wrong_strategies.{cls}"}
        (options / f"{name}.yaml").write_text(f"# Wrong.\n{yaml.safe_dump(node)}")
    return folder


@pytest.fixture(scope="module")
def verify(project: Path, warm_command: Any) -> Any:
    """``verify(strategies, *overrides)``: (completed process, content of verify.json)."""

    def run(strategies: str, *overrides: str) -> tuple[Any, dict[str, Any]]:
        folder = project / f"verified-{len(list(project.glob('verified-*')))}"
        words = ["+recipe=digits", f"strategies={strategies}", "--config-dir", "conf"]
        args = ["verify", *words, f"verify.dir={folder}", "verify.steps=3", *overrides]
        done = warm_command(args, cwd=project, timeout_s=1920)
        assert (folder / "verify.json").is_file(), done.stderr
        return done, json.loads((folder / "verify.json").read_text())

    return run


def rung(content: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    (found,) = [rung for rung in content["rungs"] if rung["rung"] == name]
    return {outcome["label"]: outcome for outcome in found["strategies"]}


def test_strategies_that_agree_do_so_on_both_rungs(verify: Any) -> None:
    done, content = verify("[single,{fsdp:{reshard_after_forward:false}}]")
    assert done.returncode == content["exit_code"] == 0, done.stdout
    for name in ("sgd", "recipe"):
        outcomes = rung(content, name)
        statuses = {label: outcome["status"] for label, outcome in outcomes.items()}
        fsdp = "fsdp reshard_after_forward=false"
        assert statuses == {"single": "reference", fsdp: "agrees"}
        assert [o["processes"] for o in outcomes.values()] == [1, 2]
        assert len(outcomes[fsdp]["rows"]) == 1 + 3, "the start and three steps"
        losses = [row["loss"] for row in outcomes["single"]["rows"][1:]]
        assert len(set(losses)) == 3, "it trained"
        assert [row["samples"] for row in outcomes[fsdp]["rows"][1:]] == [64, 128, 192]
        assert outcomes[fsdp]["largest"]["parameters"]["absolute"] <= 1e-6


def test_meshes_are_compared_and_one_that_is_wrong_is_found_out(verify: Any) -> None:
    """Parameters of every stage and every part of a layer, put together, beside one process."""
    done, content = verify(
        "[single,{doubles:{mesh.tp:2}}]",
        "meshes=[{tp:2},{pp:2}]",
        "model=mlp",
        "verify.ladder=[sgd]",
        "trainer.accumulate=2",
        "launcher.num_processes=2",
    )
    outcomes = rung(content, "sgd")
    statuses = {label: outcome["status"] for label, outcome in outcomes.items()}
    assert statuses == {
        "single": "reference",
        "doubles mesh.tp=2": "apart",
        "parallel mesh.tp=2": "agrees",
        "parallel mesh.pp=2": "agrees",
    }, done.stdout
    assert done.returncode == 12
    assert all(len(outcome["rows"]) == 1 + 3 for outcome in outcomes.values())


def test_operations_are_deterministic_while_strategies_are_compared(verify: Any) -> None:
    done, content = verify("[single,measures]", "verify.ladder=[sgd]", "verify.steps=2")
    assert rung(content, "sgd")["measures"]["status"] == "agrees", done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(2000)  # nine strategies, one after the other, beside other tests
def test_every_strategy_that_is_installed_agrees_or_says_why_not(verify: Any) -> None:
    """Those of plugins too, whatever their names; on a CPU two cannot run.

    Without ``fsdp``, which the test above trains, and ``auto``, which is one of the others here.
    """
    shown = {"single", "fsdp", "auto"}
    installed = [name for name in find_roots().groups()["strategy"] if name not in shown]
    done, content = verify(
        f"[single,{','.join(installed)}]",
        "verify.ladder=[sgd]",
        "verify.steps=2",
        "trainer.device=cpu",
    )
    outcomes = rung(content, "sgd")
    others = {"single": "reference", "dp": "refused", "nccl": "missing"}
    expected = {name: others.get(name, "agrees") for name in ("single", *installed)}
    assert {label: outcome["status"] for label, outcome in outcomes.items()} == expected, (
        done.stdout
    )
    assert "not over a cpu" in outcomes["dp"]["words"]
    assert "CUDA" in outcomes["nccl"]["words"]
    assert done.returncode == 1, "a missing library weighs more than a refusal"


@pytest.fixture(scope="module")
def found_out(verify: Any) -> Any:
    """``found_out(name)``: a wrong strategy under plain SGD, compared once."""
    return cache(lambda name: verify(f"[single,{name}]", "verify.ladder=[sgd]"))


@pytest.mark.parametrize(
    ("strategy", "step", "quantity", "rule", "words"),
    [
        ("averages_twice", 1, "grad_norm", "averaging", "divided by the 2 ranks once too often"),
        ("never_shards", 1, "loss", "data", "another order of them"),
        ("never_communicates", 1, "parameters", "replicas", "not communicated"),
        ("other_rate", 1, "lr", "schedule", "2 times the reference's"),
        ("other_weights", 0, "parameters", "initialisation", "before the first step"),
    ],
)
@pytest.mark.matrix(1)
def test_a_wrong_strategy_is_found_out_and_the_right_rule_suspected(
    strategy: str, step: int, quantity: str, rule: str, words: str, found_out: Any
) -> None:
    done, content = found_out(strategy)
    assert done.returncode == content["exit_code"] == 12
    outcome = rung(content, "sgd")[strategy]
    assert outcome["status"] == "apart"
    suspect = outcome["suspect"]
    assert (suspect["step"], suspect["quantity"], suspect["rule"]) == (step, quantity, rule)
    assert words in suspect["because"]
    assert f"Suspect: {rule}" in " ".join(done.stdout.split())


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_but_itself_and_says_who_is_apart(found_out: Any) -> None:
    done, _ = found_out("averages_twice")
    path = next(Path(line) for line in done.stdout.splitlines() if line.endswith("verify.html"))
    page, parser = path.read_text(), Links()
    parser.feed(page)
    assert parser.links == []
    assert "averages_twice" in page
    assert "Suspect: averaging" in page
    assert page.count("<svg") >= 5


def test_parameters_are_taken_off_the_disk_once_compared(found_out: Any) -> None:
    done, _ = found_out("averages_twice")
    home = next(Path(x).parent for x in done.stdout.splitlines() if x.endswith("verify.json"))
    assert not list(home.rglob("*.npz"))
    assert (home / "sgd" / "single" / "metrics.jsonl").is_file(), "the runs are runs"


def test_what_clipping_does_shows_on_the_rung_of_the_recipe_alone(verify: Any) -> None:
    done, content = verify(
        "[single,never_clips]",
        "optimizer=sgd",
        "optimizer.lr=0.5",
        "schedule=constant",
        "trainer.max_grad_norm=0.01",
    )
    assert done.returncode == 12
    assert rung(content, "sgd")["never_clips"]["status"] == "agrees"
    suspect = rung(content, "recipe")["never_clips"]["suspect"]
    assert (suspect["step"], suspect["rule"]) == (2, "optimizer"), "the update of step 1"
    assert "clipping" in suspect["because"]


def test_a_strategy_that_refuses_or_fails_is_a_row_in_its_own_words(verify: Any) -> None:
    done, content = verify("[single,refuses]", "verify.ladder=[sgd]")
    assert done.returncode == 11
    row = rung(content, "sgd")["refuses"]
    assert row["status"] == "refused"
    assert "cannot honour trainer.max_grad_norm; set it to null" in row["words"]
    assert row["words"] in " ".join(done.stdout.split())
    done, content = verify("[single,refuses,fails,other_rate]", "verify.ladder=[sgd]")
    assert done.returncode == 12, "a broken bound weighs most"
    done, content = verify("[single,refuses,fails]", "verify.ladder=[sgd]")
    assert done.returncode == 3, "then a run that failed"
    assert "out of luck" in rung(content, "sgd")["fails"]["words"]
