"""The tasks of the federated benchmarks: small CNNs on images, a small transformer on bytes.

Models are functions of a dict of parameters, so that loops, vmap, torch.compile and JAX compute the same. Parameters
and data are random, from numpy's generator, since the time of a round does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, CONTEXT, LAYERS = 128, 32, 2, 32, 2
_SIDE = 28

Parameters = dict[str, torch.Tensor]


class Task(NamedTuple):
    """A model and the data of its clients.

    Attributes:
        name: its key in TASKS.
        shapes: the shapes of the parameters, by name.
        examples: a function of ``(generator, count)`` that returns inputs and labels ``[count, ...]``.
        loss: a function of parameters, inputs and labels of one batch that returns the mean loss.
        batch: the number of examples per step of a client.
        steps: the number of SGD steps of each client in a round.
        rate: the learning rate of these steps.
    """

    name: str
    shapes: dict[str, tuple[int, ...]]
    examples: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
    loss: Callable[[Parameters, torch.Tensor, torch.Tensor], torch.Tensor]
    batch: int
    steps: int = 2
    rate: float = 0.05

    def parameters(self) -> dict[str, np.ndarray]:
        """Returns the server's parameters, the same for every contender."""
        generator = np.random.default_rng(0)
        return {name: _initial(generator, name, shape) for name, shape in self.shapes.items()}

    def num_parameters(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def data(self, clients: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels, each ``[clients, steps, batch, ...]``."""
        inputs, labels = self.examples(np.random.default_rng(1), clients * self.steps * self.batch)
        return tuple(x.reshape(clients, self.steps, self.batch, *x.shape[1:]) for x in (inputs, labels))


def _initial(generator: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("scale"):
        return np.ones(shape, np.float32)
    # Convolutions, and what is named weight, are laid out as in torch.nn: [out, in, ...]; the others are [in, out].
    fan_in = int(np.prod(shape[1:])) if len(shape) == 4 or name.endswith("weight") else shape[0]
    deviation = 0.0 if name.endswith("bias") else fan_in**-0.5
    return (generator.standard_normal(shape) * deviation).astype(np.float32)


def cnn_loss(p: Parameters, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = functional.max_pool2d(functional.conv2d(images, p["conv1"], p["conv1_bias"], padding=1).relu(), 2)
    x = functional.max_pool2d(functional.conv2d(x, p["conv2"], p["conv2_bias"], padding=1).relu(), 2)
    return functional.cross_entropy(x.flatten(1) @ p["out"] + p["out_bias"], labels)


def cifar10_loss(p: Parameters, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = functional.conv2d(images.permute(0, 3, 1, 2), p["conv1_weight"], p["conv1_bias"]).relu()
    x = functional.max_pool2d(functional.conv2d(x, p["conv2_weight"], p["conv2_bias"]).relu(), 2)
    x = functional.linear(x.flatten(1), p["hidden_weight"], p["hidden_bias"]).relu()
    return functional.cross_entropy(functional.linear(x, p["out_weight"], p["out_bias"]), labels)


def transformer_loss(p: Parameters, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = functional.embedding(tokens, p["embedding"]) + p["position"]
    batch, length, width = x.shape
    for layer in range(LAYERS):
        scale, bias, qkv, out = (p[f"{layer}.{name}"] for name in ("norm1_scale", "norm1_bias", "qkv", "out"))
        y = functional.layer_norm(x, (width,), scale, bias) @ qkv
        q, k, v = y.view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(batch, length, width) @ out
        scale, bias, up, down = (p[f"{layer}.{name}"] for name in ("norm2_scale", "norm2_bias", "up", "down"))
        x = x + functional.gelu(functional.layer_norm(x, (width,), scale, bias) @ up, approximate="tanh") @ down
    logits = x @ p["head"]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _images(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    images = generator.standard_normal((count, 1, _SIDE, _SIDE)).astype(np.float32)
    return images, generator.integers(0, 10, count)


def _cifar10_images(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    images = generator.standard_normal((count, 32, 32, 3)).astype(np.float32)
    return images, generator.integers(0, 10, count)


def _text(generator: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    text = generator.integers(0, VOCABULARY, (count, CONTEXT + 1))
    return np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])


def _transformer_shapes() -> dict[str, tuple[int, ...]]:
    w = WIDTH
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, w), "position": (CONTEXT, w)}
    for layer in range(LAYERS):
        of_layer = {"norm1_scale": (w,), "norm1_bias": (w,), "qkv": (w, 3 * w), "out": (w, w)}
        of_layer |= {"norm2_scale": (w,), "norm2_bias": (w,), "up": (w, 4 * w), "down": (4 * w, w)}
        shapes |= {f"{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes | {"head": (w, VOCABULARY)}


_CNN_SHAPES = {
    "conv1": (8, 1, 3, 3),
    "conv1_bias": (8,),
    "conv2": (16, 8, 3, 3),
    "conv2_bias": (16,),
    "out": (16 * (_SIDE // 4) ** 2, 10),
    "out_bias": (10,),
}
_CNN = Task("cnn", _CNN_SHAPES, _images, cnn_loss, batch=8)
_CIFAR10_SHAPES = {
    "conv1_weight": (32, 3, 3, 3),
    "conv1_bias": (32,),
    "conv2_weight": (64, 32, 3, 3),
    "conv2_bias": (64,),
    "hidden_weight": (128, 64 * 14**2),
    "hidden_bias": (128,),
    "out_weight": (10, 128),
    "out_bias": (10,),
}
_CIFAR10 = Task("cifar10", _CIFAR10_SHAPES, _cifar10_images, cifar10_loss, batch=10, steps=5, rate=0.1)
_TRANSFORMER = Task("transformer", _transformer_shapes(), _text, transformer_loss, batch=1)
_OF_FOUR = _TRANSFORMER._replace(name="transformer, 4 sequences", batch=4)
TASKS = {task.name: task for task in (_CNN, _CIFAR10, _TRANSFORMER, _OF_FOUR)}


def tensors(value: Any) -> Any:
    """Converts numpy's arrays in a dict or tuple to tensors."""
    if isinstance(value, dict):
        return {name: torch.from_numpy(x) for name, x in value.items()}
    return tuple(torch.from_numpy(x) for x in value)
