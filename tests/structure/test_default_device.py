"""bagua creates tensors on explicit devices, not on torch's default device (torch.set_default_device)."""

import ast
from pathlib import Path

import torch
from torch.utils import _device

BAGUA = Path(__file__).resolve().parents[2] / "bagua"
# Separate programs, and functions for the user's computation, where torch's default is the user's choice.
OTHERS = ("federated", "replay", "testing")
FACTORIES = {f.__name__ for f in _device._device_constructors() if getattr(torch, f.__name__, None) is f}


def test_factories_name_a_device():
    found = []
    for path in BAGUA.rglob("*.py"):
        if path.relative_to(BAGUA).parts[0] in OTHERS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            is_factory = ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES
            if is_factory and "device" not in {keyword.arg for keyword in node.keywords}:
                found.append(f"{path.relative_to(BAGUA)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, 'give device="cpu", or where it is to be:\n' + "\n".join(found)
    assert {"tensor", "empty", "zeros", "as_tensor", "randn"} <= FACTORIES
