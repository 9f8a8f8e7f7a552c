"""AdaSum (arXiv 2006.02924): gradients of the ranks that point the same way are averaged, orthogonal ones added up."""

import dataclasses

import torch

from bagua.algorithms import Algorithm


@dataclasses.dataclass(kw_only=True)
class AdaSum(Algorithm):
    """Replaces each parameter's gradient g by the adasum of all ranks' g.

    adasum(a, b) = (1 - ab / 2aa) a + (1 - ab / 2bb) b; for more ranks, it is the adasum of the adasums of both halves.
    Each rank sends (n-1) G bytes and needs n G bytes of memory.
    """

    def communicate(self, bucket, group):
        gathered = bucket.flat.new_empty(group.size * bucket.numel)
        yield group.all_gather(gathered, bucket)
        for begin, end in map(bucket.place_of, bucket.members):
            bucket.flat[begin:end] = adasum([flat[begin:end] for flat in gathered.view(group.size, bucket.numel)])


def adasum(grads):
    """Returns the adasum of a parameter's gradients by rank, in float32 or wider; every rank computes the same."""
    if len(grads) == 1:
        return grads[0].to(torch.promote_types(grads[0].dtype, torch.float32))
    a, b = adasum(grads[: len(grads) // 2]), adasum(grads[len(grads) // 2 :])
    ab, aa, bb = (float((x * y).sum(dtype=torch.float64)) for x, y in ((a, b), (a, a), (b, b)))
    return (1 - ab / (2 * aa)) * a + (1 - ab / (2 * bb)) * b if aa and bb else a + b
