"""A program of a user of the original project, except for the device: scikit-learn's digits by each algorithm.

The last line of rank 0 is a JSON object of accuracies. Run by test_program.py.
"""

from __future__ import annotations

import argparse
import json
import logging

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import bagua.torch_api as bagua


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.fc1 = torch.nn.Linear(16 * 16, 64)
        self.fc2 = torch.nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def choose(name, model, optimizer):
    if name == "gradient_allreduce":
        from bagua.torch_api.algorithms import gradient_allreduce

        algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
    elif name == "bytegrad":
        from bagua.torch_api.algorithms import bytegrad

        algorithm = bytegrad.ByteGradAlgorithm()
    elif name == "decentralized":
        from bagua.torch_api.algorithms import decentralized

        algorithm = decentralized.DecentralizedAlgorithm()
    elif name == "low_precision_decentralized":
        from bagua.torch_api.algorithms import decentralized

        algorithm = decentralized.LowPrecisionDecentralizedAlgorithm()
    elif name == "qadam":
        from bagua.torch_api.algorithms import q_adam

        optimizer = q_adam.QAdamOptimizer(model.parameters(), lr=0.003, warmup_steps=20)
        algorithm = q_adam.QAdamAlgorithm(optimizer)
    elif name == "async":
        from bagua.torch_api.algorithms import async_model_average

        algorithm = async_model_average.AsyncModelAverageAlgorithm(sync_interval_ms=20)
    else:
        raise NotImplementedError(name)
    return algorithm, optimizer


def train(model, loader, optimizer):
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        F.nll_loss(model(data), target).backward()
        optimizer.step()


def test(model, images, labels):
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(1) == labels).sum()
    both = torch.empty(1, dtype=correct.dtype)
    bagua.allreduce(correct.view(1), both, op=bagua.ReduceOp.SUM)
    return both.item() / (len(labels) * bagua.get_world_size())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithms", nargs="+", default=["gradient_allreduce"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()

    print("device", bagua.get_local_rank(), flush=True)  # the original's programs ask before init_process_group
    bagua.init_process_group()
    if bagua.get_rank() == 0:
        logging.getLogger().setLevel(logging.INFO)

    if bagua.get_local_rank() == 0:
        digits = load_digits()
        torch.distributed.barrier()
    else:
        torch.distributed.barrier()
        digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_set = torch.utils.data.TensorDataset(images[:1400], labels[:1400])
    sampler = torch.utils.data.distributed.DistributedSampler(
        train_set, num_replicas=bagua.get_world_size(), rank=bagua.get_rank()
    )
    batch_size = args.batch_size // bagua.get_world_size()
    loader = torch.utils.data.DataLoader(train_set, batch_size=batch_size, sampler=sampler)

    accuracies = {}
    for name in args.algorithms:
        torch.manual_seed(666 + bagua.get_rank())
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        algorithm, optimizer = choose(name, model, optimizer)
        model = model.with_bagua([optimizer], algorithm, do_flatten=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            if name == "async":
                model.bagua_algorithm.resume(model)
            train(model, loader, optimizer)
            if name == "async":
                model.bagua_algorithm.abort(model)
            accuracies[name] = test(model, images[1400:], labels[1400:])
            scheduler.step()
        if name == "async":
            algorithm.abort(model)
    if bagua.get_rank() == 0:
        print(json.dumps(accuracies))


if __name__ == "__main__":
    main()
