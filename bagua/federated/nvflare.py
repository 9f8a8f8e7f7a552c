"""NVFlare as a platform: run_on's requests travel as tasks of a job, one for each exchange.

    class Server(nvflare.ServerController):  # a Controller, the workflow of the job's server
        def run(self, platform):
            print(federated.run_on(platform, graph, x=x))

    class Site(nvflare.ClientExecutor):  # an Executor, for the tasks of all names
        def data_of(self, fl_ctx):
            return {"y": rows[fl_ctx.get_identity_name()]}

A job names both classes by their modules, which its sites can import. A client's secret key and values stay in its
process, which lives as long as the job. It needs the package nvflare: pip install 'bagua[nvflare]'.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from bagua.errors import Aborted, BaguaError
from bagua.federated.programs.nodes import NodePlatform
from bagua.federated.programs.platform import Client, Platform

_TASK = "bagua"
_BYTES, _ERROR = "bytes", "error"  # keys of what travels


class NVFlarePlatform(NodePlatform):
    """The clients of an NVFlare job, by their names; they may drop out of a run with a threshold.

    Args:
        controller: of the job, which runs.
        fl_ctx, abort_signal: of its ``control_flow``.
        clients: how many there are, which are waited for; or the names of those that take part.
        timeout: in seconds, of the wait for clients and of each exchange; NVFlare rounds it up to whole ones.

    Raises:
        InvalidArgument: there are more than `clients`, so it is open which take part.
        DeadlineExceeded: there are fewer after `timeout`.
    """

    framework, at_a_node = "NVFlare", "client"

    def __init__(
        self,
        controller: Controller,
        fl_ctx: FLContext,
        abort_signal: Signal,
        clients: int | Sequence[str],
        *,
        timeout: float = 600.0,
    ) -> None:
        self._controller, self._fl_ctx, self._abort_signal = controller, fl_ctx, abort_signal
        super().__init__(clients, timeout)

    def _connected(self) -> Sequence[str]:
        return [client.name for client in self._fl_ctx.get_engine().get_clients()]

    def _send(
        self, request: bytes, number: int, nodes: Sequence[str], enough: int
    ) -> tuple[dict[str, bytes], dict[str, str]]:
        replies: dict[str, bytes] = {}
        errors: dict[str, str] = {}

        def take(client_task: ClientTask, fl_ctx: FLContext) -> None:
            result = client_task.result
            if result.get_return_code() == ReturnCode.OK and _BYTES in result:
                replies[client_task.client.name] = result[_BYTES]
            else:
                errors[client_task.client.name] = f"{result.get_return_code()}: {result.get(_ERROR, 'see its log')}"
            client_task.result = None
            if len(nodes) - len(errors) < enough:
                self._controller.cancel_task(task)

        task = Task(_TASK, Shareable({_BYTES: request}), timeout=math.ceil(self._timeout), result_received_cb=take)
        self._controller.broadcast_and_wait(
            task, self._fl_ctx, list(nodes), min_responses=len(nodes), abort_signal=self._abort_signal
        )
        if self._abort_signal.triggered:
            raise Aborted(f"NVFlare ends the job, in exchange {number} of {len(nodes)} clients")
        return dict(replies), dict(errors)


class ServerController(Controller):
    """The workflow of a job's server: derive from it, and define ``run``.

    Args:
        clients, timeout: of NVFlarePlatform.
    """

    def __init__(self, clients: int | Sequence[str], timeout: float = 600.0) -> None:
        super().__init__()
        self.clients, self.timeout = clients, timeout  # a job's file has them under these names

    @abstractmethod
    def run(self, platform: Platform) -> None:
        """Calls ``federated.run_on`` on the platform, and uses the results. Errors end the job."""

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Does nothing: all is in ``run``."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        self.run(NVFlarePlatform(self, fl_ctx, abort_signal, self.clients, timeout=self.timeout))

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Does nothing: nothing is open."""

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drops the reply of a client that was late."""


class ClientExecutor(Executor):
    """Answers the tasks at a client: derive from it, and define ``data_of``.

    Attributes:
        functions: as of ``federated.Client``, those that programs may call here.
        in_the_clear: whether it answers runs with ``Coded``, too, in which the server sees what it sends.
    """

    functions: Mapping[str, Callable] = MappingProxyType({})
    in_the_clear = False

    def __init__(self) -> None:
        super().__init__()
        self._client: Client | None = None

    @abstractmethod
    def data_of(self, fl_ctx: FLContext) -> dict[str, Any]:
        """Returns the client's own values by the names of the traced functions' arguments. Called once in a job."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        try:
            if self._client is None:
                make = Client.in_the_clear if self.in_the_clear else Client
                self._client = make(self.functions, **self.data_of(fl_ctx))
            return Shareable({_BYTES: self._client.answer(shareable[_BYTES])})
        except Exception as error:
            self.log_exception(fl_ctx, f"the client failed: {type(error).__name__}")
            reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
            # Only errors of bagua have texts without values.
            reply[_ERROR] = str(error) if isinstance(error, BaguaError) else type(error).__name__
            return reply
