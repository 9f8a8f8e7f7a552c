"""The allowed imports between packages, files and folders, by the tables below.

A new package, file of an ordered package, or folder of csrc/ that is missing in the tables is a failure too: add its
allowed imports here.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STDLIB = frozenset(sys.stdlib_module_names)
RANK_PY = ROOT / "bagua/cli/rank.py"

# ---- Python ---------------------------------------------------------------------------------------------
# "errors" stands for a file at the top or a whole package, "net.links" for one file of a package, and
# "data_parallel.__init__" for what the package itself exports.
ERRORS = {"errors"}
CONFIG = {"errors", "config"}
CORE = CONFIG | {"_C"}
# ProcessGroup and its parts.
GROUP = {
    f"distributed.{name}"
    for name in (
        *("nodes", "memory_overlap", "plain_data", "arguments", "devices", "job_ranks", "work", "tensors", "cores"),
        *("objects", "process_group"),
    )
}
BUCKETS = CORE | GROUP | {"distributed.checkpoints", "codecs", "buckets"}
RECORDS = {f"profiler.{name}" for name in ("recorder", "chrome_trace", "clock_sync", "timeline")}
HOOKS = {f"distributed.{name}" for name in ("coded_reductions", "process_group", "world")} | {"profiler.hook_timeline"}
STEPPING = (
    BUCKETS | RECORDS | {"optim", "distributed.world", "distributed.collectives", "distributed.consensus", "algorithms"}
)

# The allowed imports of a file at the top, and of any file of a package, besides its own package.
MAY_IMPORT = {
    "errors": set(),
    "config": ERRORS,
    "files": set(),
    "torch_version": set(),
    "optim": CORE | {"distributed.arguments", "distributed.devices"},
    "net": CORE,
    "distributed": CORE | {"net", "codecs"},
    "codecs": CORE | GROUP,
    "buckets": CORE | GROUP | {"codecs"},
    "algorithms": (BUCKETS - {"_C"}) | {"optim"},
    "profiler": CONFIG | GROUP | {"files", "distributed.consensus"},
    "data_parallel": STEPPING | {"files"},
    "ddp": ERRORS | HOOKS | {"torch_backend"},
    "fsdp": ERRORS | HOOKS | {"distributed.tensors"},
    "amp": {"data_parallel.handle", "distributed.process_group", "distributed.world"},
    "metrics": ERRORS | {"data_parallel.handle", "data_parallel.reducer"},
    "replay": CONFIG | {"files"},  # and public names, of `import bagua`
    "simulator": CORE | GROUP | {"files", "replay"},  # likewise
    "choice": STEPPING | {"data_parallel", "replay", "simulator"},
    "integrations": set(),  # likewise
    "cli": CORE
    | {
        "net",
        "distributed",
        "replay",
        "simulator",
        "choice",
        "codecs",
        "files",
        "profiler.report",
        "profiler.chrome_trace",
        "torch_backend",
    },
    "run": {"cli.run"},
    "__main__": {"cli.__init__"},
    "torch_backend": CONFIG
    | GROUP
    | {"net.exhausted", "torch_version", *(f"distributed.{name}" for name in ("bootstrap", "world"))},
    "torch_api": (STEPPING - {"_C"}) | {"torch_version"} | {"data_parallel.__init__", "data_parallel.handle"},
    "federated": ERRORS
    | {f"distributed.{name}" for name in ("devices", "process_group", "world", "consensus", "plain_data")}
    | {"codecs", "metrics", "torch_version"},
}

# The files of ordered packages: each may import those before it, and outside its package those listed here.
ORDER = {
    "net": {
        "exhausted": ERRORS,
        "fork_guard": set(),
        "interfaces": CONFIG,
        "auth": CONFIG,
        "stall_watch": set(),
        "rendezvous": CORE,
        "congestion": ERRORS,
        "connector": CONFIG,
        "reports": CORE,
        "dialer": CORE,
        "listener": CONFIG,
        "torch_transport": CORE,
        "links": CORE,
        "__init__": set(),
    },
    "distributed": {
        "nodes": set(),
        "memory_overlap": set(),
        "plain_data": ERRORS,
        "arguments": CORE,
        "devices": CORE,
        "job_ranks": ERRORS,
        "work": CORE,
        "tensors": CORE,
        "cores": CORE,
        "objects": ERRORS,
        "process_group": CORE,
        "checkpoints": ERRORS,
        "consensus": ERRORS,
        "bootstrap": CORE | {"net"},
        "world": CONFIG | {"net"},
        "collectives": CONFIG | {"codecs"},
        "exchange_rows": CONFIG | {"codecs"},
        "coded_reductions": CORE | {"codecs"},
        "preemption": ERRORS,
        "__init__": set(),
    },
    "profiler": {
        "stragglers": set(),
        "recorder": ERRORS | {"distributed.job_ranks"},
        "chrome_trace": ERRORS | {"files"},
        "rank_trace": ERRORS,
        "report": ERRORS,
        "clock_sync": CONFIG | GROUP,
        "timeline": ERRORS | {"distributed.consensus", "distributed.job_ranks", "distributed.process_group"},
        "hook_timeline": ERRORS | {"distributed.process_group"},
        "__init__": set(),
    },
    "data_parallel": {
        "errors": BUCKETS,
        "scope": STEPPING,
        "checks": BUCKETS | {"algorithms"},
        "zero_copy": BUCKETS,
        "states": BUCKETS | {"algorithms"},
        "buffers": GROUP,
        "initial_sync": BUCKETS,
        "replica_check": CORE | {"distributed.devices", "distributed.process_group", "distributed.tensors"},
        "reducer": STEPPING,
        "join": STEPPING,
        "handle": STEPPING,
        "wrap": STEPPING,
        "ddp": STEPPING,
        "compiling": BUCKETS,
        "average": STEPPING,
        "checkpoint": STEPPING | {"files"},
        "__init__": set(),
    },
    "cli": {
        "rank": set(),
        "progress": set(),
        "endings": set(),
        "make_token": set(),
        "run": CONFIG | {"net.congestion", "torch_backend"},
        "calibrate": CONFIG | {"distributed", "choice", "replay", "codecs", "files"},
        "simulate": CORE | {"replay", "simulator"},
        "doctor": CORE | {"net", "distributed", "choice"},
        "bench": ERRORS | {"replay", "torch_backend"},
        "timeline": ERRORS | {"profiler.report", "profiler.chrome_trace"},
        "__init__": CORE,
    },
}
# The packages of bagua/federated from the ground up: each may import those before it, and those files beside them all.
FEDERATED = ("verbs", "programs", "library")
# Further allowed imports of single files.
BESIDE = {"torch_backend.callback_thread": {"_C"}}
# The allowed imports outside bagua, besides the standard library.
THIRD_PARTY = {
    "errors": set(),
    "config": set(),
    "metrics": {"torch", "prometheus_client"},
    "federated": {"torch", "numpy", "cryptography", "Crypto", "dp_accounting", "flwr", "nvflare"},
    "replay": {"torch", "matplotlib"},
    "integrations": {"torch", "accelerate", "lightning", "ray", "transformers"},
}
THIRD_PARTY_DEFAULT = {"torch", "numpy"}
# The files that export the public names.
FACADE = {"__init__", "_public"}
# Files that use public names only: `import bagua`, and only names of its __all__.
ON_PUBLIC_NAMES = {"replay", "integrations", "simulator"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def imports_of(path):
    """Yields (line, dotted name) of every import, relative ones resolved; `from a import b` gives a.b."""
    name = module_name(path)
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def production_files():
    return sorted(p for p in (ROOT / "bagua").rglob("*.py") if "testing" not in p.relative_to(ROOT).parts)


def package_of(path):
    return path.relative_to(ROOT / "bagua").with_suffix("").parts[0]


def layer_of(name):
    """Returns the tables' name of a module of bagua: "errors", "net.links", "data_parallel.__init__"."""
    top, _, rest = name.partition(".")
    folder = ROOT / "bagua" / top
    if not folder.is_dir():
        return top
    first = rest.split(".")[0]
    known = first and ((folder / first).is_dir() or (folder / f"{first}.py").exists())
    return f"{top}.{first if known else '__init__'}"


def may_import(importer, imported):
    """Returns True if an import is allowed; both names are those of layer_of."""
    top, _, file = importer.partition(".")
    imported_top, _, imported_file = imported.partition(".")
    order = ORDER.get(top)
    if imported_top == top:
        files = list(order or ())
        return not order or imported_file in files[: files.index(file)]
    allowed = MAY_IMPORT[top] | BESIDE.get(importer, set())
    if order:
        allowed_here = order[file]
        return all({imported, imported_top} & names for names in (allowed, allowed_here))
    return bool({imported, imported_top} & allowed)


def test_python_imports():
    for path in production_files():
        package = package_of(path)
        importer = layer_of(module_name(path).partition(".")[2] + (".__init__" if path.stem == "__init__" else ""))
        if package in FACADE:
            allowed, third_party = {*MAY_IMPORT, *FACADE, "_C"}, set()
        else:
            assert package in MAY_IMPORT, f"bagua/{package} is in no table: add it to MAY_IMPORT, and to CONTRIBUTING"
            third_party = THIRD_PARTY.get(package, THIRD_PARTY_DEFAULT)
            if package in ORDER:
                assert path.stem in ORDER[package], f"{path} is in no table: add it to ORDER"
        for line, name in imports_of(path):
            top, _, rest = name.partition(".")
            if top != "bagua":
                assert top in STDLIB | third_party, f"{path}:{line}: {package} must not import {name}"
            elif package in FACADE:
                assert rest.split(".")[0] in allowed, f"{path}:{line}: {name} is in no table"
            elif not rest:
                assert package in ON_PUBLIC_NAMES, f"{path}:{line}: {package} must not import bagua as a whole"
            else:
                assert may_import(importer, layer_of(rest)), f"{path}:{line}: {importer} must not import {name}"


def federated_imports(package):
    """(where, package of bagua/federated) of every import within it."""
    for path in sorted((ROOT / "bagua/federated" / package).glob("*.py")):
        for line, name in imports_of(path):
            if name.startswith("bagua.federated."):
                yield f"{path}:{line}", name.split(".")[2]


def test_the_packages_of_federated_stand_on_one_another():
    folders = {path.parent.name for path in (ROOT / "bagua/federated").glob("*/__init__.py")}
    assert folders == set(FEDERATED)
    assert {path.stem for path in (ROOT / "bagua/federated").glob("*.py")} == {"__init__", "flower", "nvflare"}
    for index, package in enumerate(FEDERATED):
        for where, imported in federated_imports(package):
            assert imported in FEDERATED[: index + 1], f"{where}: {package} must not import {imported}"


def test_the_tables_name_what_is_there():
    top = {path.stem for path in (ROOT / "bagua").glob("*.py")} - FACADE
    packages = {path.parent.name for path in (ROOT / "bagua").glob("*/__init__.py")} - {"testing"}
    assert set(MAY_IMPORT) == top | packages
    for package, files in ORDER.items():
        assert set(files) == {path.stem for path in (ROOT / "bagua" / package).glob("*.py")}
    files = (ROOT / "bagua").glob("*/*.py")
    known = {"_C", *MAY_IMPORT} | {f"{path.parent.name}.{path.stem}" for path in files}
    for allowed in (
        *MAY_IMPORT.values(),
        *BESIDE.values(),
        *(names for files in ORDER.values() for names in files.values()),
    ):
        assert allowed <= known


# Files that pass on objects of programs; testing is not part of a job.
PICKLES = {
    *("distributed/process_group.py", "distributed/collectives.py", "_public.py"),
    *("torch_api/__init__.py", "torch_api/communication.py"),
}


def test_no_message_of_baguas_own_is_unpickled():
    for path in production_files():
        if str(path.relative_to(ROOT / "bagua")) in PICKLES or "testing" in path.parts:
            continue
        for node in ast.walk(tree_of(path)):
            name = getattr(node, "attr", getattr(node, "id", ""))
            assert name not in ("broadcast_object", "all_gather_object"), f"{path}:{node.lineno}"
            if name in ("loads", "load") and isinstance(node, ast.Attribute):
                assert getattr(node.value, "id", "") != "pickle", f"{path}:{node.lineno}"


def test_the_top_is_the_public_face_and_foundations():
    assert len(list((ROOT / "bagua").glob("*.py"))) <= 14


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("net.auth", "net.links"),
        ("net.links", "distributed.process_group"),
        ("net.congestion", "config"),
        ("distributed.tensors", "net.links"),
        ("distributed.process_group", "distributed.world"),
        ("distributed.arguments", "buckets"),
        ("distributed.consensus", "buckets"),
        ("codecs.base", "distributed.world"),
        ("algorithms.bytegrad", "_C"),
        ("algorithms.bytegrad", "data_parallel.reducer"),
        ("algorithms.base", "data_parallel.states"),
        ("data_parallel.reducer", "data_parallel.wrap"),
        ("data_parallel.reducer", "profiler.report"),
        ("data_parallel.buffers", "algorithms"),
        ("data_parallel.handle", "amp"),
        ("amp", "data_parallel.reducer"),
        ("profiler.recorder", "distributed.work"),
        ("torch_api.env", "data_parallel.zero_copy"),
        ("federated.verbs", "buckets"),
        ("cli.rank", "errors"),
        ("cli.progress", "cli.run"),
        ("errors", "config"),
    ],
)
def test_the_tables_refuse(importer, imported):
    assert layer_of(importer) == importer
    assert not may_import(importer, imported)


def test_algorithms_do_not_know_each_other():
    for path in sorted((ROOT / "bagua/algorithms").glob("*.py")):
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[:2] == ["bagua", "algorithms"] and path.stem != "__init__":
                shared = parts[2] in ("base", "registry") or parts[2].startswith("_")
                assert shared, f"{path}:{line}: an algorithm must not import another one ({name})"


def test_only_algorithms_know_concrete_algorithms():
    concrete = {path.stem for path in (ROOT / "bagua/algorithms").glob("*.py")} - {"base", "registry", "__init__"}
    for path in production_files():
        if package_of(path) != "algorithms":
            for line, name in imports_of(path):
                parts = name.split(".")
                is_concrete = parts[:2] == ["bagua", "algorithms"] and len(parts) > 2 and parts[2] in concrete
                assert not is_concrete, f"{path}:{line}: imports the algorithm {name}"


def test_only_config_reads_the_environment():
    for path in production_files():
        tree = tree_of(path)
        writes = {
            id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "update"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                # cli/rank.py imports nothing of bagua, which the script that it runs imports first.
                allowed = package_of(path) == "config" or path == RANK_PY or id(node) in writes
                assert allowed, f"{path}:{node.lineno}: only bagua/config.py reads os.environ"


def public_names():
    public = {p.parent.name for p in (ROOT / "bagua").glob("*/__init__.py")} - set(ORDER)
    for node in ast.walk(ast.parse((ROOT / "bagua/_public.py").read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            public |= set(ast.literal_eval(node.value))
    return public


def names_of_bagua(path):
    """Yields (line, name) of every `bagua.name` that a file uses."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "bagua":
            yield node.lineno, node.attr


def test_what_stands_on_public_names_uses_no_others():
    public = public_names()
    for path in production_files():
        if package_of(path) in ON_PUBLIC_NAMES:
            for line, name in names_of_bagua(path):
                assert name in public, f"{path}:{line}: bagua.{name} is not public"


def test_examples_and_benchmarks_use_public_names():
    public = public_names()
    for path in sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]):
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "bagua":
                assert len(parts) == 1 or parts[1] in public, f"{path}:{line}: {name} is not public"
                assert not any(part.startswith("_") for part in parts[1:]), f"{path}:{line}: {name} is private"
        for line, name in names_of_bagua(path):
            assert name in public, f"{path}:{line}: bagua.{name} is not public"


# ---- C++ ------------------------------------------------------------------------------------------------
# Folders of csrc -> the folders whose headers they may include, beside their own; a path that ends in .h is that header
# only. common <- device <- kernels <- codecs; common <- transport.h <- each transport by itself, and the communicator,
# which knows none of them; collectives see a group's ranks (group_view.h), not how they are connected.
MAY_INCLUDE = {
    "common": set(),
    "device": {"common"},
    "device/*": {"common", "device"},
    "kernels": {"common", "device", "device/cuda/check.h", "device/cuda/device_scope.h"},
    "codecs": {"common", "kernels"},
    "transport": {"common"},
    "transport/*": {"common", "transport/transport.h"},
    "transport/pinned": {"common", "device", "transport/transport.h"},
    "transport/nccl": {"common", "device", "transport/device_transport.h"},
    "communicator": {"common", "device", "transport/transport.h", "transport/device_transport.h"},
    "collectives": {
        "common",
        "device",
        "kernels",
        "codecs/codec.h",
        "transport/transport.h",
        "communicator/group_view.h",
    },
    "engine": {"common", "device", "kernels/counter_rng.h", "communicator/communicator.h", "collectives/collectives.h"},
}
EVERYTHING = {"bindings", "tests"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def cpp_files():
    return sorted(p for suffix in ("*.h", "*.cc", "*.cu", "*.cuh") for p in (ROOT / "csrc").rglob(suffix))


def cpp_folder(relative):
    """csrc/transport/tcp/x.h -> transport/tcp, and of csrc/device likewise; csrc/kernels/cpu/x.h -> kernels."""
    parts = Path(relative).parts[1:-1]
    return "/".join(parts[:2]) if parts[0] in ("transport", "device") else parts[0]


def row_of(folder):
    return folder if folder in MAY_INCLUDE else re.sub("/.*", "/*", folder)


def may_include(folder, included):
    """Returns True if a file of csrc/<folder> may include csrc/<included>; None if no table has the folder."""
    target = cpp_folder(f"csrc/{included}")
    if folder in EVERYTHING or target == folder:
        return True
    row = row_of(folder)
    if row not in MAY_INCLUDE:
        return None
    return target in MAY_INCLUDE[row] or included in MAY_INCLUDE[row]


def test_cpp_includes():
    for path in cpp_files():
        folder = cpp_folder(path.relative_to(ROOT))
        for bracket, included in INCLUDE.findall(path.read_text()):
            where = f"{path}: #include {included}"
            if bracket == "<" or not included.startswith("csrc/"):
                if folder != "bindings":
                    assert not re.match(r"(pybind11|Python\.h|bagua_rust)", included), (
                        f"{where}: only csrc/bindings may"
                    )
                assert not re.match(r"(torch|ATen|c10)/", included), f"{where}: the core does not know libtorch"
                assert bracket == "<" or folder == "bindings", f"{where}: own headers are named from the root, csrc/..."
                continue
            assert (ROOT / included).exists(), f"{where}: no such file"
            allowed = may_include(folder, included.removeprefix("csrc/"))
            assert allowed is not None, (
                f"csrc/{folder} is in no table: add it to MAY_INCLUDE here, and to the table in CONTRIBUTING.md"
            )
            assert allowed, f"{where}: the table does not allow it to {folder}"


def test_the_table_of_csrc_names_what_is_there():
    folders = {cpp_folder(path.relative_to(ROOT)) for path in cpp_files()} - EVERYTHING
    assert {row_of(folder) for folder in folders} == set(MAY_INCLUDE)
    for name in set().union(*MAY_INCLUDE.values()):
        assert (ROOT / "csrc" / name).exists(), f"csrc/{name} is allowed, but does not exist"


@pytest.mark.parametrize(
    ("folder", "included"),
    [
        ("common", "kernels/reduce.h"),
        ("kernels", "codecs/codec.h"),
        ("transport", "transport/tcp/tcp_channel.h"),
        ("transport/shm", "transport/tcp/tcp_channel.h"),
        ("transport/shm", "communicator/control_link.h"),
        ("transport/local", "communicator/communicator.h"),
        ("communicator", "transport/nccl/nccl_transport.h"),
        ("collectives", "transport/device_transport.h"),
        ("communicator", "transport/local/local_channel.h"),
        ("collectives", "transport/shm/shm_channel.h"),
        ("collectives", "communicator/communicator.h"),
        ("collectives", "engine/engine.h"),
        ("engine", "communicator/control_link.h"),
        ("engine", "bindings/group.h"),
    ],
)
def test_the_table_of_csrc_refuses(folder, included):
    assert (ROOT / "csrc" / included).exists() and (ROOT / "csrc" / folder).is_dir()
    assert may_include(folder, included) is False


def test_cuda_and_no_cuda_have_the_same_files():
    for folder in (ROOT / "csrc").rglob("cuda"):
        stubs = {path.stem for path in (folder.parent / "no_cuda").glob("*.cc")}
        assert {path.stem for path in folder.glob("*.cu")} == stubs, f"{folder} and its no_cuda differ"


# ---- Rust -----------------------------------------------------------------------------------------------
FORBIDDEN_IN_RUST = re.compile(r"\bstd::(net|thread|time|fs|process|env|io)\b")


def rust_code(path):
    """Returns the file without comments and without its unit tests."""
    text = path.read_text().split("#[cfg(test)]")[0]
    return re.sub(r"//[^\n]*", "", text)


def test_rust_orders_and_does_nothing_else():
    for path in sorted((ROOT / "rust_core/src").glob("*.rs")):
        code = rust_code(path)
        found = FORBIDDEN_IN_RUST.search(code)
        assert found is None, f"{path}: {found[0]}: no socket, thread, clock or file in the ordering core"
        if path.name != "ffi.rs":
            assert not re.search(r"\bunsafe\s*(\{|fn|impl|extern)", code), f"{path}: unsafe belongs in ffi.rs"


def test_rust_has_no_dependencies():
    assert (ROOT / "rust_core/Cargo.lock").read_text().count("[[package]]") == 1
