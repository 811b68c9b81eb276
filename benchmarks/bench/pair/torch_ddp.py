"""PyTorch's DistributedDataParallel over Gloo."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bench.pair.data import (
    BLOCKS,
    HEADS,
    LEARNING_RATES,
    TOKENS,
    WIDTH,
    batches,
    initial_weights,
    judged,
)
from bench.pair.job import BATCH, CLASSES, Pair, Workload

__all__ = ["start"]

#: Keras's; PyTorch's own is 1e-8.
_EPSILON = 1e-7


def start(job: Pair) -> Any:
    """Joins the group."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    return _Process(job.processes)


class _Process:
    def __init__(self, processes: int) -> None:
        self.rank, self._processes = distributed.get_rank(), processes

    def exchange(self, count: int) -> Callable[[], Any]:
        """An all-reduce in place."""
        values = torch.zeros(count)
        return lambda: distributed.all_reduce(values)

    def train(self, workload: Workload, blocks: int, clock: Any) -> float:
        plain = _build(workload)
        model = DistributedDataParallel(plain)
        optimizer, lossfn = _optimizer(workload, model), nn.CrossEntropyLoss()
        features, labels = _tensors(*batches(workload, self.rank, self._processes))
        share = BATCH // self._processes
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


def _tensors(features: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = torch.from_numpy(features)
    if tensor.dim() == 4:
        tensor = tensor.permute(0, 3, 1, 2).contiguous()
    return tensor, torch.from_numpy(labels)


def _build(workload: Workload) -> nn.Module:
    makers = {
        "mlp": functools.partial(_mlp, (*workload.shape, *workload.hidden)),
        "convnet": _convnet,
        "transformer": _Transformer,
    }
    model: nn.Module = makers[workload.kind]()
    values = map(torch.from_numpy, initial_weights(workload))
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                parameter.copy_(_in_torch_layout(next(values), module, workload))
    return model


def _mlp(widths: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))


def _convnet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, CLASSES)),
    )


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.letters(tokens)).mean(1))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.before(x)
        parts = (self.query(normal), self.key(normal), self.value(normal))
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        hidden = nn.functional.gelu(self.up(self.between(x)))
        return x + self.down(hidden)  # type: ignore[no-any-return]


def _in_torch_layout(value: torch.Tensor, module: nn.Module, workload: Workload) -> torch.Tensor:
    """A weight in Keras's layout as a module of PyTorch has it."""
    if isinstance(module, nn.Conv2d) and value.dim() == 4:
        return value.permute(3, 2, 0, 1)
    if not isinstance(module, nn.Linear):
        return value
    if value.numel() == module.out_features:  # The biases of attention are by head.
        return value.reshape(-1)
    if workload.kind == "convnet":  # Channels come first here, last in Keras.
        value = value.reshape(5, 5, 64, CLASSES).permute(2, 0, 1, 3)
    return value.reshape(module.in_features, module.out_features).T


def _judge(workload: Workload, model: nn.Module, lossfn: Any) -> float:
    features, labels = _tensors(*judged(workload))
    with torch.no_grad():
        return float(lossfn(model(features), labels))
