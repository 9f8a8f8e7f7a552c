"""The exception tree is the same in three languages."""

import builtins
import re
from pathlib import Path

from bagua import _C, errors

ROOT = Path(__file__).resolve().parents[2]


def python_classes():
    return {name for name, value in vars(errors).items() if isinstance(value, type)} - {"BaguaError"}


def enum_body(file, name):
    return re.search(rf"enum (?:class )?{name} \{{(.*?)\n\}}", (ROOT / file).read_text(), re.DOTALL)[1]


def cpp_kinds():
    """Returns the enumerators of ErrorKind, in their order."""
    return re.findall(r"^\s*k(\w+),", enum_body("csrc/common/error.h", "ErrorKind"), re.MULTILINE)


def rust_codes():
    body = enum_body("rust_core/src/error.rs", "ErrorCode")
    return {name: int(value) for name, value in re.findall(r"^\s*(\w+) = (\d+),", body, re.MULTILINE)}


def header_codes():
    body = enum_body("rust_core/include/bagua_rust.h", "BaguaRustCode")
    return {name: int(value) for name, value in re.findall(r"BAGUA_RUST_(\w+) = (\d+)", body)}


def test_python_classes_form_one_tree_with_the_builtin_ones():
    for name in python_classes():
        assert issubclass(getattr(errors, name), errors.BaguaError)
    builtin_base = {"InvalidArgument": "ValueError", "DeadlineExceeded": "TimeoutError"}
    for name, base in builtin_base.items():
        assert issubclass(getattr(errors, name), getattr(builtins, base))
    assert set(errors.__all__) == python_classes() | {"BaguaError"}


def test_cpp_kinds_are_the_python_classes():
    assert {kind if kind in python_classes() else f"{kind}Error" for kind in cpp_kinds()} == python_classes()


def test_the_bindings_translate_in_the_order_of_the_kinds():
    names = [kind if kind in python_classes() else f"{kind}Error" for kind in cpp_kinds()]
    assert list(_C.error_classes) == names


def test_rust_codes_are_those_of_the_header():
    def screaming(name):
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()

    assert {"OK": 0, **{screaming(name): code for name, code in rust_codes().items()}} == header_codes()


def test_rust_codes_say_whose_mistake_it_is():
    """Codes 1 to 99 become InvalidArgument, 100 and above InternalError."""
    codes = rust_codes()
    assert codes["Internal"] == 100
    assert all(1 <= code < 100 for name, code in codes.items() if name != "Internal")
