"""Builds bagua._C by CMake; everything else stands in pyproject.toml.

The build folder is kept (build/cmake-<python>), so a second build compiles only what changed. Environment:
BAGUA_CUDA (0, 1, or auto: where nvcc is, unless the torch that is installed has no CUDA), BAGUA_BUILD_DIR,
BAGUA_CMAKE_ARGS (more arguments for CMake), CMAKE_BUILD_PARALLEL_LEVEL (default: all cores), BAGUA_SKIP_NATIVE=1
(the Python files only: the Makefile installs those first and builds the module after, by `setup.py build_ext
--inplace`).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find_cargo():
    homes = [os.environ.get("CARGO_HOME"), str(Path.home() / ".cargo")]
    return shutil.which("cargo") or next(filter(None, (shutil.which(f"{h}/bin/cargo") for h in homes if h)), None)


def build_tools():
    """cmake and ninja where the system has none, as build requirements: pip asks for them by `egg_info`."""
    if "egg_info" not in sys.argv:
        return []
    return [
        requirement
        for program, requirement in [("cmake", "cmake>=3.22"), ("ninja", "ninja")]
        if shutil.which(program) is None
    ]


def chosen_cuda():
    """Returns BAGUA_CUDA; 0 for a torch without CUDA, of which a build in isolation can read the version file only."""
    choice = os.environ.get("BAGUA_CUDA", "auto")
    version = Path(sysconfig.get_path("platlib"), "torch", "version.py")
    if choice == "auto" and version.exists() and re.search(r"^cuda\b.*= None$", version.read_text(), re.MULTILINE):
        return "0"
    return choice


def check_toolchain():
    """Ends the build with one message that names everything that is missing."""
    missing = {}
    if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")):
        missing["a C++20 compiler"] = "g++"
    if find_cargo() is None:
        missing["cargo (Rust 1.63 or later)"] = "cargo"
    if shutil.which("cmake") is None:
        missing["cmake"] = "cmake"
    if not any(shutil.which(name) for name in ("ninja", "ninja-build", "make")):
        missing["ninja"] = "ninja-build"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        missing[f"Python's headers (Python.h of {sys.executable})"] = "python3-dev"
    if missing:
        sys.exit(
            f"\nbagua: cannot build the extension module, missing: {', '.join(missing)}.\n"
            f"On Debian and Ubuntu:\n\n    sudo apt-get install -y {' '.join(missing.values())}\n"
        )


class CMakeBuild(build_ext):
    def run(self):
        if os.environ.get("BAGUA_SKIP_NATIVE") != "1":
            super().run()

    def build_extension(self, extension):
        import pybind11

        check_toolchain()
        build_dir = Path(os.environ.get("BAGUA_BUILD_DIR") or ROOT / "build" / f"cmake-{sys.implementation.cache_tag}")
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build_dir),
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DBAGUA_CUDA={chosen_cuda()}",
            f"-DBAGUA_CARGO={find_cargo()}",
        ]  # fmt: skip
        if shutil.which("ninja") and not (build_dir / "Makefile").exists():
            configure += ["-G", "Ninja"]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(len(os.sched_getaffinity(0)))
        self.run_cmake([*configure, *shlex.split(os.environ.get("BAGUA_CMAKE_ARGS", ""))])
        self.run_cmake(["cmake", "--build", str(build_dir), "--target", "_C", "--parallel", jobs])

        (built,) = build_dir.glob(f"_C*{sysconfig.get_config_var('EXT_SUFFIX')}")
        target = Path(self.get_ext_fullpath(extension.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file in place of the old one: processes that have the old one mapped go on unharmed.
        fresh = target.with_suffix(".so.new")
        shutil.copy2(built, fresh)
        fresh.replace(target)

    def run_cmake(self, command):
        try:
            subprocess.run(command, cwd=ROOT, check=True)
        except subprocess.CalledProcessError as error:
            sys.exit(f"bagua: {shlex.join(command)} failed with status {error.returncode}; its output is above.")


# `sources` stays empty: CMake knows them.
setup(
    ext_modules=[Extension("bagua._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    setup_requires=build_tools(),
)
