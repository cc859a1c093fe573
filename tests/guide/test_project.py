"""What contributors and packagers rely on: one address, commands of the hooks, workflows like pyproject."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import torchq_compat
from migration.generate.pages import guide_pages
from torchq_compat.cli import main
from torchq_compat.port import process as project
from torchq_compat.support.versions import TESTED

ROOT = Path(torchq_compat.__file__).parents[1]
PACKAGE = ROOT / "torchq_compat"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESS: str = PYPROJECT["urls"]["Homepage"]


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():  # an unpacked sdist holds nothing else
        made = {"build", "dist", "__pycache__", "torchq_compat.egg-info", "PKG-INFO"}
        return [path for path in ROOT.rglob("*") if path.is_file() and not made & {*path.parts}]
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_the_address_stands_in_one_place() -> None:
    assert list(PYPROJECT["urls"]) == ["Homepage"]
    holders = [p.name for p in tracked_files() if p.exists() and ADDRESS.encode() in p.read_bytes()]
    assert holders == ["pyproject.toml"]


def test_no_other_address_of_this_project() -> None:
    ours = re.compile(r"https?://[^\s\"'<>)`]*torchq[-_]compat[^\s\"'<>)`]*")
    found = {
        (path.name, address)
        for path in tracked_files()
        if path.exists() and path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".j2", ".txt", ".json"}
        for address in ours.findall(path.read_text())
    }
    assert found == {("pyproject.toml", ADDRESS)}


def test_the_address_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Metadata:
        def get_all(self, field: str) -> list[str]:
            assert field == "Project-URL"
            return ["Changelog, https://a.invalid/c", "Homepage, https://a.invalid"]

    monkeypatch.setattr(project, "metadata", lambda name: Metadata())
    assert project.project_address() == "https://a.invalid"


def test_help_of_a_source_tree_needs_no_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise project.PackageNotFoundError(name)

    monkeypatch.setattr(project, "metadata", missing)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "compare" in capsys.readouterr().out


def test_the_hooks_are_commands_with_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert {hook["id"] for hook in hooks} == {"torchq-compat-scan", "torchq-compat-rewrite"}
    for hook in hooks:
        program, command, *options = hook["entry"].split()
        assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
        with pytest.raises(SystemExit):
            main([command, "--help"])
        help_text = capsys.readouterr().out
        assert all(option in help_text for option in options)


def test_the_workflows_try_every_python_that_is_promised() -> None:
    folder = ROOT / ".github" / "workflows"
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
    assert set(workflows) == {"canary", "checks", "wheels"}
    prefix = "Programming Language :: Python :: 3."
    promised = [name.removeprefix(prefix) for name in PYPROJECT["classifiers"] if name.startswith(prefix)]
    matrix = workflows["checks"]["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == [f"3.{minor}" for minor in promised]
    assert PYPROJECT["requires-python"] == f">={matrix['python'][0]}"
    pins = (ROOT / "constraints.txt").read_text()
    assert f"torch=={matrix['torch'][0]}." in pins
    assert {torch for torch, _ in TESTED} <= set(matrix["torch"])
    last = int(matrix["torch"][-1].split(".")[1])
    assert f"torch>={matrix['torch'][0]},<2.{last + 1}" in PYPROJECT["dependencies"]


def test_contributing_names_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`((?:torchq_compat|migration|tests)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name


def prose() -> dict[str, str]:
    """Return the pages that people read, by name."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    pages += [*(ROOT / "migration").glob("*.md"), *(ROOT / "migration" / "guide").glob("*.md")]
    return {path.relative_to(ROOT).as_posix(): " ".join(path.read_text().split()) for path in pages}


def test_nothing_is_installed_from_an_index_that_has_it_not() -> None:
    assert [name for name, text in prose().items() if re.search(r"install '?torchq[-_]compat", text)] == []
    hints = [p.name for p in PACKAGE.rglob("*.py") if "pip install torchq" in p.read_text()]
    assert hints == [], "errors.install_extra has the words"


def test_versions_are_those_of_pyproject() -> None:
    readme = prose()["README.md"]
    first, last = (minor.split(".")[1] for minor in (TESTED[0][0], TESTED[-1][0]))
    assert f"torch 2.{first} to 2.{last} with torchao {TESTED[0][1]}" in readme
    pins = dict(re.match(r"([a-z]+)(.*)", pin).groups() for pin in PYPROJECT["dependencies"])  # type: ignore[union-attr]
    assert pins["torch"] == f">=2.{first},<2.{int(last) + 1}"
    assert pins["torchao"].startswith(f">={TESTED[0][1]},")
    pythons = re.findall(r"Python :: 3\.(\d+)", " ".join(PYPROJECT["classifiers"]))
    assert f"Python 3.{pythons[0]} to 3.{pythons[-1]}" in readme
    assert PYPROJECT["requires-python"] == f">=3.{pythons[0]}"


def test_no_page_claims_what_another_denies() -> None:
    """Claims that were true once: PT2E's Quantizers may decompose an LSTM, and all CPUs run one graph."""
    stale = re.compile(
        r"PT2E (silently )?leaves (an |its )?LSTMs?( silently)? float(?! unless)"
        r"|on CPUs other than x86|q-dq graph on (ARM|other CPUs)",
        re.IGNORECASE,
    )
    assert {name: match[0] for name, text in prose().items() if (match := stale.search(text))} == {}


def test_readme_and_changelog_are_short() -> None:
    words = {name: len(text.split()) for name, text in prose().items()}
    assert words["README.md"] < 700
    assert words["CHANGELOG.md"] < 1500


def test_the_guide_is_short() -> None:
    pages = {page.name: page.read_text() for page in guide_pages(ROOT)}
    assert sum(len(text.split()) for text in pages.values()) < 11_700
    # Two screens: 110 lines of 120 columns.
    lines = {name: sum(1 + len(line) // 120 for line in text.splitlines()) for name, text in pages.items()}
    assert {name: count for name, count in lines.items() if count > 110} == {}
