"""A file that grows past 400 lines wants to be two."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400


def test_no_source_file_is_longer_than_400_lines():
    sources = [
        path
        for folder in ("bagua", "csrc", "rust_core/src", "examples", "benchmarks", "scripts")
        for suffix in ("*.py", "*.cc", "*.h", "*.cu", "*.rs", "*.sh")
        for path in (ROOT / folder).rglob(suffix)
    ]
    assert len(sources) > 50
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in sources}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}
