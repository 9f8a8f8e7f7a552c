"""BaguaConfig in Ray Train on Ray's local cluster, fed by Ray Data: one run, as starting it takes seconds."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.needs("ray", "pyarrow"),
    pytest.mark.slow("nothing: Ray starts a cluster"),
    pytest.mark.timeout(400),
]


@pytest.fixture
def cluster(monkeypatch):
    import ray

    monkeypatch.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def test_a_run_on_the_local_cluster(cluster, tmp_path):
    """The training function trains on torch's DDP, on bagua, and on bagua from a checkpoint of the ranks."""
    import ray.data
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from bagua.integrations.ray import BaguaConfig

    def train(config):  # Ray sends it by value
        import os
        import tempfile

        import ray.train
        import torch.distributed as dist

        import bagua

        gloo = dist.new_group(backend="gloo")
        data = ray.train.get_dataset_shard("train")
        batches = [(one["x"].float(), one["y"]) for one in data.iter_torch_batches(batch_size=8)]

        def network():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 4))
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def epoch(model, optimizer):
            for x, y in batches:
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return [parameter.detach().clone() for parameter in model.parameters()]

        model, optimizer = network()
        of_torch = epoch(torch.nn.parallel.DistributedDataParallel(model, process_group=gloo), optimizer)
        model, optimizer = network()
        of_bagua = epoch(bagua.with_bagua(model, optimizer), optimizer)

        onebit = {"algorithm": "bytegrad", "codec": "onebit", "error_feedback": True}
        model, optimizer = network()
        bagua.with_bagua(model, optimizer, **onebit)
        epoch(model, optimizer)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "bagua": model.bagua.state_dict()}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state, os.path.join(folder, f"rank{bagua.get_rank()}.pt"))
            ray.train.report({"epoch": 1}, checkpoint=ray.train.Checkpoint.from_directory(folder))
        straight = epoch(model, optimizer)
        model, optimizer = network()
        bagua.with_bagua(model, optimizer, **onebit)
        with ray.train.get_checkpoint().as_directory() as folder:
            state = torch.load(os.path.join(folder, f"rank{bagua.get_rank()}.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        model.bagua.load_state_dict(state["bagua"])
        resumed = epoch(model, optimizer)

        difference = max(float((mine - theirs).abs().max()) for mine, theirs in zip(of_bagua, of_torch, strict=True))
        are_equal = all(torch.equal(one, other) for one, other in zip(resumed, straight, strict=True))
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, [dist.get_backend(), len(batches), difference, are_equal])
        if bagua.get_rank() == 0:
            torch.save(of_ranks, config["path"])

    x = [[((7 * row + 3 * column) % 11) / 5 - 1 for column in range(8)] for row in range(64)]
    rows = [{"x": values, "y": max(range(4), key=values.__getitem__)} for values in x]
    path = str(tmp_path / "of_ranks.pt")
    TorchTrainer(
        train,
        train_loop_config={"path": path},
        torch_config=BaguaConfig(timeout_s=60),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
        datasets={"train": ray.data.from_items(rows)},
    ).fit()
    of_ranks = torch.load(path)
    assert len(of_ranks) == 2
    for backend, num_batches, difference, are_equal in of_ranks:
        assert backend == "bagua" and num_batches == 4
        assert difference < 1e-5 and are_equal
