"""Masked sums out of which clients may drop at any point: `threshold` of them are enough for the sum of those left.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", 2017, for a server that follows
the protocol. Beside the masks of every two clients, which cancel out, a client adds one of its own. It gives each
client, through the server, an encrypted share of its secret key and one of the seed of its own mask (Shamir). Once the
server has the masked values, the clients that are left reveal to it, of each client, a share of one of the two: of the
seed, if its value came, so that its own mask can be taken away; of the key, if it did not, so that the masks that the
others share with it can. Of no client they reveal both. Keys and seeds are other ones for every sum.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bagua.errors import InvalidArgument
from bagua.federated.programs.fixed_point import FixedPoint
from bagua.federated.programs.secure_sum import added_codes, codes_of, cryptography, numbers_of, sums_of

_SEED_BYTES = 32
_HALF = 16  # bytes that are shared at once
_NONCE = bytes(12)  # of keys that encrypt once
_TAG_BYTES = 16  # which encryption adds


def _shamir() -> Any:
    try:
        from Crypto.Protocol.SecretSharing import Shamir
    except ImportError:
        raise InvalidArgument("sums that survive drop-outs need pycryptodome: pip install 'bagua[federated]'") from None
    return Shamir


def _split(secret: bytes, threshold: int, num: int) -> list[bytes]:
    """Shares of 32 bytes, one for each client."""
    halves = [_shamir().split(threshold, num, secret[at : at + _HALF]) for at in (0, _HALF)]
    return [low + high for (_, low), (_, high) in zip(*halves, strict=True)]


def _combined(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret of shares by the numbers of those that had them."""
    few = list(shares.items())[:threshold]
    return b"".join(
        _shamir().combine([(index + 1, share[at : at + _HALF]) for index, share in few]) for at in (0, _HALF)
    )


def _derived(shared: bytes, session: bytes, what: str) -> bytes:
    _, hashes, _, _, hkdf = cryptography()
    return hkdf.HKDF(hashes.SHA256(), _SEED_BYTES, salt=session, info=what.encode()).derive(shared)


def _pair_seed(secret: bytes, public: bytes, session: bytes) -> bytes:
    x25519 = cryptography()[2]
    shared = x25519.X25519PrivateKey.from_private_bytes(secret).exchange(
        x25519.X25519PublicKey.from_public_bytes(public)
    )
    return _derived(shared, session, "bagua.federated masks")


def _public(secret: bytes) -> bytes:
    return cryptography()[2].X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def _digest(seed: bytes) -> bytes:
    return hashlib.sha256(seed).digest()


def like_keys(num_sums: int) -> list[bytes]:
    """Returns public keys of a client, as long as any."""
    return [bytes(_SEED_BYTES)] * (2 * num_sums + 1)


def like_boxes(num_sums: int, num_clients: int, index: int) -> list[bytes]:
    """Returns what ``Member.share`` of a client returns, as long as any."""
    box = bytes(2 * _SEED_BYTES * num_sums + _TAG_BYTES)
    return [b"" if other == index else box for other in range(num_clients)]


def check_threshold(threshold: int, num_clients: int) -> None:
    """Raises InvalidArgument unless more than two thirds of the clients, of two at least, are needed.

    For a server that follows the protocol any number would do. Two sets of more than half have one in common, so that
    no server has both secrets of a client revealed by different ones; above two thirds it gains little by telling
    clients different lists of who is left, which they cannot compare.
    """
    is_number = isinstance(threshold, int) and not isinstance(threshold, bool)
    if num_clients < 2 or not is_number or not 2 * num_clients < 3 * threshold <= 3 * num_clients:
        raise InvalidArgument(
            f"threshold={threshold!r} for {num_clients} clients, expected more than two thirds of two or more"
        )


class Member:
    """One client's side of a run with `num_sums` sums.

    Args:
        coding: of the values; equal at all clients and the server.
        threshold: how many clients are enough.
    """

    def __init__(self, coding: FixedPoint, num_sums: int, threshold: int) -> None:
        make = cryptography()[2].X25519PrivateKey.generate
        self.coding, self.threshold, self.index = coding, threshold, -1
        self._keys = [make().private_bytes_raw() for _ in range(num_sums)]
        self._box_key = make().private_bytes_raw()
        self._seeds = [secrets.token_bytes(_SEED_BYTES) for _ in range(num_sums)]
        self._public: list[list[bytes]] = []  # of all clients
        self._session = b""
        self._shares: dict[int, bytes] = {}  # by the client whose secrets they are of
        self._alive: dict[int, list[int]] = {}  # those whose masks are in this client's value, by sum
        self._revealed: list[int] = []  # the sums for which it has revealed shares

    def state(self) -> dict[str, Any]:
        """Plain values for ``restore``, the secrets among them."""
        return {name.lstrip("_"): value for name, value in vars(self).items() if name != "coding"}

    @classmethod
    def restore(cls, coding: FixedPoint, state: dict[str, Any]) -> Member:
        """The same side again."""
        restored = cls(coding, 0, state["threshold"])
        for name in vars(restored):
            if name != "coding":
                setattr(restored, name, state[name.lstrip("_")])
        return restored

    @property
    def public_keys(self) -> list[bytes]:
        """One for each sum, the digest of a seed for each, and the one that shares are encrypted for."""
        return [*map(_public, self._keys), *map(_digest, self._seeds), _public(self._box_key)]

    def share(self, everyone: Sequence[Sequence[bytes]], session: bytes) -> list[bytes]:
        """The shares of its secrets, encrypted for each client.

        Args:
            everyone: the public keys of all clients, in an order that is the same for all.
            session: names what runs.

        Raises:
            InvalidArgument: keys that are not this client's once, or not as many as its own; a threshold that is not
                more than half.
        """
        if self.index >= 0:
            raise InvalidArgument("shares of this client's secrets for a second time: it gives them once in a run")
        own = self.public_keys
        keys = [list(one) for one in everyone]
        flat = [key for one in keys for key in one]
        if keys.count(own) != 1 or any(len(one) != len(own) for one in keys) or len(set(flat)) != len(flat):
            raise InvalidArgument("the public keys of the clients are not one of each, or not this client's among them")
        check_threshold(self.threshold, len(keys))
        self.index, self._public, self._session = keys.index(own), keys, session
        parts = [
            [_split(secret, self.threshold, len(keys)) for secret in pair]
            for pair in zip(self._keys, self._seeds, strict=True)
        ]
        encrypted = []
        for other in range(len(keys)):
            share = b"".join(of_key[other] + of_seed[other] for of_key, of_seed in parts)
            if other == self.index:
                self._shares[self.index] = share
                encrypted.append(b"")
                continue
            encrypted.append(self._cipher(self.index, other).encrypt(_NONCE, share, None))
        return encrypted

    def receive(self, boxes: Mapping[int, Sequence[bytes]]) -> None:
        """Takes the shares that the others have encrypted for this client.

        Args:
            boxes: what ``share`` returned, by client; those that dropped out before have none.

        Raises:
            InvalidArgument: one is not what its client has encrypted.
        """
        from cryptography.exceptions import InvalidTag

        for other, encrypted in boxes.items():
            if other == self.index:
                continue
            try:
                self._shares[other] = self._cipher(other, self.index).decrypt(_NONCE, encrypted[self.index], None)
            except (InvalidTag, IndexError):
                raise InvalidArgument(f"the share of client {other} is not what it has encrypted") from None

    def mask(self, values: Sequence[torch.Tensor], number: int, alive: Sequence[int]) -> torch.Tensor:
        """Returns what the server may see of this client's values, as ``SecureSum.mask`` does.

        Args:
            number: of the sum, another for each.
            alive: the clients that are to send values, this one among them.

        Raises:
            InvalidArgument: a value out of range; fewer clients than the threshold; clients without shares.
        """
        alive = sorted(alive)
        can_be_had = self.index in alive and len(alive) >= self.threshold and set(alive) <= self._shares.keys()
        if number in self._alive or not can_be_had:
            raise InvalidArgument(
                f"sum {number} of the clients {alive}: a client takes part once in each, with {self.threshold} of "
                "those whose shares it has"
            )
        codes = codes_of(self.coding, values, len(self._public))
        self._alive[number] = alive
        codes = codes + numbers_of(self._seeds[number], number, codes.numel())
        for other in alive:
            if other != self.index:
                seed = _pair_seed(self._keys[number], self._public[other][number], self._session)
                numbers = numbers_of(seed, number, codes.numel())
                codes = codes + numbers if self.index < other else codes - numbers
        return self.coding.wrap(codes)

    def has_ended(self, num_sums: int) -> bool:
        """Returns True if it has revealed shares for the last sum."""
        return num_sums - 1 in self._revealed

    def reveal(self, number: int, survivors: Sequence[int]) -> dict[int, bytes]:
        """A share of one secret of each client: of its own mask if it survived, otherwise of its key.

        Args:
            survivors: the clients whose masked values the server has.

        Raises:
            InvalidArgument: it has revealed shares for this sum already, has no value in it, or fewer survive than the
                threshold: it would reveal what hides single values.
        """
        alive, kept = self._alive.get(number, []), set(survivors)
        if number in self._revealed or self.index not in kept or not kept <= set(alive) or len(kept) < self.threshold:
            raise InvalidArgument(
                f"shares for sum {number} of the clients {sorted(kept)}: a client reveals them once for each sum, of "
                f"those that took part, with itself and {self.threshold} at least"
            )
        self._revealed.append(number)
        begin = number * 2 * _SEED_BYTES
        return {other: self._shares[other][begin + _SEED_BYTES * (other in kept) :][:_SEED_BYTES] for other in alive}

    def _cipher(self, sender: int, receiver: int) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        other = receiver if sender == self.index else sender
        x25519 = cryptography()[2]
        shared = x25519.X25519PrivateKey.from_private_bytes(self._box_key).exchange(
            x25519.X25519PublicKey.from_public_bytes(self._public[other][-1])
        )
        return ChaCha20Poly1305(_derived(shared, self._session, f"bagua.federated shares {sender} {receiver}"))


def add_up(
    coding: FixedPoint,
    masked: Mapping[int, torch.Tensor],
    alive: Sequence[int],
    revealed: Mapping[int, Mapping[int, bytes]],
    keys: Sequence[Sequence[bytes]],
    number: int,
    session: bytes,
    threshold: int,
    likes: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The server's side: the sums over the clients whose masked values came.

    Args:
        masked: packed, by client.
        alive: the clients whose masks are in them.
        revealed: of the clients that have answered, the shares of each of these; ``threshold`` of them at least.
        keys: the public keys of all clients.
        likes: tensors of the shapes and dtypes of the sums.

    Raises:
        InvalidArgument: masked values of another number than these, or shares that are none.
    """
    total = added_codes(coding, masked, likes)
    numel, num_sums = total.numel(), len(keys[0]) // 2
    for client in alive:
        shares = {index: one.get(client) for index, one in revealed.items()}
        odd = next((i for i, one in shares.items() if not isinstance(one, bytes) or len(one) != _SEED_BYTES), None)
        if odd is not None:
            raise InvalidArgument(f"client {odd} has revealed no share of client {client}")
        secret, is_there = _combined(shares, threshold), client in masked
        if (_digest if is_there else _public)(secret) != keys[client][number + num_sums * is_there]:
            raise InvalidArgument(f"the shares of a secret of client {client} do not give it: not all are its own")
        if is_there:
            total = total - numbers_of(secret, number, numel)
            continue
        for other in masked:
            numbers = numbers_of(_pair_seed(secret, keys[other][number], session), number, numel)
            total = total - numbers if other < client else total + numbers
    return sums_of(coding, total, likes)
