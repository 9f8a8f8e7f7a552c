"""bagua.save and bagua.load: another number of ranks, what is saved beside the model, kills, and what is refused."""

import copy
import os
import shutil
import signal

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from bagua.testing import spawn
from tests.conformance.test_checkpoints import start, train
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in
from tests.meeting import meet

ONEBIT = ("bytegrad", {"codec": "onebit", "error_feedback": True})


def _written(rank, world_size, folder, variant):
    with process_group():
        model, optimizer = start(variant)
        train(model, optimizer, rank, range(3))
        bagua.save(folder, model, optimizer)
        return [model.state_dict(), optimizer.state_dict(), model.bagua.state_dict()]


def _read_anew(rank, world_size, folder, variant):
    with process_group():
        model, optimizer = start(variant, seed=5)
        bagua.load(folder, model, optimizer)
        loaded = copy.deepcopy([model.state_dict(), optimizer.state_dict(), model.bagua.state_dict()])
        train(model, optimizer, rank, range(3, 5))  # and saves what is read the same way
        bagua.save(folder, model, optimizer)
        bagua.load(folder, model, optimizer)
        return loaded


def _mean(values):
    return sum(value.double() for value in values) / len(values)


@fast_in("algorithm, growing", [("bytegrad", False), ("powersgd", True)], [("bytegrad", True), ("powersgd", False)])
def test_residuals_on_another_number_of_ranks(pool2, pool4, tmp_path, algorithm, growing):
    """Each rank's counts in the mean of all, so their mean is kept; owners' count as they are."""
    variant = {"bytegrad": ONEBIT, "powersgd": ("powersgd", {})}[algorithm]
    before, after = (pool2, pool4) if growing else (pool4, pool2)
    old = before.run(_written, args=(tmp_path, variant))
    new = after.run(_read_anew, args=(tmp_path, variant))
    for of_rank in new:
        assert all(torch.equal(value, old[0][0][name]) for name, value in of_rank[0].items())
        assert of_rank[2]["num_steps"] == 3
    name = {"bytegrad": "residual", "powersgd": "error"}[algorithm]
    residuals = [[one[2]["parameters"]["states"][name] for one in states] for states in (old, new)]
    assert residuals[0][0]["parameters"].keys() == residuals[1][0]["parameters"].keys() != set()
    for parameter in residuals[0][0]["parameters"]:
        means = [_mean([one["parameters"][parameter] for one in states]) for states in residuals]
        torch.testing.assert_close(means[1], means[0], atol=1e-7, rtol=1e-6)
    for bucket, (_, numel, _) in residuals[0][0]["stripes"].items():
        whole = torch.zeros(numel)
        for one in residuals[0]:
            begin, _, stripe = one["stripes"][bucket]
            whole[begin : begin + stripe.numel()] = stripe
        assert whole.count_nonzero()
        held = torch.cat([value.reshape(-1) for value in residuals[1][0]["owners"].values()])
        assert held.count_nonzero() >= whole.count_nonzero()


@fast_in("algorithm", ["low_precision_decentralized"], ["local_sgd"])
def test_weights_on_another_number_of_ranks(pool2, pool4, tmp_path, algorithm):
    """All begin from the mean of the weights and of the optimizers' moments."""
    variant = (algorithm, {"sync_every": 100} if algorithm == "local_sgd" else {})
    old = pool4.run(_written, args=(tmp_path, variant))
    assert not torch.equal(old[0][0]["wide.weight"], old[1][0]["wide.weight"])
    for of_rank in pool2.run(_read_anew, args=(tmp_path, variant)):
        for name, value in of_rank[0].items():
            if value.is_floating_point():
                torch.testing.assert_close(value.double(), _mean([one[0][name] for one in old]), atol=1e-6, rtol=1e-5)
        moments = [one[1]["state"][1]["exp_avg"] for one in old]
        torch.testing.assert_close(of_rank[1]["state"][1]["exp_avg"].double(), _mean(moments), atol=1e-7, rtol=1e-5)


def _with_others(rank, world_size, folder):
    with process_group():
        model, optimizer = start(ONEBIT)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scheduler.step()
        with pytest.raises(InvalidArgument, match="plain data"):
            bagua.save(folder, model, optimizer, loader=object() if rank == 1 else 1)
        with pytest.raises(InvalidArgument, match="the ranks disagree about names"):
            bagua.save(folder, model, optimizer, **{f"of_{rank}": 1})
        (folder / "best_model.pt").write_text("the program's own")
        bagua.save(folder, model, optimizer, scheduler=scheduler, step=3, seen=torch.arange(3) + rank)
        bagua.save(folder, model, optimizer, scheduler=scheduler, step=3, seen=torch.arange(3) + rank)
        assert (folder / "best_model.pt").exists()
        again = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        plain = bagua.load(folder, model, optimizer, scheduler=again)
        assert again.last_epoch == 1
        assert plain["step"] == 3 and torch.equal(plain["seen"], torch.arange(3) + rank)
        assert sorted(plain) == ["seen", "step"]
        with pytest.raises(InvalidArgument, match=r"holds \['scheduler', 'seen', 'step'\], but load got \['scaler'\]"):
            bagua.load(folder, model, optimizer, scaler=again)
        halves = [{"params": [model.scale]}, {"params": [model.wide.weight]}]
        with pytest.raises(InvalidArgument, match="parameters in its groups"):
            bagua.load(folder, model, torch.optim.AdamW(halves))
        with pytest.raises(InvalidArgument, match="holds 1 optimizers, load got 0"):
            bagua.load(folder, model)
        with pytest.raises(InvalidArgument, match="'bytegrad', the model runs 'gradient_allreduce'"):
            bagua.load(folder, *start(("gradient_allreduce", {})))
        with pytest.raises(InvalidArgument, match="holds no checkpoint of bagua.save"):
            bagua.load(folder / "nothing", model, optimizer)
        with pytest.raises(InvalidArgument, match="the model is not wrapped"):
            bagua.save(folder, torch.nn.Linear(2, 2))
        wider, its = start(ONEBIT, kind=_Wider)
        with pytest.raises(InvalidArgument, match="trainable parameters|'narrow.weight'"):
            bagua.load(folder, wider, its)


class _Wider(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(16, 4096)

    def forward(self, x):
        return self.wide(x).sum(1)


def test_what_is_saved_beside_the_model(pool2, tmp_path):
    pool2.run(_with_others, args=(tmp_path,))


def _dies_while_saving(rank, world_size, folder):
    bagua.init_process_group()
    model, optimizer = start(ONEBIT)
    train(model, optimizer, rank, range(2))
    bagua.save(folder, model, optimizer, step=2)
    meet()
    if rank == 1:
        write = bagua.data_parallel.checkpoint.replace_file

        def dies(path, content):
            write(path.with_suffix(".part"), content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        bagua.data_parallel.checkpoint.replace_file = dies
    with pytest.raises(bagua.BaguaError, match="rank 1"):
        bagua.save(folder, model, optimizer, step=3)
    os._exit(0)


def _reads_the_earlier(rank, world_size, folder):
    with process_group():
        model, optimizer = start(ONEBIT)
        assert bagua.load(folder, model, optimizer)["step"] == 2
        bagua.save(folder, model, optimizer, step=4)
        assert bagua.load(folder, model, optimizer)["step"] == 4


def test_a_rank_that_dies_while_it_saves_leaves_the_earlier_checkpoint(pool2, tmp_path):
    spawn(_dies_while_saving, 2, args=(tmp_path,), expect_exit={0: 0, 1: -signal.SIGKILL})
    pool2.run(_reads_the_earlier, args=(tmp_path,))
    assert len(list(tmp_path.glob("*.pt"))) == 3  # of the last save alone


def _each_from_its_own_disk(rank, world_size, folder):
    with process_group():
        model, optimizer = start(("local_sgd", {"sync_every": 100}))
        train(model, optimizer, rank, range(2))
        bagua.save(folder / str(rank), model, optimizer)
        weight = model.wide.weight.detach().clone()
        for name in os.listdir(folder / str(rank)):
            if name.startswith(f"rank{1 - rank}"):
                os.unlink(folder / str(rank) / name)
        bagua.load(folder / str(rank), model, optimizer)
        assert torch.equal(model.wide.weight, weight)


def test_hosts_with_disks_of_their_own(tmp_path):
    spawn(_each_from_its_own_disk, 2, args=(tmp_path,), nodes=2)


def _misses_a_file(rank, world_size, folder):
    with process_group():
        model, optimizer = start(ONEBIT)
        with pytest.raises(InvalidArgument, match="rank3.1.pt is missing"):
            bagua.load(folder, model, optimizer)


def test_a_file_that_is_missing_is_named(pool2, pool4, tmp_path):
    pool4.run(_written, args=(tmp_path, ONEBIT))
    os.unlink(tmp_path / "rank3.1.pt")
    pool2.run(_misses_a_file, args=(tmp_path,))
    shutil.rmtree(tmp_path)
