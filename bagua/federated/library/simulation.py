"""Simulation: rounds of a program over sampled cohorts, with who drops out, figures, and checkpoints.

The loop around a ``federated.program``. All ranks run the same rounds: cohort, participation and random numbers come
from the seed and the number of the round, so that a run that goes on from a checkpoint goes on bit for bit, also on
another number of ranks where sums are exact (``SecureSum``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import numbers
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from bagua import metrics as dashboards
from bagua.distributed import consensus, world
from bagua.distributed.devices import seeded
from bagua.errors import InvalidArgument
from bagua.federated.library import privacy, sampling
from bagua.federated.library.clients import ClientStore
from bagua.federated.verbs.operators import record
from bagua.federated.verbs.placement import local_slice

State = Any  # a pytree of tensors and numbers, equal on all ranks


class Round(NamedTuple):
    """The round that a step computes.

    Attributes:
        number: from 0.
        seed: of this round alone; the same on all ranks.
        cohort: int64 ``[size]``, the clients of all ranks; at the end of a Poisson cohort some that were not drawn, and
            do not get through the round.
        clients: int64 ``[num_local]``, those of this rank.
        mask: bool ``[num_local]``, which of these get through the round; give it to the reductions.
        participants: how many of the cohort get through.
        client_state: ``[num_local, ...]``: what this rank's clients have in the ``ClientStore``; None without one.
    """

    number: int
    seed: int
    cohort: torch.Tensor
    clients: torch.Tensor
    mask: torch.Tensor
    participants: int
    client_state: State = None

    def per_client(self, draw: Callable[[torch.Generator], torch.Tensor], *, use: str = "") -> torch.Tensor:
        """``[num_local, ...]`` of random numbers, each client's own; see ``sampling.per_client``.

        Args:
            use: what for, another word for each: two draws for the same use are from equal generators.
        """
        seed = sampling.seed_of(self.seed, "use", use) if use else self.seed
        return sampling.per_client(draw, self.clients, seed=seed, round=self.number)


Step = Callable[[State, Round], Any]  # (state, figures), or (state, figures, the clients' new rows)


@dataclasses.dataclass(frozen=True)
class Availability:
    """The clients of a cohort that get through a round: drawn by seed, for each client and round.

    Clients drop out, each with the same probability. The others answer after durations whose logarithms are normal:
    one half of the variance is of the client, so that slow ones stay slow, the other of the round. With `wait_for` the
    round ends when so many have answered, and the stragglers are dropped (Bonawitz et al., arXiv 1902.01046).

    Args:
        dropout: 0 to 1.
        wait_for: at least 1; None: for all that have not dropped out.
        spread: deviation of the logarithms of the durations, at least 0.
    """

    dropout: float = 0.0
    wait_for: int | None = None
    spread: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.dropout, numbers.Real) and 0 <= self.dropout <= 1):
            raise InvalidArgument(f"dropout={self.dropout!r}, expected a probability, from 0 to 1")
        if self.wait_for is not None and sampling.integer("wait_for", self.wait_for) < 1:
            raise InvalidArgument(f"wait_for={self.wait_for!r}, expected None or at least 1")
        if not (isinstance(self.spread, numbers.Real) and self.spread >= 0):
            raise InvalidArgument(f"spread={self.spread!r}, expected a number of at least 0")

    def mask(self, cohort: torch.Tensor, *, seed: int, round: int) -> torch.Tensor:
        """bool ``[cohort]``: who gets through."""
        stays = sampling.participates(cohort, 1 - self.dropout, seed=seed, round=round)
        if self.wait_for is None or self.wait_for >= int(stays.sum()):
            return stays
        durations = torch.where(stays, self.durations(cohort, seed=seed, round=round), torch.inf)
        fastest = durations.argsort(stable=True)[: self.wait_for]
        return torch.zeros_like(stays).index_fill(0, fastest, True)

    def durations(self, clients: Sequence[int] | torch.Tensor, *, seed: int, round: int) -> torch.Tensor:
        """float64 ``[clients]``: how long each takes, in units of the median client."""
        normal = statistics.NormalDist()

        def draw(*what: int | str) -> float:
            return normal.inv_cdf((sampling.seed_of(seed, "duration", *what) + 1) / (2**63 + 1))

        logs = [draw(client) + draw(client, round) for client in sampling.numbers_of(clients)]
        return torch.tensor(logs, dtype=torch.float64).mul(self.spread / 2**0.5).exp()


class Simulation:
    """Runs rounds of a step.

    Args:
        step: ``(state, round) -> (state, figures)``, called on all ranks: it loads what ``round.clients`` have, calls a
            program with ``clients=cohort`` and the same `num_local` and `group`, and returns the next state and figures
            by name, numbers or tensors ``[]``. torch's generator is seeded for every round, the same on all ranks, and
            put back afterwards. With `clients` it returns ``round.client_state`` as it is to be, too, as the third.
        state: before the first round: a pytree of tensors and numbers, equal on all ranks.
        population: how many clients there are.
        cohort: how many of them a round has; or ``sampling.Poisson(rate)``, whose rounds differ in their number: make
            the program of each by ``program(clients=len(round.cohort))``.
        seed: of everything that is drawn.
        availability: the clients that get through a round. In a round without any, nothing happens, unless Poisson
            cohorts have a budget: an empty cohort is private, so the step runs and adds its noise all the same.
        clients: a ``ClientStore``: rows of clients, kept for those that get through the round.
        budget: a ``privacy.Budget`` of this cohort and population: what the rounds so far have spent is the figure
            "epsilon", and ``run`` ends before the round that would spend more than it has. A round without clients
            counts as one.
        num_local: as of ``federated.program``, but no single number; for cohorts of fixed size.
        group: as of ``federated.program``.
        writer: a SummaryWriter of TensorBoard, or anything with its ``add_scalar``; rank 0 writes ``<name>/<figure>``.
        name: what scalars and progress begin with.
        progress: a line on stderr of rank 0; by default where that is a terminal.

    Attributes:
        state: after the last round.
        round: the number of the next one: how many are done.

    Raises:
        InvalidArgument: a cohort that is not from 1 to the population, or a budget of another one; Poisson cohorts
            with num_local, or with a budget and an availability with wait_for.

    Example:
        >>> import torch
        >>> from bagua import federated
        >>> values = torch.arange(100.0)
        >>> mean = federated.program(federated.reduce_weighted_mean, clients=10)
        >>> def step(state, round):
        ...     found = mean(values[round.clients], torch.ones(len(round.clients)), mask=round.mask)
        ...     return state + found, {"mean": found}
        >>> run = federated.Simulation(step, torch.zeros(()), population=100, cohort=10, seed=1)
        >>> figures = run.run(3)
        >>> len(figures), run.round, sorted(figures[0])
        (3, 3, ['bytes_down', 'bytes_up', 'mean', 'participants'])
    """

    def __init__(
        self,
        step: Step,
        state: State,
        *,
        population: int,
        cohort: int | sampling.Poisson,
        seed: int,
        availability: Availability | None = None,
        clients: ClientStore | None = None,
        budget: privacy.Budget | None = None,
        num_local: Sequence[int] | None = None,
        group: world.GroupLike = None,
        writer: dashboards.ScalarWriter | None = None,
        name: str = "federated",
        progress: bool | None = None,
    ) -> None:
        population = sampling.integer("population", population)
        sampling.check_cohort(cohort, population)
        is_poisson = isinstance(cohort, sampling.Poisson)
        cohort = cohort if is_poisson else sampling.integer("cohort", cohort)
        if budget is not None and (budget.cohort, budget.population) != (cohort, population):
            raise InvalidArgument(
                f"a budget of cohorts of {budget.cohort} of {budget.population} clients, but cohort={cohort} and "
                f"population={population}: give it these"
            )
        if is_poisson and num_local is not None:
            raise InvalidArgument(
                f"num_local={num_local} with cohort={cohort}, whose size changes: leave it out, so that each round's "
                "clients are spread evenly"
            )
        if is_poisson and budget is not None and availability is not None and availability.wait_for is not None:
            raise InvalidArgument(
                f"wait_for={availability.wait_for} with a budget of Poisson cohorts, where one client more may drop "
                "another: the sum then changes by more than is accounted for; leave wait_for out"
            )
        self.state = state
        self.round = 0
        self._budget = budget
        self._began = _kinds(state)  # which rounds may change
        self._step = step
        self._availability = availability or Availability()
        self._cohort = cohort
        self._runs_for_nobody = is_poisson and budget is not None
        self._job: dict[str, Any] = {
            "population": population,
            "cohort": repr(cohort) if is_poisson else cohort,
            "seed": seed,
            "availability": repr(self._availability),
        }
        self._group = world.resolve(group) if group is not None or world.is_initialized() else None
        self._is_first = self._group is None or self._group.rank == 0
        self._num_local = num_local
        if not isinstance(cohort, sampling.Poisson):
            self._slice(cohort)  # which checks num_local
        self._clients, self._has_rows = clients, False
        self._is_checked = False  # the state, after the first round that did something
        self._parts: dict[int, list[slice]] = {}  # of a cohort of that size, by rank
        self._writer, self._name = writer, name
        self._shows_progress = self._is_first and (sys.stderr.isatty() if progress is None else progress)
        self._figures: dict[str, float] = {}

    def run(self, rounds: int, *, checkpoint: str | Path | None = None, every: int = 1) -> list[dict[str, float]]:
        """Runs until `rounds` are done in all; where a checkpoint was loaded, those that are left.

        Args:
            rounds: the number in all, or fewer where the budget is spent.
            checkpoint: where to ``save``, after every `every` rounds and the last.
            every: at least 1.

        Returns:
            The figures of the rounds that ran: the step's, "participants", how many clients got through, "bytes_down"
            and "bytes_up", to and from each client of the programs that the step has called, as ``federated.record``
            counts them, and "epsilon".
        """
        if every < 1:
            raise InvalidArgument(f"every={every!r}, expected at least 1")
        if checkpoint is not None:
            self._check_kept()
        found = []
        self._open_rows()
        while self.round < rounds and self._may_spend():
            begin = time.monotonic()
            figures = self._run_one()
            found.append(figures)
            self._figures = {"rounds": self.round, "round_seconds": time.monotonic() - begin, **figures}
            if self._writer is not None and self._is_first:
                dashboards.add_figures(figures, self._writer, self.round - 1, self._name)
            if self._shows_progress:
                self._show(rounds)
            is_last = self.round == rounds or not self._may_spend()
            if checkpoint is not None and (self.round % every == 0 or is_last):
                self.save(checkpoint)
        return found

    def sample(self, number: int) -> Round:
        """Returns the round of that number: it can be asked for at any time."""
        cohort, mask = self._draw(number)
        round_seed, mine = sampling.seed_of(self._job["seed"], "round", number), self._slice(len(cohort))
        return Round(number, round_seed, cohort, cohort[mine], mask[mine], int(mask.sum()))

    def values(self) -> dict[str, float]:
        """The figures of the last round, "rounds" and "round_seconds"; empty before there is one."""
        return dict(self._figures)

    def collector(self) -> dashboards.FiguresCollector:
        """Returns a collector for prometheus-client: gauges ``bagua_<name>_<figure>`` with the label ``rank``.

        Example:
            >>> from prometheus_client import REGISTRY                            # doctest: +SKIP
            >>> REGISTRY.register(simulation.collector())                         # doctest: +SKIP
        """
        rank = 0 if self._group is None else self._group.rank
        return dashboards.FiguresCollector(self.values, f"bagua_{self._name}", {"rank": str(rank)})

    def _draw(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the clients of all ranks in that round, and the mask of those that get through it."""
        population, seed = self._job["population"], self._job["seed"]
        if not isinstance(self._cohort, sampling.Poisson):
            cohort = sampling.cohort(population, self._cohort, seed=seed, round=number)
            return cohort, self._availability.mask(cohort, seed=seed, round=number)
        cohort, is_drawn = self._cohort.draw(population, seed=seed, round=number)
        gets_through = self._availability.mask(cohort[is_drawn], seed=seed, round=number)
        return cohort, is_drawn.masked_scatter(is_drawn, gets_through)

    def _slice(self, size: int) -> slice:
        return local_slice(size, group=self._group, num_local=self._num_local)

    def _may_spend(self) -> bool:
        return self._budget is None or self._budget.spent(self.round + 1) <= self._budget.epsilon

    def _run_one(self) -> dict[str, float]:
        round = self.sample(self.round)
        figures: Mapping[str, Any] = {}
        counted = {"participants": float(round.participants), "bytes_down": 0.0, "bytes_up": 0.0}
        if round.participants or self._runs_for_nobody:
            round = self._with_rows(round)
            devices = {leaf.device for leaf in pytree.tree_leaves(self.state) if isinstance(leaf, torch.Tensor)}
            with seeded(round.seed, devices), record() as verbs:
                try:
                    result = self._step(self.state, round)
                except InvalidArgument as error:
                    raise InvalidArgument(f"in round {round.number}: {error}") from error
            counted |= {"bytes_down": float(verbs.bytes_down), "bytes_up": float(verbs.bytes_up)}
            if self._clients is not None:
                result = self._without_rows(self._clients, result, round)
            self.state, figures = result
            if not self._is_checked:
                self._check_equal()
                self._is_checked = True
        self.round += 1
        if self._budget is not None:
            counted["epsilon"] = self._budget.spent(self.round)
        return {**{name: _number(name, x) for name, x in figures.items()}, **counted}

    def _open_rows(self) -> None:
        """Begins with the first rows of clients, unless rows were loaded; collective."""
        clients, group = self._clients, self._group
        if clients is None or self._has_rows:
            return
        rank, num_ranks = (0, 1) if group is None else (group.rank, group.size)
        self._agree(lambda: (clients.check_new(), {"a client's first row": clients.kind}))
        self._agree(lambda: (clients.create(rank, num_ranks), {}))
        self._has_rows = True

    def _with_rows(self, round: Round) -> Round:
        if self._clients is None:
            return round
        rows = self._clients.read(self._group, round.cohort.tolist(), self._parts_of(len(round.cohort)))
        return round._replace(client_state=rows)

    def _parts_of(self, size: int) -> list[slice]:
        """Returns each rank's part of a cohort; collective for every new size."""
        if size not in self._parts:
            mine = self._slice(size)
            ends = (mine.start, mine.stop)
            everyone = [ends] if self._group is None else self._group.all_gather_plain(ends)
            self._parts[size] = [slice(*one) for one in everyone]
        return self._parts[size]

    def _without_rows(self, clients: ClientStore, result: Any, round: Round) -> tuple[State, Mapping[str, Any]]:
        """Keeps the clients' rows of a step's result, and returns the rest."""

        def check() -> tuple[None, dict[str, Any]]:
            if not isinstance(result, tuple) or len(result) != 3:
                raise InvalidArgument(
                    "with clients= a step returns (state, figures, the clients' rows); return round.client_state as it "
                    "is to be, third"
                )
            clients.check(result[2], len(round.clients))
            return None, {}

        self._agree(check)
        state, figures, rows = result
        cohort, mask = self._draw(round.number)
        parts = self._parts_of(len(cohort))
        clients.write(self._group, cohort.tolist(), parts, rows, mask.tolist(), self.round + 1)
        return state, figures

    def _check_equal(self) -> None:
        """Raises on all ranks if the state differs between them after a round."""
        if self._group is None or self._group.size == 1:
            return

        def describe() -> tuple[None, dict[str, str]]:
            found = {}
            for path, leaf in pytree.tree_flatten_with_path(self.state)[0]:
                (described,) = _described([leaf]).values()
                found[f"the state{pytree.keystr(path)} after a round"] = described
            return None, found

        remedy = (
            "the state is the server's, equal on all ranks; keep what clients have in clients=ClientStore(...), or "
            "make it the server's by a reduction"
        )
        consensus.agree(self._group, describe, remedy)

    def _check_kept(self) -> None:
        if self._clients is not None and self._clients.folder is None:
            raise InvalidArgument("the clients' rows are in memory, so they cannot be saved; give ClientStore a folder")

    def _show(self, rounds: int) -> None:
        figures = "  ".join(f"{name} {value:.4g}" for name, value in self._figures.items() if name != "rounds")
        line = f"{self._name}: {self.round} of {rounds} rounds  {figures}"
        end = "\n" if self.round == rounds or not sys.stderr.isatty() else ""
        print(f"\r\x1b[K{line}" if sys.stderr.isatty() else line, end=end, file=sys.stderr, flush=True)

    # ---- checkpoints

    def save(self, path: str | Path) -> None:
        """Writes the state and the number of the round, by rank 0; all ranks call it.

        The file is there as a whole or not at all; one of the same name is replaced.

        Raises:
            InvalidArgument: on all ranks, where the state is not the same on all, or has what ``load`` could not read,
                such as a number of NumPy's; and on the others, where rank 0 cannot write: it raises what the system
                says.
        """
        self._check_kept()
        self._open_rows()
        leaves, structure = pytree.tree_flatten(self.state)
        # To be read on any machine, by ranks with any device.
        leaves = [leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._agree(lambda: (None, {"the round": self.round, **_described(leaves)}))
        content = {"round": self.round, "job": self._job, "leaves": leaves, "structure": str(structure)}
        content["began"] = self._began
        if self._clients is not None:
            content["clients"] = {"ranks": 1 if self._group is None else self._group.size, "row": self._clients.kind}
        content["noise_multiplier"] = None if self._budget is None else self._budget.noise_multiplier

        def write() -> tuple[None, dict[str, Any]]:
            if self._is_first:
                unfinished = f"{path}.{os.getpid()}"
                try:
                    with open(unfinished, "wb") as file:
                        torch.save(content, file)
                    os.replace(unfinished, path)
                finally:
                    Path(unfinished).unlink(missing_ok=True)
            return None, {}

        self._agree(write)
        if self._clients is not None:
            self._clients.forget(self.round)

    def load(self, path: str | Path) -> None:
        """Goes on where ``save`` was called; rank 0 reads, all ranks call it. The number of ranks may be another.

        Raises:
            InvalidArgument: on all ranks: the file is no checkpoint, or that of a simulation with another seed,
                population, cohort or availability, or, with Poisson cohorts and a budget, one whose rounds had none, or
                its clients' rows are missing, or its state has another structure, or began with tensors of other
                shapes or dtypes. On the others, where rank 0 cannot read it: it raises what the system says.
        """

        self._check_kept()

        def read() -> tuple[bytes, dict[str, Any]]:
            return (Path(path).read_bytes() if self._is_first else b""), {}

        payload = self._agree(read)
        if self._group is not None and self._group.size > 1:
            payload = self._group.broadcast_bytes(payload if self._is_first else None, 0)

        def parse() -> tuple[dict[str, Any], dict[str, Any]]:
            try:
                content = torch.load(io.BytesIO(payload), weights_only=True)
                is_ours = _is_checkpoint(content, self._job.keys())
            except Exception as error:  # torch raises what its parsers do
                raise InvalidArgument(
                    f"{path} is no checkpoint of a Simulation, or not all of one ({type(error).__name__}): give a file "
                    "that save wrote"
                ) from error
            if not is_ours:
                raise InvalidArgument(f"{path} is no checkpoint of a Simulation: give a file that save wrote")
            for name, value in self._job.items():
                if content["job"][name] != value:
                    raise InvalidArgument(
                        f"the checkpoint {path} has {name}={content['job'][name]!r}, expected {value!r}"
                    )
            structure = pytree.tree_structure(self.state)
            if content["structure"] != str(structure) or len(content["leaves"]) != structure.num_leaves:
                raise InvalidArgument(
                    f"the checkpoint {path} has a state {content['structure']} of {len(content['leaves'])} leaves, "
                    f"expected {structure} of {structure.num_leaves}"
                )
            paths = [path for path, _ in pytree.tree_flatten_with_path(self.state)[0]]
            now, filed = _kinds(self.state), _kinds_of(zip(paths, content["leaves"], strict=True))
            # Older ones do not say how they began; their tensors kept shape and dtype.
            began = "began" in content
            ours, theirs = (self._began, content["began"]) if began else (now, filed)
            for where, kind in ours.items():
                other = theirs.get(where, kind)
                if other != kind and filed.get(where) != now.get(where):
                    raise InvalidArgument(
                        f"the checkpoint {path} is of a simulation {'that began ' if began else ''}with a state"
                        f"{where and ' at '}{where} of {other}, expected {kind}: begin with a state like that one's"
                    )
            filed_rows = content.get("clients", {}).get("row", "no rows")
            rows = "no rows" if self._clients is None else self._clients.kind
            if filed_rows != rows:
                raise InvalidArgument(f"the checkpoint {path} has of clients {filed_rows}, expected {rows}")
            noise = content.get("noise_multiplier")
            if self._runs_for_nobody and noise is None and content["round"]:
                raise InvalidArgument(
                    f"the checkpoint {path} is of {content['round']} rounds of Poisson cohorts without a budget, of "
                    "which those without clients added no noise: begin anew with the budget"
                )
            if self._budget is not None and noise not in (None, self._budget.noise_multiplier):
                raise InvalidArgument(
                    f"the checkpoint {path} is of rounds with noise_multiplier={noise}, expected "
                    f"{self._budget.noise_multiplier}: by that is counted what they have spent"
                )
            return content, {}

        content = self._agree(parse)
        if self._clients is not None:
            clients, saved_ranks = self._clients, content["clients"]["ranks"]
            rank, num_ranks = (0, 1) if self._group is None else (self._group.rank, self._group.size)
            self._agree(lambda: (clients.load(rank, num_ranks, saved_ranks, content["round"]), {}))
            self._has_rows = True
        before, structure = pytree.tree_flatten(self.state)
        leaves = [
            leaf.to(old.device) if isinstance(leaf, torch.Tensor) and isinstance(old, torch.Tensor) else leaf
            for leaf, old in zip(content["leaves"], before, strict=True)
        ]
        self.state = pytree.tree_unflatten(leaves, structure)
        self.round = content["round"]

    def _agree(self, prepare: Callable[[], tuple[Any, dict[str, Any]]]) -> Any:
        """Returns what `prepare` returns; where it fails on one rank, all raise."""
        if self._group is None or self._group.size == 1:
            return prepare()[0]
        return consensus.agree(self._group, prepare, "a state is the same on all ranks: take it from reductions only")


def _is_checkpoint(content: Any, job: Iterable[str]) -> bool:
    """Returns True if it has the fields that ``save`` writes, each of its type."""
    if not isinstance(content, dict):
        return False
    round, of_job, leaves = (content.get(name) for name in ("round", "job", "leaves"))
    rows = content.get("clients", {"ranks": 1, "row": ""})
    if not isinstance(rows, dict) or not isinstance(rows.get("ranks"), int) or not isinstance(rows.get("row"), str):
        return False
    is_round = isinstance(round, int) and not isinstance(round, bool) and round >= 0
    is_job = isinstance(of_job, dict) and {*job} <= of_job.keys()
    has_texts = isinstance(content.get("began", {}), dict) and isinstance(content.get("structure"), str)
    return is_round and is_job and isinstance(leaves, list) and has_texts


def _kinds(state: State) -> dict[str, str]:
    """Returns the tensors by their paths."""
    return _kinds_of(pytree.tree_flatten_with_path(state)[0])


def _kinds_of(leaves: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    return {
        pytree.keystr(path): f"{leaf.dtype} and shape {list(leaf.shape)}"
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    }


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"the figure {name!r} is {value!r}, expected a number or a tensor []") from error


def _check_leaf(index: int, leaf: Any) -> None:
    """Raises if load could not read it: what is saved and cannot be read is lost."""
    try:
        if isinstance(leaf, torch.Tensor):
            is_good = leaf.layout is torch.strided
        else:
            written = io.BytesIO()
            torch.save(leaf, written)
            torch.load(io.BytesIO(written.getvalue()), weights_only=True)
            is_good = True
    except Exception:  # torch raises what pickle and its parsers do
        is_good = False
    if not is_good:
        raise InvalidArgument(
            f"leaf {index} of the state is {leaf!r}, a {type(leaf).__name__} that a checkpoint cannot hold, expected "
            "dense tensors and Python's numbers: use torch.as_tensor, float or int"
        )


def _described(leaves: Sequence[Any]) -> dict[str, str]:
    described = {}
    for index, leaf in enumerate(leaves):
        _check_leaf(index, leaf)
        if isinstance(leaf, torch.Tensor):
            flat = leaf.clone(memory_format=torch.contiguous_format).reshape(-1)
            data = flat.cpu().view(torch.uint8).numpy() if leaf.numel() else b""
            digest = hashlib.sha256(data).hexdigest()[:16]
            described[f"leaf {index} of the state"] = f"{list(leaf.shape)} {leaf.dtype} with digest {digest}"
        else:
            described[f"leaf {index} of the state"] = repr(leaf)
    return described
