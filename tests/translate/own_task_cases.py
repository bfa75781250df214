"""Projects as people write them, and engines of one process that do nothing but torch."""

from __future__ import annotations

from pathlib import Path

ENGINES = {
    "horovod/__init__.py": "",
    "horovod/torch.py": """\
def init(): pass
def size(): return 1
def rank(): return 0
local_rank = rank
def broadcast_parameters(parameters, root_rank): pass
def broadcast_optimizer_state(optimizer, root_rank): pass
def DistributedOptimizer(optimizer, **options): return optimizer
""",
    "deepspeed/__init__.py": """\
import json
import torch

class Engine:
    def __init__(self, model, parameters, config):
        self.module, self.device, self.passes = model, torch.device("cpu"), 0
        self.accumulate = config.get("gradient_accumulation_steps", 1)
        lr = config["optimizer"]["params"]["lr"]
        self.optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=lr)
    def __call__(self, *args, **named): return self.module(*args, **named)
    def train(self): self.module.train()
    def eval(self): self.module.eval()
    def backward(self, loss): (loss / self.accumulate).backward()
    def step(self):
        self.passes += 1
        if self.passes % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

def initialize(args=None, model=None, model_parameters=None, config=None):
    config = json.load(open(config or args.deepspeed_config))
    engine = Engine(model, model_parameters, config)
    return engine, engine.optimizer, None, None

def add_config_arguments(parser):
    parser.add_argument("--deepspeed_config")
    return parser
""",
}
"""Modules by the names of Horovod and DeepSpeed: a script under them is its plain loop."""

DIGITS = {
    "train.py": """\
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
import horovod.torch as hvd
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--hidden", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--seed", type=int, default=7)
parser.add_argument("--no-cuda", action="store_true", default=False)


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.fc1 = nn.Linear(64, hidden)
        self.fc2 = nn.Linear(hidden, 4)

    def forward(self, x):
        return F.log_softmax(self.fc2(torch.relu(self.fc1(x))), dim=1)


def make_data(count, seed):
    g = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 8, 8, generator=g)
    return TensorDataset(images, torch.randint(0, 4, (count,), generator=g))


def main(args):
    def train_epoch(epoch):
        model.train()
        train_sampler.set_epoch(epoch)
        for batch_idx, (data, target) in enumerate(train_loader):
            if args.cuda:
                data, target = data.cuda(), target.cuda()
            optimizer.zero_grad()
            output = model(data.view(-1, 64))
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
            if hvd.rank() == 0:
                print("loss", loss.item())

    def test():
        model.eval()
        with torch.no_grad():
            for data, target in test_loader:
                if args.cuda:
                    data, target = data.cuda(), target.cuda()
                F.nll_loss(model(data.view(-1, 64)), target)

    hvd.init()
    torch.manual_seed(args.seed)
    if args.cuda:
        torch.cuda.set_device(hvd.local_rank())
    kwargs = {"num_workers": 1, "pin_memory": True} if args.cuda else {}
    train_dataset = make_data(44, 1)
    train_sampler = DistributedSampler(
        train_dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    train_loader = DataLoader(
        train_dataset, batch_size=args.batch_size, sampler=train_sampler, **kwargs
    )
    test_loader = DataLoader(make_data(16, 2), batch_size=16)
    model = Net(args.hidden)
    if args.cuda:
        model.cuda()
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(1, args.epochs + 1):
        train_epoch(epoch)
        test()


if __name__ == "__main__":
    args = parser.parse_args()
    args.cuda = not args.no_cuda and torch.cuda.is_available()
    main(args)
""",
}
"""As Horovod's own example: the loop in a function within a function, a ragged tail."""

DS = """\
{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0,
 "optimizer": {"type": "SGD", "params": {"lr": 0.05}}}
"""

ROWS = {
    "ds.json": DS,
    "lib/__init__.py": "",
    "lib/net.py": """\
from torch import nn

class Net(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()
        layers = [nn.Linear(12, width)]
        for _ in range(depth):
            layers += [nn.ReLU(), nn.Linear(width, width)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.body(x))
""",
    "lib/data.py": """\
import torch
from torch.utils.data import Dataset

class Rows(Dataset):
    def __init__(self, path, count=32, scale=1.0):
        g = torch.Generator().manual_seed(len(path))
        self.x = torch.randn(count, 12, generator=g) * scale
        self.y = torch.randint(0, 3, (count,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "y": self.y[i]}

def collate(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
""",
    "lib/losses.py": """\
import torch.nn.functional as F
from torch import nn

class Smooth(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.eps = eps

    def forward(self, x, y):
        return F.cross_entropy(x, y, label_smoothing=self.eps)
""",
    "train.py": """\
import argparse
import deepspeed
import torch
from torch.utils.data import DataLoader
from lib import data as datasets
from lib.losses import Smooth
from lib.net import Net


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--data-path", type=str, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


class Trainer:
    def __init__(self, args):
        self.args = args
        self.net = Net(args.width, depth=args.depth)
        for p in self.net.body[0].parameters():
            p.requires_grad = False
        self.net.head.weight.data.mul_(2.0)
        self.criterion = Smooth(args.smoothing)
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            args=args, model=self.net, model_parameters=self.net.parameters()
        )
        dataset = datasets.Rows(args.data_path, scale=0.5)
        self.loader = DataLoader(
            dataset, batch_size=4, shuffle=False, collate_fn=datasets.collate
        )

    def step(self, batch):
        batch = {k: v.to(self.engine.device) for k, v in batch.items()}
        logits = self.engine(batch["x"])
        loss = self.criterion(logits, batch["y"])
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def fit(self):
        for epoch in range(self.args.epochs):
            for step, batch in enumerate(self.loader):
                loss = self.step(batch)
                print("loss", loss.item())


def main():
    args = get_args()
    torch.manual_seed(11)
    trainer = Trainer(args)
    trainer.fit()


if __name__ == "__main__":
    main()
""",
}
"""A class with methods, modules beside it, arguments of the launch line, frozen layers."""

TEXTS = {
    "ds.json": DS.replace('"gradient_accumulation_steps": 2', '"gradient_accumulation_steps": 1'),
    "finetune.py": """\
import argparse
import dataclasses
import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Config:
    def __init__(self, words, width):
        self.words, self.width, self.tied = words, width, False


class LanguageModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.words, config.width)
        self.head = nn.Linear(config.width, config.words, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)


class Texts(Dataset):
    def __init__(self, count, length):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 50, (count, length), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(5)
    config = Config(50, args.width)
    config.tied = True
    model = LanguageModel(config)
    full = Texts(24, 8)
    train_data = Subset(full, list(range(16)))
    eval_data = Subset(full, range(16, 24))
    train_loader = DataLoader(train_data, batch_size=4)
    eval_loader = DataLoader(eval_data, batch_size=4)
    model, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config="ds.json"
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for epoch in range(2):
        model.train()
        for step, batch in enumerate(train_loader):
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            loss = outputs.loss
            model.backward(loss)
            model.step()
            print("loss", loss.item())
        model.eval()
        for batch in eval_loader:
            with torch.no_grad():
                outputs = model(**{k: v.to(device) for k, v in batch.items()})


if __name__ == "__main__":
    main()
""",
}
"""A model that computes its own loss, as those of transformers do, and an evaluation."""

SMALL = """\
import argparse
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import horovod.torch as hvd
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--hidden", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--path", required=True)


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.fc1 = nn.Linear(8, hidden)
        self.fc2 = nn.Linear(hidden, 4)

    def forward(self, x, h=None):
        return self.fc2(torch.relu(self.fc1(x)))


def make_data(count):
    g = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 8, generator=g), torch.randint(0, 4, (count,), generator=g)
    )


def loss_of(model, batch, args):
    return F.cross_entropy(model(batch[0]), batch[1])


def make(args):
    return Net(args.hidden)


def main():
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(3)
    data = make_data(40)
    loader = DataLoader(DATA, batch_size=8, shuffle=False)
    model = MODEL
    SETUP
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(2):
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            BODY
            loss.backward()
            AFTER
            optimizer.step()
            print("loss", loss.item())


END
"""
GUARD = 'if __name__ == "__main__":\n    main()'


def small(
    body: str = "loss = F.cross_entropy(model(x), y)",
    *,
    model: str = "Net(args.hidden)",
    data: str = "data",
    setup: str = "",
    after: str = "",
    end: str = GUARD,
) -> dict[str, str]:
    """A project of one script whose step and set-up are these lines."""
    parts = {"DATA": data, "MODEL": model, "END": end}
    parts |= {"SETUP": setup, "BODY": body, "AFTER": after}
    lines = []
    for line in SMALL.splitlines():
        word = line.strip()
        if word in ("SETUP", "BODY", "AFTER"):
            indent = line[: len(line) - len(word)]
            lines += [indent + one for one in parts[word].splitlines()]
            continue
        for name in ("DATA", "MODEL", "END"):
            line = line.replace(name, parts[name])
        lines.append(line)
    return {"train.py": "\n".join(lines) + "\n"}


def write(folder: Path, files: dict[str, str]) -> Path:
    """The files of a project in a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
