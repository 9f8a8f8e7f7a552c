"""The losses of tasks.py in JAX, for DrJAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.federated.tasks import HEADS, LAYERS, WIDTH

Parameters = dict[str, Any]


def _cross_entropy(logits: Any, labels: Any) -> Any:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen.mean()


def cnn_loss(p: Parameters, images: Any, labels: Any) -> Any:
    x = images
    for name in ("conv1", "conv2"):
        x = lax.conv_general_dilated(x, p[name], (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
        x = jax.nn.relu(x + p[f"{name}_bias"][:, None, None])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return _cross_entropy(x.reshape(len(x), -1) @ p["out"] + p["out_bias"], labels)


def _layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def transformer_loss(p: Parameters, tokens: Any, labels: Any) -> Any:
    x = p["embedding"][tokens] + p["position"]
    batch, length, width = x.shape
    hidden = ~jnp.tril(jnp.ones((length, length), bool))
    for layer in range(LAYERS):
        y = _layer_norm(x, p[f"{layer}.norm1_scale"], p[f"{layer}.norm1_bias"]) @ p[f"{layer}.qkv"]
        q, k, v = jnp.moveaxis(y.reshape(batch, length, 3, HEADS, width // HEADS), (2, 3), (0, 2))
        scores = jnp.where(hidden, -jnp.inf, q @ k.swapaxes(-1, -2) * (WIDTH // HEADS) ** -0.5)
        mixed = jax.nn.softmax(scores) @ v
        x = x + mixed.swapaxes(1, 2).reshape(batch, length, width) @ p[f"{layer}.out"]
        y = _layer_norm(x, p[f"{layer}.norm2_scale"], p[f"{layer}.norm2_bias"]) @ p[f"{layer}.up"]
        x = x + jax.nn.gelu(y) @ p[f"{layer}.down"]
    return _cross_entropy(x @ p["head"], labels)


LOSSES = {"cnn": cnn_loss, "transformer": transformer_loss, "transformer, 4 sequences": transformer_loss}
