"""Programs where clients are somewhere else: what a platform must offer, and both sides of what is sent.

    graph = federated.trace(torch.func.grad(loss), x, y)
    platform = federated.IsolatedClients([federated.Client(y=row) for row in rows])
    gradient = federated.run_on(platform, graph, x=x)

The server runs the graph's rounds (rounds.py). It sends every client the same request and gets a reply from each: first
the graph, for public keys, then for every round the values that are broadcast, for the clients' parts of the
reductions, masked (secure_sum.py, dropouts.py) or by a codec (coded.py). Clients keep their values from round to round.
All of what is sent are bytes from which nothing is run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bagua.errors import BaguaError, InvalidArgument
from bagua.federated.programs import coded, dropouts, messages, secure_sum
from bagua.federated.programs.coded import Coded
from bagua.federated.programs.deltas import Deltas, Receiving, Sending
from bagua.federated.programs.fixed_point import FixedPoint
from bagua.federated.programs.graph import CHECK_TOTAL, MAP, SERVER, Graph, Node, Value, leaf_name, operator_of
from bagua.federated.programs.graph_files import from_bytes, to_bytes
from bagua.federated.programs.rounds import Round, Turn, client_side, counts_of, rounds_of
from bagua.federated.verbs.reduction import widened
from bagua.federated.verbs.traced import is_drawn

Tree = Any  # a pytree of tensors
logger = logging.getLogger("bagua")


class Platform(ABC):
    """A carrier of bytes between a server and its clients. Implement it for yours.

    At a client, ``federated.Client(...).answer(request)`` is the reply; the client must be the same object, or one
    restored from ``state``, for all requests of a run, and from run to run where it keeps what a codec has lost.

    Attributes:
        bytes_down: sent to each client in the last run.
        bytes_up: received in it from each, the mean over those that replied.
    """

    bytes_down: int = 0
    bytes_up: float = 0.0

    @property
    @abstractmethod
    def num_clients(self) -> int:
        """The number of clients that answer."""

    def begin(self, enough: int) -> None:  # noqa: B027
        """A run begins, in which the replies of `enough` clients are enough. Does nothing, unless overridden.

        A platform that can lose clients lets them drop out of each exchange of the run down to that many.
        """

    @abstractmethod
    def exchange(self, request: bytes) -> Sequence[bytes]:
        """Gives the request to all clients.

        Returns:
            Their replies, one of each, in any order. In a run with a threshold some may be missing.

        Raises:
            Exception: fewer clients replied than are enough; the run ends with it.
        """


class IsolatedClients(Platform):
    """Clients in this process, each of which gets bytes only and sees its own data only.

    Args:
        clients: of the run.
    """

    def __init__(self, clients: Sequence[Client]) -> None:
        self.clients = list(clients)

    @property
    def num_clients(self) -> int:
        return len(self.clients)

    def exchange(self, request: bytes) -> list[bytes]:
        return [client.answer(request) for client in self.clients]


def run_on(
    platform: Platform,
    graph: Graph,
    /,
    *,
    coding: FixedPoint | Coded | None = None,
    threshold: int | None = None,
    deltas: Deltas | None = None,
    **values: Tree,
) -> Tree:
    """Returns what the traced function returns, computed by a server and the platform's clients.

    Sums are of fixed point numbers with masks: they differ from those of the program by ``coding.tolerance(n)`` at
    most, which means are divided by n of. Or they are of a codec's messages, in the clear: the server sees what each
    client sends, and clients refuse it that are not made by ``Client.in_the_clear``. ``platform.bytes_down`` and
    ``bytes_up`` say what has travelled.

    Args:
        platform: that carries what is sent; as many clients as the graph is over.
        graph: over one placement, of ``federated.trace``.
        coding: of the sums; None: FixedPoint(), of 62 bits with 32 behind the point. Coded(...): by a codec.
        threshold: how many clients are enough, more than two thirds, or any number in the clear; the others may drop
            out at any point, for good, on a platform that then returns the replies that came, as Flower's does.
            A sum then is of those whose values came, and a mean is their mean; numbers of clients that the graph has
            computed with, as in the derivative of a mean, stay. With masks it takes an exchange more in all, and one
            per round. None: all must answer.
        deltas: sends changes of the arguments that are broadcast, since the last run with this object.
        values: the server's, by the names of the traced function's arguments.

    Raises:
        InvalidArgument: values that are missing, or of other shapes, another number of clients than the graph's, fewer
            than two with masks, replies that are not one of each client, or fewer than the threshold, a value that is
            out of the range of `coding`, of a dtype that a codec does not encode, or total weights of 0.
    """
    coding = coding or FixedPoint()
    rounds, last = rounds_of(graph)
    ((_, size),) = graph.placements.items()
    if platform.num_clients != size:
        raise InvalidArgument(f"{graph.name} is over {size} clients, but the platform has {platform.num_clients}")
    _refuse_same_numbers(graph)
    if size < 2 and isinstance(coding, FixedPoint):
        raise InvalidArgument(f"{graph.name} is over 1 client: its sums would be that client's values, refused")
    known = _bind(graph, [value for value in graph.inputs if value.placement == SERVER], values, "the server")
    device = _device_of(known)
    session = secrets.token_bytes(16)
    clients_graph, turns = client_side(graph, rounds)
    sending = None if deltas is None else Sending(deltas, graph, [value for one in rounds for value in one.sent_down])
    of_deltas = None if sending is None else sending.request
    opening = messages.opening(session, to_bytes(clients_graph), turns, coding, threshold, of_deltas)
    platform.bytes_down, platform.bytes_up = 0, 0.0
    sums_over: _All
    if isinstance(coding, Coded):
        sums_over = _InTheClear(platform, size, session, coding, threshold, rounds)
    elif threshold is None:
        sums_over = _All(platform, size, session, coding)
    else:
        dropouts.check_threshold(threshold, size)
        sums_over = _AnyOf(platform, size, session, coding, threshold)
    if rounds:  # no client is asked what the server knows
        platform.begin(size if threshold is None else threshold)
        replies = sums_over.open(opening)
        if sending is not None:
            sending.start(replies)
    for number, this in enumerate(rounds):
        for node in this.at_server:
            known.update(zip(node.results, _at_server(graph, node, known), strict=True))
        sent = [known[value] for value in this.sent_down]
        extra: dict[str, Any] = {}
        if sending is not None:
            sent, extra = sending.write(this.sent_down, sent), {"base": sending.base}
        likes = [_like(value, node.verb) for node in this.up for value in node.args]
        found, num_left = sums_over.sums(number, sent, likes, extra)
        sums = [total.to(device) for total in found]
        for node in this.up:
            for result in node.results:
                total = sums.pop(0)
                known[result] = (total / num_left).to(result.dtype) if node.verb == "reduce_mean" else total
    if sending is not None:
        sending.end(session)
    for node in last:
        known.update(zip(node.results, _at_server(graph, node, known), strict=True))
    leaves = [known[output] if isinstance(output, Value) else output for output in graph.outputs]
    return pytree.tree_unflatten(leaves, graph.structures[1])


class _All:
    """Sums over all clients, each of which answers every request."""

    def __init__(self, platform: Platform, size: int, session: bytes, coding: Any) -> None:
        self._platform, self._size, self._session, self._coding = platform, size, session, coding
        self._keys: list[Any] = []

    def open(self, opening: dict[str, Any]) -> list[dict[str, Any]]:
        """Begins the run, and returns the replies."""
        replies = _replies(self._platform, opening, "key", self._size)
        self._keys = [reply["key"] for reply in replies]
        return replies

    def sums(
        self, number: int, sent: Sequence[torch.Tensor], likes: Sequence[torch.Tensor], extra: dict[str, Any]
    ) -> tuple[list[torch.Tensor], int]:
        """Returns the sums of a round, and over how many clients they are; `extra` is said in the request."""
        request = messages.round_request(self._session, number, sent, self._keys) | extra
        masked = [reply["masked"] for reply in _replies(self._platform, request, "masked", self._size)]
        return secure_sum.add_up(self._coding, masked, likes), self._size


class _AnyOf(_All):
    """Sums over those that are left of the clients: see dropouts.py."""

    def __init__(self, platform: Platform, size: int, session: bytes, coding: Any, threshold: int) -> None:
        super().__init__(platform, size, session, coding)
        self._threshold, self._alive = threshold, list(range(size))
        self._boxes: dict[int, list[bytes]] = {}

    def open(self, opening: dict[str, Any]) -> list[dict[str, Any]]:
        replies = [one for one in _exchanged(self._platform, opening) if isinstance(one.get("keys"), list)]
        self._keys = [reply["keys"] for reply in replies]
        self._alive = list(range(len(self._keys)))
        self._check_left("the exchange of keys")
        self._boxes = self._ask(messages.share(self._session, self._keys), "shares", "the exchange of shares")
        return replies

    def sums(
        self, number: int, sent: Sequence[torch.Tensor], likes: Sequence[torch.Tensor], extra: dict[str, Any]
    ) -> tuple[list[torch.Tensor], int]:
        request = messages.round_request(self._session, number, sent, ()) | {"alive": self._alive} | extra
        alive = self._alive
        if number == 0:
            request["boxes"] = self._boxes
        masked = self._ask(request, "masked", f"round {number}")
        survivors = self._alive
        request = messages.reveal(self._session, number, survivors)
        revealed = self._ask(request, "revealed", f"the end of round {number}")
        self._alive = survivors  # one that has not revealed may be there again
        total = dropouts.add_up(
            self._coding, masked, alive, revealed, self._keys, number, self._session, self._threshold, likes
        )
        return total, len(masked)

    def _ask(self, request: dict[str, Any], key: str, where: str) -> dict[int, Any]:
        """Returns what clients that were left reply under the key; they are those that are left."""
        replies = _exchanged(self._platform, request)
        found = {reply["index"]: reply[key] for reply in replies if key in reply and reply.get("index") in self._alive}
        self._alive = sorted(found)
        self._check_left(where)
        return found

    def _check_left(self, where: str) -> None:
        gone = sorted(set(range(len(self._keys))) - set(self._alive))
        if len(self._alive) < self._threshold:
            raise InvalidArgument(
                f"{len(self._alive)} of {self._size} clients are left after {where}, of which {self._threshold} are "
                f"needed; gone: {', '.join(map(str, gone)) or 'those that sent no keys'}"
            )
        if gone:
            logger.info("clients %s have dropped out by %s", gone, where)


class _InTheClear(_AnyOf):
    """Sums of the messages of a codec, over those that are left of the clients; all must be where no threshold is."""

    def __init__(
        self,
        platform: Platform,
        size: int,
        session: bytes,
        coding: Coded,
        threshold: int | None,
        rounds: Sequence[Round],
    ) -> None:
        is_number = isinstance(threshold, int) and not isinstance(threshold, bool)
        if threshold is not None and not (is_number and 1 <= threshold <= size):
            raise InvalidArgument(f"threshold={threshold!r} for {size} clients, expected 1 to all of them")
        super().__init__(platform, size, session, coding, threshold or size)
        self._may_drop_out = threshold is not None
        self._reductions = [[node.args for node in one.up] for one in rounds]
        for reductions in self._reductions:
            coding.messages_of(reductions)  # raises for dtypes that the codec does not encode

    def open(self, opening: dict[str, Any]) -> list[dict[str, Any]]:
        replies = [one for one in _exchanged(self._platform, opening) if isinstance(one.get("key"), bytes)]
        self._keys = [reply["key"] for reply in replies]
        self._alive = list(range(len(self._keys)))
        self._check_left("the exchange of names")
        return replies

    def sums(
        self, number: int, sent: Sequence[torch.Tensor], likes: Sequence[torch.Tensor], extra: dict[str, Any]
    ) -> tuple[list[torch.Tensor], int]:
        request = messages.round_request(self._session, number, sent, self._keys) | extra
        if self._may_drop_out:
            request["alive"] = self._alive
        found = self._ask(request, "coded", f"round {number}")
        return coded.add_up(self._coding, found, self._reductions[number], likes), len(found)


def _exchanged(platform: Platform, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the replies to a request, and counts what has travelled."""
    written = messages.write(request)
    platform.bytes_down += len(written)
    replies = list(platform.exchange(written) or ())
    found = [messages.read(reply) for reply in replies]
    platform.bytes_up += sum(map(len, replies)) / max(1, len(replies))
    return found


def _refuse_same_numbers(graph: Graph) -> None:
    """Refuses maps whose clients are to draw the same random numbers: each draws its own where it is."""
    for node in graph.nodes:
        if node.verb == MAP and node.randomness == "same" and _draws(graph.functions[node.target]):
            raise InvalidArgument(
                f'the client function {node.target} draws random numbers, the "same" at all clients, which are not in '
                "one process: draw them at the server and federated.broadcast them"
            )


def _draws(function: Graph) -> bool:
    operators = [node for node in function.nodes if not node.verb and node.target not in function.constants]
    return any(is_drawn(dataclasses.replace(node, target=operator_of(node.target))) for node in operators) or any(
        map(_draws, function.functions.values())
    )


# The keys of requests.
_CONTENT = {
    "open": {"graph", "turns", "session", "coding"},
    "share": {"session", "keys"},
    "round": {"number", "session", "values"},
    "reveal": {"number", "session", "survivors"},
}


def _device_of(known: dict[Value, torch.Tensor]) -> torch.device:
    """The device on which a side computes: that of its own values. What it sends is on the CPU."""
    return next((tensor.device for tensor in known.values()), torch.device("cpu"))


def _like(value: Value, verb: str) -> torch.Tensor:
    like = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return widened(like) if verb == "reduce_mean" else like


def _replies(platform: Platform, request: dict[str, Any], key: str, size: int) -> list[dict[str, Any]]:
    """Returns the reply of each client, which has that key.

    Raises:
        InvalidArgument: it is not one reply of each client.
    """
    replies = _exchanged(platform, request)
    if len(replies) != size or any(key not in reply for reply in replies):
        raise InvalidArgument(
            f"{len(replies)} replies, of which {sum(key in reply for reply in replies)} have a {key}: expected one of "
            f"each of {size} clients, since no sum can be had without all"
        )
    if key == "key":
        odd = next((i for i, one in enumerate(replies) if not isinstance(one[key], bytes) or len(one[key]) != 32), None)
        if odd is not None:
            raise InvalidArgument(f"reply {odd} has the key {replies[odd][key]!r}, expected 32 bytes")
    if key == "masked":
        found = [reply.get("index", -1) for reply in replies]
        if sorted(map(str, found)) != sorted(map(str, range(size))):
            raise InvalidArgument(f"replies of the clients {found}, expected one of each of {size}")
    return replies


def _at_server(graph: Graph, node: Node, known: dict[Value, Any]) -> Sequence[torch.Tensor]:
    if node.target == CHECK_TOTAL:
        if any(bool((known[value] == 0).any()) for value in node.args):
            raise InvalidArgument("the weights of the clients that take part add up to 0, so there is no mean")
        return [known[value] for value in node.args]
    return graph.compute_operator(node, known, lambda name: 1)


class Client:
    """One client of a run, and of the runs after it.

    It answers by masked values only, whatever a server asks for, unless it is made by ``Client.in_the_clear``.

    From run to run it keeps what codecs have lost of its values, in float32, by round and reduction, and the server's
    values that changes are of (``Deltas``). So give a client the same object, or its restored ``state``, in all runs.
    What is lost is of the last program whose tensors it has sent by a codec. Traced again with other constants, such as
    a learning rate, it is the same program; with another name, other operators or shapes it is another one.

    Args:
        functions: by name, those that graphs may call here: the functions of ``map_fn(vectorize=False)``. No other code
            of a graph is run.
        data: its own values, by the names of the traced function's arguments, without the clients' axis.
    """

    def __init__(self, functions: Mapping[str, Callable] | None = None, /, **data: Tree) -> None:
        self._functions = functions or {}
        self._data = data
        self._graph: Graph | None = None
        self._is_in_the_clear = False
        self._residuals: dict[str, dict[str, torch.Tensor]] = {}  # of one program, by round and message
        self._received = Receiving()

    @classmethod
    def in_the_clear(cls, functions: Mapping[str, Callable] | None = None, /, **data: Tree) -> Client:
        """A client that answers runs with ``Coded``, too: the server sees what it sends there.

        Args:
            functions, data: as of ``Client``.
        """
        client = cls(functions, **data)
        client._is_in_the_clear = True
        return client

    def state(self) -> bytes:
        """Returns what ``restore`` needs to answer the next request of a run, without the data.

        It has the client's secret key and values: it must not leave the client. After the last round it is of no run,
        and has what codecs have lost, for the next one.
        A client is restored from its newest state only, for one that answers a round twice uses its masks twice.
        """
        if self._graph is None or (self._next == len(self._turns) and not self._must_reveal()):
            return self._written(None)
        _, done, sent = counts_of(self._turns[: self._next])
        needed = {value for node in self._graph.nodes[done:] for value in node.inputs} | set(self._graph.outputs[sent:])
        needed -= set(self._own_values(self._graph))
        run = {
            "graph": self._graph_bytes,
            "turns": list(map(tuple, self._turns)),
            "session": self._session,
            "next": self._next,
            "coding": dataclasses.astuple(self._sum.coding),
            "survives": isinstance(self._sum, dropouts.Member),
            "deltas": self._deltas,
            "sum": self._sum.state(),
            "known": {
                number: self._known[value]
                for value, number in self._graph.numbers().items()
                if value in needed and value in self._known
            },
        }
        return self._written(run)

    def _written(self, run: dict[str, Any] | None) -> bytes:
        kept = {"run": run, "residuals": self._residuals, "received": self._received.state()}
        return messages.write({**kept, "in_the_clear": self._is_in_the_clear})

    def _must_reveal(self) -> bool:
        return isinstance(self._sum, dropouts.Member) and not self._sum.has_ended(len(self._turns))

    @classmethod
    def restore(cls, state: bytes, functions: Mapping[str, Callable] | None = None, /, **data: Tree) -> Client:
        """The client of which this is the state.

        Args:
            state: of ``state()``, kept where no other reads it.
            functions, data: as before.
        """
        client = cls(functions, **data)
        kept = messages.read(state)
        client._residuals, run, client._is_in_the_clear = kept["residuals"], kept["run"], kept["in_the_clear"]
        client._received = Receiving.restore(kept["received"])
        if run is not None:
            client._begin(run)
            client._next = run["next"]
            coding = messages.coding_of(run)
            if isinstance(coding, Coded):
                client._sum = coded.Sender.restore(coding, run["sum"])
            else:
                side = dropouts.Member if run["survives"] else secure_sum.SecureSum
                client._sum = side.restore(coding, run["sum"])
            values = list(client._graph.numbers())
            known = {values[number]: tensor.to(client._device) for number, tensor in run["known"].items()}
            client._known.update(known)
        return client

    def answer(self, request: bytes) -> bytes:
        """The reply to a request of run_on.

        Raises:
            InvalidArgument: it is none that run_on sends, comes out of turn, or is for values in the clear, the graph
                needs data that this client does not have, there are fewer than two clients, a value is out of the range
                of a sum, or the graph cannot be computed on the data. Platforms may tell the server what an error says,
                so it has no value; what raised it is its cause.
        """
        try:
            return messages.write(self._reply(messages.read(request)))
        except BaguaError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
            raise InvalidArgument(
                f"a message that run_on does not send: it raised {type(error).__name__}, this error's cause"
            ) from error

    def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        if not _CONTENT.get(message.get("what"), {""}) <= message.keys():
            raise InvalidArgument(f"a message with {', '.join(map(str, message)) or 'nothing'}: none that run_on sends")
        if message["what"] == "open":
            reply = self._open(message)
            if self._deltas is not None and self._deltas["base"] is not None:
                reply["has"] = self._deltas["base"] == self._received.run
            return reply
        if self._graph is None or message["session"] != self._session:
            raise InvalidArgument(f"{message['what']} of another run: a client answers one run at a time")
        side = self._sum
        if isinstance(side, coded.Sender) and message["what"] == "round" and message["number"] == 0:
            side.join(message.get("keys", []))
        if message["what"] == "round" and side.index in message.get("alive", [side.index]):
            return self._round(message)
        if not isinstance(side, dropouts.Member) and "alive" not in message:
            raise InvalidArgument(f"{message['what']} in a run whose clients must all answer")
        if message["what"] == "share" and isinstance(side, dropouts.Member):
            shares = side.share(message["keys"], self._session)
            return messages.shares(shares, side.index)
        if message["what"] == "reveal" and isinstance(side, dropouts.Member) and side.index in message["survivors"]:
            of_clients = side.reveal(message["number"], message["survivors"])
            return messages.revealed(of_clients, side.index)
        return {"index": side.index}  # it counts as one that has dropped out

    def _open(self, message: dict[str, Any]) -> dict[str, Any]:
        coding = messages.coding_of(message)
        if isinstance(coding, Coded) and not self._is_in_the_clear:
            raise InvalidArgument(
                f"a run with {coding}, in which the server sees what each client sends, but this client sends masked "
                "values only: make it by Client.in_the_clear(...), or by in_the_clear=True on Flower and NVFlare"
            )
        self._begin(message)
        self._received.begin()
        self._sum: secure_sum.SecureSum | dropouts.Member | coded.Sender
        if isinstance(coding, Coded):
            self._sum = coded.Sender(coding)
            return messages.key(self._sum.name)
        if "threshold" in message:
            self._sum = dropouts.Member(coding, len(self._turns), message["threshold"])
            return messages.keys(self._sum.public_keys)
        self._sum = secure_sum.SecureSum(coding)
        return messages.key(self._sum.public_key)

    def _begin(self, run: dict[str, Any]) -> None:
        graph, turns = from_bytes(run["graph"]), [Turn(*numbers) for numbers in run["turns"]]
        graph.install(self._functions)
        ((_, size),) = graph.placements.items()
        totals = counts_of(turns)
        num_sent = sum(value.placement == SERVER for value in graph.inputs)
        if totals != (num_sent, len(graph.nodes), len(graph.outputs)):
            raise InvalidArgument(f"rounds of {totals} inputs, nodes and outputs, which {graph.name} does not have")
        own = self._own_values(graph)
        inputs, outputs = [f"{value.name}: {value}" for value in graph.inputs], list(map(str, graph.outputs))
        operators = [node.target for one in (graph, *graph.functions.values()) for node in one.nodes]
        program = repr((graph.name, inputs, operators, outputs, [turn.outputs for turn in turns]))
        self._program = hashlib.sha256(program.encode()).hexdigest()
        self._graph_bytes, self._graph, self._turns, self._num_clients = run["graph"], graph, turns, size
        self._session, self._next, self._deltas = run["session"], 0, run.get("deltas")
        self._known: dict[Value, torch.Tensor] = dict(own)
        self._device = _device_of(self._known)

    def _own_values(self, graph: Graph) -> dict[Value, torch.Tensor]:
        ((where, _),) = graph.placements.items()
        placed = [value for value in graph.inputs if value.placement == where]
        return {value: leaf[None] for value, leaf in _bind(graph, placed, self._data, "a client").items()}

    def _round(self, message: dict[str, Any]) -> dict[str, Any]:
        graph, number = self._graph, message["number"]
        if graph is None or number != self._next or number >= len(self._turns):
            raise InvalidArgument(
                f"round {number} out of turn: a client answers each round of a run once, in their order"
            )
        self._next += 1
        if number == 0 and isinstance(self._sum, dropouts.Member):
            self._sum.receive(message.get("boxes", {}))
        elif number == 0 and isinstance(self._sum, secure_sum.SecureSum):
            keys = message.get("keys", [])
            if len(keys) != self._num_clients:
                raise InvalidArgument(f"{len(keys)} clients take part in a program over {self._num_clients}")
            self._sum.agree_on_seeds(keys, self._session)
        inputs, nodes, outputs = counts_of(self._turns[:number])
        turn = self._turns[number]
        sent = [value for value in graph.inputs if value.placement == SERVER][inputs:][: turn.inputs]
        if len(message["values"]) != len(sent):
            raise InvalidArgument(f"round {number} with {len(message['values'])} values, expected {len(sent)}")
        given = message["values"]
        if self._deltas is not None:
            given = self._received.read(self._deltas, message["base"], self._session, inputs, sent, given)
        self._known.update(zip(sent, (value.to(self._device) for value in given), strict=True))
        for node in graph.nodes[nodes:][: turn.nodes]:
            self._known.update(zip(node.results, self._compute(graph, node), strict=True))
        # A client sends parts of sums, masked or in a codec.
        parts = [self._known[value][0] for value in graph.outputs[outputs:][: sum(turn.outputs)]]
        side = self._sum
        if isinstance(side, coded.Sender):
            residuals = self._residuals.get(self._program, {})
            encoded = side.encode(parts, turn.outputs, number, residuals)
            if residuals:
                self._residuals = {self._program: residuals}
            return messages.in_the_clear(encoded, side.index)
        if isinstance(side, dropouts.Member):
            return messages.masked(side.mask(parts, number, message["alive"]), side.coding, side.index)
        return messages.masked(side.mask(parts, number), side.coding, side.index)

    def _compute(self, graph: Graph, node: Node) -> Sequence[torch.Tensor]:
        try:
            return self._results(graph, node)
        except Exception as error:  # torch's may say values, such as a label that is none of the classes
            raise InvalidArgument(
                f"{node.title} of {graph.name} raised {type(error).__name__} on a client's data, this error's cause"
            ) from error

    def _results(self, graph: Graph, node: Node) -> Sequence[torch.Tensor]:
        """Computes a node at one client, whose axis has one element."""
        if node.verb == MAP:
            function = graph.functions[node.target].as_client_function()
            return [result[None] for result in function(*(self._known[value][0] for value in node.args))]
        if node.verb:
            return [self._known[value][None] for value in node.args]
        return graph.compute_operator(node, self._known, lambda name: 1)


def _bind(graph: Graph, inputs: Sequence[Value], given: dict[str, Tree], whose: str) -> dict[Value, torch.Tensor]:
    """The inputs' tensors, which are found by name."""
    leaves: dict[str, Any] = {}
    bound: dict[Value, torch.Tensor] = {}
    for name, tree in given.items():
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            leaves[leaf_name(name, path)] = leaf
    for value in inputs:
        leaf = leaves.pop(value.name, None)
        if not isinstance(leaf, torch.Tensor) or tuple(leaf.shape) != value.shape or leaf.dtype != value.dtype:
            got = "None" if leaf is None else type(leaf).__name__
            if isinstance(leaf, torch.Tensor):
                got = f"{leaf.dtype} of shape {list(leaf.shape)}"
            raise InvalidArgument(f"{graph.name} needs of {whose} {value.name}: {value}, but got {got}")
        bound[value] = leaf
    if leaves:
        known = ", ".join(value.name for value in inputs) or "nothing"
        raise InvalidArgument(f"{graph.name} takes no {next(iter(leaves))} of {whose}, only {known}")
    return bound
