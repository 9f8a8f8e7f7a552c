"""A model whose gradients are known: loss = sum (x - c)^2 / 2 has the gradient x - c, element by element."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Quadratic(torch.nn.Module):
    """Two parameters; the loss is that of their distance to a target of all elements."""

    def __init__(self, shapes: Sequence[tuple[int, ...]] = ((13, 7), (5,)), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(shape, dtype=dtype) for shape in shapes])

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        pieces = target.split([part.numel() for part in self.parts])
        return sum(((part.reshape(-1) - c) ** 2).sum() for part, c in zip(self.parts, pieces, strict=True)) / 2

    @property
    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)


def target_of(rank: int, step: int, numel: int) -> torch.Tensor:
    """Differs for every rank and step."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank), dtype=torch.float64)


def weights_of(model: Quadratic) -> list[float]:
    return torch.cat([part.detach().reshape(-1) for part in model.parts]).tolist()


def step_once(model: Quadratic, optimizer: torch.optim.Optimizer, rank: int, step: int) -> list[float]:
    """One training step; the weights after it."""
    optimizer.zero_grad()
    model(target_of(rank, step, model.numel).to(model.parts[0].dtype)).backward()
    optimizer.step()
    return weights_of(model)
