"""The sdist holds what a build needs, the wheel what a user needs, and neither anything else."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build/dev"
CUDA = os.environ.get("BAGUA_CUDA", "0")  # as make builds: its kernels take minutes to compile
pytestmark = [pytest.mark.timeout(900), pytest.mark.needs("setuptools", "pybind11")]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    call = f"import setuptools.build_meta as b; print(b.build_sdist({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", call], cwd=ROOT, check=True, capture_output=True, timeout=120)
    (file,) = folder.glob("*.tar.gz")
    return file


@pytest.fixture(
    scope="module",
    params=["tree", pytest.param("sdist", marks=[pytest.mark.slow("test_the_sdist_holds_every_source")])],
)
def wheel(request, tmp_path_factory):
    """Built from the sdist, in a folder of its own; or from the tree, with the objects that make build has left."""
    folder = tmp_path_factory.mktemp("wheel")
    if request.param == "tree":
        if not (BUILT / "CMakeCache.txt").exists():
            pytest.skip(f"{BUILT.relative_to(ROOT)} is not there: make build has not run")
        command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
        command += ["build", "--build-base", str(folder / "build"), "bdist_wheel", "--dist-dir", str(folder)]
        env = {**os.environ, "BAGUA_BUILD_DIR": str(BUILT), "BAGUA_CUDA": CUDA}
        subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=800)
        (file,) = folder.glob("*.whl")
        return file
    sdist = request.getfixturevalue("sdist")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(sdist)],
        cwd=folder,
        # Without optimisation: what is in the files is looked at, not how fast it runs.
        env={**os.environ, "BAGUA_CMAKE_ARGS": "-DCMAKE_CXX_FLAGS_RELEASE=-O0", "BAGUA_CUDA": CUDA},
        check=True,
        timeout=800,
    )
    (file,) = folder.glob("*.whl")
    return file


@pytest.mark.skipif(shutil.which("git") is None, reason="git, which lists the sources, is not installed")
def test_the_sdist_holds_every_source(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "bagua", "csrc", "rust_core", "tests", "examples", "scripts", "CMakeLists.txt", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert set(tracked) <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or "/target/" in name]


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = {name.split("/")[0] for name in names}
    assert packages == {"bagua", next(name for name in packages if name.endswith(".dist-info"))}
    assert any(name.startswith("bagua/_C.") and name.endswith(".so") for name in names)
    assert {"bagua/__init__.py", "bagua/testing/__init__.py", "bagua/py.typed", "bagua/_C.pyi"} <= set(names)
    models = {str(path.relative_to(ROOT)) for path in (ROOT / "bagua/replay/models").glob("*.json")}
    assert models and models <= set(names)
    assert not [name for name in names if name.endswith((".h", ".cc", ".rs"))]


def test_the_wheel_works_where_nothing_else_of_bagua_is(wheel, tmp_path):
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-compile", "--target", str(target), str(wheel)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    program = f"import sys; sys.path.insert(0, {str(target)!r}); import bagua; print(bagua.__file__, bagua.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert str(target) in done.stdout


@pytest.fixture
def chosen_cuda(monkeypatch):
    """Returns chosen_cuda of setup.py, and sets BAGUA_CUDA for it, by default as if unset."""
    import setuptools

    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    choose = runpy.run_path(str(ROOT / "setup.py"))["chosen_cuda"]

    def chosen(choice=None):
        monkeypatch.delenv("BAGUA_CUDA", raising=False)
        if choice is not None:
            monkeypatch.setenv("BAGUA_CUDA", choice)
        return choose()

    return chosen


def test_the_build_has_cuda_only_if_the_installed_torch_has(chosen_cuda):
    import torch

    assert chosen_cuda() == ("0" if torch.version.cuda is None else "auto")
    assert [chosen_cuda(choice) for choice in ("0", "1")] == ["0", "1"]


@pytest.mark.parametrize(
    ("version", "chosen"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "0"),
        ("cuda = None\n", "0"),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "auto"),
        (None, "auto"),
    ],
    ids=["CPU", "older CPU", "CUDA", "no torch"],
)
def test_cuda_is_chosen_by_the_version_of_torch(chosen_cuda, version, chosen, monkeypatch, tmp_path):
    """The build in isolation of `pip install .` cannot import torch, and reads its version where it is installed."""
    if version is not None:
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch/version.py").write_text(version)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert chosen_cuda() == chosen
