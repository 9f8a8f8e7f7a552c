"""The example of a plug-in: found where it is installed, beside its oracle, and under checks of the built-in ones."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import bagua
from bagua.testing import Pool
from tests.conformance import test_checkpoints, test_gradients, test_replicas, test_single_rank
from tests.conformance.training import assert_equal_on_all_ranks, batch, loss_of, make_net, process_group
from tests.distributed.worlds import fast_in

PLUGIN = Path(__file__).parents[2] / "examples/plugin"
pytestmark = pytest.mark.needs("setuptools")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with what the plug-in's wheel holds, on sys.path here and in the ranks."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PLUGIN, folder / "source")  # the wheel is built in the source folder
    build = f"import setuptools.build_meta as backend; backend.build_wheel({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=folder / "source", capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    sys.path.insert(0, str(folder / "site"))
    yield folder / "site"
    sys.path.remove(str(folder / "site"))


@pytest.fixture(scope="module")
def ranks(site):
    """Pools of ranks that see the plug-in, by their number; no other test uses them."""
    pools = {n: Pool(n) for n in (1, 2, 4)}
    yield pools
    for pool in pools.values():
        pool.__exit__(None, None, None)


def test_is_short():
    (module,) = PLUGIN.glob("*.py")
    assert module.read_text().count("\n") <= 40


def test_is_listed_where_it_is_installed(site):
    assert "adasum" in bagua.algorithms.available()
    assert "bagua_adasum" not in sys.modules


def _two_steps(rank, world_size):
    with process_group():
        model = make_net(seed=rank)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        model = bagua.with_bagua(model, optimizer, algorithm="adasum")
        first = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        assert not any(torch.equal(a, b) for a, b in zip(first, optimizer.param_groups[0]["params"], strict=True))
        return sys.modules["bagua_adasum"].__file__


def test_trains_where_it_is_installed(site, ranks):
    assert ranks[2].run(_two_steps) == [str(site / "bagua_adasum.py")] * 2


def _oracle(grads):
    """Returns the AdaSum of lists of numbers, by rank."""
    if len(grads) == 1:
        return grads[0]
    half = len(grads) // 2
    a, b = _oracle(grads[:half]), _oracle(grads[half:])
    ab = aa = bb = 0.0
    for x, y in zip(a, b, strict=True):
        ab, aa, bb = ab + x * y, aa + x * x, bb + y * y
    of_a = 1 - ab / (2 * aa) if aa else 1.0
    of_b = 1 - ab / (2 * bb) if bb else 1.0
    return [of_a * x + of_b * y for x, y in zip(a, b, strict=True)]


def _like_the_oracle(rank, world_size, dtype):
    shapes = {
        "matrix": (7, 33),
        "vector": (5,),
        "empty": (0, 3),
        "zero": (3,),
        "alike": (4,),
        "orthogonal": (world_size,),
    }

    def gradients(of_rank):
        generator = torch.Generator().manual_seed(10 + of_rank)
        grads = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        grads["zero"] *= of_rank % 2
        grads["alike"] = torch.tensor([1.0, -2.0, 0.5, 4.0], dtype=dtype)
        grads["orthogonal"] = torch.eye(world_size, dtype=dtype)[of_rank]
        return grads

    with process_group():
        model = torch.nn.ParameterDict({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()})
        model = bagua.with_bagua(model, algorithm="adasum", bucket_bytes=512)
        for _ in range(2):
            model.zero_grad()
            sum((p * gradients(rank)[name]).sum() for name, p in model.items()).backward()
            per_rank = [gradients(r) for r in range(world_size)]
            for name, parameter in model.items():
                oracle = _oracle([grads[name].double().flatten().tolist() for grads in per_rank])
                expected = torch.tensor(oracle, dtype=torch.float64)
                actual = parameter.grad.flatten().double()
                tolerance = 4 * torch.finfo(dtype).eps * max([1.0, *expected.abs().tolist()])
                torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
            assert torch.equal(model["alike"].grad, gradients(0)["alike"])
            assert torch.equal(model["orthogonal"].grad, torch.ones(world_size, dtype=dtype))
            assert_equal_on_all_ranks({name: p.grad for name, p in model.items()})


@fast_in(
    "num_ranks, dtype",
    [(2, torch.float32), (4, torch.bfloat16)],
    list(itertools.product([2, 4], [torch.float32, torch.float64, torch.bfloat16, torch.float16])),
)
def test_equals_the_oracle(ranks, num_ranks, dtype):
    ranks[num_ranks].run(_like_the_oracle, args=(dtype,))


# The conformance tests of built-in algorithms whose gradients need not be a mean: ranks, function, arguments after the
# name.
CHECKS = {
    "equals plain torch on one rank": (1, test_single_rank._equals_plain_torch, ("adamw", True)),
    "a backward that raised is forgotten": (1, test_single_rank._recovers, ()),
    "stay bit-identical": (2, test_replicas._stay_identical, (test_replicas.FEW,)),
    "four ranks stay bit-identical": (4, test_replicas._stay_identical, (test_replicas.MANY,)),
    "starts as rank 0": (2, test_replicas._start, ()),
    "several models": (2, test_replicas._several_models, ()),
    "copies": (2, test_replicas._copies, ()),
    "clipping": (2, test_gradients._clipping, ()),
    "gradient penalty": (2, test_gradients._gradient_penalty, ()),
    "live gradients survive the new layout": (2, test_gradients._live_gradients_survive_the_new_layout, ()),
}


@fast_in("check", ["equals plain torch on one rank", "stay bit-identical", "gradient penalty"], CHECKS)
def test_passes_the_checks_of_the_built_in_ones(ranks, check):
    num_ranks, function, arguments = CHECKS[check]
    ranks[num_ranks].run(function, args=("adasum", *arguments))


def test_resumes_like_the_built_in_ones(ranks):
    ranks[2].run(test_checkpoints._resume, args=(("adasum", {}), test_checkpoints.Net))
