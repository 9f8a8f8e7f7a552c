"""Random numbers that client functions draw from torch's own generators: `randomness` of map_fn and map_reduce.

"different": torch.func.vmap draws for all of this rank's clients at once, and the ranks have mostly the same seed. So
each draws from a seed of its own: what the CPU's generator gives next, and the rank. Afterwards the generators of all
ranks are one number further, however many clients each holds. Neither holds of graphs of torch.compile and make_fx,
which keep no seed: they draw from the generator as it is.
"same": every chunk of clients draws the same.
What runs again for a derivative draws what it drew before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from bagua.distributed.devices import seeded
from bagua.errors import InvalidArgument
from bagua.federated.verbs.placement import Placement

Result = TypeVar("Result")


def seed_of(*parts: int | str) -> int:
    """A seed from 0 to 2^63 - 1 that depends on all parts and on their order.

    Example:
        >>> seed_of(1, "shuffle", 7) == seed_of(1, "shuffle", 7) != seed_of(7, "shuffle", 1)
        True
    """
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, (int, str)):
            raise InvalidArgument(f"seed of {part!r}, a {type(part).__name__}, expected integers and strings")
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw_for_rank(
    clients: Placement, randomness: str, tensors: Iterable[torch.Tensor], compute: Callable[[], Result]
) -> Result:
    """The result of `compute`, which draws for this rank's clients what no other rank does.

    Args:
        tensors: on whose devices it draws, besides the CPU.
    """
    if randomness != "different" or not clients.is_distributed:
        return compute()
    return Draws(clients, randomness).run(tensors, compute)


class Draws:
    """Lets client functions draw, and draw the same when they run again for derivatives."""

    def __init__(self, clients: Placement, randomness: str) -> None:
        self._clients = clients
        self._randomness = randomness
        self._seed: int | None = None  # of this rank
        self._put_back: Callable[[], None] | None = None  # the state in which the first run begins

    def run(self, tensors: Iterable[torch.Tensor], compute: Callable[[], Result]) -> Result:
        """The result of `compute`, as draw_for_rank."""
        if self._randomness == "error" or torch.compiler.is_compiling() or _has_no_values():
            return compute()
        tensors = list(tensors)
        if self._randomness == "different" and self._clients.is_distributed:
            if self._seed is None:
                with temporarily_clear_interpreter_stack():  # one number for a batch of programs, too
                    drawn = int(torch.randint(2**62, (), device="cpu"))
                self._seed = seed_of(drawn, self._clients.group.rank)
            with seeded(self._seed, {tensor.device for tensor in tensors}):
                return compute()
        if self._put_back is None:
            self._put_back = rewind(tensors)
            return compute()
        with as_if_not_drawn(tensors):
            self._put_back()
            return compute()


@contextmanager
def as_if_not_drawn(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Puts the generators of the CPU and of the tensors' devices back to where they are now, at the end."""
    put_back = rewind(tensors)
    try:
        yield
    finally:
        put_back()


_MODES = tuple(getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY"))


def _has_no_values() -> bool:
    """Returns True if a graph is made, or shapes alone are computed."""
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in _MODES)


def rewind(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Returns a function that puts the generators of the CPU and of the tensors' devices back to where they are now."""
    of_cpu = torch.get_rng_state()
    modules = {x.device: torch.get_device_module(x.device) for x in tensors if not x.is_cpu}
    of_devices = {device: module.get_rng_state(device) for device, module in modules.items()}

    def put_back() -> None:
        torch.set_rng_state(of_cpu)
        for device, state in of_devices.items():
            modules[device].set_rng_state(state, device)

    return put_back
