"""The emulated torch device: models train on it to the CPU's bits, its streams are late, what would be a bug on a GPU
shows. Every test runs in one process of its own, since a loaded device is a process's accelerator for good."""

import copy
import ctypes
import io
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

import tests.emulated_device as emulated
from bagua import _C
from tests.devices.device_process import on_the_emulated_device, run_there


def on(device):
    return torch.device("emulated", device)


# ---- models ---------------------------------------------------------------------------------------------


def mlp():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def conv_net():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(36, 4),
    )


def train(make_model, make_optimizer, device, shape, steps=4):
    """Trains a model; returns weights, buffers and losses."""
    torch.manual_seed(3)
    model = make_model()
    data, labels = torch.randn(steps, *shape), torch.randint(0, 4, (steps, shape[0]))
    model, data, labels = model.to(device), data.to(device), labels.to(device)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for x, y in zip(data, labels, strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [t.cpu() for t in (*model.state_dict().values(), *losses)]


OPTIMIZERS = {
    "sgd": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, **how),
    "adam": lambda p, **how: torch.optim.Adam(p, lr=0.01, **how),
}
HOW = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("model", ["mlp", "conv_net"])
def test_training_has_the_cpus_bits(alone_on_emulated, model, name, how):
    alone_on_emulated.run(run_there, args=(lambda: check_training(model, name, how),))


def check_training(model, name, how):
    make_model, shape = {"mlp": (mlp, (8, 16)), "conv_net": (conv_net, (8, 1, 8, 8))}[model]

    def optimizer(parameters):
        return OPTIMIZERS[name](parameters, **HOW[how])

    expected = train(make_model, optimizer, "cpu", shape)
    found = train(make_model, optimizer, "emulated", shape)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not torch.equal(expected[-1], expected[-4])  # it learns something


@on_the_emulated_device
def test_grad_scaler_skips_an_overflow():
    """The same scales and weights as on the CPU; one step in three overflows."""

    def run(device):
        torch.manual_seed(1)
        model = nn.Linear(4, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            x = torch.full((2, 4), float("inf") if step % 3 == 2 else step + 1.0).to(device)
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, model.weight.detach().cpu()

    scales, weight = run("emulated")
    expected_scales, expected_weight = run("cpu")
    assert scales == expected_scales == [8.0, 16.0, 8.0, 8.0, 16.0, 8.0]
    assert torch.equal(weight, expected_weight) and weight.isfinite().all()


@on_the_emulated_device
def test_autocast():
    model, x = mlp().to("emulated"), torch.randn(8, 16, device="emulated")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("emulated", dtype=dtype):
            y = model(x)
            assert y.dtype == dtype
            assert y.softmax(1).dtype == torch.float32
            assert torch.cat([y, x[:, :4]]).dtype == torch.float32
            assert torch.log(y.abs() + 1).dtype == torch.float32
        y.float().sum().backward()
        assert model[0].weight.grad.dtype == torch.float32
    half = [p.detach().cpu().half() for p in model.parameters()]
    with torch.autocast("emulated", dtype=torch.float16):
        y = model(x)
    expected = nn.functional.linear(nn.functional.linear(x.cpu().half(), half[0], half[1]).relu(), half[2], half[3])
    assert torch.equal(y.cpu(), expected)


@on_the_emulated_device
def test_activation_checkpointing_draws_the_same_dropout():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to("emulated")
    grads = []
    for is_checkpointed in (False, True):
        torch.manual_seed(5)
        model.zero_grad()
        x = torch.ones(4, 8, device="emulated")
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
        y.square().sum().backward()
        grads.append(model[0].weight.grad.cpu())
    assert torch.equal(*grads)


# ---- memory ---------------------------------------------------------------------------------------------


@on_the_emulated_device
def test_the_host_dies_where_it_touches_a_tensor():
    x = torch.ones(4, device="emulated")
    torch.accelerator.synchronize()
    with pytest.raises(TypeError, match="emulated"):
        x.numpy()
    for touch in (
        lambda: ctypes.c_float.from_address(x.data_ptr()).value,
        lambda: ctypes.memset(x.data_ptr(), 0, 4),
    ):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            touch()
            os._exit(0)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    reader, writer = os.pipe()
    buffer = (ctypes.c_char * 16).from_address(x.data_ptr())
    with pytest.raises(OSError, match="Bad address"):
        os.write(writer, buffer)
    os.close(reader), os.close(writer)
    assert x.tolist() == [1.0] * 4


@on_the_emulated_device
def test_memory_is_undefined_until_written():
    assert torch.empty(100, device="emulated").isnan().all()
    assert (torch.empty(100, dtype=torch.int64, device="emulated") == -1).all()


@on_the_emulated_device
def test_memory_ends_at_the_limit():
    emulated.limit_memory(1000)
    with pytest.raises(RuntimeError, match="emulated:0 is out of memory: asked for 4000 bytes"):
        torch.empty(1000, device="emulated")
    emulated.limit_memory(None)
    torch.empty(1000, device="emulated")


@on_the_emulated_device
def test_all_memory_comes_back():
    model = mlp().to("emulated")
    before = emulated.counters()["live_bytes"]
    model(torch.randn(64, 16, device="emulated")).sum().backward()
    model.zero_grad()
    torch.accelerator.synchronize()
    assert emulated.counters()["live_bytes"] == before
    assert torch.accelerator.memory_allocated() == before


@on_the_emulated_device
def test_views_and_storages():
    """Strided reads and writes, growth and sharing of storages, against the CPU."""

    def run(device):
        seen = []
        x = torch.arange(60, dtype=torch.float32).to(device)
        y = x.view(3, 4, 5)
        y[:, 1].fill_(-1)
        y.transpose(0, 2)[1:3] += 10
        y.permute(2, 0, 1)[::2, :, 1::2].copy_(torch.ones(3, 3, 2))
        seen.append(x.clone())
        y[0, :, 1] = y[2, :, 3]
        x[10:30] = x[5:25].clone()
        x[1:41].copy_(x[0:40].clone())
        seen += [x.clone(), y.unfold(2, 3, 2), y.diagonal(), x[::7], y.flip(1), x.as_strided((4, 3), (2, 5), 1)]
        z = x.clone()
        z.resize_(70)[60:] = 7
        seen += [z, z.to(torch.float16), z[::3].double()]
        z.resize_(2, 3)
        shared = torch.empty(0, device=device).set_(x.untyped_storage(), 6, (2, 3), (3, 1))
        shared.mul_(2)
        seen += [z, shared, x]
        other = torch.empty(0, device=device).set_(x)
        other.add_(1)
        kept = torch.arange(4.0).to(device)
        kept.untyped_storage().resize_(8)
        kept.untyped_storage().resize_(16)
        seen += [x, kept[:2], torch.view_as_real(torch.complex(x, x)), torch.view_as_complex(x.view(30, 2)).real]
        seen += [x.view(torch.int32), x.expand(2, 60), torch.empty(0, 3, device=device), torch.tensor(2.5).to(device)]
        return [t.cpu() for t in seen]

    for index, (a, b) in enumerate(zip(run("cpu"), run("emulated"), strict=True)):
        assert a.shape == b.shape and torch.equal(a, b), index


@on_the_emulated_device
def test_saving_and_copying():
    model = mlp().to("emulated")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for where, device in ((None, "emulated"), ("cpu", "cpu")):
        file.seek(0)
        for key, value in torch.load(file, map_location=where).items():
            assert value.device.type == device
            assert torch.equal(value.cpu(), model.state_dict()[key].cpu())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.add_(1)
    assert torch.equal(twin[0].weight.cpu(), model[0].weight.cpu() + 1)


# ---- copies ---------------------------------------------------------------------------------------------


@on_the_emulated_device
def test_only_what_the_user_copies_is_counted():
    x = torch.ones(256).to("emulated")
    emulated.reset_counters()
    y = torch.empty_like(x)
    y.copy_(x)
    (y @ x).relu_()
    counts = emulated.counters()
    assert (counts["bytes_to_device"], counts["bytes_to_host"], counts["bytes_on_device"]) == (0, 0, 1024)
    y.to("cpu"), y[::2].tolist(), y.sum().item(), torch.ones(16, dtype=torch.int64).to("emulated")
    counts = emulated.counters()
    assert (counts["bytes_to_device"], counts["bytes_to_host"]) == (128, 1024 + 512 + 4)
    assert counts["launches"] == {}


@on_the_emulated_device
def test_pinned_memory():
    x = torch.arange(1000.0)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned() and pinned[10:].is_pinned() and torch.equal(x, pinned)
    assert torch.empty(10, pin_memory=True).is_pinned()
    y = pinned.to("emulated", non_blocking=True)
    back = torch.empty(1000, pin_memory=True)
    back.copy_(y, non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(back, x)
    # Memory that is freed while copies use it stays until they are done.
    for _ in range(20):
        y = torch.arange(100.0).pin_memory().to("emulated", non_blocking=True)
        assert y.sum().item() == 4950.0
    del pinned, back
    torch.accelerator.synchronize()


@on_the_emulated_device
def test_a_pinned_copy_is_late():
    """A pinned copy includes changes that the host makes before it is done; a blocking copy does not."""
    pinned, y = torch.zeros(4).pin_memory(), torch.zeros(4, device="emulated")
    num_wrong = {True: 0, False: 0}
    for non_blocking in (True, False):
        for _ in range(40):
            pinned.fill_(1)
            y.copy_(pinned, non_blocking=non_blocking)
            pinned.fill_(2)
            num_wrong[non_blocking] += y[0].item() != 1
    assert num_wrong[True] > 5
    assert num_wrong[False] == 0


@on_the_emulated_device
def test_a_data_loader_pins():
    data = torch.utils.data.TensorDataset(torch.arange(8.0), torch.arange(8))
    seen = []
    for x, y in torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True):
        assert x.is_pinned() and y.is_pinned()
        seen.append(x.to("emulated", non_blocking=True))
    assert torch.cat(seen).tolist() == list(range(8))


@on_the_emulated_device
def test_bagua_knows_the_device():
    assert _C.has_device_runtime("emulated")
    assert _C.num_devices("emulated") == emulated.num_devices


# ---- streams --------------------------------------------------------------------------------------------


@on_the_emulated_device
def test_streams_have_handles():
    default = torch.accelerator.current_stream()
    assert emulated.stream_handle(default) == 0 == default.native_handle
    a, b = torch.Stream(device="emulated"), torch.Stream(device=on(1))
    assert a.device == on(0) and b.device == on(1)
    assert len({0, emulated.stream_handle(a), emulated.stream_handle(b)}) == 3
    assert a.native_handle == emulated.stream_handle(a)
    with a:
        assert torch.accelerator.current_stream() == a
        assert torch.accelerator.current_stream(1).stream_id == 0
    assert torch.accelerator.current_stream() == default
    torch.accelerator.set_stream(b)
    assert torch.accelerator.current_device_index() == 1
    assert torch.empty(1, device="emulated").device == on(1)


@on_the_emulated_device
def test_streams_are_late():
    emulated.set_delay(5e-3)
    x, stream = torch.zeros(8, device="emulated"), torch.accelerator.current_stream()
    num_late = 0
    for _ in range(10):
        x.add_(1)
        event = stream.record_event()
        num_late += not event.query()
        event.synchronize()
        assert event.query()
        stream.synchronize()  # that the event has been recorded may be known before that the stream is idle
        assert stream.query()
    assert num_late > 0
    assert x.tolist() == [10.0] * 8


@on_the_emulated_device
def test_a_missing_wait_gives_wrong_numbers():
    """One stream computes, another reads: an event makes that right, and its absence shows."""
    side = torch.Stream(device="emulated")
    x, y = torch.zeros(8, device="emulated"), torch.zeros(8, device="emulated")
    num_wrong = {True: 0, False: 0}
    for waits in (False, True):
        for step in range(40):
            torch.accelerator.synchronize()
            x.fill_(step)
            if waits:
                side.wait_stream(torch.accelerator.current_stream())
            with side:
                y.copy_(x)
            side.synchronize()
            with side:
                num_wrong[waits] += y[0].item() != step
    assert num_wrong[False] > 3
    assert num_wrong[True] == 0


@on_the_emulated_device
def test_an_event_is_its_last_record():
    emulated.set_delay(2e-3)
    event, side = torch.Event("emulated"), torch.Stream(device="emulated")
    assert event.query()  # never recorded
    side.wait_event(event)
    assert side.query()
    x = torch.zeros(8, device="emulated")
    for step in range(5):
        x.fill_(step)
        event.record()
        side.wait_event(event)
        with side:
            assert x[0].item() == step
    other = torch.Stream(device=on(1))
    x.fill_(7)
    event.record()
    event.wait(other)  # of another device
    other.synchronize()
    assert event.query()
    with pytest.raises(RuntimeError, match="device"):
        event.record(other)


@on_the_emulated_device
def test_memory_that_another_stream_uses_must_be_recorded():
    side = torch.Stream(device="emulated")
    y = torch.zeros(100, device="emulated")
    for step in range(20):
        x = torch.full((100,), float(step), device="emulated")
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y.copy_(x)
        x.record_stream(side)
        del x  # side may not have come to the copy
        with side:
            assert y[0].item() == step
    emulated.set_delay(5e-3)
    with pytest.raises(RuntimeError, match="emulated:0: copy: .* is no live memory of emulated:0"):
        for _ in range(50):
            x = torch.full((100,), 1.0, device="emulated")
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                y.copy_(x)
            del x
            torch.accelerator.synchronize()


@on_the_emulated_device
def test_backward_runs_on_the_streams_of_forward():
    side = torch.Stream(device="emulated")
    w = torch.full((8,), 2.0, device="emulated", requires_grad=True)
    for _ in range(10):
        w.grad = None
        x = w * 3
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            y = x * x
        x.record_stream(side)
        torch.accelerator.current_stream().wait_stream(side)
        (y * w).sum().backward()  # 9 w^3
        assert w.grad.tolist() == [108.0] * 8


@on_the_emulated_device
def test_several_devices():
    assert torch.accelerator.device_count() == emulated.num_devices == torch.emulated.device_count()
    x = torch.arange(12.0, device=on(1))
    for step in range(10):
        x.fill_(step)
        y = x.to(on(3))  # ordered behind and before both streams
        x.fill_(-1)
        assert y.device == on(3) and y[0].item() == step
    z = x.view(3, 4).t()
    z.copy_(torch.arange(12, device=on(0)).view(4, 3))
    assert torch.equal(z.cpu(), torch.arange(12.0).view(4, 3))
    with pytest.raises(RuntimeError, match="xpected all tensors to be on the same device"):
        x + y
    with pytest.raises(RuntimeError, match="xpected all tensors to be on the same device"):
        torch._foreach_add_([x], [y])
    rows, is_even = torch.arange(12), torch.arange(12) % 2 == 0
    assert torch.equal(x[rows].cpu(), x.cpu()) and x[is_even].numel() == 6 and (x * torch.tensor(2.0)).device == on(1)
    with_the_cpu = (lambda: torch.where(is_even, x, x), lambda: torch.equal(x, x.cpu()), lambda: x.gather(0, rows))
    for call in with_the_cpu:
        with pytest.raises(RuntimeError, match="to be on the same device, found emulated:1 and cpu"):
            call()
    with torch.emulated.device(2):
        assert torch.ones(1, device="emulated").device == on(2)
    assert torch.accelerator.current_device_index() == 0
    with pytest.raises(RuntimeError, match="there is no emulated:4"):
        torch.empty(1, device=on(4))
    model = nn.Linear(3, 2).to(on(2))
    model(torch.ones(1, 3, device=on(2))).sum().backward()
    assert model.weight.grad.device == on(2)


@on_the_emulated_device
def test_generators():
    mine, expected = torch.Generator("emulated").manual_seed(4), torch.Generator().manual_seed(4)
    assert mine.device.type == "emulated"
    for draw in (
        lambda d, g: torch.rand(10, device=d, generator=g),
        lambda d, g: torch.randperm(20, device=d, generator=g),
    ):
        assert torch.equal(draw("emulated", mine).cpu(), draw("cpu", expected))
    state = mine.get_state()
    first = torch.randn(3, device="emulated", generator=mine)
    mine.set_state(state)
    assert torch.equal(first.cpu(), torch.randn(3, device="emulated", generator=mine).cpu())
    torch.manual_seed(9)
    first = torch.randn(5, device="emulated")
    torch.manual_seed(9)
    assert torch.equal(first.cpu(), torch.randn(5))


@on_the_emulated_device
def test_threads_have_streams_of_their_own():
    side, seen = torch.Stream(device="emulated"), []

    def look():
        seen.append(torch.accelerator.current_stream())

    with side:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen[0].stream_id == 0


@on_the_emulated_device
def test_a_forked_child_is_told():
    torch.ones(1, device="emulated")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="emulated")
        except RuntimeError as error:
            os.write(writer, f"{torch.emulated.is_available()} {error}".encode())
        os._exit(0)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    text = os.read(reader, 1000).decode()
    os.close(reader)
    assert text.startswith("False the emulated device was used before this process was forked")


# ---- the build ------------------------------------------------------------------------------------------


def test_one_process_builds_and_the_others_wait(monkeypatch, tmp_path):
    """Lock files of one process exclude each other, too: they are opened apart."""
    compiled = []

    def slow_compile(library):
        compiled.append(library)
        time.sleep(0.05)
        library.touch()

    monkeypatch.setattr(emulated, "FOLDER", tmp_path / "made")
    monkeypatch.setattr(emulated, "_compile", slow_compile)
    monkeypatch.setattr(emulated, "unavailable", lambda: None)
    threads = [threading.Thread(target=emulated.build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled == [emulated.build()]


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert emulated.unavailable() == "needs a C++20 compiler, and there is no no-such-compiler"
