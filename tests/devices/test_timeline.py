"""The timeline of a model on a device: operations as the device has run them, no arithmetic that the host enqueued."""

import time

import torch

from tests import accelerator
from tests.devices.device_process import on_each_device

STEPS = 3


def train(group, algorithm, device_type):
    """The model's timeline, and the times around its training on the host's clock."""
    import bagua

    device = torch.device("cpu") if device_type == "cpu" else accelerator.use_device_of(group.rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    bagua.with_bagua(model, optimizer, algorithm=algorithm, group=group, bucket_bytes=17_000)
    begin_ns = time.monotonic_ns()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(4, 64, device=device)).square().mean().backward()
        optimizer.step()
    if device_type != "cpu":
        torch.accelerator.synchronize()
    for _ in range(1000):  # the worker looks 50 us after the device has ended
        timeline = model.bagua.timeline()
        kinds = [span.kind for span in timeline.spans]
        if kinds.count("operation") == kinds.count("queued"):
            break
        time.sleep(1e-3)
    end_ns = time.monotonic_ns()
    model.bagua.remove()
    return timeline, begin_ns, end_ns


def operations(rank, world_size):
    import bagua

    bagua.init_process_group(timeout=20)
    try:
        with accelerator.delayed(2e-3):
            timeline, begin_ns, end_ns = train(bagua.get_default_group(), "bytegrad", accelerator.kind())
    finally:
        bagua.destroy_process_group()
    spans = {}
    for span in timeline.spans:
        spans.setdefault(span.kind, []).append(span)
    assert spans.keys() == {"queued", "operation", "wire"}
    assert len(spans["operation"]) == len(spans["queued"]) >= STEPS
    queued = {span.ticket: span for span in spans["queued"]}
    until_ns = begin_ns
    for span in sorted(spans["operation"], key=lambda span: span.begin_ns):
        assert until_ns <= span.begin_ns < span.end_ns <= end_ns  # one after the other, on the host's clock
        assert queued[span.ticket].end_ns <= span.begin_ns
        until_ns = span.end_ns
    if accelerator.is_emulated():  # half of all commands are late by 1 ms on average: what the device took is seen
        assert max(span.end_ns - span.begin_ns for span in spans["operation"]) > 1e6
    assert all(begin_ns <= span.begin_ns <= span.end_ns <= end_ns for span in spans["wire"])


def test_operations_are_as_the_device_has_run_them(pair_on_devices):
    pair_on_devices.run(operations)


@on_each_device
def test_the_cpu_has_its_arithmetic_in_the_same_process():
    from bagua.testing import world

    for timeline, *_ in world(2, train, "bytegrad", "cpu"):
        assert {span.kind for span in timeline.spans} >= {"queued", "operation", "wire", "encode", "decode"}
