"""Idioms of DeepSpeed's own examples: a masked language model, and two engines in one loop.

They have the settings of ``deepspeed_idioms.py``, which runs them.
"""

from __future__ import annotations

import argparse
import tempfile

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.config import ADAM_OPTIMIZER, LAMB_OPTIMIZER
from deepspeed_parts import config, finish, start
from deepspeed_scaled_idioms import allow_fp16
from torch import nn

WORDS, WIDTH, LENGTH, MASK, STEPS = 29, 16, 8, 1, 8
NOISE, FEATURES = 3, 6


class Words(nn.Module):
    """Its output layer is its embedding; it returns the loss itself."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, targets):
        hidden = self.embedding(tokens)
        hidden = self.mix(hidden + hidden.mean(dim=1, keepdim=True))
        at = torch.nonzero((targets != 0).view(-1)).view(-1)
        chosen = torch.index_select(hidden.view(-1, WIDTH), 0, at)
        return nn.functional.cross_entropy(self.head(chosen), targets.view(-1)[at])


def masked_words(stage, fp16=True):
    """States on the host, the loss scale as it comes, and the loss is what the engine returns."""
    if fp16:
        allow_fp16()
    torch.manual_seed(0)
    model = Words()
    engine, *_ = start(
        model,
        config=config(
            # DeepSpeed's own kernel rounds otherwise than torch's Adam, and fp16 shows it.
            optimizer={"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
            fp16={"enabled": fp16},
            zero_optimization={"stage": stage, "offload_optimizer": {"device": "cpu"}},
        ),
    )
    engine.train()
    rows, generator = [], torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        words = torch.randint(2, WORDS, (4, LENGTH), generator=generator)
        hidden = torch.rand(words.shape, generator=generator) < 0.3
        hidden[:, 0] = True
        targets = torch.where(hidden, words, torch.zeros_like(words))
        loss = engine(torch.where(hidden, torch.full_like(words, MASK), words), targets)
        engine.backward(loss)
        engine.step()
        rows.append({"loss": loss.item(), "counts": [engine.global_steps, engine.skipped_steps]})
    return finish(engine, rows)


def adversaries():
    """Two engines, one of whose losses goes through the other's model, called as bare modules."""
    torch.manual_seed(0)
    makes = nn.Sequential(nn.Linear(NOISE, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, FEATURES))
    judges = nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())
    settings = config()
    del settings["optimizer"]
    engines = [
        deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.999)),
            config=settings,
        )[0]
        for model in (judges, makes)
    ]
    rows, generator = [], torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        judges.zero_grad()
        true, false = torch.ones(4, 1), torch.zeros(4, 1)
        on_real = nn.functional.binary_cross_entropy(
            judges(torch.rand(4, FEATURES, generator=generator)), true
        )
        engines[0].backward(on_real)
        made = makes(torch.randn(4, NOISE, generator=generator))
        on_made = nn.functional.binary_cross_entropy(judges(made.detach()), false)
        engines[0].backward(on_made)
        engines[0].step()
        makes.zero_grad()
        deceived = nn.functional.binary_cross_entropy(judges(made), true)
        engines[1].backward(deceived)
        engines[1].step()
        rows.append({"real": on_real.item(), "made": on_made.item(), "deceived": deceived.item()})
    other = finish(engines[1], [])["state"]
    return finish(engines[0], rows, other=sorted(other.items()))


class Pretraining:
    """The network within an object of the script's own, which the engine replaces."""

    def __init__(self):
        torch.manual_seed(0)
        self.network = Words()


def pretrain(stage, accumulate=2):
    """Parameters in two groups, a rate that the script sets at each boundary, clipping and scaling
    from the configuration; saved in the middle with counters of its own, and gone on with from
    there by a second engine."""
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    model, args = Pretraining(), parser.parse_args([])
    settings = config(
        optimizer={"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        gradient_accumulation_steps=accumulate,
        gradient_clipping=0.5,
        zero_optimization={"stage": stage},
        wall_clock_breakdown=False,
        prescale_gradients=False,
        steps_per_print=100,
    )

    def build():
        named = list(model.network.named_parameters())
        plain = [p for name, p in named if "bias" in name or "mix.0" in name]
        kept = [p for name, p in named if not ("bias" in name or "mix.0" in name)]
        groups = [{"params": kept, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        model.network, model.optimizer, _, _ = deepspeed.initialize(
            args=args, model=model.network, model_parameters=groups, config=settings
        )

    def run(rows, first, steps):
        samples, done = first, first // accumulate
        for at in range(first, first + steps):
            generator = torch.Generator().manual_seed(10 * at + dist.get_rank())
            words = torch.randint(2, WORDS, (4, LENGTH), generator=generator)
            hidden = torch.arange(LENGTH).expand_as(words) % 3 == at % 3
            targets = torch.where(hidden, words, torch.zeros_like(words))
            tokens = torch.where(hidden, torch.full_like(words, MASK), words)
            loss = model.network.forward(tokens, targets)
            model.network.backward(loss)
            row = {"loss": loss.item(), "ends": model.network.is_gradient_accumulation_boundary()}
            if row["ends"]:
                rate = 0.01 * min(1.0, (done + 1) / 4)
                for group in model.optimizer.param_groups:
                    group["lr"] = rate
                report = torch.tensor([loss.item()])
                dist.all_reduce(report)
                row["mean"] = float(report / dist.get_world_size())
                model.network.step()
                done += 1
            else:
                model.network.step()
            samples += 1
            rows.append(row)
        return samples, done

    build()
    rows, folder = [], [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    model.network.train()
    samples, done = run(rows, 0, 6)
    state = {"epoch": 1, "last_global_step": done, "last_global_data_samples": samples}
    model.network.save_checkpoint(folder[0], "epoch1", state)
    model = Pretraining()
    build()
    _, found = model.network.load_checkpoint(folder[0], "epoch1")
    kept = [found[key] for key in sorted(state)]
    run(rows, found["last_global_data_samples"], 6)
    names = [ADAM_OPTIMIZER, LAMB_OPTIMIZER, model.network.optimizer_name()]
    return finish(model.network, rows, kept=kept, names=names)


IDIOMS = {
    "words_1": lambda: masked_words(1),
    "words_2": lambda: masked_words(2),
    "words_3": lambda: masked_words(3, fp16=False),
    "adversaries": adversaries,
    **{f"pretrain_{stage}": lambda stage=stage: pretrain(stage) for stage in range(4)},
}
