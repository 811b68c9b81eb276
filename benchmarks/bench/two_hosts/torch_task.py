"""PyTorch's DistributedDataParallel over Gloo, with its communication hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

from bench.two_hosts import data
from bench.two_hosts.clock import Clock
from bench.two_hosts.job import BATCH, BLOCK, PEERS, Job
from bench.two_hosts.network import ADDRESSES

__all__ = ["train"]


def train(job: Job, clock: Clock) -> None:
    """Trains; the clock takes each block. See `bench.two_hosts.keras_task`."""
    torch.set_num_threads(1)
    where = f"tcp://{ADDRESSES[0]}:{job.ports[0]}"
    distributed.init_process_group("gloo", init_method=where, rank=job.rank, world_size=2)
    plain = build(job.model)
    model = DistributedDataParallel(plain)
    _hook(model, PEERS[job.peer].options["hook"])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-7)
    lossfn = nn.CrossEntropyLoss()
    features, labels = map(torch.from_numpy, data.examples(job.model, BLOCK * (1 + job.blocks)))
    batch = BATCH[job.model]
    share = slice(job.rank * batch // 2, (job.rank + 1) * batch // 2)
    for block in range(1 + job.blocks):
        clock.start()
        for step in range(block * BLOCK, (block + 1) * BLOCK):
            x = features[step * batch : (step + 1) * batch][share]
            y = labels[step * batch : (step + 1) * batch][share].long()
            optimizer.zero_grad()
            lossfn(model(x).flatten(0, -2), y.flatten()).backward()
            optimizer.step()
        clock.stop()
        with torch.no_grad():
            x, y = map(torch.from_numpy, data.held_out(job.model))
            clock.judge(float(lossfn(plain(x).flatten(0, -2), y.long().flatten())))
    distributed.barrier()
    distributed.destroy_process_group()


def _hook(model: Any, name: str) -> None:
    if name in ("bf16", "fp16"):
        model.register_comm_hook(None, getattr(default_hooks, f"{name}_compress_hook"))
    elif name == "powersgd":
        state = power.PowerSGDState(
            process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2
        )
        model.register_comm_hook(state, power.powerSGD_hook)


def build(name: str) -> nn.Module:
    """A model with its initial weights."""
    model: nn.Module = (
        nn.Sequential(
            *(nn.Linear(1024, 1536), nn.ReLU(), nn.Linear(1536, 1536), nn.ReLU()),
            nn.Linear(1536, 10),
        )
        if name == "mlp"
        else _Transformer()
    )
    values = map(torch.from_numpy, data.weights(name))
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            turned = value.dim() == 2 and id(parameter) not in tables
            parameter.copy_(value.T if turned else value)
    return model


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(data.WIDTH)
        self.joined = nn.Linear(data.WIDTH, 3 * data.WIDTH)
        self.out = nn.Linear(data.WIDTH, data.WIDTH)
        self.second = nn.LayerNorm(data.WIDTH)
        self.wide = nn.Linear(data.WIDTH, 4 * data.WIDTH)
        self.narrow = nn.Linear(4 * data.WIDTH, data.WIDTH)

    def forward(self, x: Any) -> Any:
        size = data.WIDTH // data.HEADS
        parts = self.joined(self.first(x)).view(-1, data.LENGTH, 3, data.HEADS, size)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4).unbind(0)
        later = torch.triu(torch.ones(data.LENGTH, data.LENGTH), 1) * -1e9
        scores = queries @ keys.transpose(-1, -2) / size**0.5 + later
        mixed = (scores.softmax(-1) @ values).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(data.VOCABULARY, data.WIDTH)
        self.places = nn.Embedding(data.LENGTH, data.WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(data.DEPTH)))
        self.last = nn.LayerNorm(data.WIDTH)
        self.out = nn.Linear(data.WIDTH, data.VOCABULARY)

    def forward(self, x: Any) -> Any:
        embedded = self.tokens(x) + self.places(torch.arange(data.LENGTH))
        return self.out(self.last(self.blocks(embedded)))
