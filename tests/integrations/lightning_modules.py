"""The LightningModules of the tests: importing them imports Lightning."""

from __future__ import annotations

import lightning
import torch

import bagua


class Net(lightning.LightningModule):
    def __init__(self, optimizer="sgd"):
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)]
        self.net, self.optimizer = torch.nn.Sequential(*layers), optimizer
        self.sent_bytes = []

    def forward(self, x):
        return self.net(x)

    def loss(self, batch):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_train_batch_end(self, *_):
        if bagua.is_initialized():
            self.sent_bytes.append(bagua.get_default_group().bytes_sent)

    def configure_optimizers(self):
        if self.optimizer == "qadam":
            return bagua.optim.QAdam(self.parameters(), lr=0.01, warmup_steps=4)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Manual(Net):
    """Two optimizers, each of half of the layers, which step in turn on two micro-batches."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.head = torch.nn.Linear(8, 4)
        self.net[1] = torch.nn.Identity()  # Lightning's DDP does not send its buffers with manual optimization

    def training_step(self, batch, index):
        x, y = batch
        for network, optimizer in zip((self.net, self.head), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            with self.trainer.strategy.block_backward_sync():
                self.manual_backward(torch.nn.functional.cross_entropy(network(x[:4]), y[:4]))
            self.manual_backward(torch.nn.functional.cross_entropy(network(x[4:]), y[4:]))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (self.net, self.head)]
