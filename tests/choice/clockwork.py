"""A training whose steps take what a table says, by a clock that goes by hand."""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import torch

import bagua
from bagua.choice import Row, chooser, recording
from bagua.simulator import Link

BASE = "gradient_allreduce"
COMPUTE_S = 0.25  # of a step; what it takes beyond that, a rank waits at the end of backward


class Clock:
    """Passes ``perf_counter`` on, and goes by hand."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s


class Training:
    """A wrapped model.

    Args:
        rank: skews the clock a little, as real ones are.
        seconds: of a step by candidate, or by algorithm; others take those of the base.
        predicted: the same; None for what cannot be rehearsed.
        options: of with_bagua.
    """

    def __init__(self, rank, seconds, predicted, *, optimizer=True, **options):
        torch.manual_seed(0)
        self.clock, self.rank, self.seconds = Clock(), rank, dict(seconds)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.num_steps, self.ran, self.asked_for = 0, [], []

        def predict(group, network, profile, candidates, until_s):
            self.asked_for.append([str(one) for one in candidates])
            self.clock.now_s += 0.1 * (1 + self.rank)  # ranks take unlike long
            return [Row(str(one), predicted.get(str(one), predicted.get(one.algorithm))) for one in candidates]

        class Recording(recording.Recording):
            def end_backward(recording):
                self.clock.now_s += max(0.0, self._step_s() - COMPUTE_S)
                super().end_backward()

        self._patches = contextlib.ExitStack()
        for module, name, value in (
            (chooser, "time", self.clock),
            (recording, "time", self.clock),
            (chooser, "predict", predict),
            (chooser, "measure_network", lambda *_: types.SimpleNamespace(link=Link(up=1e9))),
            (chooser, "Recording", Recording),
        ):
            self._patches.enter_context(mock.patch.object(module, name, value))
        optimizers = [self.optimizer] if optimizer else []
        bagua.with_bagua(self.model, optimizers, **{"algorithm": "auto", **options})
        self.handle = self.model.bagua

    def end(self):
        """Undoes what it has changed in modules, which a pool's ranks keep."""
        self.model.bagua.remove()
        self._patches.close()

    @property
    def candidate(self):
        """What it trains under now, as a table names it."""
        choosing = self.handle.reducer.choosing
        state = None if choosing is None else choosing.state()
        if state is None:
            return self.handle.algorithm.name
        options = ",".join(f"{name}={value}" for name, value in state["options"].items())
        return f"{state['algorithm']}:{options}" if options else state["algorithm"]

    def _step_s(self):
        name = self.handle.algorithm.name
        return self.seconds.get(self.candidate, self.seconds.get(name, self.seconds[BASE]))

    def step(self, micro_batches=0):
        """One step; ranks' clocks differ by a hundredth of it. Micro-batches before its last one are local."""
        generator = torch.Generator().manual_seed(1000 * self.num_steps + self.rank)
        self.optimizer.zero_grad()
        for _ in range(micro_batches):
            with self.model.no_sync():
                self.model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        output = self.model(torch.randn(4, 8, generator=generator))
        self.ran.append(self.candidate)
        recording = self.handle.reducer.choosing and self.handle.reducer.choosing._recording
        self.clock.now_s += COMPUTE_S * (1 + 0.01 * self.rank)
        output.square().mean().backward()
        if not recording:  # which waits itself
            self.clock.now_s += max(0.0, self._step_s() - COMPUTE_S)
        self.optimizer.step()
        self.num_steps += 1

    def steps(self, num):
        for _ in range(num):
            self.step()

    def until_chosen(self, **options):
        """Trains until it has chosen, and returns the choice."""
        while self.handle.choice is None:
            assert self.num_steps < 500
            self.step(**options)
        return self.handle.choice
