"""What may import what: the tables below are the section of that name in the design, file by file.

A new file of bagua/ or room of csrc/ that no table names is a failure too: say here what it may see.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STDLIB = frozenset(sys.stdlib_module_names)

# ---- Python ---------------------------------------------------------------------------------------------
# Top-level names of bagua -> the names of bagua they may import. Groups stand for what is below them.
ERRORS = {"errors"}
CONFIG = {"errors", "config"}
CONNECTING = {
    "interfaces",
    "handshake",
    "rendezvous",
    "fork_guard",
    "dialing",
    "accepting",
    "questions",
    "watching",
    "congestion",
    "connections",
}
TORCH = {"torch_pump", "torch_transport"}
GROUP = CONFIG | {"_C", "reduction", "work", "overlap", "tensors", "nodes", "lanes", "objects", "group"}
BUCKETS = GROUP | {"codecs", "bucket", "checkpoints"}
POLICY = BUCKETS | {"error_feedback", "optim"}
STEPPING = POLICY | {
    "world",
    "communication",
    "agreement",
    "nonfinite",
    "replicas",
    "recorder",
    "clocks",
    "trace",
    "timeline",
    "unused",
    "parameter_errors",
    "hook_failures",
    "optimizer_hooks",
}
# What watches over the optimizers' steps, from the ground up.
OPTIMIZERS = STEPPING | {"algorithms", "followed_optimizers", "local_gradients", "skipped_steps"}

MAY_IMPORT = {
    "errors": set(),
    "config": ERRORS,
    "recorder": ERRORS,
    "clocks": GROUP - {"_C"},
    "trace": ERRORS | {"recorder"},
    "timeline": ERRORS | {"recorder", "clocks", "trace"},
    "stragglers": set(),
    "trace_file": ERRORS | {"trace"},
    "trace_report": ERRORS | {"trace", "trace_file", "stragglers"},
    "metrics": ERRORS | {"handle", "step"},
    "interfaces": CONFIG,
    "handshake": CONFIG,
    "rendezvous": CONFIG | {"_C"},
    "fork_guard": set(),
    "congestion": ERRORS,
    "dialing": CONFIG | CONNECTING,
    "accepting": CONFIG | CONNECTING,
    "questions": CONFIG | CONNECTING | {"_C"},
    "watching": CONFIG | CONNECTING,
    "torch_pump": ERRORS | {"_C"},
    "torch_transport": CONFIG | TORCH | {"_C"},
    "connections": CONFIG | CONNECTING | TORCH | {"_C"},
    "reduction": CONFIG | {"_C"},
    "work": CONFIG | {"_C"},
    "overlap": set(),
    "tensors": CONFIG | {"overlap", "reduction"},
    "nodes": set(),
    "objects": set(),
    "lanes": CONFIG | {"_C"},
    "group": GROUP,
    "codecs": GROUP | {"codecs"},
    "bucket": BUCKETS,
    "checkpoints": GROUP,
    "error_feedback": BUCKETS,
    "optim": ERRORS,
    "callbacks": {"_C", "errors", "work"},
    "meeting": GROUP | CONNECTING | TORCH,
    "world": BUCKETS | CONNECTING | TORCH | {"meeting", "world"},
    "communication": BUCKETS | {"world", "communication"},
    "algorithms": (POLICY | {"algorithms"}) - {"_C"},
    "end_of_backward": set(),
    "borrowed": POLICY | {"algorithms"},
    "agreement": STEPPING,
    "optimizer_hooks": set(),
    "local_gradients": BUCKETS,
    "followed_optimizers": STEPPING | {"algorithms"},
    "nonfinite": STEPPING | {"followed_optimizers"},
    "replicas": STEPPING,
    "unused": STEPPING,
    "parameter_errors": STEPPING,
    "skipped_steps": STEPPING | {"algorithms", "followed_optimizers"},
    "hook_failures": ERRORS | {"group"},
    "optimizer_steps": OPTIMIZERS,
    "step": STEPPING | {"algorithms", "borrowed", "end_of_backward", "optimizer_steps", "step"},
    "takeover": STEPPING | {"step"},
    "handle": STEPPING | {"algorithms", "step", "takeover", "handle"},
    "data_parallel": STEPPING | {"algorithms", "step", "takeover", "handle", "data_parallel"},
    "torch_backend": GROUP - {"_C"} | {"callbacks", "meeting", "world", "torch_backend"},
    "torch_api": STEPPING - {"_C"} | {"algorithms", "step", "handle", "data_parallel", "torch_api"},
    "federated": ERRORS | {"group", "world", "agreement", "codecs", "metrics", "federated"},
    "run": CONFIG | {"congestion"},
    "doctor": STEPPING | CONNECTING | {"run"},
    "profiles": ERRORS,
    "bench": ERRORS | {"profiles"},
    "cli": CONFIG | {"run", "doctor", "bench", "trace_report"},
}
# Beside the standard library.
THIRD_PARTY = {
    "errors": set(),
    "config": set(),
    "metrics": {"torch", "prometheus_client"},
    "federated": {"torch", "numpy", "cryptography", "dp_accounting", "flwr"},
}
THIRD_PARTY_DEFAULT = {"torch", "numpy"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def imports_of(path):
    """(line, dotted name) of every import, relative ones resolved; `from a import b` gives a.b."""
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


def room_of(path):
    return path.relative_to(ROOT / "bagua").with_suffix("").parts[0]


def test_python_imports():
    for path in production_files():
        room = room_of(path)
        if room == "__init__":  # the facade
            allowed, third_party = {*MAY_IMPORT, "_C"}, set()
        else:
            assert room in MAY_IMPORT, f"bagua/{room} is in no table: add it to MAY_IMPORT, and to the map of rooms"
            allowed, third_party = MAY_IMPORT[room], THIRD_PARTY.get(room, THIRD_PARTY_DEFAULT)
        for line, name in imports_of(path):
            top, _, rest = name.partition(".")
            if top == "bagua":
                assert rest.split(".")[0] in allowed, f"{path}:{line}: {room} must not import {name}"
            else:
                assert top in STDLIB | third_party, f"{path}:{line}: {room} must not import {name}"


def test_algorithms_do_not_know_each_other():
    shared = {"base", "compressed", "registry", "weights", "__init__"}
    for path in sorted((ROOT / "bagua/algorithms").glob("*.py")):
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[:2] == ["bagua", "algorithms"] and path.stem != "__init__":
                assert parts[2] in shared, f"{path}:{line}: an algorithm must not import another one ({name})"


def test_only_algorithms_know_concrete_algorithms():
    concrete = {path.stem for path in (ROOT / "bagua/algorithms").glob("*.py")} - {"base", "registry", "__init__"}
    for path in production_files():
        if room_of(path) != "algorithms":
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
                allowed = room_of(path) == "config" or id(node) in writes
                assert allowed, f"{path}:{node.lineno}: only bagua/config.py reads os.environ"


def public_names():
    public = {p.parent.name for p in (ROOT / "bagua").glob("*/__init__.py")}
    for node in ast.walk(ast.parse((ROOT / "bagua/__init__.py").read_text())):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            public |= set(ast.literal_eval(node.value))
    return public


def test_examples_and_benchmarks_use_public_names():
    public = public_names()
    for path in sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]):
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[0] == "bagua":
                assert len(parts) == 1 or parts[1] in public, f"{path}:{line}: {name} is not public"
                assert not any(part.startswith("_") for part in parts[1:]), f"{path}:{line}: {name} is private"
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "bagua":
                assert node.attr in public, f"{path}:{node.lineno}: bagua.{node.attr} is not public"


# ---- C++ ------------------------------------------------------------------------------------------------
# Rooms of csrc -> the rooms whose headers they may include, beside their own. A path that ends in .h is
# that header only; "transport" is the contract in csrc/transport itself, not the folders below it.
MAY_INCLUDE = {
    "common": set(),
    "kernels": {"common"},
    "codecs": {"common", "kernels"},
    "transport": {"common"},
    "transport/*": {"common", "transport"},
    "collectives": {"common", "kernels", "transport", "codecs/codec.h"},
    "engine": {"common", "kernels", "transport", "collectives", "codecs/codec.h"},
}
EVERYTHING = {"bindings", "tests"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def cpp_files():
    return sorted(p for suffix in ("*.h", "*.cc", "*.cu", "*.cuh") for p in (ROOT / "csrc").rglob(suffix))


def cpp_room(relative):
    """csrc/transport/tcp/x.h -> transport/tcp; csrc/kernels/cpu/x.h -> kernels."""
    parts = Path(relative).parts[1:-1]
    return "/".join(parts[:2]) if parts[0] == "transport" else parts[0]


def test_cpp_includes():
    for path in cpp_files():
        room = cpp_room(path.relative_to(ROOT))
        for bracket, included in INCLUDE.findall(path.read_text()):
            where = f"{path}: #include {included}"
            if bracket == "<" or not included.startswith("csrc/"):
                if room != "bindings":
                    assert not re.match(r"(pybind11|Python\.h|bagua_rust)", included), (
                        f"{where}: only csrc/bindings may"
                    )
                assert not re.match(r"(torch|ATen|c10)/", included), f"{where}: the core does not know libtorch"
                assert bracket == "<" or room == "bindings", f"{where}: own headers are named from the root, csrc/..."
                continue
            assert (ROOT / included).exists(), f"{where}: no such file"
            target = cpp_room(included)
            if room in EVERYTHING or target == room:
                continue
            allowed = MAY_INCLUDE.get(room) or MAY_INCLUDE.get(re.sub("/.*", "/*", room))
            assert allowed is not None, (
                f"csrc/{room} is in no table: add it to MAY_INCLUDE here, and to the map of rooms"
            )
            allowed_here = target in allowed or included.removeprefix("csrc/") in allowed
            assert allowed_here, f"{where}: {room} may include {sorted(allowed) or 'nothing of csrc'} only"


def test_cuda_and_no_cuda_have_the_same_files():
    for folder in (ROOT / "csrc").rglob("cuda"):
        stubs = {path.stem for path in (folder.parent / "no_cuda").glob("*.cc")}
        assert {path.stem for path in folder.glob("*.cu")} == stubs, f"{folder} and its no_cuda differ"


# ---- Rust -----------------------------------------------------------------------------------------------
FORBIDDEN_IN_RUST = re.compile(r"\bstd::(net|thread|time|fs|process|env|io)\b")


def rust_code(path):
    """The file without comments and without its unit tests."""
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
