"""Flower (flwr) as a platform: run_on's requests travel as Flower's messages, one Flower round for each exchange.

    app = flower.server_app(lambda platform: federated.run_on(platform, graph, x=x), clients=4)    # at the server
    app = flower.client_app(lambda context: {"y": rows[context.node_config["partition-id"]]})     # at every client

What a client keeps between rounds, its secret key among it, is in the state of its node's context, which Flower does
not send to the server; so each round may be answered by another process. flwr is imported when one of these is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bagua.errors import InvalidArgument
from bagua.federated.programs.nodes import POLL_SECONDS, NodePlatform
from bagua.federated.programs.platform import Client, Platform

_ACTION = "bagua"
_RECORD = "bagua"  # of messages and of the context's state; its one array is _BYTES
_BYTES = "bytes"
# In seconds. What is not answered expires after the wait for it: Flower would report an error instead.
_TTL_BEYOND_TIMEOUT = 1.0


def _flwr() -> tuple[Any, Any, Any]:
    try:
        import flwr.app
        import flwr.clientapp
        import flwr.serverapp
    except ImportError as error:
        raise InvalidArgument(
            f"programs on Flower need the package flwr ({error}): pip install 'bagua[flower]'"
        ) from None
    return flwr.app, flwr.clientapp, flwr.serverapp


def _record(data: bytes) -> Any:
    """Bytes as an array, which Flower sends in pieces where it is large."""
    app = _flwr()[0]
    return app.ArrayRecord({_BYTES: app.Array(dtype="uint8", shape=(len(data),), stype="bytes", data=data)})


def _bytes(records: Any) -> bytes:
    return records[_RECORD][_BYTES].data


class FlowerPlatform(NodePlatform):
    """The nodes of a Flower grid, inside of a ServerApp; they may drop out of a run with a threshold.

    Args:
        grid: that Flower gives the ServerApp.
        clients: how many nodes there are, which are waited for; or the ids of those that take part.
        timeout: in seconds, of the wait for nodes and of each exchange. A node that is only late holds up one exchange
            of a run by it. Flower itself takes a SuperNode that was killed for unreachable after a minute.

    Raises:
        InvalidArgument: there are more nodes than `clients`, so it is open which take part; flwr is not installed.
        DeadlineExceeded: there are fewer after `timeout`.
    """

    framework, at_a_node = "Flower", "SuperNode"

    def __init__(self, grid: Any, clients: int | Sequence[int], *, timeout: float = 600.0) -> None:
        _flwr()
        self._grid = grid
        super().__init__(clients, timeout)

    def _connected(self) -> Sequence[int]:
        return self._grid.get_node_ids()

    def _send(
        self, request: bytes, number: int, nodes: Sequence[int], enough: int
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        app = _flwr()[0]
        messages = [
            app.Message(
                app.RecordDict({_RECORD: _record(request)}),
                node,
                f"{app.MessageType.QUERY}.{_ACTION}",
                group_id=str(number),
                ttl=self._timeout + _TTL_BEYOND_TIMEOUT,
            )
            for node in nodes
        ]
        taken = set(self._grid.push_messages(messages))  # which has given each message its id
        waiting = {one.metadata.message_id: one.metadata.dst_node_id for one in messages}
        errors = {node: "not sent: Flower takes no message for it" for one, node in waiting.items() if one not in taken}
        # An error that Flower itself reports of a node comes from the SuperLink, but replies to the node's message.
        waiting = {one: node for one, node in waiting.items() if one in taken}
        replies: dict[int, bytes] = {}
        deadline = time.monotonic() + self._timeout
        while waiting and len(nodes) - len(errors) >= enough:
            for reply in self._grid.pull_messages(set(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    errors[node] = f"code {reply.error.code}: {reply.error.reason}"
                    continue
                try:
                    replies[node] = _bytes(reply.content)
                except (LookupError, AttributeError):
                    errors[node] = "a reply that client_app does not make"
            if time.monotonic() >= deadline:
                break
            if waiting:
                time.sleep(POLL_SECONDS)
        return replies, errors


def server_app(function: Callable[[Platform], Any], clients: int, *, timeout: float = 600.0) -> Any:
    """A ServerApp that runs programs.

    Args:
        function: what to do on the platform: calls of ``federated.run_on``, and what happens with their results.
        clients, timeout: of FlowerPlatform.

    Returns:
        flwr.serverapp.ServerApp, for `flwr run` or Flower's simulation.
    """
    app = _flwr()[2].ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        function(FlowerPlatform(grid, clients, timeout=timeout))

    return app


def client_app(
    data_of: Callable[[Any], dict[str, Any]],
    functions: Mapping[str, Callable] | None = None,
    *,
    in_the_clear: bool = False,
) -> Any:
    """A ClientApp that answers server_app's programs.

    Args:
        data_of: of a node's context, its own values by the names of the traced functions' arguments, the same in all
            rounds of a run. Called in every round.
        functions: as of ``federated.Client``, those that programs may call here.
        in_the_clear: whether it answers runs with ``Coded``, too, in which the server sees what it sends.

    Returns:
        flwr.clientapp.ClientApp.
    """
    flwr_app, clientapp, _ = _flwr()
    app, make = clientapp.ClientApp(), Client.in_the_clear if in_the_clear else Client

    @app.query(_ACTION)
    def answer(message: Any, context: Any) -> Any:
        data = data_of(context)
        is_known = _RECORD in context.state
        client = Client.restore(_bytes(context.state), functions, **data) if is_known else make(functions, **data)
        reply = client.answer(_bytes(message.content))
        context.state[_RECORD] = _record(client.state())
        return flwr_app.Message(flwr_app.RecordDict({_RECORD: _record(reply)}), reply_to=message)

    return app
