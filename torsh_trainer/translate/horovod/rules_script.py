"""What a script does: the optimizer and its wrapper, the start, the batch, the rate."""

from __future__ import annotations

from typing import Any

from torsh_trainer.translate.horovod.job import HorovodJob, Leaf, PerProcess
from torsh_trainer.translate.horovod.rules import constant_rule, fixed_rule, rule, switch_rule
from torsh_trainer.translate.outcomes import Outcome, approximate, dead, exact, faster, refuse
from torsh_trainer.translate.python.torch_calls import (
    CHANGES_GRADIENT,
    CHANGES_OPTION,
    OTHER_ADAM,
    PLAIN_SCHEDULES,
    RUNS_TEXT,
    STEPS_BESIDE,
)

_PLUGIN = "the plugin torsh-trainer-horovod trains so: strategy=horovod"

# -- the wrapper ---------------------------------------------------------------------------------


@rule("engine", "Every process holds the whole model: DistributedDataParallel.")
def _engine(job: HorovodJob, leaf: Leaf) -> Outcome:
    why = "every process holds the whole model, and gradients are reduced while backward goes on"
    return Outcome("exact", why, choices={"strategy": "ddp"})


fixed_rule("wrapper.names", "exact", "parameters have the names of the model")


@rule("op", "The mean or the sum of the gradients.")
def _op(job: HorovodJob, leaf: Leaf) -> Outcome:
    if leaf.value in (None, "average"):
        return exact("gradients are averaged over processes")
    if leaf.value == "sum":
        return exact("gradients are added up over processes", strategy__op="sum")
    if leaf.value == "adasum":
        return refuse(f"not in this release: Adasum without Horovod; {_PLUGIN} strategy.op=adasum")
    return refuse(f"op={leaf.value}: Horovod takes it, and documents average, sum and adasum alone")


@rule("compression", "Gradients travel as they are, or in fp16.")
def _compression(job: HorovodJob, leaf: Leaf) -> Outcome:
    if leaf.value in (None, "none"):
        return exact("gradients travel as they are")
    if job.world_size == 1:
        return exact("one process: nothing travels, and Horovod rounds nothing")
    if job.reproduces:
        return Outcome(
            "emulated",
            "rounded to fp16, added up so, and divided after that; communication after the backward"
            " is the way in which ddp does so",
            values={"precision.reduce": "fp16", "strategy.overlap": False},
        )
    return approximate(
        "divided by the number of processes before the sum, not after it: fewer overflows, and "
        "other roundings of small numbers",
        precision__reduce="fp16",
    )


@rule("passes", "Horovod adds up so many backward passes, and divides by none of them.")
def _passes(job: HorovodJob, leaf: Leaf) -> Outcome:
    passes = leaf.value or 1
    divided = job.get("loss.divided_by", 1)
    if passes == 1 and isinstance(divided, str):
        return exact("one backward pass a step", trainer__accumulate=1)
    if not isinstance(divided, int | float) or divided <= 0:
        return refuse(f"the loss is divided by {divided}")
    scale = passes / divided
    if scale != int(scale) or passes % max(1, int(scale)):
        return refuse(
            f"{passes} passes are added up and the loss is divided by {divided:g}: put what is "
            "left of the factor into the task's loss"
        )
    values: dict[str, Any] = {"trainer.accumulate": passes}
    if scale != 1:
        values["strategy.backward_passes_per_step"] = int(scale)
    if passes == 1:
        return exact("one backward pass a step", trainer__accumulate=1)
    why = "the sum of its passes" if scale != 1 else "the script divides their sum: a mean"
    return Outcome("exact", why, values=values)


fixed_rule(
    "passes.changed",
    "refused",
    "not in this release: another number of passes while the job runs",
)


@rule("loss.division", "What the script divides a loss by, beside Horovod's sum of passes.")
def _division(job: HorovodJob, leaf: Leaf) -> Outcome:
    passes = job.get("backward_passes_per_step", 1)
    if isinstance(leaf.value, str):
        return Outcome("yours", "no mean over passes: a part of your loss, which your task keeps")
    if passes == 1:
        return refuse("it is no mean over passes: put the division into the task's loss")
    return exact("together with the number of passes")


@rule("predivide", "Dividing by a factor before the sum, and by the rest after it.")
def _predivide(job: HorovodJob, leaf: Leaf) -> Outcome:
    factor = leaf.value if leaf.value is not None else 1.0
    if factor == 1.0:
        return exact("gradients are divided after the sum")
    if job.is_given("groups") or job.get("num_groups"):
        return dead("Horovod reduces groups without it")
    if job.get("compression") == "fp16":
        return approximate("the mean is the same; fp16 rounds, and overflows, at another place")
    power = float(factor).hex().startswith("0x1.0000000000000p")
    if power:
        return exact("a power of two moves no digit: the mean is the same")
    return approximate("the mean is the same, and rounded at another place")


fixed_rule(
    "groups", "performance-only", "buckets are made by size; groups change no sum of two ranks"
)
switch_rule(
    "sparse",
    "Sparse gradients of embeddings.",
    on=exact("the same sums; it is for embeddings with sparse=True alone"),
    off=exact("sparse gradients are reduced as such"),
)


@rule("process-sets", "Reducing over some of the processes.")
def _sets(job: HorovodJob, leaf: Leaf) -> Outcome:
    if leaf.name == "process_set" and str(leaf.value).rpartition(".")[2] in (
        "None",
        "global_process_set",
    ):
        return exact("all processes")
    return refuse("not in this release: gradients that are reduced over some of the processes")


fixed_rule(
    "process-sets.permission",
    "dead",
    "a permission; what a script does with process sets is refused where it does it",
)

# -- the start -----------------------------------------------------------------------------------

fixed_rule("script.init", "exact", "every process finds its place by itself")


@rule("unused.by-hand", "Parameters without a gradient, where the script reduces gradients itself.")
def _judge_unused_by_hand(job: HorovodJob, leaf: Leaf) -> Outcome:
    why = "a parameter that no loss reaches has no gradient to reduce, and is not stepped"
    return exact(why, strategy__find_unused_parameters=True)


@rule("script.run", "A script that starts its processes itself.")
def _run(job: HorovodJob, leaf: Leaf) -> Outcome:
    if leaf.value == job.world_size:
        return exact("the launcher starts as many")
    if job.world_size is not None:
        return approximate(f"it starts {leaf.value} processes; this plan is for {job.world_size}")
    return approximate("how many processes it starts is not known: state --world-size")


fixed_rule(
    "script.communication",
    "approximate",
    "the script's own communication: the trainer averages metrics and losses by itself; what else "
    "it is for belongs into a task",
)
fixed_rule(
    "script.join",
    "approximate",
    "processes that run out of batches wait; here an epoch is cut into steps that all have",
)
constant_rule(
    "script.sync-batchnorm",
    "Batch normalisation over the samples of all processes.",
    approximate(
        "in place of every BatchNorm, over the samples of all processes; Horovod's is for GPUs "
        "alone, and nothing proves yet that the two are the same",
        trainer__sync_batchnorm=True,
    ),
)


@rule("start.parameters", "Every process starts with rank 0's parameters.")
def _parameters(job: HorovodJob, leaf: Leaf) -> Outcome:
    if leaf.value is None:
        return approximate(
            "missing: processes start with their own parameters, the same only where all draw them "
            "from one seed; here all have rank 0's"
        )
    return exact("every process starts with rank 0's parameters and buffers")


_MOVES_THE_START = {"LinearLR", "ConstantLR", "OneCycleLR", "CyclicLR", "LambdaLR"}
_DEFAULT_LR = {"Adadelta": 1.0, "Adafactor": 1e-2, "Adagrad": 1e-2, "RMSprop": 1e-2}
_DEFAULT_LR |= {"ASGD": 1e-2, "Rprop": 1e-2, "Adamax": 2e-3, "NAdam": 2e-3}


@rule("start.optimizer", "A fresh optimizer gets its state by a step with gradients of zero.")
def _optimizer_state(job: HorovodJob, leaf: Leaf) -> Outcome:
    kind = job.get("optimizer")
    decays = job.get("optimizer.weight_decay", 0.01 if kind == "AdamW" else 0) or kind == "ASGD"
    lost = str(leaf.value).startswith("before")
    if not decays and (lost or kind == "SGD") and not job.get("optimizer.dampening"):
        return exact("its step with gradients of zero moves nothing: no weight decay")
    counted = "its momentum begins with it" if kind == "SGD" else f"{kind} counts it"
    said = ["weights decay by it"] if decays else []
    said.append("wrapping loses the state" if lost else counted)
    what = "Horovod takes a step with gradients of zero to make the state: " + ", and ".join(said)
    if not job.reproduces:
        return approximate(f"{what}; left out")
    lr = job.get("optimizer.lr", _DEFAULT_LR.get(kind, 1e-3))
    if isinstance(lr, PerProcess):
        return approximate(f"{what}; its rate is {lr}: state --world-size; left out")
    values: dict[str, Any] = {"trainer.phantom_lr": float(lr)}
    if lost:
        values["trainer.phantom_state"] = False
    if job.get("scheduler") in _MOVES_THE_START and str(leaf.value).endswith("scheduled"):
        why = f"{what}; at a rate that {job.get('scheduler')} has set before, here the optimizer's"
        return Outcome("approximate", why, values=values)
    return Outcome("emulated", what, values=values)


constant_rule(
    "start.buffers",
    "Every process keeps its own buffers, such as those of BatchNorm.",
    exact("nobody takes rank 0's while training", strategy__broadcast_buffers=False),
)


@rule("start.unused", "Parameters that a step does not reach get gradients of zero.")
def _judge_unused(job: HorovodJob, leaf: Leaf) -> Outcome:
    if job.world_size == 1:
        why = "one process: Horovod leaves them as they are"
        return exact(why, strategy__find_unused_parameters=True)
    return Outcome(
        "emulated",
        "they decay, and their momentum goes on; false is faster where every step reaches all",
        values={"strategy.find_unused_parameters": True, "strategy.zero_unused": True},
    )


# -- the optimizer -------------------------------------------------------------------------------

TORCH = {
    "Adadelta": "adadelta",
    "Adafactor": "adafactor",
    "Adagrad": "adagrad",
    "Adam": "adam",
    "AdamW": "adamw",
    "Adamax": "adamax",
    "ASGD": "asgd",
    "NAdam": "nadam",
    "RAdam": "radam",
    "RMSprop": "rmsprop",
    "Rprop": "rprop",
    "SGD": "sgd",
}
OPTIONS = {
    "ASGD": {"lambd", "alpha", "t0", "weight_decay"},
    "Adadelta": {"rho", "eps", "weight_decay"},
    "Adafactor": {"beta2_decay", "eps", "d", "weight_decay"},
    "Adagrad": {"lr_decay", "weight_decay", "initial_accumulator_value", "eps"},
    "Adam": {"betas", "eps", "weight_decay", "amsgrad", "decoupled_weight_decay"},
    "AdamW": {"betas", "eps", "weight_decay", "amsgrad"},
    "Adamax": {"betas", "eps", "weight_decay"},
    "NAdam": {"betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay"},
    "RAdam": {"betas", "eps", "weight_decay", "decoupled_weight_decay"},
    "RMSprop": {"alpha", "eps", "weight_decay", "momentum", "centered"},
    "Rprop": {"etas", "step_sizes"},
    "SGD": {"momentum", "dampening", "weight_decay", "nesterov"},
}
_ANY = {"maximize", "foreach", "fused"}


@rule("optimizer.type", "The optimizer of torch, as it is.")
def _type(job: HorovodJob, leaf: Leaf) -> Outcome:
    if leaf.value not in TORCH:
        return refuse(f"torch.optim.{leaf.value}: not in this release, or no optimizer of torch")
    values: dict[str, Any] = {"optimizer.no_decay": False}
    if job.reproduces and not job.is_given("optimizer.fused"):
        values["optimizer.fused"] = False  # torch's fused kernels round otherwise
    return Outcome(
        "exact", "the same optimizer", choices={"optimizer": TORCH[leaf.value]}, values=values
    )


fixed_rule("optimizer.other-adam", "approximate", OTHER_ADAM)


@rule("optimizer.lr", "The learning rate, with whatever the script multiplies it by.")
def _lr(job: HorovodJob, leaf: Leaf) -> Outcome:
    if isinstance(leaf.value, PerProcess):
        return Outcome(
            "exact",
            "so much for each process",
            values={"optimizer.lr": leaf.value.each, "optimizer.lr_scaling": "linear"},
        )
    return exact("the script's own factors are in it", optimizer__lr=leaf.value)


@rule("optimizer.option", "Options of the optimizer, as they are.")
def _option(job: HorovodJob, leaf: Leaf) -> Outcome:
    kind, option = job.get("optimizer"), leaf.name.partition(".")[2]
    if option == "initial_accumulator_value" and kind == "Adagrad":
        why = "wrapping makes another Adagrad, whose sums begin at 0"
        if job.reproduces or not leaf.value:
            return dead(why)
        return approximate(why, optimizer__initial_accumulator_value=leaf.value)
    if option in OPTIONS.get(kind, set()) | _ANY:
        return exact("the same option", **{f"optimizer__{option}": leaf.value})
    return refuse(f"{kind} takes no {option} here: remove it")


fixed_rule(
    "optimizer.groups",
    "refused",
    "groups of parameters that the script makes: name them in optimizer.groups, by pattern",
)
fixed_rule(
    "optimizer.several",
    "refused",
    "a second optimizer: a task with build_optimizers trains with several",
)

# -- the batch -----------------------------------------------------------------------------------


@rule("data.batch", "Samples of one forward of one process.")
def _batch(job: HorovodJob, leaf: Leaf) -> Outcome:
    if leaf.value is None:
        return Outcome("yours", "the data set makes its batches by itself, and so does yours")
    if isinstance(leaf.value, float):
        return refuse("torch refuses a batch that is no whole number: write it with // or int()")
    slices, passes = job.get("slices"), job.get("backward_passes_per_step", 1)
    if slices is None:
        return exact("samples of one forward of one process", data__micro_batch_size=leaf.value)
    if slices * passes != leaf.value:
        return refuse(f"the loop takes {leaf.value} samples apart by {slices}, in {passes} passes")
    return exact("samples of a step of one process, which the loop takes apart")


fixed_rule(
    "data.unread",
    "yours",
    "no DataLoader is read around the backward pass: state data.micro_batch_size beside your data",
)


@rule("data.slices", "The loop takes a batch apart, one backward pass for each slice.")
def _slices(job: HorovodJob, leaf: Leaf) -> Outcome:
    return exact("samples of one forward of one process", data__micro_batch_size=leaf.value)


@rule("data.sampler", "Each process has its part of the samples.")
def _sampler(job: HorovodJob, leaf: Leaf) -> Outcome:
    if leaf.value:
        return approximate(
            "a new order every epoch, drawn by another rule: other samples stand beside each other",
            data__shuffle=True,
        )
    if job.world_size == 1:
        return exact("in order", data__shuffle=False)
    return approximate(
        "in order, and a step has the same samples, but other ones stand beside each other in a "
        "process, which batch normalisation sees; none is repeated to make the shares equal",
        data__shuffle=False,
    )


fixed_rule(
    "data.own-sampler",
    "approximate",
    "no DistributedSampler: each process reads all samples; here an epoch reads each once",
)


@rule("data.drop-last", "The ragged tail of an epoch.")
def _drop_last(job: HorovodJob, leaf: Leaf) -> Outcome:
    if job.world_size == 1:
        return exact("the same", data__drop_last=leaf.value)
    return approximate(
        "of the batch of all processes; a DistributedSampler repeats samples before, where they do "
        "not divide among processes",
        data__drop_last=leaf.value,
    )


@rule("data.workers", "Processes that load.")
def _workers(job: HorovodJob, leaf: Leaf) -> Outcome:
    return faster("the same number", data__num_workers=leaf.value)


@rule("data.pinned", "Page-locked batches.")
def _judge_pinned(job: HorovodJob, leaf: Leaf) -> Outcome:
    return faster("the same", data__pin_memory=leaf.value)


# -- the step ------------------------------------------------------------------------------------


@rule("clip", "Clipping between synchronize() and step(): of the reduced gradient.")
def _clip(job: HorovodJob, leaf: Leaf) -> Outcome:
    if leaf.name == "clip_grad_value":
        return exact("every element of the reduced gradient", trainer__max_grad_value=leaf.value)
    if job.get("norm_type", 2) != 2:
        return refuse("not in this release: clipping by another norm than the L2 norm")
    return exact(
        "the same formula, of the reduced gradient: min(1, clip / (norm + 1e-6))",
        trainer__max_grad_norm=float(leaf.value),
    )


constant_rule(
    "clip.norm-type",
    "Which norm clipping takes.",
    refuse("not in this release: clipping by another norm than the L2 norm"),
)
fixed_rule(
    "clip.early",
    "refused",
    "clips while gradients travel, before optimizer.synchronize(): some processes clip their own "
    "gradient, some what has arrived; trainer.max_grad_norm clips what is reduced",
)


@rule("precision.autocast", "Forward in half precision, by autocast.")
def _autocast(job: HorovodJob, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return dead("off")
    low = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(job.get("autocast.dtype"))
    if low is None:
        return refuse(f"autocast to {job.get('autocast.dtype')}")
    values: dict[str, Any] = {}
    if low == "fp16" and not job.get("scaler"):
        values["precision.loss_scaling.scale"] = 1.0
    return Outcome(
        "approximate",
        "forward and loss are under autocast; the script may leave some of it out",
        choices={"precision": f"{low}_mixed"},
        values=values,
    )


@rule("precision.dtype", "What autocast computes in.")
def _dtype(job: HorovodJob, leaf: Leaf) -> Outcome:
    return exact("together with autocast") if job.get("autocast") else dead("autocast is off")


@rule("precision.scaler", "A loss that is scaled, against underflow in fp16.")
def _scaler(job: HorovodJob, leaf: Leaf) -> Outcome:
    if not leaf.value:
        return dead("off")
    if job.get("autocast") and job.get("autocast.dtype") in ("float16", "half"):
        return approximate("the loss is scaled with torch's defaults: start 65536, window 2000")
    return approximate("a loss that is not computed in fp16 is not scaled here")


# -- the rate ------------------------------------------------------------------------------------

SCHEDULERS = {
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "PolynomialLR",
    "StepLR",
}


_END = "num_training_steps"


@rule("schedule.type", "Schedulers of torch, as they are.")
def _schedule(job: HorovodJob, leaf: Leaf) -> Outcome:
    if job.get("interval") == "never":
        return dead("the script never steps it")
    if leaf.value in PLAIN_SCHEDULES:
        return Outcome(
            "approximate",
            "the same curve, which ends with the run: state trainer.max_steps",
            choices={"schedule": PLAIN_SCHEDULES[leaf.value]},
        )
    if leaf.value not in SCHEDULERS:
        return refuse(f"{leaf.value}: its rate is a function of the script; write it as a schedule")
    return Outcome(
        "exact",
        "torch's own",
        choices={"schedule": "torch"},
        values={"schedule.scheduler": leaf.value},
    )


@rule("schedule.option", "Options of the scheduler, as they are.")
def _schedule_option(job: HorovodJob, leaf: Leaf) -> Outcome:
    if job.get("interval") == "never":
        return dead("the script never steps it")
    option = leaf.name.partition(".")[2]
    if job.get("scheduler") in PLAIN_SCHEDULES:
        if option == "num_warmup_steps":
            return approximate("updates of the rise from 0", schedule__warmup_steps=leaf.value)
        return dead("the curve ends with the run") if option == _END else refuse("state schedule=")
    if job.get("scheduler") not in SCHEDULERS:
        return refuse("its rate is a function of the script")
    if option == "last_epoch" and leaf.value != -1:
        return refuse("a schedule that begins elsewhere: a checkpoint resumes it")
    if option == "last_epoch":
        return dead("begins at the first update")
    return exact("the same option", **{f"schedule__options__{option}": leaf.value})


@rule("schedule.interval", "Whether the scheduler steps with each update or once an epoch.")
def _interval(job: HorovodJob, leaf: Leaf) -> Outcome:
    if job.get("scheduler") in PLAIN_SCHEDULES and leaf.value == "epoch":
        return refuse("the script steps once an epoch a curve that is made for updates")
    if job.get("scheduler") in PLAIN_SCHEDULES and leaf.value == "step":
        return exact("with each update, as schedules here do")
    if leaf.value == "never":
        return dead("nothing steps it here")
    if job.get("scheduler") not in SCHEDULERS:
        return dead("it belongs to the scheduler above, which has no translation")
    if leaf.value not in ("step", "epoch"):
        return Outcome(
            "yours",
            f"it steps {leaf.value}, which is not read: say schedule.interval=step or epoch",
        )
    return exact("as often as in the script", schedule__interval=leaf.value)


fixed_rule(
    "schedule.unread",
    "refused",
    "it is made where reading does not get to: write what it does as a schedule",
)
fixed_rule("schedule.several", "refused", "a second scheduler: write what both do as one schedule")
fixed_rule(
    "schedule.by-hand",
    "refused",
    "the script sets the rate itself: write what it does as a schedule, or as one of torch",
)


@rule("length", "Rounds over the data, or steps, as the script's loops have them.")
def _length(job: HorovodJob, leaf: Leaf) -> Outcome:
    return exact("as many as its loops have", **{f"trainer__max_{leaf.key}": leaf.value})


@rule("length.sooner", "Rounds of a loop that a condition may end.")
def _sooner(job: HorovodJob, leaf: Leaf) -> Outcome:
    why = "as many as its loops have, unless a condition of the script ends them sooner"
    return approximate(why, **{f"trainer__max_{leaf.key}": leaf.value})


fixed_rule(
    "length.untold",
    "yours",
    "reading does not tell how many rounds: trainer.max_epochs or trainer.max_steps says it",
)
fixed_rule(
    "precision.cast",
    "yours",
    "your task casts its model as the script does, and all that is held for a parameter with it; "
    "precision=fp32 leaves it so",
)
fixed_rule("step.beside", "refused", STEPS_BESIDE)
fixed_rule("script.uncalled", "dead", "nothing that was read calls the function that does it")
fixed_rule("gradient.changed", "refused", CHANGES_GRADIENT)
fixed_rule("script.exec", "refused", RUNS_TEXT)
fixed_rule("optimizer.by-hand", "refused", CHANGES_OPTION)
