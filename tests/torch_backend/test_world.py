"""Who opens and closes bagua's world, and how torch's groups are made on top of it."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bagua
from tests.torch_backend.programs import TIMEOUT, run, start, values

ROOT = Path(__file__).resolve().parents[2]


def total(world_size, ranks, numel=10):
    return sum(values(rank, world_size, numel) for rank in ranks)


def open_and_close(rank, world_size):
    for _ in range(3):
        start()
        assert dist.get_backend() == "bagua" and bagua.get_rank() == rank and bagua.get_world_size() == world_size
        x, y = values(rank, world_size, 10), values(rank, world_size, 10)
        dist.all_reduce(x)
        bagua.all_reduce(y)
        assert torch.equal(x, total(world_size, range(world_size))) and torch.equal(x, y)
        model = bagua.with_bagua(torch.nn.Linear(3, 2))
        model(torch.ones(1, 3)).sum().backward()
        dist.destroy_process_group()
        assert not bagua.is_initialized() and not dist.is_initialized()


def test_init_destroy_init(pool2):
    pool2.run(open_and_close)


def share(rank, world_size):
    bagua.init_process_group(timeout=TIMEOUT)
    mine = bagua.get_default_group()
    start()
    work = dist.all_reduce(values(rank, world_size, 10), async_op=True)
    x = values(rank, world_size, 10)
    bagua.all_reduce(x)
    work.wait()
    dist.destroy_process_group()
    assert bagua.get_default_group() is mine
    bagua.all_reduce(x)  # what torch has opened is closed, and only that
    start()
    bagua.destroy_process_group()
    with pytest.raises(bagua.InvalidArgument, match="destroyed"):
        dist.barrier()
    bagua.init_process_group(timeout=TIMEOUT)
    dist.destroy_process_group()
    assert bagua.is_initialized()  # not the world that the destroyed groups belonged to
    bagua.destroy_process_group()


def test_the_program_has_its_own_world(pool2):
    pool2.run(share)


def another_world(rank, world_size):
    store = dist.HashStore()
    bagua.init_process_group(store=store, rank=0, world_size=1)
    with pytest.raises(bagua.InvalidArgument, match="rank 0 of 1.*of 2"):
        start()
    bagua.destroy_process_group()


def test_a_world_of_another_size_is_refused(pool2):
    pool2.run(another_world)


def subgroups(rank, world_size):
    """Overlapping groups, used at the same time, made by everybody or by their members only, in any order of ranks."""
    first, last = [0, 1, 2], [1, 2, 3]
    overlapping = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in (first, last)]
    works = []
    for ranks, group in zip((first, last), overlapping, strict=True):
        if rank in ranks:
            x = values(rank, world_size, 10)
            works.append((dist.all_reduce(x, group=group, async_op=True), x, total(world_size, ranks)))
    for work, x, expected in reversed(works):
        work.wait()
        assert torch.equal(x, expected)
    pair = [0, 1] if rank < 2 else [2, 3]
    for _ in range(2):  # torch makes the same name again
        local = dist.new_group(pair, use_local_synchronization=True, timeout=TIMEOUT)
        x = values(rank, world_size, 10)
        dist.all_reduce(x, group=local)
        assert torch.equal(x, total(world_size, pair))
        dist.destroy_process_group(local)
    # bagua's own groups count by themselves, though not all ranks made the same groups of torch.
    if rank == 0:
        alone = dist.new_group([0], use_local_synchronization=True, timeout=TIMEOUT)
        dist.barrier(alone)
    own = bagua.new_group([0, 3])
    if rank in (0, 3):
        x = values(rank, world_size, 10)
        bagua.all_reduce(x, group=own)
        assert torch.equal(x, total(world_size, [0, 3]))
    dist.barrier()


def test_subgroups(pool4):
    run(pool4, subgroups)


def unsorted_group(rank, world_size):
    order = [2, 0, 3, 1]
    group = dist.new_group(order, sort_ranks=False, timeout=TIMEOUT)
    assert dist.get_rank(group) == order.index(rank)
    gathered = [torch.zeros(1) for _ in order]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
    assert [int(x) for x in gathered] == order
    x = torch.tensor([float(rank)])
    dist.broadcast(x, src=3, group=group)
    assert x == 3


@pytest.mark.skipif("sort_ranks" not in dist.new_group.__code__.co_varnames and
                    "sort_ranks" not in getattr(dist.new_group, "__wrapped__", dist.new_group).__code__.co_varnames,
                    reason="this torch sorts the ranks of every group")  # fmt: skip
def test_ranks_in_any_order(pool4):
    run(pool4, unsorted_group)


def beside_gloo(rank, world_size):
    """The default group is gloo's."""
    start("gloo")
    if rank < 2:
        with pytest.raises(bagua.InvalidArgument, match="bagua.init_process_group"):
            dist.new_group([0, 1], backend="bagua", timeout=TIMEOUT)
    else:
        dist.new_group([0, 1], backend="bagua", timeout=TIMEOUT)
    everybody = dist.new_group(backend="bagua", timeout=TIMEOUT)
    pair = dist.new_group([0, 1], backend="bagua", timeout=TIMEOUT)
    x = values(rank, world_size, 10)
    dist.all_reduce(x, group=everybody)
    assert torch.equal(x, total(world_size, range(world_size)))
    if rank < 2:
        dist.barrier(pair)
        dist.destroy_process_group(pair)
    assert bagua.is_initialized()
    dist.destroy_process_group(everybody)
    assert not bagua.is_initialized()
    dist.destroy_process_group()


def test_beside_another_backend(pool4):
    pool4.run(beside_gloo)


def refused_options(rank, world_size):
    with pytest.raises(bagua.InvalidArgument, match="takes no options"):
        dist.init_process_group("bagua", pg_options=object(), timeout=TIMEOUT)
    assert not bagua.is_initialized()


def test_options_are_refused(pool2):
    pool2.run(refused_options)


def deadline(rank, world_size, set_later):
    start(timeout=TIMEOUT if set_later else timedelta(seconds=1))
    if set_later:
        options = dist.distributed_c10d.BarrierOptions()
        options.timeout = timedelta(seconds=20)
        dist.group.WORLD.barrier(options).wait()
        dist.group.WORLD.set_timeout(timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(bagua.DeadlineExceeded) as raised:
            dist.all_reduce(torch.ones(3))
        assert raised.value.rank == 1
    else:
        dist.distributed_c10d._get_default_group().get_group_store().wait(["done"], timedelta(seconds=20))
    if rank == 0:
        dist.distributed_c10d._get_default_group().get_group_store().set("done", "1")
    dist.destroy_process_group()


@pytest.mark.parametrize("set_later", [False, True])
def test_the_timeout_is_torchs(pool2, set_later):
    pool2.run(deadline, args=(set_later,))


def test_an_older_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.8.1"))
    with pytest.raises(bagua.InvalidArgument, match="needs torch 2.9"):
        dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


def test_registering_twice_changes_nothing():
    before = dict(dist.Backend._plugins)
    bagua.torch_backend.register()
    assert dist.Backend._plugins == before and "bagua" in dist.Backend.backend_list


def test_the_entry_point_registers_the_backend(tmp_path):
    """torch 2.14 finds it in the metadata of the installed package; for older torch we load it as that does."""
    _, _, declared = (
        (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."torch.distributed.backends"]')
    )
    name, _, value = declared.split("\n")[1].replace('"', "").partition(" = ")
    assert name == "bagua"
    installed = tmp_path / "bagua-0.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: bagua\nVersion: 0.0\n")
    (installed / "entry_points.txt").write_text(f"[torch.distributed.backends]\n{name} = {value}\n")
    program = (
        "import sys, torch.distributed as dist\n"
        f"sys.path[:0] = {[str(tmp_path), str(ROOT)]!r}\n"
        "if not hasattr(dist.Backend, '_ensure_backend_registered'):\n"
        "    from importlib.metadata import entry_points\n"
        "    [found] = [e for e in entry_points(group='torch.distributed.backends') if e.value == "
        + repr(value)
        + "]\n"
        "    found.load()()\n"
        "else:\n"
        "    assert 'bagua' not in sys.modules\n"
        "dist.init_process_group('bagua', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "print('done', sys.modules['bagua'].__file__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"done {bagua.__file__}\n", done.stderr


README_FENCE = "```python\nimport torch.distributed as dist\n"


def readme_example(rank, world_size):
    _, _, after = (ROOT / "README.md").read_text().partition(README_FENCE)
    exec(compile("import torch.distributed as dist\n" + after.split("```")[0], "README.md", "exec"), {})
    assert after and not dist.is_initialized()


def test_the_example_of_the_readme(pool2):
    pool2.run(readme_example)
