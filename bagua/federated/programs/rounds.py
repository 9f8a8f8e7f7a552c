"""The messages of a graph: its rounds, each down to the clients and up again, and their bytes.

Nodes are as early as what they need allows: what clients compute for a reduction needs the reductions before it only
through what is broadcast. All reductions of a round travel together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from bagua.errors import InvalidArgument
from bagua.federated.programs import dropouts, messages
from bagua.federated.programs.coded import Coded
from bagua.federated.programs.deltas import Deltas, Sending
from bagua.federated.programs.fixed_point import FixedPoint
from bagua.federated.programs.graph import BROADCAST, EVERYWHERE, REDUCTIONS, SERVER, Graph, Node, Value
from bagua.federated.programs.graph_files import to_bytes


@dataclass
class Round:
    """One exchange.

    Attributes:
        at_server: nodes that the server computes before it.
        down: the broadcasts, each of values that clients cannot make themselves.
        at_clients: nodes that every client computes then, constants too.
        up: the reductions.
        sent_down: what travels down: without constants, and every value once in all rounds, since clients keep it.
    """

    at_server: list[Node] = field(default_factory=list)
    down: list[Node] = field(default_factory=list)
    at_clients: list[Node] = field(default_factory=list)
    up: list[Node] = field(default_factory=list)
    sent_down: list[Value] = field(default_factory=list)

    @property
    def bytes_down(self) -> int:
        """Sends to each client."""
        return sum(value.nbytes for value in self.sent_down)

    @property
    def bytes_up(self) -> int:
        """Receives from each client, in the values' own dtypes."""
        return sum(value.nbytes for node in self.up for value in node.args)


def rounds_of(graph: Graph) -> tuple[list[Round], list[Node]]:
    """The rounds, and what the server computes after the last.

    Raises:
        InvalidArgument: the graph is not over one placement, or returns what clients have.
    """
    if len(graph.placements) != 1:
        raise InvalidArgument(
            f"{graph.name} is over {', '.join(graph.placements) or 'no clients'}, expected one placement: trace the "
            "part that is over one"
        )
    (where,) = graph.placements
    for output in graph.outputs:
        if isinstance(output, Value) and output.placement == where:
            raise InvalidArgument(
                f"{graph.name} returns {output.name}: {output}, which stays at the {where}: reduce it, or drop it"
            )
    stage: dict[Value, int] = dict.fromkeys(graph.inputs, 0)
    rounds: list[Round] = []
    for node in graph.nodes:
        at = max((stage[value] for value in node.inputs), default=0)
        while len(rounds) <= at:
            rounds.append(Round())
        this = rounds[at]
        if node.verb in REDUCTIONS:
            this.up.append(node)
        elif node.verb == BROADCAST:
            this.down.append(node)
        elif node.results_placement in (SERVER, EVERYWHERE):
            this.at_server.append(node)
        if node.verb not in REDUCTIONS and node.results_placement != SERVER:
            this.at_clients.append(node)
        stage.update((result, at + (node.verb in REDUCTIONS)) for result in node.results)
    last: list[Node] = []
    while rounds and not rounds[-1].up:
        last = [*rounds.pop().at_server, *last]
    kept: set[Value] = set()
    for this in rounds:
        needed = dict.fromkeys(value for node in this.down for value in node.args if value.placement == SERVER)
        this.sent_down = [value for value in needed if value not in kept]
        kept.update(needed)
    return rounds, last


class Turn(NamedTuple):
    """Counts how many inputs a client gets in a round, how many nodes it computes, and its outputs, by reduction."""

    inputs: int
    nodes: int
    outputs: tuple[int, ...]


def counts_of(turns: Sequence[Turn]) -> tuple[int, int, int]:
    """Returns how many inputs, nodes and outputs these rounds have together."""
    outputs = sum(sum(turn.outputs) for turn in turns)
    return sum(turn.inputs for turn in turns), sum(turn.nodes for turn in turns), outputs


def client_side(graph: Graph, rounds: Sequence[Round]) -> tuple[Graph, list[Turn]]:
    """Returns what a client computes, without anything that is the server's own.

    Returns:
        A graph whose inputs are the clients' own, then what they are sent round by round; whose nodes, and whose
        outputs, which are parts of reductions, come round by round too. And how many of each a round has.
    """
    placed = [value for value in graph.inputs if value.placement in graph.placements]
    inputs, nodes, outputs, turns = placed, [], [], []
    needed = {value for this in rounds for node in this.up for value in node.args}
    for node in reversed([node for this in rounds for node in this.at_clients]):
        if needed.intersection(node.results):
            needed.update(node.inputs)
    for this in rounds:
        sent = this.sent_down
        own = [node for node in this.at_clients if needed.intersection(node.results)]
        parts = [value for node in this.up for value in node.args]
        turns.append(Turn(len(sent), len(own), tuple(len(node.args) for node in this.up)))
        inputs, nodes, outputs = [*inputs, *sent], [*nodes, *own], [*outputs, *parts]
    targets = {node.target for node in nodes}
    return replace(
        graph,
        inputs=inputs,
        nodes=nodes,
        outputs=outputs,
        structures=None,
        constants={name: tensor for name, tensor in graph.constants.items() if name in targets},
        functions={name: function for name, function in graph.functions.items() if name in targets},
        programs={},
    ), turns


@dataclass(frozen=True)
class Cost:
    """The rounds of a graph, and their bytes to and from each client.

    Attributes:
        rounds: exchanges one after the other.
        bytes_down, bytes_up: of each round.
    """

    bytes_down: tuple[int, ...]
    bytes_up: tuple[int, ...]

    @property
    def rounds(self) -> int:
        return len(self.bytes_up)

    def __str__(self) -> str:
        down, up = sum(self.bytes_down), sum(self.bytes_up)
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} rounds"
        lines = [f"{rounds}, {down} bytes down and {up} bytes up per client"]
        for number, (one_down, one_up) in enumerate(zip(self.bytes_down, self.bytes_up, strict=True)):
            lines.append(f"    round {number}: {one_down} down, {one_up} up")
        return "\n".join(lines)


def cost_of(
    graph: Graph,
    *,
    coding: FixedPoint | Coded | None = None,
    threshold: int | None = None,
    deltas: Deltas | None = None,
) -> Cost:
    """Rounds and bytes of a graph.

    Args:
        coding: the bytes are what ``run_on`` with it sends and gets in all, with the graph and the keys in the first
            round; up from the last client, whose number may have more digits than others'. None: those of the values
            in their own dtypes.
        threshold: as of ``run_on``, with a `coding`: the bytes of a run in which all answer. Those that drop out make
            what the others send a little shorter.
        deltas: as of ``run_on``, with a `coding`: the bytes of the next run with it, if all clients have what the last
            one sent.
    """
    rounds, _ = rounds_of(graph)
    if coding is None:
        if threshold is not None or deltas is not None:
            raise InvalidArgument("a threshold or deltas with values in their own dtypes: give the coding, too")
        return Cost(tuple(one.bytes_down for one in rounds), tuple(one.bytes_up for one in rounds))
    ((_, size),) = graph.placements.items()
    of_clients, turns = client_side(graph, rounds)
    session, key, everyone, last = bytes(16), bytes(32), list(range(size)), size - 1
    sending = None if deltas is None else Sending(deltas, graph, [value for one in rounds for value in one.sent_down])
    of_deltas = None if sending is None else sending.request
    opening = messages.opening(session, to_bytes(of_clients), turns, coding, threshold, of_deltas)
    has_shares = threshold is not None and isinstance(coding, FixedPoint)
    down, up = [], []
    for number, one in enumerate(rounds):
        values = [torch.zeros(value.shape, dtype=value.dtype, device="cpu") for value in one.sent_down]
        if sending is not None:
            values = sending.like(one.sent_down)
        request = messages.round_request(session, number, values, [] if has_shares else [key] * size)
        if sending is not None:
            request["base"] = sending.base
        exchanges = [(request, _answer(one, coding, last))]
        if threshold is not None:
            request["alive"] = everyone
        if number == 0:
            answer = messages.keys(dropouts.like_keys(len(rounds))) if has_shares else messages.key(key)
            if sending is not None and sending.base is not None:
                answer["has"] = True
            exchanges.append((opening, answer))
        if number == 0 and has_shares:
            keys, boxes = dropouts.like_keys(len(rounds)), [dropouts.like_boxes(len(rounds), size, i) for i in everyone]
            request["boxes"] = dict(enumerate(boxes))
            exchanges.append((messages.share(session, [keys] * size), messages.shares(boxes[last], last)))
        if has_shares:
            shares = messages.revealed(dict.fromkeys(everyone, key), last)
            exchanges.append((messages.reveal(session, number, everyone), shares))
        down.append(sum(len(messages.write(request)) for request, _ in exchanges))
        up.append(sum(len(messages.write(answer)) for _, answer in exchanges))
    return Cost(tuple(down), tuple(up))


def _answer(round: Round, coding: FixedPoint | Coded, index: int) -> dict[str, Any]:
    """Returns an answer of a client in a round, as long as any."""
    if isinstance(coding, FixedPoint):
        values = [value for node in round.up for value in node.args]
        numel = sum(math.prod(value.shape) * (1 + value.dtype.is_complex) for value in values)
        return messages.masked(torch.zeros(numel, dtype=torch.int64, device="cpu"), coding, index)
    kinds = coding.messages_of([node.args for node in round.up])
    return messages.in_the_clear([torch.zeros(one.shape, dtype=one.dtype, device="cpu") for one in kinds], index)
