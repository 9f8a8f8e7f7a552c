"""The CUDA kernels as compiled by nvcc: for each shipped architecture without warnings, spills and local memory, and
with 128-bit loads and stores where they matter; for one architecture with at most the registers and shared memory of
cuda_kernels.tsv.

`python tests/structure/test_cuda_kernels.py` writes the table anew. It is for one version of nvcc: with another one the
registers may differ, and only the occupancy is compared.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("cuda_kernels.tsv")
ARCHITECTURES = ["80", "90", "100"]  # as CMakeLists.txt has them
OF_TABLE = "90"
NUM_THREADS = 256  # of a block: kNumThreads in csrc/kernels/cuda/launch.h
# Those whose codec has another number for the 2048 elements of a block; most have it in their name.
BLOCK_THREADS = re.compile(r"(?:MinmaxUint8|Topk)<(\d+)>|(?:Qsgd|SmallFloat)<\d, (\d+)>")
OTHER_BLOCK_THREADS = {"<Centroid": 64, "<Onebit": 64, "reduce_encode_scattered_kernel": 64}
DTYPES = ["f32", "f64", "f16", "bf16", "i8", "u8", "i32", "i64", "bool"]
# Kernels that divide, in f32 or f64: the instructions for that are fused multiply-adds.
DIVIDING = re.compile(r"Minmax|Qsgd|SmallFloat|Onebit|Centroid|code_chunks|Reduce<f64, Plain, Sum, |^adam_kernel")
LOAD, STORE = {"LDG"}, {"STG"}
# The other side of encoding and decoding are codes: four bytes per thread, 128 per warp, because headers misalign them.
HOT = {
    r"^encode_kernel<\w+(<[\d, ]+>)?, f32, ": LOAD,
    r"^decode(_scattered)?_kernel<(\w+(<[\d, ]+>)?, )?f32>": STORE,
    r"^decode_add_kernel<": LOAD | STORE,
    r"^encode_with_residual_kernel<\w+(<[\d, ]+>)?, f32, ": LOAD | STORE,
    r"^reduce_encode(_scattered)?_kernel<(\w+(<[\d, ]+>)?, )?true, ": LOAD | STORE,
    r"^encode_chunks_kernel<\w+, f32>": LOAD,
    r"^decode_chunks_kernel<\w+, f32>": STORE,
    r"^encode_chunks_with_residual_kernel<\w+, f32>": LOAD | STORE,
    r"^reduce_encode_chunks_kernel<\w+, true>": LOAD | STORE,
    r"^elementwise_kernel<(HalfEncode|HalfEncodeWithResidual)<f32": LOAD | STORE,
    r"^elementwise_kernel<(HalfReduceEncode|Reduce)<": LOAD | STORE,
    r"^adam_kernel<Floating<f(32|64)>": LOAD | STORE,
    r"^copy_segments_kernel": LOAD | STORE,
    r"^digest_kernel": LOAD,
}
pytestmark = [
    pytest.mark.slow("nothing: compiles every kernel for a GPU"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed"),
]


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel, as reported by ptxas."""

    threads: int  # of a block
    registers: int
    shared_bytes: int
    stack_bytes: int
    spilled_bytes: int

    @property
    def occupancy(self):
        """Threads that a multiprocessor of compute capability 9.0 holds of those that it has room for: 64 warps, 32
        blocks, 65536 registers in steps of 8 per thread, 228 KB of shared memory of which a block takes 1 KB more than
        it asks for.
        """
        warps = self.threads // 32
        by_registers = 65536 // (-(-self.registers // 8) * 8 * 32) // warps
        by_shared = 228 * 1024 // (-(-(self.shared_bytes + 1024) // 128) * 128)
        return min(32, 64 // warps, by_registers, by_shared) * warps / 64


def short_name(mangled):
    """reduce_encode_kernel<Qsgd<8>>"""
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(
        r"\(anonymous namespace\)::|bagua::kernels::(cuda::)?|minifloat::|minmax_uint8::|qsgd::|centroid::",
        "",
        name,
    )
    name = re.sub(r"\(bagua::DType\)(\d)", lambda match: DTYPES[int(match[1])], name)
    name = re.sub(r"\((unsigned )?[A-Za-z]+\)(?=\d)", "", name)
    name = re.sub(r"\bunsigned short\b", "u16", name)
    for c_name, dtype in [
        ("unsigned char", "u8"),
        ("signed char", "i8"),
        ("unsigned int", "u32"),
        ("unsigned long", "u64"),
    ]:
        name = name.replace(c_name, dtype)
    for c_name, dtype in [("float", "f32"), ("double", "f64"), ("int", "i32"), ("long", "i64")]:
        name = re.sub(rf"<{c_name},", f"<{dtype},", name)
    return name.removeprefix("void ").split("(")[0].replace(" >", ">")


def threads_of(kernel):
    named = BLOCK_THREADS.search(kernel)
    if named:
        return int(named[1] or named[2])
    return next((number for part, number in OTHER_BLOCK_THREADS.items() if part in kernel), NUM_THREADS)


def version_of_nvcc():
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release ([\d.]+)", text)[1]


def compile_kernels(folder, architectures):
    """{architecture: {kernel: Resources}} and the objects, by the commands of CMake."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-DBAGUA_CUDA=1", "-DBAGUA_BUILD_PYTHON=OFF"]
    real = ";".join(f"{architecture}-real" for architecture in architectures)
    configure += ["-DBAGUA_WARNINGS_AS_ERRORS=ON", f"-DCMAKE_CUDA_ARCHITECTURES={real}"]
    subprocess.run(configure, check=True, capture_output=True, timeout=120)
    entries = json.loads((folder / "compile_commands.json").read_text())
    entries = [entry for entry in entries if entry["file"].endswith(".cu")]
    assert {Path(entry["file"]) for entry in entries} == set(ROOT.glob("csrc/*/cuda/*.cu"))

    def compile_one(entry):
        command = [*shlex.split(entry["command"]), "-Xptxas", "-v"]
        output = Path(entry["directory"], command[command.index("-o") + 1])
        output.parent.mkdir(parents=True, exist_ok=True)
        result = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True, timeout=600)
        assert result.returncode == 0, f"{entry['file']}:\n{result.stdout}{result.stderr}"
        return output, result.stdout + result.stderr

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = list(pool.map(compile_one, entries))
    kernels = {architecture: {} for architecture in architectures}
    for _, report in results:
        for part in report.split("Compiling entry function '")[1:]:
            mangled, architecture = re.match(r"(\w+)' for 'sm_(\d+)'", part).groups()
            stack, stores, loads = (
                int(re.search(rf"(\d+) bytes {what}", part)[1])
                for what in ("stack frame", "spill stores", "spill loads")
            )
            shared = re.search(r"(\d+) bytes smem", part)
            name = short_name(mangled)
            assert name not in kernels[architecture], f"two kernels have the name {name}"
            registers = int(re.search(r"Used (\d+) registers", part)[1])
            kernels[architecture][name] = Resources(
                threads_of(name), registers, int(shared[1]) if shared else 0, stack, stores + loads
            )
    return kernels, [output for output, _ in results]


def table_of(kernels):
    lines = [f"# nvcc {version_of_nvcc()}, sm_{OF_TABLE}"]
    lines += ["kernel\tthreads\tregisters\tshared bytes\toccupancy"]
    for name, of in sorted(kernels.items()):
        lines.append(f"{name}\t{of.threads}\t{of.registers}\t{of.shared_bytes}\t{of.occupancy:.2f}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compile_kernels(tmp_path_factory.mktemp("cuda"), ARCHITECTURES)


def test_the_architectures_are_those_that_are_shipped():
    choices = re.findall(
        r"set\(BAGUA_CUDA_ARCHITECTURES ((?: ?\d+(?:-real)?)+)\)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert max((re.findall(r"\d+", choice) for choice in choices), key=len) == ARCHITECTURES


def test_kernels_keep_everything_in_registers(compiled):
    for architecture, kernels in compiled[0].items():
        assert len(kernels) > 100
        found = {name: r for name, r in kernels.items() if r.stack_bytes or r.spilled_bytes}
        assert found == {}, f"sm_{architecture}"


def test_resources_are_those_of_the_table(compiled):
    kernels = compiled[0][OF_TABLE]
    header, _, *rows = TABLE.read_text().splitlines()
    known = {row.split("\t")[0]: row.split("\t")[1:] for row in rows}
    assert known.keys() == kernels.keys(), f"write {TABLE.name} anew: see the head of this file"
    if f"nvcc {version_of_nvcc()}," in header:
        assert TABLE.read_text() == table_of(kernels), f"write {TABLE.name} anew: see the head of this file"
    for name, resources in kernels.items():
        assert resources.occupancy >= 0.8 * float(known[name][3]), f"{name}: {resources}, the table has {known[name]}"


def test_the_table_leaves_no_kernel_alone_on_a_multiprocessor():
    for row in TABLE.read_text().splitlines()[2:]:
        name, threads, *_, occupancy = row.split("\t")
        # Fewer threads in a block have more elements each, which they load together.
        in_flight = float(occupancy) * 256 / int(threads)
        assert float(occupancy) >= 0.25 and in_flight >= 0.375, f"{name}: too few to hide how far away memory is"


def test_the_runtime_compiles_without_a_warning(tmp_path):
    files = sorted((ROOT / "csrc/device/cuda").glob("*.cc"))
    assert files
    flags = ["-std=c++20", f"-I{ROOT}", "-DBAGUA_WITH_CUDA=1", "-Xcompiler=-Wall,-Wextra,-Werror"]
    for file in files:
        subprocess.run(["nvcc", *flags, "-c", file, "-o", tmp_path / f"{file.stem}.o"], check=True)


def find_cuobjdump():
    found = shutil.which("cuobjdump")
    if found is None and (spec := find_spec("nvidia")) is not None:
        for folder in spec.submodule_search_locations:
            found = next(map(str, Path(folder).glob("*/bin/cuobjdump")), found)
    return found


@pytest.fixture(scope="module", params=ARCHITECTURES)
def instructions(request, compiled):
    """{kernel: its instructions, in order}, of one architecture."""
    cuobjdump = find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("cuobjdump is not installed: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    path = f"{Path(cuobjdump).parent}:{os.environ['PATH']}"  # where it looks for nvdisasm
    kernels = {}
    for output in compiled[1]:
        command = [cuobjdump, "-sass", "-arch", f"sm_{request.param}", output]
        text = subprocess.run(
            command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
        ).stdout
        for part in text.split("Function : ")[1:]:
            mangled, _, body = part.partition("\n")
            body = re.sub(r"HFMA2(?=(?:\.MMA)? R\d+, -RZ, RZ,)", "MOV", body)  # of a constant
            found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", body)
            kernels[short_name(mangled.strip())] = found
    assert kernels.keys() == compiled[0][request.param].keys()
    return kernels


def test_hot_kernels_move_16_bytes_at_a_time(instructions):
    for pattern, needed in HOT.items():
        kernels = [name for name in instructions if re.search(pattern, name)]
        assert kernels, f"{pattern} is no kernel any more"
        for name in kernels:
            wide = {i[:3] for i in instructions[name] if re.match(r"(LDG|STG)\b.*\.128", i)}
            assert wide >= needed, f"{name}: {wide}"


def test_no_kernel_touches_local_memory(instructions):
    for name, found in instructions.items():
        assert not [i for i in found if i.startswith(("LDL", "STL"))], name


def test_no_clamp_to_0_decides_a_branch(instructions):
    """ptxas 13.0 makes one VIMNMX.RELU of `y = x < 0 ? 0 : x < n ? x : n` and `y == n`, whose predicate is true for all
    x above 0: seen on an H200."""
    for name, found in instructions.items():
        assert "VIMNMX.RELU" not in found, name


def test_no_multiplication_is_fused_with_an_addition(instructions):
    """--fmad=false: the CPU rounds both."""
    for name, found in instructions.items():
        fused = [i for i in found if i.startswith(("FFMA", "DFMA", "HFMA"))]
        assert DIVIDING.search(name) or not fused, f"{name}: {set(fused)}"


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        TABLE.write_text(table_of(compile_kernels(Path(folder), [OF_TABLE])[0][OF_TABLE]))
    sys.stdout.write(f"{TABLE} has been written\n")
