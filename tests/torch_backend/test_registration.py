"""The name "bagua" in torch's registry of backends, and the versions of torch that it is for."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bagua
from bagua.torch_version import is_torch_at_least
from tests.torch_backend.programs import needs_torch

ROOT = Path(__file__).resolve().parents[2]


def test_an_older_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.8.1"))
    with pytest.raises(bagua.InvalidArgument, match="needs torch 2.9"):
        dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("version", ["2.9.0a0+145a3a7bda.nv25.10", "2.13.0+cpu"])
def test_a_torch_is_as_old_as_its_release(monkeypatch, version):
    """Containers have one from before its release."""
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    assert is_torch_at_least(2, 9) and not is_torch_at_least(3, 1)
    assert is_torch_at_least(2, 12) == (not version.startswith("2.9"))


def test_registering_twice_changes_nothing():
    before = dict(dist.Backend._plugins)
    bagua.torch_backend.register()
    assert dist.Backend._plugins == before and "bagua" in dist.Backend.backend_list


@pytest.fixture
def installed(tmp_path):
    """A folder with the metadata of an installed package, which declares what pyproject.toml does."""
    _, _, declared = (
        (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."torch.distributed.backends"]')
    )
    name, _, value = declared.split("\n")[1].replace('"', "").partition(" = ")
    assert name == "bagua"
    metadata = tmp_path / "bagua-0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bagua\nVersion: 0.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch.distributed.backends]\n{name} = {value}\n")
    return tmp_path


def test_the_entry_point_is_what_registers_the_backend(installed):
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    (found,) = distribution.entry_points
    assert found.load() is bagua.torch_backend.register


@needs_torch
@pytest.mark.skipif(not hasattr(dist.Backend, "_ensure_backend_registered"), reason="needs torch 2.14")
def test_torch_finds_the_entry_point(installed):
    program = (
        "import sys, torch.distributed as dist\n"
        f"sys.path[:0] = {[str(installed), str(ROOT)]!r}\n"
        "assert 'bagua' not in sys.modules\n"
        "dist.init_process_group('bagua', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "print('done', sys.modules['bagua'].__file__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=installed, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"done {bagua.__file__}\n", done.stderr


def test_a_store_that_outlives_the_ranks_is_used_again(monkeypatch):
    """torchrun's store does, when it starts all ranks again after a failure (--max-restarts)."""
    store = dist.HashStore()
    for attempt in range(3):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        dist.init_process_group("bagua", store=store, rank=0, world_size=1)
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [1.0] * 3
        dist.destroy_process_group()
