"""Models of transformers: from a configuration, with random weights, or from a local folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torsh_trainer.errors import ConfigError, nearest
from torsh_trainer.tasks.huggingface.library import first_line, transformers
from torsh_trainer.utils.lookup import list_first

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A model by its configuration; its task chooses the head.

    ``pretrained`` is a local folder as ``save_pretrained`` writes it: weights (one file or shards
    and their index) and ``config.json``. ``config`` is a folder with a ``config.json``, such a
    file, or the name of a model type (``gpt2``), for random weights. ``overrides`` replace values
    of the configuration. ``attn_implementation`` is that of transformers; null lets it choose.
    ``gradient_checkpointing`` computes activations again in backward, as the model itself does.
    ``ignore_mismatched_sizes`` starts weights anew whose shape is another than in the folder.

    Nothing is downloaded, and code in a folder is not run. Weights are float32: see ``precision``.

    Raises:
        ConfigError: neither or both of ``pretrained`` and ``config`` are given, or
            ``trust_remote_code`` is true.
    """

    pretrained: str | None = None
    config: str | None = None
    overrides: Mapping[str, Any] | None = None
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    ignore_mismatched_sizes: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.trust_remote_code or "trust_remote_code" in (self.overrides or {}):
            raise ConfigError(
                "model.trust_remote_code=true is refused: code that lies in a folder of weights "
                "is not run",
                fix="take a model type that transformers has, or import the model's class in a "
                "task of your own",
            )
        if (self.pretrained is None) == (self.config is None):
            raise ConfigError(
                "model=hf takes either model.pretrained or model.config"
                + ("" if self.config is None else ", and both are given"),
                fix="give model.pretrained=FOLDER for its weights, or model.config=gpt2 (a model "
                "type, a folder or a config.json) for random ones",
            )

    @property
    def saved(self) -> dict[str, Any]:
        """The values of the ``config.json`` that is named; of a model type, its name alone.

        Raises:
            ConfigError: there is no such folder or file, or it is no configuration.
        """
        if self.pretrained is not None:
            if not Path(self.pretrained).is_dir():
                raise ConfigError(
                    f"model.pretrained={self.pretrained}: there is no such folder, and nothing is "
                    "downloaded",
                    fix="give a local folder, such as `hf download NAME --local-dir FOLDER` writes",
                )
            return _values("pretrained", Path(self.pretrained, "config.json"))
        path = Path(str(self.config))
        if path.is_dir():
            return _values("config", path / "config.json")
        return _values("config", path) if path.is_file() else {"model_type": self.config}

    def make_config(self, **settings: Any) -> Any:
        """The configuration: as saved, with ``settings`` and ``overrides``.

        Raises:
            ConfigError: the model type is unknown, or it has no such value or refuses it.
            ResourceError: transformers is not installed.
        """
        values = self.saved
        kind = _kind(values, self.pretrained or self.config)
        names = getattr(kind, "attribute_map", {})
        known = kind()
        overrides = self.overrides or {}
        for name in overrides:
            if not hasattr(known, name):
                raise ConfigError(
                    f"model.overrides: {values['model_type']} has no {name!r}",
                    fix=nearest(name, [*known.to_dict(), *names]),
                )
        if "num_labels" in overrides:
            values = {k: v for k, v in values.items() if k not in ("id2label", "label2id")}
        given = {names.get(name, name): value for name, value in overrides.items()}
        try:
            return kind.from_dict({**values, **settings, **given, "dtype": "float32"})
        except Exception as error:
            raise ConfigError(
                f"{values['model_type']} refuses its configuration: {first_line(error)}",
                fix="correct model.overrides, or the config.json",
            ) from error

    def build(self, head: str, **settings: Any) -> nn.Module:
        """The model that the class ``head`` of transformers makes (``AutoModelForCausalLM``).

        ``settings`` are values of the configuration, below ``overrides``. On the meta device it
        has no weights.

        Raises:
            ConfigError: the model type has no such head, or the weights do not fit.
            ResourceError: transformers is not installed.
        """
        config = self.make_config(**settings)
        kind = getattr(transformers(), head)
        if type(config) not in kind._model_mapping:
            raise ConfigError(
                f"the model type {config.model_type} has no {head.removeprefix('AutoModelFor')} "
                "head in transformers",
                fix="take another model",
            )
        options: dict[str, Any] = {"dtype": torch.float32}
        if self.attn_implementation is not None:
            options["attn_implementation"] = self.attn_implementation
        if self.pretrained is None or torch.get_default_device().type == "meta":
            model = _make_model(lambda: kind.from_config(config, **options), self.config)
        else:
            model = self._load_pretrained(kind, config, options)
        if self.gradient_checkpointing:
            _checkpoint(model)
        return model

    def _load_pretrained(self, kind: Any, config: Any, options: Mapping[str, Any]) -> nn.Module:
        model, told = _make_model(
            lambda: kind.from_pretrained(
                self.pretrained,
                config=config,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told apart below, in a sentence
                **options,
            ),
            self.pretrained,
        )
        mismatched = sorted(name for name, *_ in told["mismatched_keys"])
        if mismatched and not self.ignore_mismatched_sizes:
            raise ConfigError(
                f"model.pretrained={self.pretrained}: {list_first(mismatched)} has another "
                "shape than the model",
                fix="correct model.overrides and the classes of the data, or let it start anew "
                "with model.ignore_mismatched_sizes=true",
            )
        new = sorted({*told["missing_keys"], *mismatched})
        if len(new) >= sum(1 for _ in model.parameters()):
            raise ConfigError(
                f"model.pretrained={self.pretrained}: no weight in it belongs to the model",
                fix="check that config.json and the weights are of one model",
            )
        if new:
            log.warning("%s: starts with random weights: %s", self.pretrained, list_first(new))
        return model


def _values(knob: str, path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model.{knob}: cannot read {path} ({error.strerror})",
            fix="give a folder that save_pretrained of transformers has written",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"model.{knob}: {path} is not JSON ({error})", fix="save it again"
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(
            f"model.{knob}: {path} names no model_type",
            fix="give a config.json of a transformers model",
        )
    return values


def _kind(values: Mapping[str, Any], where: str | None) -> Any:
    """The class of the configuration."""
    known = transformers().CONFIG_MAPPING
    name = values["model_type"]
    if name in known:
        return known[name]
    if "auto_map" in values:
        raise ConfigError(
            f"{where} needs code that lies beside its weights (auto_map in config.json), and such "
            "code is not run: trust_remote_code is refused",
            fix="take a model type that transformers has",
        )
    if where == name:
        raise ConfigError(
            f"model.config={name} is neither a folder nor a model type that transformers knows, "
            "and nothing is downloaded",
            fix=_offer(name, known) or "give a local folder, or a model type such as gpt2",
        )
    raise ConfigError(
        f"{where} is of the model type {name!r}, which transformers does not know",
        fix=_offer(name, known) or "a newer release of transformers may",
    )


def _offer(name: str, known: Mapping[str, Any]) -> str:
    """The nearest names; there are too many to list them all."""
    offer = nearest(name, known)
    return offer if offer.startswith("did you mean") else ""


def _make_model(make: Callable[[], Any], where: str | None) -> Any:
    try:
        return make()
    except Exception as error:
        raise ConfigError(
            f"transformers cannot make the model of {where}: {first_line(error)}",
            fix="correct model.overrides or the folder; debug=true shows the traceback",
        ) from error


def _checkpoint(model: nn.Module) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"model.gradient_checkpointing=true: {type(model).__name__} does not support it",
            fix="set trainer.activation_checkpointing=true instead",
        )
    enable: Any = model.gradient_checkpointing_enable
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
