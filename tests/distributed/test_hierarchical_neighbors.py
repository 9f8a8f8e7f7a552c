"""neighbor_average(hierarchical=True) against the matrix of its definition, full and low precision."""

import torch

import bagua
from bagua.testing import world as thread_world
from tests.codec_specs import CONTRACTIONS, SPECS
from tests.distributed.oracles import neighbor_weights
from tests.distributed.worlds import fast_in

TOPOLOGIES = ("all", "ring", "shift_one", "exponential")
LAYOUTS = ([0, 0, 1], [0, 1, 0, 2, 1, 2, 3, 4])
NUMEL = 5000


def _values(rank):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) + rank


def _node_rows(topology, counts, step):
    """Between nodes k and l of n_k and n_l ranks w_kl m / n_k, m the smallest node, and the rest for k itself."""
    num_nodes = len(counts)
    rows = []
    for k in range(num_nodes):
        row = neighbor_weights(topology, num_nodes, k, step)
        if len(set(row)) == 1:  # everybody with everybody: the mean over ranks
            rows.append([count / sum(counts) for count in counts])
            continue
        row = [weight * min(counts) / counts[k] for weight in row]
        row[k] = 1 - sum(weight for other, weight in enumerate(row) if other != k)
        rows.append(row)
    return rows


def check(group, codec):
    nodes = group.nodes.members
    counts = [len(members) for members in nodes]
    means = [sum(_values(r).double() for r in members) / len(members) for members in nodes]
    own = next(k for k, members in enumerate(nodes) if group.rank in members)
    for topology in TOPOLOGIES:
        for step in range(3):
            x = _values(group.rank)
            group.neighbor_average(x, topology, step, codec=codec, hierarchical=True).wait()
            row = _node_rows(topology, counts, step)[own]
            expected = sum(weight * mean for weight, mean in zip(row, means, strict=True))
            allowed = torch.full((NUMEL,), 1e-5, dtype=torch.float64)
            if codec is not None and len(set(neighbor_weights(topology, len(counts), own, step))) == 1:
                # Of each node's part, and of their sum, which no rank knows more exactly.
                parts = [mean * count / group.size for mean, count in zip(means, counts, strict=True)]
                bounds = [bagua.codecs.get(codec).error_bound(part.float()) for part in parts]
                spread = sum(bounds)
                allowed += spread + 2 * bagua.codecs.get(codec).error_bound((expected.abs() + spread).float()).max()
            elif codec is not None:
                bounds = [bagua.codecs.get(codec).error_bound(mean.float()) for mean in means]
                allowed += sum(row[k] * bounds[k] for k in range(len(nodes)) if k != own)
            off = (x.double() - expected).abs()
            assert bool((off <= allowed).all()), f"{topology} {step} {codec}: {float((off - allowed).max())}"
            everybody = torch.empty(group.size * NUMEL)
            group.all_gather(everybody, x).wait()
            of_rank = everybody.view(group.size, NUMEL)
            assert all(torch.equal(of_rank[r], x) for r in nodes[own])
            if codec is None:
                mean = sum(_values(r).double() for r in range(group.size)) / group.size
                assert float((of_rank.double().mean(0) - mean).abs().max()) < 1e-5
            elif row[own] < 1:
                assert float(off.max()) > 1e-7  # something was encoded


@fast_in("codec", [None, "qsgd:bits=4"], [spec for spec in SPECS if spec not in CONTRACTIONS])
def test_nodes_average_by_the_topology(codec):
    for layout in LAYOUTS:
        thread_world(len(layout), lambda group: check(group, codec), nodes=layout)


def check_one_node(group):
    """Nobody is on another node: nothing travels under the codec, and all topologies are the mean of all."""
    expected = sum(_values(r).double() for r in range(group.size)) / group.size
    for topology in TOPOLOGIES:
        x = _values(group.rank)
        group.neighbor_average(x, topology, codec="qsgd:bits=2", hierarchical=True).wait()
        assert float((x.double() - expected).abs().max()) < 1e-5


def test_one_node():
    thread_world(3, check_one_node, nodes=[0, 0, 0])
