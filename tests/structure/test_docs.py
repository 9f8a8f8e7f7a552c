"""Every path, heading, command and public name in a .md file exists, and docs/index.md links to every page."""

import contextlib
import io
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IGNORED_FOLDERS = {".git", ".venv", "build", "dist", "target", "node_modules", ".pytest_cache"}
GENERATED = {"build", "dist", ".venv"}  # paths into these appear when something is built
READERS_FILES = {"train.py"}  # the reader's own script in examples of use
SUFFIXES = r"\.(py|h|cc|cu|rs|md|toml|txt|sh|in|yml|json|png|supp)"

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")


def documents():
    return sorted(
        path for path in ROOT.rglob("*.md") if not IGNORED_FOLDERS & set(path.relative_to(ROOT).parts)
    )  # fmt: skip


def spans_and_commands(text):
    """Returns inline code, and the command lines of shell blocks (without `$ ` prompts and comments)."""
    commands = []
    for language, body in FENCE.findall(text):
        if language in ("sh", "bash", "console", "shell"):
            body = body.replace("\\\n", " ")
            lines = (line.strip().removeprefix("$ ").split(" #")[0].strip() for line in body.splitlines())
            commands += [line for line in lines if line and not line.startswith("#")]
    return SPAN.findall(FENCE.sub("", text)), commands


def looks_like_a_path(token):
    if not re.fullmatch(r"[\w./<>*-]+", token) or token.startswith(("-", "/", "http")):
        return False
    return re.search(SUFFIXES + "$", token) is not None or (
        "/" in token and (ROOT / token.split("/")[0]).is_dir() and token.split("/")[0] != ""
    )


def path_exists(token, document):
    token = token.rstrip("/")
    if token in READERS_FILES or token.split("/")[0] in GENERATED:
        return True
    pattern = re.sub(r"<[^>]*>", "*", token)
    bases = (ROOT, document.parent)
    if "/" not in pattern:  # a bare file name, as in `bytegrad.py`: anywhere in the tree
        bases = (*bases, *(p for p in ROOT.iterdir() if p.is_dir() and p.name not in IGNORED_FOLDERS))
        return any(next(base.rglob(pattern) if base != ROOT else base.glob(pattern), None) for base in bases)
    return any(next(base.glob(pattern), None) is not None for base in bases)


@cache
def make_targets():
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def bagua_commands():
    from bagua.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([]) == 0
    return set(re.findall(r"^\s{2,}([a-z]+)\s", printed.getvalue(), re.MULTILINE))


def wrong_with(command):
    """Returns the part of a command line that does not exist, or None. Other programs than ours are not checked."""
    words = command.split()
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    words = words[1:] if words[:1] == ["sudo"] else words
    if not words:
        return None
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    plain = [word for word in arguments if not word.startswith("-")]
    if program == "make":
        missing = [word for word in plain if "=" not in word and word not in make_targets()]
        return f"no such make target: {missing}" if missing else None
    if program == "bagua":
        return None if not plain or plain[0] in bagua_commands() else f"no such command: bagua {plain[0]}"
    if program in ("python", "python3") and arguments[:2] == ["-m", "bagua.testing"]:
        return "bagua.testing is not a program"
    if program in ("python", "python3") and arguments[:1] == ["-m"] and arguments[1].startswith("benchmarks."):
        return None if (ROOT / f"{arguments[1].replace('.', '/')}.py").exists() else f"no such module: {arguments[1]}"
    if program in ("python", "python3", "torchrun", "bash"):
        scripts = [word for word in plain if re.search(r"\.(py|sh)$", word)]
        missing = [word for word in scripts if word not in READERS_FILES and not (ROOT / word).exists()]
        return f"no such file: {missing}" if missing else None
    return None


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_exist(document):
    text = document.read_text()
    spans, commands = spans_and_commands(text)
    tokens = [word for span in (*spans, *commands) for word in span.split()] + LINK.findall(text)
    missing = [token for token in tokens if looks_like_a_path(token) and not path_exists(token, document)]
    assert not missing, f"{document.name} names what does not exist: {missing}"


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(document):
    spans, commands = spans_and_commands(document.read_text())
    commands += [span for span in spans if span.split()[0] in ("make", "bagua", "python")]
    wrong = {command: problem for command in commands if (problem := wrong_with(command))}
    assert not wrong


def anchors(document):
    """Returns the anchors of a document: its headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_headings_exist(document):
    links = re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", FENCE.sub("", document.read_text()))
    missing = [
        f"{path}#{anchor}"
        for path, anchor in links
        if anchor not in anchors((document.parent / path).resolve() if path else document)
    ]
    assert not missing, f"{document.name} links to headings that do not exist: {missing}"


def test_the_index_has_every_page_once_and_the_readme_has_the_index():
    """The lists of docs/index.md are the site's navigation (docs/conf.py)."""
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): ", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    pages = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != "index.md")
    assert sorted(link for link in listed if link.endswith(".md") and not link.startswith("../")) == pages
    assert "docs/index.md" in LINK.findall((ROOT / "README.md").read_text())


# The page on bagua.torch_api is left out, because `bagua` means that there.
PAGES = [path for path in documents() if path.parent in (ROOT, ROOT / "docs") and path.name != "torch_api.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_public_name_exists(page):
    import bagua
    import bagua.testing

    names = re.findall(r"(?<![.\w/-])bagua\.([A-Za-z_]+(?:\.[A-Za-z_]+)*)(?=\()", page.read_text())
    for name in sorted(set(names)):
        target = bagua
        for part in name.split("."):
            assert hasattr(target, part), f"{page.name} names bagua.{name}, which does not exist"
            target = getattr(target, part)


def test_every_environment_variable_is_on_its_page():
    read = set(re.findall(r"\bBAGUA_[A-Z_]*[A-Z]\b", (ROOT / "bagua/config.py").read_text()))
    page = set(re.findall(r"^\| `(BAGUA_\w+)`", (ROOT / "docs/configuration.md").read_text(), re.MULTILINE))
    assert page == read


def test_the_version_is_that_of_pyproject():
    import bagua

    version = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert bagua.__version__ == version
    assert re.search(rf"^## \[({re.escape(version)}|Unreleased)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
