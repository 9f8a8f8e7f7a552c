"""The contenders of a round of FedAvg, each in a separate process that computes a round on request.

Each runs under an interpreter that has its packages, on the core that the parent assigns. A line on its input starts a
round; the process answers with the seconds that the round took, and writes the model after the first one to a file.
Waiting uses no processor time, so that rounds of all contenders can be timed in turns.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Model = dict[str, Any]


class Turns:
    """The turns of a contender: `begin` waits for the next one, `end` reports its result."""

    def __init__(self, result: Path) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # prints of libraries must not look like answers
        self._result: Path | None = result

    def begin(self) -> bool:
        """Waits for the next turn and begins it; returns False if there is none."""
        if not sys.stdin.readline():
            return False
        self._began = time.perf_counter()
        return True

    def end(self, model: Model) -> None:
        seconds = time.perf_counter() - self._began
        if self._result is not None:
            np.savez(self._result, **{name: np.asarray(value) for name, value in model.items()})
            self._result = None
        self._answers.write(json.dumps(seconds) + "\n")
        self._answers.flush()

    def serve(self, compute_round: Callable[[], Model]) -> None:
        while self.begin():
            self.end(compute_round())


# ---- contenders
#
# Each is called with `(turns, task, clients)` and its options, and imports its packages, which others may not have.


def _step_by_autograd(task: Any, model: Model, inputs: Any, labels: Any) -> Model:
    """Runs the steps of one client, written without torch.func."""
    import torch

    for step in range(task.steps):
        model = {name: value.detach().requires_grad_() for name, value in model.items()}
        gradients = torch.autograd.grad(task.loss(model, inputs[step], labels[step]), list(model.values()))
        with torch.no_grad():
            model = {name: value - task.rate * g for (name, value), g in zip(model.items(), gradients, strict=True)}
    return model


def client_function(task: Any) -> Callable[..., Model]:
    """Returns a function of one client's steps for torch.func and programs."""
    from torch.func import grad

    def train(model: Model, inputs: Any, labels: Any) -> Model:
        for step in range(task.steps):
            gradient = grad(task.loss)(model, inputs[step], labels[step])
            model = {name: value - task.rate * gradient[name] for name, value in model.items()}
        return model

    return train


def _mean_over_loop(train: Callable[..., Model], model: Model, inputs: Any, labels: Any) -> Model:
    total = train(model, inputs[0], labels[0])
    for client in range(1, len(inputs)):
        trained = train(model, inputs[client], labels[client])
        total = {name: value + trained[name] for name, value in total.items()}
    return {name: value / len(inputs) for name, value in total.items()}


def _torch_parts(task: Any, clients: int) -> tuple[Model, Any, Any]:
    import torch

    from benchmarks.federated.tasks import tensors

    torch.set_num_threads(1)
    return tensors(task.parameters()), *tensors(task.data(clients))


def loop(turns: Turns, task: Any, clients: int) -> None:
    parts = _torch_parts(task, clients)
    turns.serve(lambda: _mean_over_loop(functools.partial(_step_by_autograd, task), *parts))


def loop_of_modules(turns: Turns, task: Any, clients: int) -> None:
    """Trains one module for all clients in turn, each with a new optimizer, as most simulations do."""
    import torch

    model, inputs, labels = _torch_parts(task, clients)
    module = _module(task, model)

    def compute_round() -> Model:
        total = {name: torch.zeros_like(value) for name, value in model.items()}
        for client in range(clients):
            with torch.no_grad():
                for name, parameter in module.named().items():
                    parameter.copy_(model[name])
            optimizer = torch.optim.SGD(module.parameters(), lr=task.rate)
            for step in range(task.steps):
                optimizer.zero_grad()
                module.loss(inputs[client, step], labels[client, step]).backward()
                optimizer.step()
            for name, parameter in module.named().items():
                total[name] += parameter.detach()
        return {name: value / clients for name, value in total.items()}

    turns.serve(compute_round)


def _module(task: Any, model: Model) -> Any:
    """Returns the task's model as a module, in the form that pfl-research wants."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number, value in enumerate(model.values()):
                self.register_parameter(str(number), torch.nn.Parameter(value.clone()))

        def named(self) -> Model:
            return dict(zip(model, self.parameters(), strict=True))

        def loss(self, inputs: Any, labels: Any, is_eval: bool = False) -> torch.Tensor:
            return task.loss(self.named(), inputs, labels)

        def metrics(self, inputs: Any, labels: Any) -> dict:
            return {}

    return Module()


def products_alone(turns: Turns, task: Any, clients: int) -> None:
    """Runs the matrix products and convolutions of the round, each in a row on operands in the cache."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    model, inputs, labels = _torch_parts(task, clients)
    aten = torch.ops.aten
    products = {aten.mm, aten.addmm, aten.bmm, aten.convolution, aten.convolution_backward}
    calls: list[tuple[Callable, tuple, dict]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if function.overloadpacket in products:
                calls.append((function, args, kwargs or {}))
            return function(*args, **(kwargs or {}))

    with Recorder():
        leaves = {name: value.requires_grad_() for name, value in model.items()}
        torch.autograd.grad(task.loss(leaves, inputs[0, 0], labels[0, 0]), list(leaves.values()))

    def compute_round() -> Model:
        with torch.no_grad():
            for function, args, kwargs in calls:
                for _ in range(clients * task.steps):
                    function(*args, **kwargs)
        return {}

    turns.serve(compute_round)


def loop_func(turns: Turns, task: Any, clients: int) -> None:
    parts = _torch_parts(task, clients)
    turns.serve(lambda: _mean_over_loop(client_function(task), *parts))


def loop_of_compiled(turns: Turns, task: Any, clients: int) -> None:
    import torch

    parts = _torch_parts(task, clients)
    train = torch.compile(client_function(task))
    turns.serve(lambda: _mean_over_loop(train, *parts))


def compiled_loop(turns: Turns, task: Any, clients: int) -> None:
    import torch

    parts = _torch_parts(task, clients)
    round_of = torch.compile(functools.partial(_mean_over_loop, client_function(task)))
    turns.serve(lambda: round_of(*parts))


def _client_with_optimizer(task: Any) -> Callable[..., Model]:
    """Returns a function that trains one client by an optimizer of torch."""
    import torch

    def train(model: Model, inputs: Any, labels: Any) -> Model:
        leaves = {name: value.requires_grad_() for name, value in model.items()}
        optimizer = torch.optim.SGD(leaves.values(), lr=task.rate)
        for x, y in zip(inputs, labels, strict=True):
            optimizer.zero_grad()
            task.loss(leaves, x, y).backward()
            optimizer.step()
        return leaves

    return train


def _bagua_round(
    task: Any,
    clients: int,
    verb: str = "map_fn",
    chunk_size: int | None = None,
    vectorize: bool = True,
    compile_client: bool = False,
    keep_memory: bool = False,
) -> Callable[..., Model]:
    import torch

    from bagua import federated

    if keep_memory:
        federated.keep_memory()
    train = client_function(task) if vectorize or compile_client else _client_with_optimizer(task)
    if compile_client:
        train = torch.compile(train)
    options = {"chunk_size": chunk_size, "vectorize": vectorize}

    @federated.program(clients=clients)
    def fedavg(model: Model, inputs: Any, labels: Any) -> Model:
        arguments = (federated.broadcast(model), inputs, labels)
        if verb == "map_reduce":
            return federated.map_reduce(train, arguments, **options)
        return federated.reduce_mean(federated.map_fn(train, arguments, **options))

    return fedavg


def bagua(turns: Turns, task: Any, clients: int, **options: Any) -> None:
    parts = _torch_parts(task, clients)
    fedavg = _bagua_round(task, clients, **options)
    turns.serve(lambda: fedavg(*parts))


def bagua_compiled(turns: Turns, task: Any, clients: int) -> None:
    import torch

    parts = _torch_parts(task, clients)
    fedavg = torch.compile(_bagua_round(task, clients))
    turns.serve(lambda: fedavg(*parts))


def bagua_on_ranks(turns: Turns, task: Any, clients: int, **options: Any) -> None:
    from bagua import destroy_process_group, federated, init_process_group

    model, inputs, labels = _torch_parts(task, clients)
    init_process_group()
    mine = federated.local_slice(clients)
    fedavg = _bagua_round(task, clients, **options)
    turns.serve(lambda: fedavg(model, inputs[mine], labels[mine]))
    destroy_process_group()


def bagua_trace(turns: Turns, task: Any, clients: int) -> None:
    """Traces the round as a graph, without computing it."""
    from bagua import federated

    parts = _torch_parts(task, clients)
    fedavg = _bagua_round(task, clients)

    def trace() -> Model:
        federated.trace(fedavg, *parts)
        return parts[0]

    turns.serve(trace)


def drjax(turns: Turns, task: Any, clients: int) -> None:
    import drjax as dr
    import jax

    from benchmarks.federated.tasks_jax import LOSSES

    loss = LOSSES[task.name]

    def train(model: Model, inputs: Any, labels: Any) -> Model:
        for step in range(task.steps):
            gradient = jax.grad(loss)(model, inputs[step], labels[step])
            model = jax.tree.map(lambda value, g: value - task.rate * g, model, gradient)
        return model

    @jax.jit
    @dr.program(placements={"clients": clients})
    def fedavg(model: Model, inputs: Any, labels: Any) -> Model:
        return dr.reduce_mean(dr.map_fn(train, (dr.broadcast(model), inputs, labels)))

    model, (inputs, labels) = task.parameters(), task.data(clients)
    parts = jax.device_put((model, inputs, labels.astype(np.int32)))
    turns.serve(lambda: jax.block_until_ready(fedavg(*parts)))


def pfl(turns: Turns, task: Any, clients: int) -> None:
    """Runs pfl-research's FederatedAveraging in its simulated backend, with all clients in every round."""
    if "RANK" in os.environ:
        os.environ["TORCHELASTIC_RUN_ID"] = "benchmark"  # pfl then starts its process group
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    model, inputs, labels = _torch_parts(task, clients)

    class InTurns(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Metrics:
            turns.begin()
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            turns.end({name: value.detach().numpy() for name, value in module.named().items()})
            return not turns.begin(), Metrics()

    module = _module(task, model)
    datasets = [Dataset((inputs[i].flatten(0, 1), labels[i].flatten(0, 1))) for i in range(clients)]
    cohort = iter(range(10**9))
    data = FederatedDataset(datasets.__getitem__, lambda: next(cohort) % clients)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6, evaluation_frequency=10**6, train_cohort_size=clients, val_cohort_size=0
        ),
        SimulatedBackend(data, None),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=task.rate, local_batch_size=task.batch),
        callbacks=[InTurns()],
        send_metrics_to_platform=False,
    )


@functools.lru_cache(maxsize=1)
def _data_of(task_name: str, clients: int) -> tuple[Any, Any]:
    """Returns the data, in a process of Flower's clients."""
    import torch

    from benchmarks.federated.tasks import TASKS, tensors

    torch.set_num_threads(1)
    return tensors(TASKS[task_name].data(clients))


def flower(turns: Turns, task: Any, clients: int) -> None:
    """Runs Flower's simulation, with a process for each core of the machine and all clients in every round."""
    from flwr.app import ArrayRecord, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    name = task.name
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Any, context: Any) -> Any:
        from benchmarks.federated.contenders import _data_of, _step_by_autograd
        from benchmarks.federated.tasks import TASKS

        inputs, labels = _data_of(name, clients)
        mine = context.node_config["partition-id"]
        model = _step_by_autograd(
            TASKS[name], message.content["model"].to_torch_state_dict(), inputs[mine], labels[mine]
        )
        return Message(content=RecordDict({"model": ArrayRecord(model)}), reply_to=message)

    @server_app.main()
    def main(grid: Any, context: Any) -> None:
        model, _, _ = _torch_parts(task, clients)
        while len(list(grid.get_node_ids())) < clients:
            time.sleep(0.1)
        nodes = list(grid.get_node_ids())

        def compute_round() -> Model:
            content = RecordDict({"model": ArrayRecord(model)})
            messages = [Message(content=content, message_type="train", dst_node_id=node) for node in nodes]
            replies = [reply.content["model"].to_torch_state_dict() for reply in grid.send_and_receive(messages)]
            return {key: sum(reply[key] for reply in replies) / len(replies) for key in model}

        turns.serve(compute_round)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=clients, backend_config=resources)


# ---- the parent


@dataclasses.dataclass(frozen=True)
class Contender:
    """A way to compute the round.

    Attributes:
        name: its name in tables.
        function: the name of its function in this module.
        needs: the package that it imports.
        cores: the number of its cores, and of its processes (ranks), except for Flower, which starts its own.
        options: of its function.
        environ: further variables of its environment.
        is_complete: False if it computes a part of the round only, whose result is not compared.
    """

    name: str
    function: str
    needs: str = "torch"
    cores: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    is_complete: bool = True


class Running:
    """The processes of a contender, from their start to the end of the block.

    Args:
        python: the path of the interpreter.
        task: the task's name.
        cores: the cores to run on.
    """

    def __init__(self, contender: Contender, python: str, task: str, clients: int, cores: Sequence[int]) -> None:
        self.contender = contender
        self._folder = tempfile.TemporaryDirectory(prefix="bagua-bench-")
        self.result = Path(self._folder.name) / "model.npz"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed at the end of the block
        ranks = 1 if contender.needs == "flwr" else contender.cores
        port = str(_free_port())
        self._processes = []
        for rank in range(ranks):
            mine = list(cores[: contender.cores]) if ranks == 1 else [cores[rank]]
            options = [contender.function, json.dumps(contender.options), task, str(clients), str(self.result)]
            options += [",".join(map(str, mine)), str(rank)]
            root = Path(__file__).resolve().parents[2]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
            environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}  # compile anew
            environ |= contender.environ
            if ranks > 1:
                environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
                environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            self._processes.append(
                subprocess.Popen(
                    [python, "-c", "from benchmarks.federated.contenders import serve_turns; serve_turns()", *options],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    env=environ,
                )
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self._log.close()
        self._folder.cleanup()

    def turn(self, limit_s: float) -> float:
        """Runs a round; returns its seconds on the slowest rank.

        Raises:
            TimeoutError: the round takes longer.
            RuntimeError: the contender failed; the message has the end of its output.
        """
        for process in self._processes:
            process.stdin.write(b"\n")
            process.stdin.flush()
        deadline = time.monotonic() + limit_s
        return max(self._answer(process, deadline) for process in self._processes)

    def _answer(self, process: subprocess.Popen, deadline: float) -> float:
        if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            process.kill()
            raise TimeoutError(f"{self.contender.name} takes too long")
        line = process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(self._log.read().decode(errors="replace")[-3000:])
        return json.loads(line)

    def model(self) -> Model:
        """Returns the model after the first round."""
        with np.load(self.result) as arrays:
            return dict(arrays)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def has(python: str, package: str) -> bool:
    """Returns True if the interpreter can import the package."""
    found = subprocess.run([python, "-c", f"import {package}"], capture_output=True, check=False)
    return found.returncode == 0


def serve_turns() -> None:
    """Runs a contender's process, according to its arguments."""
    function, options, task, clients, result, cores, rank = sys.argv[1:]
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    from benchmarks.federated.tasks import TASKS

    turns = Turns(Path(result).with_suffix(f".{rank}.npz") if rank != "0" else Path(result))
    globals()[function](turns, TASKS[task], int(clients), **json.loads(options))
