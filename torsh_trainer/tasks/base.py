"""What the user brings: a model, data, a loss and metrics.

A task knows nothing of processes, devices or engines. It describes one sample batch; the engine
cuts, moves, weights and reduces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.optimizers import OptimizerSpec


class Mean(NamedTuple):
    """A metric on its way to being a mean: the sum of values and the weight that it is over.

    ``total`` stays on the device (a 0-dim tensor, or a number); nobody reads it until all batches
    and all ranks are summed.
    """

    total: Tensor | float
    weight: Tensor | float


def why_no_backward(loss: Any) -> ConfigError | None:
    """Why a value of ``task.loss`` has no backward; None where it could have one."""
    if not isinstance(loss, Tensor):
        return ConfigError(
            f"task.loss returned a {type(loss).__name__}, and a number has no gradient",
            fix="return the tensor itself, without .item() or float()",
        )
    if loss.dim() != 0:
        return ConfigError(
            f"task.loss returned a tensor of shape {tuple(loss.shape)}, not a scalar",
            fix="return the mean over the batch",
        )
    if not loss.requires_grad:
        return ConfigError(
            "task.loss returned a value without a gradient",
            fix="compute it from the model's outputs, without detach(), item() or no_grad",
        )
    return None


def sum_of(name: str, means: Sequence[Mean]) -> Mean:
    """The sum of a metric's parts, unread; one of weight 0 adds nothing, whatever its total.

    Raises:
        ConfigError: a part is no ``Mean`` of two numbers.
    """
    for mean in means:
        if not isinstance(mean, Mean):
            raise ConfigError(
                f"task.evaluate gave a {type(mean).__name__} for {name!r}",
                fix="give Mean(sum of the values, their weight), so that batches and ranks add up",
            )
    totals, weights = (
        [_number(name, value) for value in part] for part in zip(*means, strict=True)
    )
    if not any(isinstance(value, Tensor) for value in (*totals, *weights)):
        counted = [(t, w) for t, w in zip(totals, weights, strict=True) if w]
        return Mean(float(sum(t for t, _ in counted)), float(sum(w for _, w in counted)))
    total, weight = _column(totals), _column(weights)
    counts = (weight != 0).to(total.device)
    return Mean(torch.where(counts, total, 0.0).sum(), weight.sum())


def _number(name: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ConfigError(
            f"task.evaluate gave a tensor of shape {tuple(value.shape)} in the Mean of {name!r}",
            fix="give one number a metric: sum it, or name a metric for each",
        )
    return value.detach().reshape(())


def _column(values: list[Any]) -> Tensor:
    """Numbers and 0-dim tensors as one tensor, float64, where the first tensor is."""
    device = next((v.device for v in values if isinstance(v, Tensor)), None)
    if all(isinstance(value, Tensor) for value in values):
        return torch.stack(values).double()
    return torch.stack([torch.as_tensor(v, dtype=torch.float64, device=device) for v in values])


def metrics_of(answer: Any) -> Mapping[str, Mean]:
    """What ``task.evaluate`` gave for a batch.

    Raises:
        ConfigError: it is no mapping.
    """
    if not isinstance(answer, Mapping):
        raise ConfigError(
            f"task.evaluate gave a {type(answer).__name__}, not a mapping of metrics",
            fix='return {"loss": Mean(sum of the losses, their weight)}',
        )
    return answer


class DataSource:
    """The datasets of a task, and how samples become a batch.

    Each dataset is a map-style ``torch.utils.data.Dataset`` (``__len__``, ``__getitem__``) or an
    ``IterableDataset``. One that defines ``__getitems__(indices)`` is fetched by the batch. They
    are attributes of the class, set in ``__init__``, or properties.
    """

    train: Any = None
    """The dataset of a fit; None where there is none, as for the others."""

    eval: Any = None
    """The dataset of evaluations, during a fit (``trainer.eval_every``) and by itself."""

    test: Any = None
    """The dataset of the stage test."""

    predict: Any = None
    """The dataset of the stage predict; its predictions are in the order of its samples."""

    collate: Callable[[list[Any]], Any] | None = None
    """How a list of samples (micro-batch size, or the evaluation's) becomes a batch.

    None is torch's ``default_collate``, which stacks tensors of one shape and makes tensors of
    numbers. Samples of unequal length need one that pads, a function or a method:

        def collate(self, samples):
            rows, labels = zip(*samples)
            return pad_sequence(rows, batch_first=True), torch.tensor(labels)
    """

    def sample_weights(self) -> Tensor | None:
        """Weights of the training samples, where ``data.weighted`` draws by them.

        Shape (len(train),), none negative, of any scale: a sample of weight 2 is drawn twice as
        often as one of weight 1, with replacement. None: there are none.
        """
        return None


class Task:
    """A model, its data, its loss and its metrics.

    The least that a subclass gives: ``build_model``, ``data`` and ``loss``. A batch is whatever
    the data's ``collate`` returns: a tensor, or tuples, lists and dicts of tensors.
    """

    data: DataSource
    """Datasets and how samples become a batch; set in ``__init__``, or a property."""

    optimizer: OptimizerSpec = OptimizerSpec()
    """What ``build_optimizers`` builds unless it is overridden."""

    sample_weight: float | None = 1.0
    """The weight of every sample, when it is the same for all: then the global weight of a batch
    is known from the sampler, without communication. None: ask ``weight(batch)`` for each."""

    unit = "samples"
    """What throughput counts: samples, tokens, ..."""

    units_per_sample: float = 1.0
    """How many units one sample holds (tokens of a window)."""

    def build_model(self) -> nn.Module:
        """A new model on the default device, with its initial weights.

        Called once a process, under a generator seeded by ``trainer.seed``, so that all processes
        begin alike.
        """
        raise NotImplementedError

    def build_optimizers(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> Mapping[str, Optimizer]:
        """Optimizers by name over the trainable parameters, as the engine holds them.

        Under a sharding engine the parameters are shards (DTensors of the same names and global
        shapes). Most tasks have one optimizer, called ``main``.
        """
        return self.optimizer.build_all(named_parameters)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Model outputs for a batch, already on the device. Default: ``model(batch[0])``."""
        return model(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """The mean loss over ``weight(batch)``: a 0-dim tensor with a gradient.

        ``outputs`` are what ``forward`` gave, ``batch`` is on the device. No ``.item()``: a number
        has no gradient.
        """
        raise NotImplementedError

    def weight(self, batch: Any) -> float:
        """What ``loss`` is a mean over: samples by default, valid tokens for a language model.

        The gradient of a step is the mean over the global batch by these weights, however it is
        cut. Asked of the batch on the host, before it moves to the device; only used when
        ``sample_weight`` is None. A batch of weight 0 counts for nothing.
        """
        return float(samples_of(batch))

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Mean]:
        """Sums of metrics over a batch, by name. Default: the loss alone.

        Each is ``Mean(sum over the samples, their number)``, so that batches and ranks add up:
        ``{"accuracy": Mean((outputs.argmax(1) == batch[1]).sum(), len(batch[1]))}``. Called in eval
        mode, without gradients, on every batch of ``data.eval`` (and of ``data.test``).
        """
        loss = self.loss(self.forward(model, batch), batch)
        weight = self.weight(batch) if self.sample_weight is None else float(samples_of(batch))
        total = (loss.detach() if isinstance(loss, Tensor) else loss) * weight
        return {"loss": Mean(total, weight)}

    def summarise(self, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics from means over all batches and ranks, e.g. perplexity from loss.

        ``metrics`` are the means of what ``evaluate`` gave, by name; what is returned is reported,
        followed by schedules and early stopping, and written down. Called once an evaluation.
        """
        return metrics

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Predictions for a batch: a tensor (first dimension: samples) or a list of values.

        Called in eval mode, without gradients, on every batch of ``data.predict``; they are joined
        in the order of the samples in ``predictions.pt`` of the run directory.
        """
        return self.forward(model, batch)

    def running_averages(self, model: nn.Module) -> Mapping[str, float]:
        """Buffers, by name, that each training forward moves towards a value of its micro-batch.

        Each with its momentum: ``buffer = (1 - momentum) * buffer + momentum * value``, once in a
        forward, as BatchNorm's running statistics, which need not be named. Every engine then has
        them as one process would, however the batch is cut. Training must not read them: a rank
        knows its own micro-batches' until all meet, at an evaluation, a save or the end.
        """
        return {}

    def parallel_plan(self, mesh: Any) -> Mapping[str, Any]:
        """How the layers of the model are cut over ``mesh.tp`` processes: styles (``colwise``,
        ``colwise_gather``, ``rowwise``, ...) by patterns of module names, see docs/parallel.md.

        Asked where ``mesh.tp`` is above 1. Empty: that of ``strategy.plan``, or the model's own.
        """
        return {}

    def context_plan(self, mesh: Any) -> Mapping[str, int | None]:
        """Which arguments of the model's forward have tokens (``mesh.cp``): by name the dimension
        along which they lie, None for one that is given whole, see docs/parallel.md.

        Asked where ``mesh.cp`` is above 1. Empty: that of ``strategy.context_plan``, or the model's
        own, beside the usual names (``tokens``, ``input_ids``, ...).
        """
        return {}

    def flops_per_sample(self, model: nn.Module) -> float | None:
        """Floating-point operations of forward and backward for one sample, if it is known."""
        return None

    def notes(self, *, micro_batch_size: int) -> Mapping[str, str]:
        """Lines of a run's summary, by their word: choices of the task's own that a user may ask
        about. Asked once ``build_model`` was called."""
        return {}

    brings_program: ClassVar[bool] = False
    """Whether it trains in a program of its own: a ``training.program.ProgramTask``."""

    def state_dict(self) -> dict[str, Any]:
        """The task's own state for a checkpoint: tensors, numbers, strings; no code."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` gave."""


_SAMPLES: ContextVar[int | None] = ContextVar("samples", default=None)


@contextlib.contextmanager
def state_samples(samples: int) -> Iterator[None]:
    """Says that the batch at hand was made of so many samples, whatever its shape."""
    _SAMPLES.set(samples)
    try:
        yield
    finally:
        _SAMPLES.set(None)


def samples_of(batch: Any) -> int:
    """How many samples the batch at hand holds: as its loader says, else by its shape.

    Raises:
        ConfigError: nobody says, and there is no tensor in it.
    """
    samples = _SAMPLES.get()
    return batch_size_of(batch) if samples is None else samples


def batch_size_of(batch: Any) -> int:
    """How many samples a batch holds: the first dimension of its first tensor.

    Raises:
        ConfigError: there is no tensor in it.
    """
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list):
        for part in batch:
            try:
                return batch_size_of(part)
            except ConfigError:
                continue
    raise ConfigError(
        f"cannot tell how many samples a batch of type {type(batch).__name__} holds",
        fix="give the task a weight(batch) of its own, or a collate that returns tensors",
    )


def parameter_count(model: nn.Module) -> tuple[int, int]:
    """Parameters in all and those that train."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains)
