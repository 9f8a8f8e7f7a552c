"""bagua._C as built: one module for every torch, so it must not need torch's libraries or Python's."""

import re
import subprocess

import pytest

from bagua import _C


def test_it_links_against_the_system_only():
    """One wheel per torch version was the most frequent complaint about the original project."""
    try:
        dynamic = subprocess.run(["readelf", "-d", _C.__file__], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("readelf is not installed (binutils)")
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\]", dynamic))
    allowed = r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux.*\.so\.\d+"
    assert needed and all(re.fullmatch(allowed, name) for name in needed), needed
