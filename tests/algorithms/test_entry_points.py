"""Algorithms of other installed packages: found by their entry points, imported when asked for, and never by halves."""

from __future__ import annotations

import dataclasses
import sys
import textwrap

import pytest

import bagua
from bagua.algorithms import Algorithm, available, get, register, registry
from bagua.errors import InvalidArgument
from bagua.testing import spawn
from tests.conformance.training import batch, grads_of, loss_of, make_net, process_group

PLUGIN = """
    import dataclasses
    import bagua
    from bagua.algorithms import Algorithm, register

    @dataclasses.dataclass(kw_only=True)
    class Plain(Algorithm):
        scale: float = 1.0

        def communicate(self, bucket, group):
            bucket.flat.mul_(self.scale)
            return group.all_reduce(bucket, bagua.ReduceOp.AVG)
"""
REGISTERED = PLUGIN.replace("    @dataclasses", "    @register\n    @dataclasses").replace(
    "        scale:", '        name = "zz_plain"\n        scale:'
)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(package, {entry point: value}, {module: source}) as pip would; all is forgotten after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_given_out", set())

    def install(package, entries, sources=None):
        info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[bagua.algorithms]", *lines, ""]))
        for module, source in (sources or {}).items():
            (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))

    yield install
    for names in (registry._classes, registry._loaded, sys.modules):
        for name in [name for name in names if name.startswith("zz_")]:
            del names[name]


@pytest.mark.parametrize(
    ("value", "source"),
    [("zz_module:Plain", PLUGIN), ("zz_module:Plain", REGISTERED), ("zz_module", REGISTERED)],
    ids=["class", "registered class", "module"],
)
def test_listed_at_once_and_imported_when_asked_for(install, value, source):
    install("zz-package", {"zz_plain": value}, {"zz_module": source})
    assert "zz_plain" in available()
    assert get("bytegrad").name == "bytegrad"
    assert "zz_module" not in sys.modules
    cls = get("zz_plain")
    assert cls is sys.modules["zz_module"].Plain is get("zz_plain")
    assert cls.name == "zz_plain"
    assert bagua.algorithms.create("zz_plain", {"scale": 2.0}).options() == {"scale": 2.0}
    with pytest.raises(InvalidArgument, match=r"unknown option 'factor' for algorithm 'zz_plain'.*scale \(default 1.0"):
        bagua.algorithms.create("zz_plain", {"factor": 2.0})


def test_a_module_that_was_imported_before(install):
    install("zz-package", {"zz_plain": "zz_module"}, {"zz_module": REGISTERED})
    import zz_module

    assert get("zz_plain") is zz_module.Plain


def _train(rank, world_size):
    with process_group():
        model = bagua.with_bagua(make_net(), algorithm="zz_plain", scale=2.0)
        plain = bagua.with_bagua(make_net(), algorithm="gradient_allreduce")
        for wrapped in (model, plain):
            loss_of(wrapped, batch(rank, 0)).backward()
        expected = grads_of(plain)
        return all((grad - 2 * expected[name]).abs().max() <= 1e-5 for name, grad in grads_of(model).items())


def test_trains(install):
    install("zz-package", {"zz_plain": "zz_module:Plain"}, {"zz_module": PLUGIN})
    assert spawn(_train, 2) == [True, True]


def _only_on_rank_0(rank, world_size, folder):
    if rank == 1:
        sys.path.remove(folder)
    with process_group():
        with pytest.raises(InvalidArgument, match="unknown algorithm 'zz_plain'; available: "):
            bagua.with_bagua(make_net(), algorithm="zz_plain")


def test_a_package_that_a_rank_lacks_is_an_error_on_all_ranks(install, tmp_path):
    install("zz-package", {"zz_plain": "zz_module:Plain"}, {"zz_module": PLUGIN})
    spawn(_only_on_rank_0, 2, args=(str(tmp_path),))


PACKAGE = r"package 'zz-package' \(entry point (zz_plain|bytegrad) = zz_module(:\w+)?\)"
REFUSED = {
    "unknown module": ("zz_module", None, r"does not import \(ModuleNotFoundError: No module named 'zz_module'\)"),
    "no such class": ("zz_module:Other", PLUGIN, "module 'zz_module' has no 'Other'; name a class"),
    "registers nothing": (
        "zz_module", PLUGIN, "module 'zz_module' registers no algorithm; decorate a class with @bagua.algorithms.reg"
    ),
    "registers another name": (
        "zz_module", REGISTERED.replace("zz_plain", "zz_else"), "registers 'zz_else'; .*write `name = 'zz_plain'`"
    ),
    "names disagree": (
        "zz_module:Plain", REGISTERED.replace("zz_plain", "zz_else"), "Plain calls itself 'zz_else'; write `name = 'z"
    ),
    "no algorithm": ("zz_module:Plain", "class Plain:\n        pass", "must derive from bagua.algorithms.Algorithm"),
    "no dataclass": (
        "zz_module:Plain",
        PLUGIN.replace("@dataclasses.dataclass(kw_only=True)", ""),
        r"Plain must be decorated with @dataclasses.dataclass\(kw_only=True\)",
    ),
    "registered, not keyword-only": (
        "zz_module:Plain", REGISTERED.replace("kw_only=True", ""), r"decorated with @dataclasses.dataclass\(kw_only=T"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(install, case):
    value, source, message = REFUSED[case]
    install("zz-package", {"zz_plain": value}, {} if source is None else {"zz_module": source})
    for _ in range(2):  # and the second time for the same reason
        with pytest.raises(InvalidArgument, match=f"{PACKAGE}.*{message}") as caught:
            get("zz_plain")
    if "does not import" in message:
        assert type(caught.value.__cause__).__name__ in message
    assert get("bytegrad").name == "bytegrad"
    assert "zz_plain" in available()


def test_the_name_of_a_file_of_bagua(install):
    install("zz-package", {"bytegrad": "zz_module:Plain"}, {"zz_module": PLUGIN})
    with pytest.raises(InvalidArgument, match=f"{PACKAGE} has the name of an algorithm of bagua itself; rename or"):
        get("bytegrad")
    assert "zz_module" not in sys.modules
    assert get("qsgd").name == "qsgd"
    assert available().count("bytegrad") == 1


def test_what_is_installed_is_read_once_for_a_name(install, monkeypatch):
    install("zz-package", {"zz_plain": "zz_module:Plain"}, {"zz_module": PLUGIN})
    expected = {name: get(name) for name in ("zz_plain", "bytegrad", "async")}
    monkeypatch.setattr(registry, "entry_points", lambda **_: pytest.fail("read again"))
    assert {name: get(name) for name in expected} == expected
    with pytest.raises(pytest.fail.Exception, match="read again"):
        get("qsgd")


@pytest.mark.parametrize("same", [False, True])
def test_the_name_of_another_package(install, same):
    value = "zz_module:Plain" if same else "zz_other:Plain"
    install("zz-package", {"zz_plain": "zz_module:Plain"}, {"zz_module": PLUGIN, "zz_other": PLUGIN})
    install("zz-more", {"zz_plain": value})
    with pytest.raises(InvalidArgument, match=r"'zz_plain' is declared more than once: .*") as caught:
        get("zz_plain")
    for package in (
        "'zz-package' (entry point zz_plain = zz_module:Plain)",
        f"'zz-more' (entry point zz_plain = {value})",
    ):
        assert package in str(caught.value)
    assert not {"zz_module", "zz_other"} & set(sys.modules)


@pytest.mark.parametrize(("source", "value"), [(REGISTERED, "zz_module"), (PLUGIN, "zz_module:Plain")])
def test_the_name_of_a_class_of_the_program(install, source, value):
    install("zz-package", {"zz_plain": value}, {"zz_module": source})

    @register
    @dataclasses.dataclass(kw_only=True)
    class Mine(Algorithm):
        name = "zz_plain"

    with pytest.raises(InvalidArgument, match=rf"{PACKAGE}.*(has the name of|is already taken by).*Mine"):
        get("zz_plain")


def test_one_class_has_one_name(install):
    install("zz-package", {"zz_plain": "zz_module:Plain", "zz_two": "zz_module:Plain"}, {"zz_module": PLUGIN})
    get("zz_plain")
    with pytest.raises(InvalidArgument, match=r"entry point zz_two = zz_module:Plain\): Plain calls itself 'zz_plain'"):
        get("zz_two")


def test_the_decorator_refuses_a_name_of_bagua_whose_file_is_not_imported_yet(monkeypatch):
    monkeypatch.delitem(registry._classes, "bytegrad", raising=False)
    with pytest.raises(InvalidArgument, match="'bytegrad' is already taken by bagua itself"):

        @register
        @dataclasses.dataclass(kw_only=True)
        class Taken(Algorithm):
            name = "bytegrad"
