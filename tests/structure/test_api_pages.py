"""Every public name is on a page of the API reference (docs/api/), which autodoc makes from docstrings."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import bagua

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("", ".algorithms", ".amp", ".codecs", ".errors", ".federated", ".metrics", ".testing", ".torch_backend")


def documented():
    """Returns the objects that the pages document, by id: named ones, and all of named modules."""
    objects = set()
    for page in (ROOT / "docs/api").glob("*.rst"):
        if page.stem in ("integrations", "platforms"):  # of packages that need not be installed
            continue
        for kind, name in re.findall(r"^\.\. auto(\w+):: (\S+)", page.read_text(), re.MULTILINE):
            if kind == "module":
                module = importlib.import_module(name)
                objects |= {id(getattr(module, each)) for each in getattr(module, "__all__", vars(module))}
            else:
                module, _, attribute = name.rpartition(".")
                objects.add(id(getattr(importlib.import_module(module), attribute)))
    return objects


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(package):
    objects = documented()
    module = importlib.import_module(f"bagua{package}")
    for name in module.__all__:
        value = getattr(module, name)
        if not inspect.ismodule(value) and not isinstance(value, str):
            assert id(value) in objects, f"{module.__name__}.{name} is on no page of docs/api"


def test_every_algorithm_and_codec_is_documented():
    objects = documented()
    classes = [bagua.algorithms.get(name) for name in bagua.algorithms.available()]
    classes += [type(bagua.codecs.get(name)) for name in bagua.codecs.available()]
    assert len(classes) > 10
    assert not [cls.__name__ for cls in classes if cls.__module__.startswith("bagua.") and id(cls) not in objects]
