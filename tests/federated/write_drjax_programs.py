"""Writes drjax_programs.json: random federated programs and the numbers that DrJAX gives for them.

    python -m tests.federated.write_drjax_programs [--output FILE] [--every N]

from the repository's root, with the packages drjax and jax for CPUs; neither torch nor bagua is needed. What is written
is the same on every machine: numbers are rounded where their last bits differ.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
from pathlib import Path
from typing import Any

import drjax
import jax
import jax.numpy as jnp
import numpy as np

from tests.federated.random_programs import NUM_PROGRAMS, VERSION, Language, Program, draw, generate, run

QUICKLY_COMPILED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
DIGITS = 11  # of the largest number of an array; the others have as many decimals

OPERATIONS = {
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "root": lambda x: jnp.sqrt(1 + x**2),
    "bell": lambda x: jnp.exp(-(x**2)),
    "relu": lambda x: jnp.where(x > 0, x, 0.0),
    "weight": lambda x: 0.5 + jax.nn.sigmoid(x),
    "scale": lambda x, factor: factor * x,
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "ratio": lambda x, y: x / (1 + y**2),
    "matmul": jnp.matmul,
    "outer": jnp.outer,
    "total": lambda x: x.sum(),
    "sum_last": lambda x: x.sum(-1),
    "mean_last": lambda x: x.mean(-1),
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=-1),
    "flat": lambda x: x.reshape(-1),
    "transpose": lambda x: jnp.swapaxes(x, 0, -1),
    "first": lambda x: x[0],
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "cumulate": lambda x: jnp.cumsum(x, axis=0),
    "join": lambda x, y: jnp.concatenate([x, y]),
}


def weighted(tree: Any, weights: jax.Array, mask: list[bool] | None) -> Any:
    """DrJAX wants weights for each leaf; who does not take part has the weight 0, and zeros as values."""
    if mask is not None:
        took_part = jnp.asarray(mask)
        weights = jnp.where(took_part, weights, 0.0)
        tree = jax.tree.map(lambda x: jnp.where(took_part.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0), tree)
    return drjax.reduce_weighted_mean(tree, jax.tree.map(lambda _: weights, tree))


def language() -> Language:
    """Inside of a program: DrJAX puts its verbs in place when one begins."""
    verbs = {
        "broadcast": drjax.broadcast,
        "map": drjax.map_fn,
        "sum": drjax.reduce_sum,
        "mean": drjax.reduce_mean,
        "weighted": weighted,
        "map_sum": lambda function, arguments, chunk_size: drjax.reduce_sum(drjax.map_fn(function, arguments)),
        "map_mean": lambda function, arguments, chunk_size: drjax.reduce_mean(drjax.map_fn(function, arguments)),
    }
    return Language(OPERATIONS, verbs, jax.grad, jax.vmap)


def numbers_of(number: int, program: Program) -> dict[str, list]:
    """What it returns, its gradient, its tangents and its Hessian-vector product."""
    drawn = draw(number, program)
    names = list(drawn.inputs)

    @drjax.program(clients=program["clients"])
    def federated(*inputs: jax.Array) -> list[jax.Array]:
        return run(program, dict(zip(names, inputs, strict=True)), language())

    def with_gradient(*inputs: jax.Array) -> tuple:
        values, pull = jax.vjp(federated, *inputs)
        return values, pull(list(map(jnp.asarray, drawn.cotangents)))

    @functools.partial(jax.jit, compiler_options=QUICKLY_COMPILED)
    def derivatives(inputs: tuple, tangents: tuple) -> tuple:
        (values, slopes), (pushed, product) = jax.jvp(with_gradient, inputs, tangents)
        return values, slopes, pushed, product

    found = derivatives(
        tuple(map(jnp.asarray, drawn.inputs.values())), tuple(map(jnp.asarray, drawn.tangents.values()))
    )
    kinds = ("values", "gradient", "tangents", "product")
    return {kind: [rounded(np.asarray(array)) for array in arrays] for kind, arrays in zip(kinds, found, strict=True)}


def rounded(array: np.ndarray) -> list | float:
    assert array.dtype == np.float64 and np.isfinite(array).all()
    largest = np.abs(array).max()
    decimals = DIGITS - 1 - int(np.floor(np.log10(largest))) if largest > 1e-12 else 12
    return (np.round(array, decimals) + 0.0).tolist()  # no -0.0


def fixture(every: int) -> str:
    """One program on a line."""
    lines = []
    for number in range(0, NUM_PROGRAMS, every):
        program = generate(number)
        lines.append(json.dumps({"program": program, **numbers_of(number, program)}, separators=(",", ":")))
    return f'{{"version":{VERSION},"programs":[\n' + ",\n".join(lines) + "\n]}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("drjax_programs.json"))
    parser.add_argument("--every", type=int, default=1, help="write each N-th program only")
    options = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)  # DrJAX says at each verb that there is no mesh
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", "cpu")
    options.output.write_text(fixture(options.every))
