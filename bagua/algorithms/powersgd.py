"""powersgd: of each matrix of gradients two thin factors are averaged, and what they leave out is sent later.

Data path: policy. Per bucket two all_reduces, during backward: of P = M Q, and, when P has been made orthonormal, of
Q = M^T P; the result is P Q^T, of the rank that was asked for. Between the two other buckets are launched. Source:
arXiv 1905.13727.

Invariant: every rank computes the result from the same P and Q in the same order of operations, so ranks whose
processors and numbers of threads are alike end bit-identical.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Hashable, Sequence

import torch

from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._compressed import STATE_DTYPES
from bagua.algorithms.base import About, Algorithm, ParameterState
from bagua.algorithms.registry import register
from bagua.buckets import Bucket, Member
from bagua.distributed.process_group import ReduceOp, Work
from bagua.errors import InvalidArgument

_LOW_RANK, _WHOLE = "low rank", "whole"


@register
@dataclasses.dataclass(kw_only=True)
class PowerSGD(Algorithm):
    """M_i = g_i + e_i; P <- orthonormal(mean M_i Q); Q_i = M_i^T P; g <- P (mean Q_i)^T; e_i <- M_i - P Q_i^T.

    A parameter with two dimensions and more is a matrix: its first dimension in memory by all others. Q is what the
    step before has left, so that the factors follow the largest directions of the gradients as a power iteration does.
    Parameters of fewer dimensions, and those whose factors would not be half as large as they are, travel as they are.

    Args:
        rank: of what is sent of each matrix.
        hierarchical: reduce inside each node first, see gradient_allreduce.
        error_feedback: whether what is left out is added to the next step's gradient; without it the training stays in
            a few directions.
        state_dtype: "float32" or "bfloat16", of what error feedback remembers.
        seed: of the first Q.

    Example:
        >>> model = bagua.with_bagua(model, [optimizer], algorithm="powersgd", rank=2)
    """

    about = About(
        sends="two thin factors of each matrix of gradients",
        to="all ranks",
        when="during backward, which waits",
        bytes_per_step="2 (n-1)/n G r (a + b) / (a b) for rank r and matrices of a by b",
        memory="2 G for error feedback, in bfloat16 half; the factors",
        use_when="large matrices and a network that binds even at 2 bits per element",
        paper="[1905.13727](https://arxiv.org/abs/1905.13727)",
    )

    rank: int = 4
    hierarchical: bool = False
    error_feedback: bool = True
    state_dtype: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank < 1:
            raise InvalidArgument(f"rank is {self.rank}, expected 1 or more")
        if self.state_dtype not in STATE_DTYPES:
            raise InvalidArgument(
                f"state_dtype is {self.state_dtype!r}, expected {' or '.join(map(repr, STATE_DTYPES))}"
            )
        if not 0 <= self.seed < 2**63:
            raise InvalidArgument(f"seed is {self.seed}, expected 0 to 2**63 - 1")
        self._firsts: dict[tuple, torch.Tensor] = {}  # on a device, by parameter, type and device: its first Q

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        if parameter.dim() < 2 or not parameter.numel() or parameter.is_complex():
            return _WHOLE
        rows, columns = _sides(parameter)
        return _LOW_RANK if 2 * self._rank_of(parameter) * (rows + columns) <= rows * columns else _WHOLE

    def parameter_state(self) -> dict[str, ParameterState]:
        states = {"q": ParameterState(shape=lambda parameter: (_sides(parameter)[1], self._rank_of(parameter)))}
        if self.error_feedback:
            states["error"] = ParameterState(STATE_DTYPES[self.state_dtype], is_scaled=True)
        return states

    def communicate(self, bucket: Bucket, group: BucketGroup) -> Generator[Work, None, None]:
        if bucket.kind == _WHOLE or group.size == 1:
            reason = "no real matrices that two factors make smaller" if bucket.kind == _WHOLE else ""
            group.all_reduce(bucket, ReduceOp.AVG, hierarchical=self.hierarchical, reason=reason)
            return  # the end of backward waits for it
        dtype = torch.promote_types(bucket.dtype, torch.float32)  # a narrower one would round M, or overflow
        matrices = [_matrix(member.view).to(dtype) for member in bucket.members]
        if self.error_feedback:
            for member, matrix in zip(bucket.members, matrices, strict=True):
                matrix.add_(_matrix(bucket.state("error", member)))
        factors = [self._start(bucket, member, dtype) for member in bucket.members]

        sides = [(matrix.shape[0], q.shape[1]) for matrix, q in zip(matrices, factors, strict=True)]
        thin, ps = _side_by_side(sides, dtype, bucket.device)
        for matrix, q, p in zip(matrices, factors, ps, strict=True):
            torch.mm(matrix, q, out=p)
        yield group.all_reduce(thin, ReduceOp.AVG, hierarchical=self.hierarchical)
        ps = [_orthonormal(p) for p in ps]

        wide, qs = _side_by_side([q.shape for q in factors], dtype, bucket.device)
        for matrix, p, q in zip(matrices, ps, qs, strict=True):
            torch.mm(matrix.T, p, out=q)
        if self.error_feedback:
            for member, matrix, p, q in zip(bucket.members, matrices, ps, qs, strict=True):
                _matrix(bucket.state("error", member)).copy_(torch.addmm(matrix, p, q.T, alpha=-1))
        yield group.all_reduce(wide, ReduceOp.AVG, hierarchical=self.hierarchical)
        for member, p, q in zip(bucket.members, ps, qs, strict=True):
            _matrix(member.view).copy_(p @ q.T)
            bucket.state("q", member).copy_(q)

    def _start(self, bucket: Bucket, member: Member, dtype: torch.dtype) -> torch.Tensor:
        """The Q of the step before; at first, and where a column has become 0, random ones, the same on all ranks.

        Columns do when gradients have a lower rank for a while, and would stay so. On a device the host does not wait
        to hear whether one has: the random ones stay there.
        """
        q = bucket.state("q", member).to(dtype)
        is_alive = q.any(dim=0)
        if q.is_cpu and bool(is_alive.all()):
            return q
        key = (member.index, q.dtype, q.device)
        first = self._firsts.get(key)
        if first is None:
            generator = torch.Generator().manual_seed(self.seed + member.index)
            first = torch.randn(q.shape, generator=generator, dtype=torch.float32, device="cpu").to(q.dtype)
            if not q.is_cpu:
                # From pinned memory: from other memory the host would wait until the device has copied it.
                self._firsts[key] = first = first.pin_memory().to(q.device, non_blocking=True)
        return torch.where(is_alive, q, first)

    def _rank_of(self, parameter: torch.Tensor) -> int:
        return min(self.rank, *_sides(parameter))


def _sides(parameter: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of the matrix of a parameter's gradient, which lies in memory as the parameter does."""
    dense = torch.empty_like(parameter, device="meta")
    like = dense if dense.stride() == parameter.stride() else dense.contiguous()
    rows = like.shape[_by_stride(like)[0]]
    return rows, parameter.numel() // rows


def _matrix(gradient: torch.Tensor) -> torch.Tensor:
    """A view of it."""
    gradient = gradient.permute(_by_stride(gradient))
    return gradient.view(gradient.shape[0], -1)


def _by_stride(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda dimension: -tensor.stride(dimension))


def _orthonormal(p: torch.Tensor) -> torch.Tensor:
    """An orthonormal basis of the columns, where these are not dependent, by Cholesky factors of P^T P, twice.

    Unlike a Householder QR it keeps rows of zeros, as of embeddings that no batch has met, and NaN raises nothing.
    """
    basis = p.double()
    lengths = basis.norm(dim=0)  # which may differ by any factor, and mean nothing
    basis = basis / torch.where(lengths > 0, lengths, 1)
    for _ in range(2):
        gram = basis.T @ basis
        diagonal = gram.diagonal()
        diagonal += diagonal.sum() * 1e-14 + torch.finfo(torch.float64).tiny  # columns may be dependent
        factor = torch.linalg.cholesky_ex(gram).L
        basis = torch.linalg.solve_triangular(factor, basis.T, upper=False).T
    return basis.to(p.dtype)


def _side_by_side(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One message, and the matrices in it."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=dtype, device=device)
    return flat, [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
