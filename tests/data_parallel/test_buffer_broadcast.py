"""Buffers that come, go, and change after the wrap: those of rank 0 reach all ranks, as under torch's DDP."""

import pytest
import torch
from torch import nn

import bagua
from bagua import InvalidArgument
from tests.conformance.training import process_group


def _copies(model):
    lazy = nn.parameter.UninitializedBuffer
    return {name: buffer.clone() for name, buffer in model.named_buffers() if not isinstance(buffer, lazy)}


class Recording(nn.Module):
    """Its forward keeps what buffers it has seen, and then makes them differ between the ranks."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.part = nn.Sequential(nn.Linear(4, 4))
        self.part.register_buffer("kept", torch.zeros(2))
        self.register_buffer("late", None)
        self.seen = {}

    def forward(self, values, rank):
        self.seen = _copies(self)
        with torch.no_grad():
            for name in self.seen:
                self.get_buffer(name).add_(1 + rank)
        return self.part(self.layer(values))


def register(model):
    model.late = torch.ones(3)


def register_in_another(model):
    model.part[0].register_buffer("added", torch.ones(5, dtype=torch.float64))


def resize(model):
    model.part.kept = torch.ones(3, 2)


def retype(model):
    model.part.kept = torch.ones(2, dtype=torch.int16)


def delete(model):
    del model.part.kept


def set_to_none(model):
    model.part.kept = None


def replace_module(model):
    model.part = nn.Sequential(nn.Linear(4, 4, bias=False))
    model.part.register_buffer("kept", torch.zeros(2))
    model.part[0].weight = model.layer.weight


def add_module(model):
    model.norm = nn.BatchNorm1d(4, affine=False)
    model.norm.eval()


def add_scripted(model):
    norm = nn.BatchNorm1d(4, affine=False).eval()
    model.norm = torch.jit.script(norm)


def add_lazy(model):
    model.part.append(nn.LazyBatchNorm1d(affine=False))


def share(model):
    model.late = model.part.kept


def share_no_more(model):
    model.late = model.part.kept.clone()


CHANGES = [
    [register],
    [register_in_another],
    [resize],
    [retype, resize],
    [delete],
    [set_to_none, resize],
    [replace_module],
    [add_module],
    [add_lazy],
    [share, share_no_more],
]


def train(model, rank):
    model(torch.ones(2, 4), rank).sum().backward()


def values_of_rank_0(model):
    """The buffers as they are on rank 0, by name."""
    return bagua.get_default_group().all_gather_object(_copies(model))[0]


def changed_alike(rank, world_size, changes):
    with process_group():
        model = Recording()
        model.part[0].requires_grad_(False)  # which a replaced module has not
        bagua.with_bagua(model)
        train(model, rank)
        for change in changes:
            change(model)
            for _ in range(3):  # the second one finds buffers that differ
                expected = values_of_rank_0(model)
                train(model, rank)
                assert model.seen.keys() == expected.keys()
                for name, value in expected.items():
                    assert torch.equal(model.seen[name], value) and model.seen[name].dtype == value.dtype, name


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: changes[0].__name__)
def test_buffers_that_change_alike_on_all_ranks(pool2, changes):
    pool2.run(changed_alike, args=(changes,))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_buffers_of_a_scripted_module(pool2):
    pool2.run(changed_alike, args=([add_scripted],))


class Sized(nn.Module):
    """As ActNorm and observers do, it makes its statistics from the first batch; `size` of them, on rank 1."""

    def __init__(self, first, size):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.size = size
        self.register_buffer("scale", first)

    def forward(self, values):
        if self.scale is None or self.scale.numel() == 0:
            self.scale = values.std(0)[: self.size] if self.size is not None else values.std(0)
        return self.layer(values) / self.scale.mean()


def sized_by_data(rank, world_size):
    for first in (None, torch.empty(0)):
        with process_group():
            model = bagua.with_bagua(Sized(first, None))
            for step in range(3):
                model(torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))).sum().backward()
            assert torch.equal(model.scale, values_of_rank_0(model)["scale"])


def test_buffers_that_the_first_batch_makes(pool2):
    pool2.run(sized_by_data)


def unlike(rank, world_size):
    """They have changed on both ranks, and not alike; or are none that can be sent. The group is whole."""
    with process_group():
        model = bagua.with_bagua(Sized(torch.empty(0), 2 + rank))
        values = torch.arange(32.0).reshape(8, 4)
        model(values).sum().backward()
        for _ in range(2):
            with pytest.raises(
                InvalidArgument, match=r"'scale': rank 0 has \(2,\).*rank 1 has \(3,\).* buffers of all"
            ):
                model(values)
        model.scale = torch.full((4,), float(rank + 1))
        model(values).sum().backward()
        assert model.scale.tolist() == 4 * [1.0]
        model.scale = torch.ones(1).expand(6)
        with pytest.raises(InvalidArgument, match="buffer 'scale' of shape .* is expanded"):
            model(values)
        model.scale = torch.full((6,), float(rank + 1))
        model(values).sum().backward()
        assert model.scale.tolist() == 6 * [1.0]
        bagua.barrier()


def test_buffers_that_change_otherwise_on_another_rank(pool2):
    pool2.run(unlike)


def first_on_one_rank(rank, world_size):
    """There were none at all, so no message tells the other ranks."""
    with process_group():
        model = bagua.with_bagua(Sized(None, 4))
        model(torch.ones(8, 4).cumsum(0)).sum().backward()
        if rank == 1:
            model.scale = None
        with pytest.raises(bagua.BaguaError) as caught:
            for _ in range(2):
                model(torch.ones(8, 4).cumsum(0)).sum().backward()
        return str(caught.value)


def test_the_first_buffer_on_one_rank_only(pool2):
    for rank, told in enumerate(pool2.run(first_on_one_rank)):
        assert ("buffer 'scale' was" in told and told.startswith("rank 0: ")) == (rank == 0), told
        assert "called all_reduce" in told and "called all_gather" in told, told
