"""Rules for what a script does, and what each says of one job."""

from __future__ import annotations

from horovod_job import (
    AMP,
    BY_HAND,
    DECAY,
    LATER,
    SCRIPT,
    SLICED,
    Case,
    changed,
    environment,
    made,
    scheduled,
    scheduled_by_transformers,
    script,
    stepped,
    wrapped,
    wrapper,
)

SCRIPT_CASES: list[Case] = [
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
    (
        "unused.by-hand",
        script(BY_HAND),
        "unused parameters",
        "exact",
        {"strategy.find_unused_parameters": True},
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
    (
        "data.unread",
        script(changed(("in train_loader", "in batches()"))),
        "batch size",
        "yours",
        {},
    ),
    (
        "data.batch",
        script(changed(("batch_size=args.batch_size", "batch_size=None"))),
        "DataLoader.batch_size",
        "yours",
        {},
    ),
    (
        "optimizer.other-adam",
        script(made("transformers.AdamW(model.parameters(), lr=0.1, correct_bias=True)")),
        "transformers.AdamW",
        "approximate",
        {"optimizer.eps": 1e-6},
    ),
    (
        "schedule.unread",
        script(stepped("", "build(args).lr_scheduler.step()")),
        "build(args).lr_scheduler.step",
        "refused",
        {},
    ),
    (
        "step.beside",
        script(stepped("", "kfac.KFAC(model).step()")),
        "kfac.KFAC(model).step",
        "refused",
        {},
    ),
    (
        "gradient.changed",
        script(stepped("", "model.weight.grad.mul_(2)")),
        "model.weight.grad",
        "refused",
        {},
    ),
    (
        "script.exec",
        script(changed(("hvd.init()", "exec(open('configurator.py').read())\nhvd.init()"))),
        "exec(open('configurator.py').read())",
        "refused",
        {},
    ),
    (
        "optimizer.by-hand",
        script(stepped("", "optimizer.param_groups[0]['weight_decay'] = 0.1")),
        "param_group['weight_decay']",
        "refused",
        {},
    ),
    (
        "schedule.type",
        scheduled_by_transformers(),
        "scheduler",
        "approximate",
        {"schedule": "linear"},
    ),
    (
        "schedule.option",
        scheduled_by_transformers(),
        "scheduler.num_warmup_steps",
        "approximate",
        {"schedule.warmup_steps": 10},
    ),
    (
        "schedule.option",
        scheduled_by_transformers(),
        "scheduler.num_training_steps",
        "dead",
        {},
    ),
    ("schedule.interval", scheduled_by_transformers(), "scheduler.step", "exact", {}),
    ("length", script(SCRIPT), "epochs", "exact", {"trainer.max_epochs": 3}),
    (
        "length.sooner",
        script(
            changed(("    train(epoch)\n", "    train(epoch)\n    if done():\n        break\n"))
        ),
        "epochs",
        "approximate",
        {"trainer.max_epochs": 3},
    ),
    (
        "length.untold",
        script(changed(("range(1, 4)", "range(rounds_of(train_dataset))"))),
        "epochs",
        "yours",
        {},
    ),
    (
        "precision.cast",
        script(changed(("hvd.init()", "hvd.init()\nmodel = Net().double()"))),
        "Net().double()",
        "yours",
        {},
    ),
    (
        "data.batch",
        script(changed(("batch_size=args.batch_size", "batch_size=args.batch_size / 2"))),
        "DataLoader.batch_size",
        "refused",
        {},
    ),
    (
        "script.uncalled",
        script(changed(("hvd.init()", "def other():\n    exec(text)\n\n\nhvd.init()"))),
        "exec(text)",
        "dead",
        {},
    ),
]
