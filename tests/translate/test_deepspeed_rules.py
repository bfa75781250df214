"""Rules: what a key of DeepSpeed becomes, by group of rules."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from torsh_trainer.errors import ConfigError
from torsh_trainer.translate.deepspeed import job, keys, versions
from torsh_trainer.translate.deepspeed.rules import RULES
from torsh_trainer.translate.deepspeed.source import Options
from torsh_trainer.translate.deepspeed.translator import fill, translate
from torsh_trainer.translate.plan import VERDICTS, Ledger


def adam(**params):
    return {"optimizer": {"type": "Adam", "params": {"lr": 0.01, **params}}}


class TestTable:
    def test_every_key_has_a_rule_and_every_rule_a_line(self):
        named = {name for key in keys.schema().values() for name in key.rule.split("|")}
        assert named <= set(RULES)
        assert all(rule.doc and "\n" not in rule.doc for rule in RULES.values())

    def test_every_key_meets_a_rule_at_every_version(self):
        for key in keys.schema().values():
            rules = [RULES[name] for name in key.rule.split("|")]
            for version in ((0, 10, 0), (0, 19, 2), (0, 19, 3), versions.NEWEST):
                assert sum(rule.holds(version) for rule in rules) == 1, key.dotted

    def test_a_key_that_no_rule_took_is_refused_by_the_ledger(self):
        ledger = Ledger()
        ledger.enter("forgotten", 1, line=3, column=2)
        [finding] = ledger.close()
        assert (finding.verdict, finding.rule, finding.line) == ("refused", "ledger", 3)


class TestBatch:
    @pytest.mark.proves("batch.global", "batch.micro", "batch.accumulation")
    @pytest.mark.parametrize(
        ("given", "values"),
        [
            ((64, 4, 4), {"data.batch_size": 64, "data.micro_batch_size": 4}),
            ((64, 4, None), {"data.batch_size": 64, "data.micro_batch_size": 4}),
            ((64, None, 2), {"data.batch_size": 64, "trainer.accumulate": 2}),
            ((None, 4, 2), {"data.micro_batch_size": 4, "trainer.accumulate": 2}),
            ((64, None, None), {"data.batch_size": 64, "trainer.accumulate": 1}),
            ((None, 4, None), {"data.micro_batch_size": 4, "trainer.accumulate": 1}),
        ],
    )
    def test_two_of_the_three_are_stated_and_the_third_follows(self, given, values):
        names = (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
        config = {name: v for name, v in zip(names, given, strict=True) if v is not None}
        plan = translate(config, Options(world_size=4))
        found = {k: v for k, v in plan.values.items() if k.startswith("data.") or "accum" in k}
        assert found == values
        assert plan.values["launcher.num_processes"] == 4

    @pytest.mark.parametrize("world_size", [None, 3])
    def test_sizes_that_contradict_one_another_are_invalid(self, world_size):
        config = {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}
        with pytest.raises(ConfigError, match="contradict"):
            translate(config, Options(world_size=world_size))


class TestClipping:
    @pytest.mark.parametrize(
        ("version", "config", "norm"),
        [
            ("0.19.8", {}, 1.0),
            ("0.19.2", {}, None),
            ("0.19.8", {"gradient_clipping": 0}, None),
            ("0.19.2", {"gradient_clipping": 0.3}, 0.3),
            ("0.19.8", adam(max_grad_norm=0.7), 0.7),
        ],
    )
    def test_the_default_is_that_of_the_version(self, plan_of, version, config, norm):
        plan = plan_of(config, version=versions.parse(version))
        assert plan.values["trainer.max_grad_norm"] == norm

    def test_the_same_file_means_three_things(self, plan_of, finding_of):
        auto = {"gradient_clipping": "auto"}
        with pytest.raises(ConfigError, match="which DeepSpeed itself does not know"):
            plan_of(auto)
        stated = {"max_grad_norm": "0.4"}
        trainer = plan_of(auto, context="hf-trainer", settings=stated)
        assert trainer.values["trainer.max_grad_norm"] == 0.4
        assert plan_of(auto, context="accelerate").values["trainer.max_grad_norm"] == 1.0
        lightning = plan_of({}, context="lightning")
        assert lightning.values["trainer.max_grad_norm"] is None
        assert finding_of(lightning, "gradient_clipping").verdict == "approximate"

    def test_a_file_of_an_older_version_is_not_clipped_with_certainty(self, plan_of, finding_of):
        plan = plan_of({"sparse_gradients": False})
        assert finding_of(plan, "gradient_clipping").verdict == "approximate"


class TestStages:
    @pytest.mark.proves("zero.short-form")
    @pytest.mark.parametrize(
        ("zero", "strategy", "values"),
        [
            ({}, "ddp", {"strategy.zero1": False}),
            ({"stage": 1}, "ddp", {"strategy.zero1": True}),
            ({"stage": 2}, "fsdp", {"strategy.reshard_after_forward": False}),
            ({"stage": "3"}, "fsdp", {"strategy.reshard_after_forward": True}),
            (True, "ddp", {"strategy.zero1": True}),
            (False, "ddp", {"strategy.zero1": False}),
            ({"stage": 1, "cpu_offload": True}, "fsdp", {"strategy.cpu_offload": True}),
            (
                {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                "fsdp",
                {"strategy.cpu_offload": True},
            ),
            ({"stage": 3, "mics_shard_size": 4}, "fsdp", {"strategy.shard_size": 4}),
        ],
    )
    def test_a_stage_becomes_a_strategy(self, plan_of, zero, strategy, values):
        plan = plan_of({"zero_optimization": zero})
        assert plan.choices["strategy"] == strategy
        assert values.items() <= plan.values.items()

    def test_short_names_are_names_of_the_same_key(self, plan_of, finding_of):
        plan = plan_of({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 1}})
        found = finding_of(plan, "zero_optimization.prefetch_bucket_size")
        assert found.verdict == "performance-only"

    def test_groups_that_do_not_divide_the_world_are_refused(self, plan_of):
        zero = {"zero_optimization": {"stage": 3, "mics_shard_size": 4}}
        assert plan_of(zero, world_size=8).values["strategy.shard_size"] == 4
        assert plan_of(zero, world_size=6).exit_code == 11

    def test_what_would_change_numbers_is_refused_only_when_it_is_on(self, plan_of, finding_of):
        for value, verdict in ((False, "dead"), (True, "refused")):
            plan = plan_of({"zero_optimization": {"stage": 3, "zero_quantized_weights": value}})
            found = finding_of(plan, "zero_optimization.zero_quantized_weights")
            assert found.verdict == verdict
        plan = plan_of({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}})
        assert plan.exit_code == 11


class TestPrecision:
    @pytest.mark.parametrize(
        ("config", "precision", "reduce"),
        [
            ({}, "fp32", None),  # said, since a recipe that is silent has precision=auto
            ({"bf16": {"enabled": True}}, "bf16_true", "bf16"),
            ({"bfloat16": {"enabled": True}}, "bf16_true", "bf16"),
            ({"fp16": {"enabled": True}}, "fp16_true", "fp16"),
            ({"torch_autocast": {"enabled": True}}, "bf16_mixed", "fp32"),
            (
                {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
                "bf16_true",
                "fp32",
            ),
        ],
    )
    def test_modes(self, plan_of, config, precision, reduce):
        plan = plan_of(config)
        assert plan.choices.get("precision") == precision
        assert plan.values.get("precision.reduce") == reduce

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    def test_exact_reproduces_roundings_and_clean_says_what_differs(self, dtype, finding_of):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            dtype: {"enabled": True},
            "zero_optimization": {"stage": 3},
        }
        exact, clean = (translate(config, Options(mode=mode)) for mode in ("exact", "clean"))
        quirks = {
            "precision.rounded_start": True,
            "precision.gradients": dtype,
            "precision.rounded_products": True,
        }
        if dtype == "fp16":
            quirks["precision.loss_scaling.growth_delay"] = 1
            quirks["precision.loss_scaling.divide_by_grown"] = True
        assert quirks.items() <= exact.values.items()
        assert not quirks.keys() & clean.values.keys()
        assert clean.choices["precision"] == exact.choices["precision"]
        for key in (f"{dtype}.enabled", "data_types.grad_accum_dtype"):
            assert finding_of(exact, key).verdict == "emulated"
            assert finding_of(clean, key).verdict == "approximate"

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_clean_leaves_a_job_in_fp32_as_it_is_since_it_has_no_quirks(self, plan_of, stage):
        config = {"zero_optimization": {"stage": stage}, **adam(torch_adam=True)}
        exact, clean = (plan_of(config, mode=mode) for mode in ("exact", "clean"))
        # torch's fused kernels round otherwise: which is left out, as roundings are
        assert {**clean.values, "optimizer.fused": False} == exact.values
        assert clean.exit_code == 0

    def test_stage_0_takes_a_phantom_step_at_the_optimizers_rate(self, plan_of, finding_of):
        plan = plan_of({"bf16": {"enabled": True}, **adam(lr=0.25, torch_adam=True)})
        assert plan.values["trainer.phantom_lr"] == 0.25
        assert finding_of(plan, "bf16.enabled").verdict == "emulated"
        fast = plan_of({"bf16": {"enabled": True}, **adam(lr=0.25, weight_decay=0.1)})
        assert finding_of(fast, "bf16.enabled").verdict == "approximate"
        unknown = plan_of({"bf16": {"enabled": True}})
        assert finding_of(unknown, "bf16.enabled").verdict == "approximate"

    @pytest.mark.parametrize("kind", sorted(job.TORCH_OPTIMIZERS))
    def test_without_a_rate_the_phantom_step_has_torchs_own(self, plan_of, kind):
        name = "AdamW" if kind == "adamw" else kind[0].upper() + kind[1:]
        default = inspect.signature(getattr(torch.optim, name)).parameters["lr"].default
        plan = plan_of({"bf16": {"enabled": True}, "optimizer": {"type": kind}})
        assert plan.values["trainer.phantom_lr"] == default

    def test_stage_0_in_fp16_is_what_was_meant(self, plan_of, finding_of):
        found = finding_of(plan_of({"fp16": {"enabled": True}, **adam()}), "fp16.enabled")
        assert found.verdict == "approximate"
        assert "not multiplied" in found.why

    def test_a_fixed_scale_leaves_the_knobs_of_a_dynamic_one_dead(self, plan_of, finding_of):
        plan = plan_of({"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 2}})
        assert plan.values["precision.loss_scaling.scale"] == 128
        assert finding_of(plan, "fp16.hysteresis").verdict == "dead"

    def test_a_block_that_is_off_is_dead_but_for_its_switch(self, plan_of, finding_of):
        plan = plan_of({"fp16": {"enabled": False, "min_loss_scale": 0}})
        assert finding_of(plan, "fp16.min_loss_scale").rule == "block.off"
        assert finding_of(plan, "fp16.enabled").verdict == "exact"


class TestOptimizer:
    @pytest.mark.parametrize(
        ("kind", "params", "option", "decay"),
        [
            ("Adam", {}, "adamw", 0.0),
            ("Adam", {"adam_w_mode": False}, "adam", 0.0),
            ("AdamW", {"adam_w_mode": False}, "adamw", 0.0),
            ("adamw", {"torch_adam": True}, "adamw", 0.01),
            ("AdamW", {"weight_decay": 0.2}, "adamw", 0.2),
        ],
    )
    def test_adam_is_adamw_unless_it_says_otherwise(self, plan_of, kind, params, option, decay):
        plan = plan_of({"optimizer": {"type": kind, "params": params}})
        assert plan.choices["optimizer"] == option
        assert plan.values["optimizer.weight_decay"] == decay
        assert plan.values["optimizer.no_decay"] is False

    def test_torch_is_asked_by_case_as_the_engine_asks(self, plan_of):
        sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
        plan = plan_of(sgd)
        assert plan.choices["optimizer"] == "sgd"
        assert plan.values["optimizer.momentum"] == 0.9
        assert plan_of({"optimizer": {"type": "sgd"}}).exit_code == 11

    @pytest.mark.parametrize("kind", ["Lamb", "Lion", "Muon", "MuAdam", "ZeroOneAdam"])
    def test_what_this_release_lacks_is_refused_by_name(self, plan_of, finding_of, kind):
        finding = finding_of(plan_of({"optimizer": {"type": kind}}), "optimizer.type")
        assert finding.verdict == "refused"
        assert "not in this release" in finding.why

    def test_one_bit_adam_is_only_like_our_compression(self, plan_of):
        optimizer = {"type": "OneBitAdam", "params": {"freeze_step": 7}}
        plan = plan_of({"optimizer": optimizer, "fp16": {"enabled": True}})
        assert plan.values["precision.reduce"] == "fp32"  # compression alone says how they travel
        assert plan.choices["compression"] == "onebit"
        assert plan.values["compression.warmup_steps"] == 7
        assert plan.exit_code == 10


class TestSchedule:
    def test_a_warm_up_is_emulated_over_the_rate_that_it_ends_at(self, plan_of, finding_of):
        params = {"warmup_min_lr": 0.002, "warmup_max_lr": 0.02, "warmup_num_steps": 9}
        plan = plan_of({**adam(), "scheduler": {"type": "WarmupLR", "params": params}})
        assert plan.choices["schedule"] == "deepspeed_warmup"
        assert plan.values["optimizer.lr"] == 0.02
        assert plan.values["schedule.start"] == pytest.approx(0.1)
        assert finding_of(plan, "optimizer.params.lr").verdict == "dead"

    def test_warmup_decay_ends_at_0_001_whatever_the_optimizer_says(self, plan_of):
        scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 50}}
        plan = plan_of({**adam(), "scheduler": scheduler})
        assert plan.values["optimizer.lr"] == 0.001
        assert (plan.values["schedule.decay"], plan.values["schedule.total_steps"]) == (
            "linear",
            50,
        )

    def test_a_scheduler_of_torch_stays_itself(self, plan_of):
        scheduler = {"type": "StepLR", "params": {"step_size": 3}}
        plan = plan_of({**adam(), "scheduler": scheduler})
        assert plan.choices["schedule"] == "torch"
        assert plan.values["schedule.scheduler"] == "StepLR"
        assert plan.values["schedule.options.step_size"] == 3

    def test_one_cycle_sets_rates_and_betas(self, plan_of, finding_of):
        params = {
            "cycle_min_lr": 0.002,
            "cycle_max_lr": 0.02,
            "cycle_second_step_size": None,
            "cycle_first_stair_count": 3,
            "decay_lr_rate": 0.5,
        }
        config = {**adam(betas=[0.5, 0.6]), "scheduler": {"type": "OneCycle", "params": params}}
        plan = plan_of(config)
        assert plan.choices["schedule"] == "deepspeed_one_cycle"
        assert plan.values["optimizer.lr"] == 0.02
        assert plan.values["schedule.low"] == pytest.approx(0.1)
        assert plan.values["schedule.first_stairs"] == 3
        assert finding_of(plan, "optimizer.params.lr").verdict == "dead"
        assert finding_of(plan, "optimizer.params.betas").verdict == "dead"
        params["cycle_momentum"] = False
        assert plan_of(config).values["optimizer.betas"] == [0.5, 0.6]

    def test_a_range_test_begins_at_its_least_rate(self, plan_of):
        params = {"lr_range_test_staircase": True}
        plan = plan_of({**adam(), "scheduler": {"type": "LRRangeTest", "params": params}})
        assert plan.choices["schedule"] == "deepspeed_range_test"
        assert plan.values["optimizer.lr"] == 0.001
        assert plan.values["schedule.staircase"] is True

    @pytest.mark.parametrize(
        ("kind", "params"),
        [
            ("Unheard", {}),
            ("OneCycle", {}),
            ("OneCycle", {"cycle_min_lr": 0.1}),
            ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.0}),
            ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": [0.2, 0.3]}),
            ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 0}),
            ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "pct_start": 0.3}),
            ("LRRangeTest", {"lr_range_test_step_size": 0}),
            ("LRRangeTest", {"lr_range_test_min_lr": "small"}),
            ("LRRangeTest", {"cycle_min_lr": 0.1}),
        ],
    )
    def test_others_are_refused(self, plan_of, kind, params):
        scheduler = {"type": kind, "params": params}
        assert plan_of({**adam(), "scheduler": scheduler}).exit_code == 11


class TestOthers:
    @pytest.mark.proves("block.empty", "monitor.wandb-name")
    def test_what_moves_no_number_is_called_so_by_definition(self, plan_of, finding_of):
        plan = plan_of({"wandb": {"enabled": True, "project": "mine", "team": "ours"}, "aio": {}})
        assert plan.values["logger.wandb.project"] == "mine"
        assert plan.values["logger.wandb.entity"] == "ours"
        assert finding_of(plan, "aio").rule == "block.empty"

    def test_whatever_says_that_numbers_are_the_same_names_what_proves_it(self, plan_of):
        config = {
            **adam(torch_adam=True, weight_decay=0.1),
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "ignore_unused_parameters": True},
        }
        said = [f for f in plan_of(config).findings if f.verdict in ("exact", "emulated")]
        assert said
        assert all(f.proved_by for f in said)
        differs = plan_of({"optimizer": {"type": "Lion"}})
        assert not any(f.proved_by for f in differs.findings if f.verdict == "refused")

    def test_a_removed_key_is_translated_and_marked(self, plan_of, finding_of):
        plan = plan_of({"curriculum_learning": {"enabled": False, "max_difficulty": 8}})
        found = finding_of(plan, "curriculum_learning.max_difficulty")
        assert (found.verdict, found.engine_takes) == ("dead", False)
        assert "0.19.8 refuses the key" in found.why

    @pytest.mark.parametrize(
        "config",
        [
            {"tensor_parallel": {"autotp_size": 2}},
            {"sequence_parallel_size": 2},
            {"comet": {"enabled": True}},
            {"autotuning": {"enabled": True}},
            {"elasticity": {"enabled": True}},
            {"compression_training": {"weight_quantization": {"a": 1}}},
        ],
    )
    def test_what_waits_for_another_release_is_refused_by_name(self, plan_of, config):
        plan = plan_of(config)
        assert plan.exit_code == 11
        assert "not in this release" in str(
            [f.why for f in plan.findings if f.verdict == "refused"]
        )

    def test_a_key_to_an_account_never_stands_in_a_report(self, plan_of):
        plan = plan_of({"comet": {"enabled": True, "api_key": "secret-one"}})
        assert "secret-one" not in repr(plan)

    def test_a_value_that_the_engine_stumbles_over_later_is_refused(self, plan_of, finding_of):
        plan = plan_of({"steps_per_print": "LOG_INTERVAL"})
        assert finding_of(plan, "steps_per_print").rule == "mismatch"

    def test_every_verdict_is_counted(self, plan_of):
        plan = plan_of({**adam(), "fp16": {"enabled": True}})
        assert sum(plan.counts.values()) == len(plan.findings)
        assert tuple(plan.counts) == VERDICTS


class TestAuto:
    FILE: ClassVar[dict[str, Any]] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        **adam(betas="auto", weight_decay="auto"),
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"},
        },
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }

    def test_raw_names_every_key_that_nothing_fills(self):
        with pytest.raises(ConfigError, match='is "auto"') as caught:
            translate(self.FILE)
        assert len(caught.value.facts["problems"]) == 9
        assert "--context hf-trainer" in str(caught.value)

    def test_hugging_face_fills_what_it_fills(self):
        settings = {"learning_rate": "3e-4", "bf16": "true", "per_device_train_batch_size": "2"}
        options = Options(context="hf-trainer", world_size=4, settings=settings)
        plan = translate(self.FILE, options)
        assert plan.values["data.batch_size"] == 8
        assert plan.values["optimizer.lr"] == 3e-4
        assert plan.values["schedule.total_steps"] is None  # the run's own
        assert plan.choices["precision"] == "bf16_true"

    def test_the_engine_is_given_what_is_filled_and_its_own_defaults_for_the_rest(self):
        settings = {"bf16": "true", "per_device_train_batch_size": "2"}
        options = Options(context="hf-trainer", world_size=4, settings=settings)
        with pytest.raises(ConfigError, match="--set max_steps=STEPS"):
            fill(self.FILE, options)
        config = fill(self.FILE, replace(options, settings={**settings, "max_steps": "7"}))
        assert config["zero_optimization"] == {"stage": 3}
        assert config["scheduler"]["params"]["total_num_steps"] == 7

    def test_a_dotted_key_fills_it_too(self):
        config = {"train_micro_batch_size_per_gpu": "auto"}
        settings = {"train_micro_batch_size_per_gpu": "6"}
        assert translate(config, Options(settings=settings)).values["data.micro_batch_size"] == 6

    @pytest.mark.parametrize(
        ("config", "says"),
        [({"train_batch_size": 8}, "leaves it out"), ({"gradient_clipping": 2.0}, "says 2.0")],
    )
    def test_a_key_that_is_no_auto_is_not_filled_in_silence(self, config, says):
        with pytest.raises(ConfigError, match=f"--set gradient_clipping .* the file {says}; write"):
            translate(config, Options(settings={"gradient_clipping": "1.0"}))

    def test_an_unknown_name_is_refused_with_the_nearest(self):
        with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
            translate(self.FILE, Options(settings={"learning_rat": "1"}))
