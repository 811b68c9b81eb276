"""PyTorch's DistributedDataParallel over Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bench.pair.data import CLASSES, LEARNING_RATES, batches, initial_weights, judged
from bench.pair.job import BATCH, Pair, Workload

__all__ = ["start"]

#: Keras's; PyTorch's own is 1e-8.
_EPSILON = 1e-7


def start(job: Pair) -> Any:
    """Joins the group."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    return _Process()


class _Process:
    def __init__(self) -> None:
        self.rank = distributed.get_rank()

    def exchange(self, count: int) -> Callable[[], Any]:
        """An all-reduce in place."""
        values = torch.zeros(count)
        return lambda: distributed.all_reduce(values)

    def train(self, workload: Workload, blocks: int, clock: Any) -> float:
        plain = _build(workload)
        model = DistributedDataParallel(plain)
        optimizer, lossfn = _optimizer(workload, model), nn.CrossEntropyLoss()
        features, labels = (torch.from_numpy(part) for part in batches(workload, self.rank))
        if features.dim() == 4:
            features = features.permute(0, 3, 1, 2).contiguous()
        share = BATCH // 2
        for _ in range(blocks):
            clock.start()
            for begin in range(0, len(features), share):
                optimizer.zero_grad()
                outputs = model(features[begin : begin + share])
                lossfn(outputs, labels[begin : begin + share]).backward()
                optimizer.step()
            clock.stop()
        return _judge(workload, plain, lossfn)

    def close(self) -> None:
        """Waits, so that neither process ends while the other still uses its connections."""
        distributed.barrier()
        distributed.destroy_process_group()


def _optimizer(workload: Workload, model: Any) -> Any:
    rate = LEARNING_RATES[workload.optimizer]
    if workload.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), rate, eps=_EPSILON)
    return torch.optim.SGD(model.parameters(), rate)


def _build(workload: Workload) -> nn.Module:
    if len(workload.shape) == 1:
        layers = [
            *(nn.Linear(1024, 1536), nn.ReLU()),
            *(nn.Linear(1536, 1536), nn.ReLU()),
            nn.Linear(1536, CLASSES),
        ]
    else:
        layers = [
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(1600, CLASSES)),
        ]
    model = nn.Sequential(*layers)
    values = map(torch.from_numpy, initial_weights(workload))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(_in_torch_layout(value, after_conv=len(workload.shape) > 1))
    return model


def _in_torch_layout(value: torch.Tensor, after_conv: bool) -> torch.Tensor:
    if value.dim() == 4:
        return value.permute(3, 2, 0, 1)
    if value.dim() == 2 and after_conv:  # Channels come first here, last in Keras.
        value = value.reshape(5, 5, 64, CLASSES).permute(2, 0, 1, 3).reshape(-1, CLASSES)
    return value.T if value.dim() == 2 else value


def _judge(workload: Workload, model: nn.Module, lossfn: Any) -> float:
    features, labels = (torch.from_numpy(part) for part in judged(workload))
    if features.dim() == 4:
        features = features.permute(0, 3, 1, 2)
    with torch.no_grad():
        return float(lossfn(model(features), labels))
