"""Broadcasts of changes: the server sends by how much its values differ from what the clients have, by a codec.

The server keeps what the clients have, so that what one message loses is in the next one, and errors do not add up. A
change is of use only to clients that have all the messages before it: where one of them has not, all get the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bagua import codecs
from bagua.errors import InvalidArgument
from bagua.federated.programs.coded import is_coded
from bagua.federated.programs.graph import Graph, Value
from bagua.federated.verbs.operators import count
from bagua.federated.verbs.reduction import widened

Tree = Any  # a pytree of tensors


class Deltas:
    """Sends the server's values to clients as changes, by one of our codecs.

    Give one object to all runs of a platform, ``run_on(..., deltas=deltas)``. The first run sends whole values, and so
    does one in which some client does not have what the last run sent: a new one, or one that had dropped out. Clients
    compute with what they have, the server with its own values. In a ``Simulation`` call ``send`` before the broadcast.

    What is sent so are the arguments of the traced function that are broadcast as they are: floating tensors. Integers,
    numbers ``[]`` and what the server computes travel as they are.

    Args:
        codec: its name with options, such as "topk:k=64"; see bagua.codecs.

    Raises:
        InvalidArgument: no such codec, or one with which what the clients have would grow away from what is sent.

    Example:
        >>> import torch
        >>> from bagua import federated
        >>> y = torch.randn(2, 3000)
        >>> @federated.program(clients=2)
        ... def gradient(x, y):
        ...     return federated.reduce_mean(federated.map_fn(lambda x, y: x - y, (federated.broadcast(x), y)))
        >>> graph = federated.trace(gradient, y[0], y)
        >>> platform = federated.IsolatedClients([federated.Client(y=row) for row in y])
        >>> x, deltas, down = torch.zeros(3000), federated.Deltas("minmax_uint8"), []
        >>> for _ in range(3):
        ...     x = x - 0.1 * federated.run_on(platform, graph, deltas=deltas, x=x)
        ...     down.append(platform.bytes_down)
        >>> down[0] - down[1] > 8000, down[1] == down[2]
        (True, True)
    """

    def __init__(self, codec: str) -> None:
        codecs.get(codec).check_error_feedback(True)  # a change has in it what the messages before it have lost
        self.codec = codec
        self._run: bytes | None = None  # the session in which the clients got what they have
        self._values: dict[str, torch.Tensor] = {}  # float32, by name

    def init(self, like: Tree) -> Tree:
        """The state of ``send`` before the first round, in which no client has anything."""
        values = pytree.tree_map(lambda leaf: torch.zeros_like(widened(leaf), device="cpu"), like)
        return {"values": values, "clients": torch.zeros(0, dtype=torch.int64, device="cpu")}

    def send(self, value: Tree, state: Tree, clients: torch.Tensor) -> tuple[Tree, Tree]:
        """Returns what the clients have after the message, to be broadcast, and the state; outside of programs.

        All ranks compute it alike: what codecs draw that round at random is from torch's generator, which a
        ``Simulation`` seeds. A message is of use to clients that got the one before: where not all of them did, the
        values are sent as they are. A client that drops out does so after it has got the message; on a platform it may
        have missed it. ``federated.record`` counts the messages in place of what is broadcast.

        Not with Poisson cohorts and a ``privacy.Budget``: the clients that were drawn decide whether all train from
        the exact values or from those of a message, so a client changes what the others send, for which the budget does
        not account.

        Args:
            value: a pytree of tensors of the server.
            state: of ``init`` or of the round before.
            clients: int64, of all ranks, such as ``round.cohort``.
        """
        has_all = set(clients.tolist()) <= set(state["clients"].tolist())
        leaves, structure = pytree.tree_flatten(value)
        sent, kept = [], []
        for leaf, old in zip(leaves, structure.flatten_up_to(state["values"]), strict=True):
            if has_all and is_coded(self.codec, leaf):
                message, new = _change(self.codec, leaf, old)
                count(down=message.numel() - leaf.nbytes)
            else:
                new = widened(leaf.detach().cpu())
            kept.append(new)
            sent.append(new.to(leaf.dtype).to(leaf.device))
        state = {"values": structure.unflatten(kept), "clients": clients.detach().cpu().clone()}
        return structure.unflatten(sent), state


def _change(codec: str, value: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the message, and what clients have that had `old` before it, float32."""
    change = widened(value.detach().cpu()) - old
    message = codecs.get(codec).encode(change.reshape(-1).contiguous())
    new = moved(codec, message, old)
    if not new.isfinite().all():
        raise InvalidArgument(
            f"a value that is to be sent as a change by the codec {codec!r} is not finite, or is not in its range"
        )
    return message, new


def moved(codec: str, message: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Returns what clients have after the message that had `old` before it."""
    return old + codecs.get(codec).decode(message, old.numel(), torch.float32).reshape(old.shape)


def _known(values: dict[str, torch.Tensor], base: bytes | None, value: Value) -> torch.Tensor | None:
    """Returns what is known of a value on both sides; None: it is sent as it is."""
    known = None if base is None else values.get(value.name)
    return known if known is not None and tuple(known.shape) == tuple(value.shape) else None


class Sending:
    """The server's side of one run.

    Attributes:
        at: the values that are sent as changes, among all that are sent in the run.
        base: the run whose values the clients need to have; None: whole values are sent.
    """

    def __init__(self, deltas: Deltas, graph: Graph, sent_down: Sequence[Value]) -> None:
        own = set(graph.inputs)
        self._deltas = deltas
        self._new: dict[str, torch.Tensor] = {}
        self.at = [i for i, value in enumerate(sent_down) if value in own and is_coded(deltas.codec, value)]
        self._chosen = {sent_down[i] for i in self.at}
        self.base = deltas._run if self.at else None

    @property
    def request(self) -> dict[str, Any]:
        """Returns what the opening says; to a `base` clients answer whether they have its values."""
        return {"codec": self._deltas.codec, "at": self.at, "base": self.base}

    def start(self, replies: Sequence[dict[str, Any]]) -> None:
        """Decides for whole values unless all clients say that they have the base."""
        if not all(reply.get("has") is True for reply in replies):
            self.base = None

    def write(self, values: Sequence[Value], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns what is sent of the values of a round."""
        sent = []
        for value, tensor in zip(values, tensors, strict=True):
            old = _known(self._deltas._values, self.base, value)
            if value in self._chosen and old is None:
                self._new[value.name] = widened(tensor.detach().cpu())
            elif value in self._chosen:
                tensor, self._new[value.name] = _change(self._deltas.codec, tensor, old)
            sent.append(tensor)
        return sent

    def like(self, values: Sequence[Value]) -> list[torch.Tensor]:
        """Returns tensors as ``write`` sends of these values."""
        codec, found = codecs.get(self._deltas.codec), []
        for value in values:
            shape, dtype = value.shape, value.dtype
            if value in self._chosen and _known(self._deltas._values, self.base, value) is not None:
                shape, dtype = (codec.wire_bytes(torch.Size(shape).numel(), torch.float32),), torch.uint8
            found.append(torch.zeros(shape, dtype=dtype, device="cpu"))
        return found

    def end(self, session: bytes) -> None:
        """Keeps what the clients have after the run."""
        if self.at:
            old = {} if self.base is None else self._deltas._values
            self._deltas._run, self._deltas._values = session, {**old, **self._new}


class Receiving:
    """A client's side: what it has of the server's values from run to run."""

    def __init__(self, run: bytes | None = None, values: dict[str, torch.Tensor] | None = None) -> None:
        self.run, self.values = run, values or {}
        self._new: dict[str, torch.Tensor] = {}

    def state(self) -> dict[str, Any]:
        """Plain values for ``restore``."""
        return {"run": self.run, "values": self.values, "new": self._new}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Receiving:
        """The same side again."""
        restored = cls(state["run"], state["values"])
        restored._new = state["new"]
        return restored

    def begin(self) -> None:
        """Forgets what a run that did not end has sent."""
        self._new = {}

    def read(
        self,
        request: dict[str, Any],
        base: bytes | None,
        session: bytes,
        begin: int,
        values: Sequence[Value],
        sent: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Returns the values of a round.

        Args:
            request: ``Sending.request``.
            base: the run of whose values these are changes; None: whole values.
            session: of the run.
            begin: how many values were sent in the rounds before.

        Raises:
            InvalidArgument: the server sends changes of values that this client does not have.
        """
        places = [at - begin for at in request["at"] if begin <= at < begin + len(values)]
        if not places:
            return list(sent)
        if base is not None and base != self.run:
            raise InvalidArgument(
                "changes of values that this client does not have, since it has missed a message: it needs whole values"
            )
        found = list(sent)
        for place in places:
            old = _known(self.values, base, values[place])
            new = widened(sent[place]) if old is None else moved(request["codec"], sent[place], old)
            self._new[values[place].name], found[place] = new, new.to(values[place].dtype)
        if len(self._new) == len(request["at"]):  # all of them are there, not before
            self.values = {**({} if base is None else self.values), **self._new}
            self.run, self._new = session, {}
        return found
