"""Causal language models and sequence classification of transformers, as tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from torsh_trainer.errors import ConfigError
from torsh_trainer.optim.optimizers import OptimizerSpec
from torsh_trainer.tasks.base import DataSource, Mean, Task
from torsh_trainer.tasks.huggingface.checks import check_causal, check_data, check_packing
from torsh_trainer.tasks.huggingface.flops import flops_per_token
from torsh_trainer.tasks.huggingface.hidden import sum_losses
from torsh_trainer.tasks.huggingface.models import HuggingFaceModel
from torsh_trainer.tasks.language_model import IGNORED, LanguageModel


class HuggingFaceTask(Task):
    """What both tasks share: a model with a head, held against the data, and its own files.

    ``model`` makes a ``HuggingFaceModel``, or a module that has the ``config`` and the outputs
    (``logits``) of transformers.
    """

    head: ClassVar[str]
    """The class of transformers that makes the model of a configuration."""

    model: Callable[[], Any]

    def build_model(self) -> nn.Module:
        made = self.model()
        if isinstance(made, HuggingFaceModel):
            made = made.build(self.head, **self._settings(made))
        if not isinstance(made, nn.Module) or not hasattr(made, "config"):
            raise ConfigError(
                f"{type(self).__name__} takes a model of transformers, not a {type(made).__name__}",
                fix="set model=hf, and model.pretrained or model.config",
            )
        check_data(made, self.data)
        self._config = config_json(made)
        self._tied = tied_names(made)
        config: Any = made.config
        config.use_cache = False  # it is for generating
        return made

    def _settings(self, model: HuggingFaceModel) -> dict[str, Any]:
        """Values of the configuration that follow from the data."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What belongs beside the weights in a folder that transformers opens."""
        if not hasattr(self, "_config"):
            return {}
        tokenizer = getattr(self.data, "tokenizer_files", dict)
        files = {"config.json": self._config, **tokenizer()}
        return {"export": {"files": files, "tied": self._tied}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass  # a run makes it anew from its model and its data


def config_json(model: nn.Module) -> str:
    """The text of a ``config.json``; of which dtype weights are, their file says."""
    config: Any = model.config
    values = json.loads(config.to_json_string())
    values = {name: value for name, value in values.items() if name not in ("dtype", "torch_dtype")}
    return json.dumps({**values, "architectures": [type(model).__name__]}, indent=2) + "\n"


def tied_names(model: nn.Module) -> list[str]:
    """Names of parameters that are others again, which transformers ties by itself."""
    named = dict(model.named_parameters())
    return [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in named]


class CausalLM(HuggingFaceTask, LanguageModel):
    """The next token by a causal language model of transformers: see ``LanguageModel``.

    Batches are those of ``LanguageModel``, or dicts as transformers' own collators make them:
    ``input_ids`` and ``labels`` (batch, T), where the label of a token is the token itself and
    -100 does not count. ``attention_mask`` and ``position_ids`` go to the model where they are.
    """

    head = "AutoModelForCausalLM"

    def _settings(self, model: HuggingFaceModel) -> dict[str, Any]:
        """Of random weights, the tokens that stand for an end are those of the tokenizer."""
        return {} if model.pretrained is not None else getattr(self.data, "special_tokens", {})

    def build_model(self) -> nn.Module:
        model = super().build_model()
        check_causal(model)
        if getattr(self.data, "packing", False):
            check_packing(model)
        if self.chunked_loss:
            sum_losses(model)
        return self._ask_model(model)

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return super().forward(model, _with_targets(batch))

    def _call(self, model: nn.Module, batch: Any, **more: Tensor) -> Tensor:
        if isinstance(batch, Tensor):
            given = {"input_ids": batch[:, :-1].long()}
        else:
            names = [name for name in ("attention_mask", "position_ids") if name in batch]
            given = {"input_ids": batch["tokens"].long(), **{name: batch[name] for name in names}}
        outputs = model(**given, **more)
        return outputs if more else outputs.logits

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return super().loss(outputs, _with_targets(batch))

    def weight(self, batch: Any) -> float:
        return super().weight(_with_targets(batch))

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Mean]:
        return super().evaluate(model, _with_targets(batch))

    def predict(self, model: nn.Module, batch: Any) -> Tensor:
        return super().predict(model, _with_targets(batch))

    def flops_per_token(self, model: nn.Module, tokens: float) -> float | None:
        """By ``tasks.huggingface.flops``, from the configuration."""
        return flops_per_token(model, tokens)


def _with_targets(batch: Any) -> Any:
    """A batch of transformers as one of ours: the target of a token is the label of the next."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        return batch
    labels = batch.get("labels")
    if labels is None or labels.shape != batch["input_ids"].shape:
        raise ConfigError(
            "a batch of input_ids has no label for each of its tokens",
            fix="let the collate add labels: input_ids, with -100 where a token does not count; "
            "of labelled texts, choose data=hf_text",
        )
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return {**batch, "tokens": batch["input_ids"], "targets": targets}


class SequenceClassification(HuggingFaceTask):
    """Cross entropy of a label for each sample, by a model of transformers.

    A batch is a dict as transformers' own collators make it: ``input_ids`` (batch, T),
    ``attention_mask``, and ``labels`` (batch,), where -100 does not count. All but the labels go
    to the model. Its configuration gets the classes that the data names.

    Evaluation gives ``loss`` and ``accuracy`` (0 to 1); prediction gives the most likely class of
    every sample, by name where the data names them.
    """

    head = "AutoModelForSequenceClassification"

    def __init__(
        self,
        model: Callable[[], Any],
        data: DataSource,
        optimizer: OptimizerSpec = OptimizerSpec(),
    ) -> None:
        self.model = model
        self.data = data
        self.optimizer = optimizer
        self.sample_weight = 1.0 if getattr(data, "all_count", False) else None

    def build_model(self) -> nn.Module:
        model = super().build_model()
        config: Any = model.config
        labels, names = config.num_labels, self._names
        if names is not None and len(names) > labels:
            raise ConfigError(
                f"the label {names[labels]!r} is number {labels} of the data, and the model has "
                f"{labels} labels",
                fix=f"set ++model.overrides.num_labels={len(names)}, or leave it out",
            )
        return model

    @property
    def _names(self) -> list[str] | None:
        names: list[str] | None = getattr(self.data, "class_names", None)
        return names

    def _settings(self, model: HuggingFaceModel) -> dict[str, Any]:
        saved, settings = model.saved, {}
        kind = saved.get("problem_type")
        if kind not in (None, "single_label_classification"):
            raise ConfigError(
                f"{model.pretrained or model.config} is for {kind}, and task=hf_classification "
                "for one label of several",
                fix="set ++model.overrides.problem_type=single_label_classification for a new head",
            )
        if saved.get("pad_token_id") is None and hasattr(self.data, "pad_token_id"):
            settings["pad_token_id"] = self.data.pad_token_id
        if self._names is None or {"num_labels", "id2label"} & {*(model.overrides or ())}:
            return settings
        before = [str(name) for _, name in sorted(_number_labels(saved.get("id2label")))]
        if before != self._names and sorted(before) == sorted(self._names):
            raise ConfigError(
                f"{model.pretrained or model.config} numbers its labels {', '.join(before)}, the "
                f"data {', '.join(self._names)}",
                fix=f"set data.classes=[{','.join(before)}]",
            )
        settings["id2label"] = dict(enumerate(self._names))
        settings["label2id"] = {name: number for number, name in enumerate(self._names)}
        return settings

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return model(**inputs).logits

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        labels = batch["labels"]
        total = F.cross_entropy(outputs.float(), labels, ignore_index=IGNORED, reduction="sum")
        return total / (labels != IGNORED).sum().clamp(min=1)  # 0, not NaN, where nothing counts

    def weight(self, batch: Any) -> float:
        return float((_labels(batch) != IGNORED).sum())

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Mean]:
        labels = _labels(batch)
        logits = self.forward(model, batch)
        count = (labels != IGNORED).sum()
        return {
            "loss": Mean(self.loss(logits, batch) * count, count),
            "accuracy": Mean((logits.argmax(-1) == labels).sum(), count),
        }

    def predict(self, model: nn.Module, batch: Any) -> Tensor | list[str]:
        best = self.forward(model, batch).argmax(-1)
        return best if self._names is None else [self._names[i] for i in best.tolist()]


def _labels(batch: Any) -> Tensor:
    if not isinstance(batch, Mapping) or "labels" not in batch:
        raise ConfigError(
            f"a batch of type {type(batch).__name__} has no labels",
            fix="choose data=hf_labelled_text, or let the collate return a dict of input_ids and "
            "labels",
        )
    labels: Tensor = batch["labels"]
    return labels


def _number_labels(labels: Any) -> list[tuple[int, str]]:
    """``id2label`` of a config.json, whose keys are text."""
    return [(int(number), name) for number, name in (labels or {}).items()]
