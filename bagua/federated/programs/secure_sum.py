"""Sums of clients' values of which the server sees nothing but the sum: pairwise masks modulo 2^bits.

Every two clients agree on a seed that the server cannot derive: X25519 over public keys that it passes on. From the
seed both make the same numbers; one adds them, the other subtracts them, so they cancel in the sum of all clients and
hide each one's values until then (Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", 2017). All must answer; dropouts.py has the part for those that drop out. Values are in fixed point, for sums
in real numbers do not cancel exactly.

A server that follows the protocol learns the sums and nothing else. One that does not could pass on public keys of its
own; against that, exchange the clients' keys by a way that it does not control. It could also send the clients other
graphs, or one whose sums are of a single client, or ask for sums in the clear (coded.py); against that, let clients
answer graphs and codings only that they know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua.errors import InvalidArgument
from bagua.federated.programs.fixed_point import FixedPoint

_SEED_BYTES = 32


def cryptography() -> Any:
    try:
        from cryptography.hazmat.primitives import ciphers, hashes
        from cryptography.hazmat.primitives.asymmetric import x25519
        from cryptography.hazmat.primitives.ciphers import algorithms
        from cryptography.hazmat.primitives.kdf import hkdf
    except ImportError:
        raise InvalidArgument("masked sums need the package cryptography: pip install 'bagua[federated]'") from None
    return ciphers, hashes, x25519, algorithms, hkdf


@dataclass
class SecureSum:
    """One client's side.

    Args:
        coding: of the values; equal at all clients and the server.
    """

    coding: FixedPoint
    _key: Any = field(init=False, repr=False)
    _seeds: dict[int, bytes] = field(init=False, default_factory=dict, repr=False)
    index: int = field(init=False, default=-1)  # of this client, once it has agreed on seeds

    def __post_init__(self) -> None:
        self._key = cryptography()[2].X25519PrivateKey.generate()

    @property
    def public_key(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def state(self) -> dict[str, Any]:
        """Plain values for ``restore``, the secret key among them."""
        return {"key": self._key.private_bytes_raw(), "seeds": self._seeds, "index": self.index}

    @classmethod
    def restore(cls, coding: FixedPoint, state: dict[str, Any]) -> SecureSum:
        """The same side again."""
        restored = cls(coding)
        restored._key = cryptography()[2].X25519PrivateKey.from_private_bytes(state["key"])
        restored._seeds, restored.index = dict(state["seeds"]), state["index"]
        return restored

    def agree_on_seeds(self, public_keys: Sequence[bytes], session: bytes) -> int:
        """One with every other client.

        Args:
            public_keys: of all clients, in an order that is the same for all.
            session: names what runs; seeds of another session are others.

        Returns:
            Which of the clients this is.

        Raises:
            InvalidArgument: fewer than two clients, this one is not among them, or a key comes twice.
        """
        if len(public_keys) < 2:
            raise InvalidArgument(
                f"a masked sum over {len(public_keys)} client, expected two at least: the sum would be its value"
            )
        if public_keys.count(self.public_key) != 1 or len(set(public_keys)) != len(public_keys):
            raise InvalidArgument("the public keys of the clients are not one of each, or not this client's among them")
        _, hashes, x25519, _, hkdf = cryptography()
        self.index = list(public_keys).index(self.public_key)
        for index, other in enumerate(public_keys):
            if index != self.index:
                shared = self._key.exchange(x25519.X25519PublicKey.from_public_bytes(other))
                made = hkdf.HKDF(hashes.SHA256(), _SEED_BYTES, salt=session, info=b"bagua.federated masks")
                self._seeds[index] = made.derive(shared)
        return self.index

    def mask(self, values: Sequence[torch.Tensor], number: int) -> torch.Tensor:
        """Returns what the server may see of this client's values.

        Args:
            values: floating or of integers.
            number: of the sum in the session, another for each: masks are never used twice.

        Returns:
            int64 of all values' elements one after the other, from 0 to 2**bits - 1, on the CPU.

        Raises:
            InvalidArgument: a value is out of the range of a sum over so many clients; which, only its cause says.
        """
        codes = codes_of(self.coding, values, len(self._seeds) + 1)
        for other, seed in self._seeds.items():
            numbers = numbers_of(seed, number, codes.numel())
            codes = codes + numbers if self.index < other else codes - numbers
        return self.coding.wrap(codes)


def codes_of(coding: FixedPoint, values: Sequence[torch.Tensor], num_clients: int) -> torch.Tensor:
    """The codes of values, one after the other, on the CPU, where the masks are made.

    Raises:
        InvalidArgument: a value is out of the range of a sum over so many clients; which, only its cause says.
    """
    try:
        return torch.cat([encode(coding, _real(value), num_clients).reshape(-1).cpu() for value in values])
    except InvalidArgument as error:
        raise InvalidArgument(
            f"a client's value is out of the range of fixed point, {coding.largest(num_clients):.6g} for a sum of "
            f"{num_clients} terms modulo 2^{coding.bits} with {coding.fraction_bits} bits behind the point (an "
            f"integer: {coding.largest_code(num_clients)}): clip the values, or give more bits"
        ) from error


def add_up(coding: FixedPoint, masked: Sequence[torch.Tensor], likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The server's side: the sums of what the clients masked.

    Args:
        masked: of all clients, packed (``FixedPoint.pack``).
        likes: tensors of the shapes and dtypes of the sums.

    Raises:
        InvalidArgument: masked values of another number than these.
    """
    return sums_of(coding, added_codes(coding, dict(enumerate(masked)), likes), likes)


def added_codes(coding: FixedPoint, masked: Mapping[int, Any], likes: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of packed codes, by client, modulo 2^bits. Raises InvalidArgument for any that are not as many."""
    numel = sum(_real(torch.empty(like.shape, dtype=like.dtype, device="meta")).numel() for like in likes)
    expected = (coding.packed_bytes(numel),)
    total = torch.zeros(numel, dtype=torch.int64, device="cpu")
    for index, one in masked.items():
        if not isinstance(one, torch.Tensor) or one.dtype != torch.uint8 or tuple(one.shape) != expected:
            got = f"{one.dtype} {list(one.shape)}" if isinstance(one, torch.Tensor) else type(one).__name__
            raise InvalidArgument(f"client {index} sent {got} for a sum, expected uint8 {list(expected)}")
        total = coding.wrap(total + coding.unpack(one, numel))
    return total


def sums_of(coding: FixedPoint, total: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values that added codes stand for, in tensors like these."""
    likes = [torch.empty(like.shape, dtype=like.dtype, device="cpu") for like in likes]
    parts = coding.wrap(total).split([_real(like).numel() for like in likes])
    sums = [decode(coding, part.reshape(_real(x).shape), _real(x)) for part, x in zip(parts, likes, strict=True)]
    return [torch.view_as_complex(s) if x.is_complex() else s for s, x in zip(sums, likes, strict=True)]


def _real(value: torch.Tensor) -> torch.Tensor:
    """Complex numbers as two real ones."""
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value


def encode(coding: FixedPoint, value: torch.Tensor, num_terms: int) -> torch.Tensor:
    """Codes of floating values; integers are theirs already, and need no bits behind the point."""
    if value.is_floating_point():
        return coding.encode(value, num_terms)
    largest = coding.largest_code(num_terms)
    found = int(value.to(torch.int64).abs().max()) if value.numel() else 0
    if not 0 <= found <= largest:
        raise InvalidArgument(
            f"an integer of magnitude {found} is out of range, {largest} for a sum of {num_terms} terms modulo "
            f"2^{coding.bits}: give more bits"
        )
    return coding.wrap(value.to(torch.int64))


def decode(coding: FixedPoint, codes: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if like.is_floating_point():
        return coding.decode(codes, like)
    half = coding.modulus // 2
    return (coding.wrap(codes + half) - half).to(like.dtype)


def numbers_of(seed: bytes, number: int, count: int) -> torch.Tensor:
    """Uniform int64, the same for the same seed and number."""
    ciphers, _, _, algorithms, _ = cryptography()
    nonce = (0).to_bytes(4, "little") + number.to_bytes(12, "little")  # of ChaCha20: the block counter, then the nonce
    stream = ciphers.Cipher(algorithms.ChaCha20(seed, nonce), mode=None).encryptor().update(bytes(8 * count))
    return torch.frombuffer(bytearray(stream), dtype=torch.int64) if count else torch.zeros(0, dtype=torch.int64)
