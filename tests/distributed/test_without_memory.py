"""Tensors that have elements but no memory of their own are refused before anything is sent, by every way in."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import bagua
from bagua import _C, codecs
from bagua.testing import world as thread_world


def without_memory():
    """(what the message calls it, tensor of 6 elements)"""
    with FakeTensorMode():
        fakes = [torch.ones(7)[:6], torch.ones(7)[1:], torch.nn.Parameter(torch.ones(6)), torch.ones(12)[::2]]
    for fake in fakes:
        yield "FakeTensor, which has a shape but no values", fake
    yield r"TwoTensor of shape \(6,\) without memory of its own", TwoTensor(torch.ones(6), torch.ones(6))
    freed = torch.ones(7)
    views = [freed[:6], freed[1:]]
    freed.untyped_storage().resize_(0)
    for view in views:
        yield r"Tensor of shape \(6,\) without memory of its own: a wrapper of other tensors, or freed", view
    yield "Tensor of shape", torch._efficientzerotensor((6,))


def check_refused(group):
    plain, whole = torch.ones(6), torch.ones(6 * group.size)
    sent = group.bytes_sent
    for message, lost in without_memory():
        calls = {
            "tensor": [
                lambda lost=lost: group.all_reduce(lost),
                lambda lost=lost: group.all_reduce(lost, codec="minmax_uint8"),
                lambda lost=lost: group.all_reduce(lost, hierarchical=True),
                lambda lost=lost: group.reduce(lost, 0),
                lambda lost=lost: group.broadcast(lost, 0),
                lambda lost=lost: group.neighbor_average(lost),
                lambda lost=lost: group.send(lost, 1 - group.rank),
                lambda lost=lost: group.recv(lost, 1 - group.rank),
                lambda lost=lost: codecs.get("minmax_uint8").encode(lost.detach()),
            ],
            "input": [
                lambda lost=lost: group.all_gather(whole, lost),
                lambda lost=lost: group.gather(whole, lost, group.rank),
                lambda lost=lost: group.all_to_all(plain, lost),
                lambda lost=lost: group.reduce_scatter(torch.ones(3), lost),
            ],
            "output": [
                lambda lost=lost: group.reduce_scatter(lost, whole),
                lambda lost=lost: group.scatter(lost, whole, group.rank),
                lambda lost=lost: group.all_to_all(lost, plain),
                lambda lost=lost: group.all_gather(lost, torch.ones(3)),
            ],
            "a part": [lambda lost=lost: group.all_reduce(whole, codec="bf16", parts=[(0, lost)])],
        }
        for name, each in calls.items():
            for index, call in enumerate(each):
                if name == "tensor" and index == len(each) - 1 and not lost.is_contiguous():
                    continue  # refused for that
                with pytest.raises(bagua.InvalidArgument, match=f"{name} is a {message}"):
                    call()
    assert group.bytes_sent == sent
    group.all_reduce(plain).wait()
    assert plain.tolist() == [group.size] * 6
    group.all_reduce(torch.empty(0)).wait()  # an empty one needs none


def test_tensors_without_memory():
    thread_world(2, check_refused)


def test_inside_transforms_of_torch_func():
    """Their tensors hold no values yet, and torch itself refuses to say where they are."""

    def check(group):
        def reduced(x):
            group.all_reduce(x)
            return x.sum()

        for transform in (torch.func.grad, torch.vmap, torch.func.functionalize):
            with pytest.raises(bagua.InvalidArgument, match="tensor is a Tensor .* inside a transform of torch.func"):
                transform(reduced)(torch.ones(2, 3) if transform is torch.vmap else torch.ones(3))

    thread_world(1, check)


def check_core(group):
    """The core by itself: an address of 0 is an error, and nothing is sent."""
    core, x, n = group._core, torch.ones(4), group.size
    address, sent = x.data_ptr(), group.bytes_sent
    f32, now = 0, (10.0, False, None, None)
    nodes = (list(range(n)), [0])
    for operation, call in {
        "all_reduce": lambda: core.all_reduce(0, 4, f32, 0, None, now),
        "all_reduce: tensor": lambda: core.hierarchical_all_reduce(*nodes, 0, 4, f32, 0, None, now),
        "residuals": lambda: core.all_reduce(
            address, 4, f32, 0, ("bf16", None), now, (address, 0, address, address, f32)
        ),
        "parts": lambda: core.all_reduce(address, 4, f32, 0, None, now, None, [(0, 2, 0)]),
        "reduce": lambda: core.reduce(0, 4, f32, 0, 0, now),
        "reduce_scatter: input": lambda: core.reduce_scatter(0, address, 2, f32, 0, None, now),
        "reduce_scatter: output": lambda: core.reduce_scatter(address, 0, 2, f32, 0, None, now),
        "neighbor_average": lambda: core.neighbor_average(0, 4, f32, 0, 0, None, now, []),
        "neighbor_average: tensor": lambda: core.hierarchical_neighbor_average(
            *nodes, 1, 0, 4, f32, 0, 0, None, now, []
        ),
        "difference_ring_average: tensor": lambda: core.difference_ring_average(
            0, 4, f32, address, address, address, ("bf16", None), now
        ),
        "difference_ring_average: a replica": lambda: core.difference_ring_average(
            address, 4, f32, address, 0, address, ("bf16", None), now
        ),
        "all_gather: input": lambda: core.all_gather(0, address, 4, f32, None, now),
        "all_gather: output": lambda: core.all_gather(address, 0, 4, f32, None, now),
        "all_to_all: input": lambda: core.all_to_all(0, [2] * n, address, [2] * n, f32, None, 0, now),
        "all_to_all: output": lambda: core.all_to_all(address, [2] * n, 0, [2] * n, f32, None, 0, now),
        "broadcast": lambda: core.broadcast(0, 4, f32, 0, None, now),
        "gather: input": lambda: core.gather(0, address, 4, f32, 0, now),
        "scatter: output": lambda: core.scatter(address, 0, 4, f32, 0, now),
        "send": lambda: core.send(0, 4, f32, 1 - group.rank, 0, now),
        "recv": lambda: core.recv(0, 4, f32, 1 - group.rank, 0, now),
        "copy_to_cold: source": lambda: _C.copy_to_cold(address, 0, 4),
        "copy_to_cold: destination": lambda: _C.copy_to_cold(0, address, 4),
        "bf16: tensor": lambda: _C.codec_encode("bf16", 0, f32, 2, address, 0),
        "bf16: message": lambda: _C.codec_encode("bf16", address, f32, 2, 0, 0),
        "bf16: tensor has": lambda: _C.codec_decode("bf16", address, f32, 2, 0),
        "bf16: message has": lambda: _C.codec_decode_add("bf16", 0, f32, 2, address),
    }.items():
        with pytest.raises(bagua.InvalidArgument, match=f"^{operation}.*no memory"):
            call()
    root_only = {"gather: output": core.gather, "scatter: input": core.scatter}
    if group.rank == 0:
        for operation, call in root_only.items():
            addresses = (address, 0) if operation == "gather: output" else (0, address)
            with pytest.raises(bagua.InvalidArgument, match=f"^{operation} has .* no memory"):
                call(*addresses, 4, f32, 0, now)
    assert group.bytes_sent == sent
    group.all_reduce(x).wait()
    assert x.tolist() == [n] * 4


def test_the_core_refuses_address_0():
    thread_world(2, check_core)
