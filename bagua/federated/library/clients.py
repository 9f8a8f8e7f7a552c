"""ClientStore: what clients keep from one round to the next in which they take part, a row for each.

A row is owned by the rank ``client % ranks``, in an SQLite file of that rank's, and moves to where the client runs in a
round and back. A row has versions: that of the last checkpoint stays until the next one is written, so a process that
is killed at any time leaves what that checkpoint needs.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bagua.distributed.process_group import ProcessGroup
from bagua.errors import InvalidArgument

Tree = Any  # a pytree of tensors


class ClientStore:
    """Keeps a pytree of tensors for each client of a population, for ``Simulation(clients=...)``.

    Clients that have not taken part yet have the initial row, which takes no space.

    Args:
        initial: the row of a client before its first round, without an axis of clients; equal on all ranks.
        folder: of the files, made where it is missing, on a disk of each host's or one that all share; None: rows are
            in memory, and a simulation that has them cannot be saved.

    Raises:
        InvalidArgument: the row is no pytree of dense tensors.

    Example:
        >>> import torch
        >>> from bagua import federated
        >>> def step(state, round):
        ...     return state, {}, round.client_state + 1
        >>> store = federated.ClientStore(torch.zeros(()))
        >>> run = federated.Simulation(step, 0, population=4, cohort=2, seed=1, clients=store)
        >>> _ = run.run(6)
        >>> float(store.rows(range(4)).sum())
        12.0
    """

    def __init__(self, initial: Tree, folder: str | Path | None = None) -> None:
        leaves, self._structure = pytree.tree_flatten(initial)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                raise InvalidArgument(f"a client's row has {leaf!r}, expected a pytree of dense tensors")
        if not leaves:
            raise InvalidArgument("a client's row has no tensor: leave the store out")
        self._leaves = [leaf.detach() for leaf in leaves]
        digest = hashlib.sha256(b"".join(map(_bytes_of, self._leaves))).hexdigest()[:16]
        described = ", ".join(
            f"{pytree.keystr(path)} {str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}".strip()
            for path, leaf in pytree.tree_flatten_with_path(initial)[0]
        )
        self.kind = f"rows of {described}, at first with digest {digest}"  # equal on all ranks
        self._sizes = [leaf.numel() * leaf.element_size() for leaf in leaves]
        self._first = b"".join(_bytes_of(leaf) for leaf in leaves)
        self.folder = None if folder is None else Path(folder)
        self._rank, self._num_ranks = 0, 1
        self._file: sqlite3.Connection | None = None

    # --- called by Simulation

    def check_new(self) -> None:
        """Raises InvalidArgument if the folder has rows of another run."""
        if self.folder is not None and (there := sorted(self.folder.glob("clients.*.sqlite"))):
            raise InvalidArgument(
                f"{there[0]} has clients' rows of another run: load its checkpoint, or give an empty folder"
            )

    def create(self, rank: int, num_ranks: int) -> None:
        """Begins with no rows, as this one of the ranks."""
        self._close()
        self._rank, self._num_ranks = rank, num_ranks
        place = ":memory:"
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = _path(self.folder, rank, num_ranks)
            path.unlink(missing_ok=True)
            place = str(path)
        self._file = sqlite3.connect(place)
        self._file.execute("CREATE TABLE rows (client INTEGER, round INTEGER, data BLOB, PRIMARY KEY (client, round))")
        self._file.commit()

    def load(self, rank: int, num_ranks: int, saved_ranks: int, round: int) -> None:
        """Goes on with the rows as they were after ``round`` rounds, of files of so many ranks.

        Raises:
            InvalidArgument: a file is missing or is none, or its rows have gone on to a later checkpoint.
        """
        assert self.folder is not None
        is_same = saved_ranks == num_ranks
        paths = [_path(self.folder, one, saved_ranks) for one in ([rank] if is_same else range(saved_ranks))]
        if missing := next((path for path in paths if not path.exists()), None):
            others = "" if is_same else "; on another number of ranks each reads the files of all"
            raise InvalidArgument(f"{missing} is missing: copy it to this host{others}")
        try:
            for path in paths:
                _check_round(path, round)
            if is_same:
                self._close()
                self._rank, self._num_ranks = rank, num_ranks
                self._file = sqlite3.connect(paths[0])
                with self._file:
                    self._file.execute("DELETE FROM rows WHERE round > ?", (round,))
                return
            self.create(rank, num_ranks)
            assert self._file is not None
            for path in paths:
                self._file.execute("ATTACH ? AS saved", (str(path),))
                with self._file:
                    self._file.execute(
                        "INSERT INTO rows SELECT client, MAX(round), data FROM saved.rows "
                        "WHERE round <= ? AND client % ? = ? GROUP BY client",
                        (round, num_ranks, rank),
                    )
                self._file.execute("DETACH saved")
            self._keep_round(round)
        except sqlite3.Error as error:
            raise InvalidArgument(
                f"the rows in {self.folder} cannot be read ({error}): give those of the checkpoint"
            ) from error

    def read(self, group: ProcessGroup | None, cohort: Sequence[int], parts: Sequence[slice]) -> Tree:
        """Returns ``[num_local, ...]``: the rows of this rank's clients of a cohort; collective.

        Args:
            parts: each rank's part of the cohort.
        """
        by_owner, to_owners, owned = self._moves(cohort, parts)
        found = _exchanged(
            group, self._stored([client for part in owned for client in part]), list(map(len, owned)), to_owners
        )
        rows = torch.empty_like(found)
        rows[by_owner] = found
        return self._placed(rows)

    def write(
        self,
        group: ProcessGroup | None,
        cohort: Sequence[int],
        parts: Sequence[slice],
        rows: Tree,
        takes_part: Sequence[bool],
        round: int,
    ) -> None:
        """Keeps the rows of those that take part, as they are after ``round`` rounds; collective.

        Args:
            rows: of this rank's clients, as ``check`` has let pass.
        """
        by_owner, to_owners, owned = self._moves(cohort, parts)
        found = _exchanged(group, self._packed(rows)[by_owner], to_owners, list(map(len, owned)))
        there = {client for client, is_there in zip(cohort, takes_part, strict=True) if is_there}
        clients = [client for part in owned for client in part]
        kept = [
            (client, round, row.numpy().tobytes())
            for client, row in zip(clients, found, strict=True)
            if client in there
        ]
        self._write(kept)

    def _moves(self, cohort: Sequence[int], parts: Sequence[slice]) -> tuple[list[int], list[int], list[list[int]]]:
        """Returns the places of this rank's clients in the order of their owners, how many each owner has of them, and
        the clients that this rank owns by the rank where they run."""
        here = cohort[parts[self._rank]]
        by_owner = sorted(range(len(here)), key=lambda place: here[place] % self._num_ranks)
        to_owners = [sum(client % self._num_ranks == owner for client in here) for owner in range(self._num_ranks)]
        owned = [[client for client in cohort[part] if client % self._num_ranks == self._rank] for part in parts]
        return by_owner, to_owners, owned

    def check(self, rows: Tree, num_local: int) -> None:
        """Raises InvalidArgument unless these are rows of so many clients."""
        leaves, structure = pytree.tree_flatten(rows)
        if structure != self._structure:
            raise InvalidArgument(f"the clients' rows have the structure {structure}, expected {self._structure}")
        for leaf, first in zip(leaves, self._leaves, strict=True):
            expected = [num_local, *first.shape]
            if not isinstance(leaf, torch.Tensor) or list(leaf.shape) != expected or leaf.dtype is not first.dtype:
                is_tensor = isinstance(leaf, torch.Tensor)
                what = f"{leaf.dtype} and shape {list(leaf.shape)}" if is_tensor else repr(leaf)
                raise InvalidArgument(f"the clients' rows have {what}, expected {first.dtype} and shape {expected}")

    def forget(self, round: int) -> None:
        """Deletes versions that the checkpoint after ``round`` rounds does not need, and files of other ranks."""
        assert self._file is not None and self.folder is not None
        self._keep_round(round)  # first: a process that is killed here has forgotten nothing that it has not noted
        with self._file:
            self._file.execute(
                "DELETE FROM rows WHERE EXISTS (SELECT 1 FROM rows AS newer WHERE newer.client = rows.client "
                "AND newer.round > rows.round AND newer.round <= ?)",
                (round,),
            )
        for path in self.folder.glob("clients.*.sqlite"):
            if not path.name.endswith(f".of.{self._num_ranks}.sqlite"):
                path.unlink(missing_ok=True)

    def _keep_round(self, round: int) -> None:
        """Notes that rows of earlier rounds may be gone."""
        assert self._file is not None
        self._file.execute(f"PRAGMA user_version = {int(round)}")

    # --- for programs

    def rows(self, clients: Sequence[int] | range) -> Tree:
        """Returns ``[clients, ...]``: rows of clients that this rank owns, those whose number % ranks is its rank.

        Raises:
            InvalidArgument: another rank owns one of them, or no round has run.
        """
        numbers = [int(client) for client in clients]
        for client in numbers:
            if client % self._num_ranks != self._rank:
                raise InvalidArgument(f"client {client} is of rank {client % self._num_ranks}: ask there for its row")
        return self._placed(self._stored(numbers))

    # --- bytes

    def _stored(self, clients: Sequence[int]) -> torch.Tensor:
        if self._file is None:
            raise InvalidArgument("the store has no rows yet: run a round of the simulation that it was given to")
        rows = bytearray()
        for client in clients:
            found = self._file.execute(
                "SELECT data FROM rows WHERE client = ? ORDER BY round DESC LIMIT 1", (client,)
            ).fetchone()
            rows += self._first if found is None else found[0]
        flat = torch.frombuffer(rows, dtype=torch.uint8) if rows else torch.empty(0, dtype=torch.uint8, device="cpu")
        return flat.view(len(clients), sum(self._sizes))

    def _write(self, rows: list[tuple[int, int, bytes]]) -> None:
        assert self._file is not None
        with self._file:  # on the disk when it ends
            self._file.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", rows)

    def _placed(self, rows: torch.Tensor) -> Tree:
        parts = rows.split(self._sizes, dim=1)
        leaves = [
            part.clone(memory_format=torch.contiguous_format)
            .view(-1)
            .view(first.dtype)
            .view(len(rows), *first.shape)
            .to(first.device)
            if part.numel()
            else first.new_empty((len(rows), *first.shape))
            for part, first in zip(parts, self._leaves, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self._structure)

    def _packed(self, rows: Tree) -> torch.Tensor:
        leaves = [leaf.detach().cpu().contiguous() for leaf in pytree.tree_leaves(rows)]
        num = len(leaves[0])
        return torch.cat(
            [
                leaf.reshape(-1).view(torch.uint8).view(num, size)
                if num and size
                else torch.empty(num, size, dtype=torch.uint8, device="cpu")
                for leaf, size in zip(leaves, self._sizes, strict=True)
            ],
            dim=1,
        )

    # --- files

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _check_round(path: Path, round: int) -> None:
    file = sqlite3.connect(path)
    try:
        (kept,) = file.execute("PRAGMA user_version").fetchone()
        file.execute("SELECT 1 FROM rows LIMIT 1").fetchone()
    finally:
        file.close()
    if kept > round:
        raise InvalidArgument(
            f"the rows in {path} have gone on to a checkpoint after {kept} rounds, and those after {round} are gone: "
            "load that one, or keep a copy of the folder with each checkpoint"
        )


def _path(folder: Path, rank: int, num_ranks: int) -> Path:
    return folder / f"clients.{rank}.of.{num_ranks}.sqlite"


def _bytes_of(leaf: torch.Tensor) -> bytes:
    flat = leaf.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _exchanged(
    group: ProcessGroup | None, rows: torch.Tensor, sends: Sequence[int], receives: Sequence[int]
) -> torch.Tensor:
    """Sends rows to ranks, in their order, and returns those that have come, rank by rank; collective."""
    if group is None or group.size == 1:
        return rows
    found = torch.empty((sum(receives), rows.shape[1]), dtype=torch.uint8, device="cpu")
    group.all_to_all(found, rows.contiguous(), list(receives), list(sends)).wait()
    return found
