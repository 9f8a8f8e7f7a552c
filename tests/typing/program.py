"""A program that uses the public names as README does, for a type checker: nothing here is run."""

from datetime import timedelta

import torch
from typing_extensions import assert_type

import bagua
from bagua import federated
from bagua.algorithms.bytegrad import ByteGrad
from bagua.replay.profiles import Profile
from bagua.testing import spawn

bagua.init_process_group(timeout=timedelta(minutes=1))
assert_type(bagua.__version__, str)
assert_type(bagua.get_rank(), int)
assert_type(bagua.get_world_size(), int)
assert_type(bagua.is_initialized(), bool)
assert_type((bagua.get_local_rank(), bagua.get_local_world_size(), bagua.get_node_rank()), tuple[int, int, int])

group = bagua.new_group([0, 1])
x = torch.ones(4)
bagua.all_reduce(x, bagua.ReduceOp.AVG, codec="minmax_uint8")
work = bagua.all_reduce(x, async_op=True)
bagua.broadcast(x, 0)
bagua.reduce(x, 0)
bagua.barrier()
bagua.all_gather(torch.empty(8), x)
bagua.reduce_scatter(x, torch.empty(8))
bagua.all_to_all(torch.empty(4), x)
bagua.gather(x, torch.empty(8), 0)
bagua.scatter(x, torch.empty(8), 0)
bagua.send(x, 1)
bagua.recv(x, 0)
bagua.neighbor_average(x, "ring")
assert_type(bagua.empty(4, 4), torch.Tensor)
bagua.broadcast_object({"seed": 1}, 0)
gathered = bagua.all_gather_object("host")

model = torch.nn.Sequential(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
same = bagua.with_bagua(model, [optimizer], algorithm="bytegrad")
assert_type(same, torch.nn.Sequential)
ddp = bagua.DistributedDataParallel(torch.nn.Linear(4, 2), algorithm=ByteGrad(), optimizers=[optimizer])
with ddp.no_sync():
    ddp(x)

assert_type(bagua.algorithms.available(), tuple[str, ...])
assert_type(bagua.codecs.available(), tuple[str, ...])
codec = bagua.codecs.get("minmax_uint8")
assert_type(codec.encode(x), torch.Tensor)
profile: Profile = bagua.profiles.Profile.load("profile.json")

try:
    bagua.barrier()
except bagua.TransportError as error:
    assert_type(error.rank, int | None)
    assert_type(error.peer, int | None)
except bagua.BaguaError as error:
    assert_type(error.operation, str | None)

bagua.destroy_process_group()

# ---- what is beside it ------------------------------------------------------------------------------------


@federated.program(clients=4)
def mean_of_squares(values: torch.Tensor) -> torch.Tensor:
    squares = federated.map_fn(lambda x: x * x, values)
    mean: torch.Tensor = federated.reduce_mean(squares)
    return mean


assert_type(mean_of_squares(torch.arange(4.0)), torch.Tensor)


def rank_plus(rank: int, world_size: int, offset: int) -> int:
    return rank + offset


results = spawn(rank_plus, 2, args=(3,), timeout=30)
adam = bagua.optim.QAdam(model.parameters(), lr=0.1, warmup_steps=10)
figures = bagua.metrics.values(bagua.DistributedDataParallel(model))
nothing = bagua.no_such_name  # type: ignore[attr-defined]
