"""The commands in the workflows, the nox sessions and the hooks exist and have the options they use."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml

import torchq_compat

ROOT = Path(torchq_compat.__file__).parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {name.lower(): packages for name, packages in PYPROJECT["project"]["optional-dependencies"].items()}
#: Tools, by the extra or the workflow line that installs them; shell builtins need none.
TOOLS = {"ruff": "test", "mypy": "test", "pytest": "test"}
BROUGHT = {"build", "pyright", "twine", "wheel"}
SHELL = {"cd", "echo", "grep", "sudo", "source"}
MARKERS = {line.partition(":")[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}


def workflow_lines() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            for step in job["steps"]:
                for line in step.get("run", "").splitlines():
                    yield path.stem, line


def session_lines() -> Iterator[tuple[str, str]]:
    """Yield the words of each ``session.run`` and ``session.install``, and the extras of each ``install``."""
    for function in ast.parse((ROOT / "noxfile.py").read_text()).body:
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or function.name == "install":  # type: ignore[attr-defined]
                continue
            words = [str(arg.value) for arg in call.args if isinstance(arg, ast.Constant)]
            name = ast.unparse(call.func)
            if name == "session.run":
                posargs = [ast.unparse(arg) for arg in call.args if isinstance(arg, ast.Starred)]
                default = re.findall(r"'([^']+)'", " ".join(posargs))
                yield function.name, shlex.join([*words, *default])  # type: ignore[attr-defined]
            elif name == "session.install":
                yield function.name, shlex.join(["pip", "install", *words])  # type: ignore[attr-defined]
            elif name == "install":
                yield function.name, f"pip install -e .[{','.join(words)}]"  # type: ignore[attr-defined]


def hook_lines() -> Iterator[tuple[str, str]]:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    for repo in config["repos"]:
        if repo["repo"] == "local":
            for hook in repo["hooks"]:
                yield hook["id"], hook["entry"]


LINES = {
    f"{where}: {line}": line
    for lines in (workflow_lines(), session_lines(), hook_lines())
    for where, line in lines
}


def problems(line: str) -> list[str]:
    """Return what is wrong with a command line of ours; nothing for shell commands and pip's packages."""
    line = re.sub(r"\$\{\{.*?\}\}", "0", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split = True
    commands = [list(words) for is_end, words in groupby(lexer, _ends_a_command) if not is_end]
    return [problem for words in commands for problem in _problems_of(words)]


def _ends_a_command(word: str) -> bool:
    return word in (";", "&&", "|", "||")


def _problems_of(words: list[str]) -> list[str]:
    program, *rest = words
    name = program.rpartition("/")[2]
    if name in SHELL:
        return []
    if name == "pip":
        extras = [e for word in rest for e in re.findall(r"\.\[([\w,]*)\]", word)]
        unknown = {e for group in extras for e in group.split(",") if e} - EXTRAS.keys()
        files = [rest[i + 1] for i, word in enumerate(rest) if word == "-c" and rest[i + 1] != "pair.txt"]
        return [*unknown, *(f for f in files if not (ROOT / f).is_file())]
    if name == "python":
        return _problems_of_python(rest)
    if name == "pytest":
        marked = [rest[i + 1] for i, word in enumerate(rest) if word == "-m"]
        return [marker for marker in marked if marker not in MARKERS]
    if program.startswith(".ci/"):
        return [] if (ROOT / program).is_file() else [program]
    if name in PYPROJECT["project"]["scripts"]:
        return []
    known = name in BROUGHT or (name in TOOLS and name in EXTRAS[TOOLS[name]])
    return [] if known else [program]


def _problems_of_python(rest: list[str]) -> list[str]:
    match rest:
        case ["-m", module, *_]:
            known = module in BROUGHT | {"venv"} or importlib.util.find_spec(module) is not None
            return [] if known else [module]
        case ["-c", code, *_]:
            compile(code, "run", "exec")
            return []
        case [file, *_]:
            return [] if (ROOT / file).is_file() else [file]
    return ["python"]


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_the_command_is_there(line: str) -> None:
    assert problems(line) == []


def test_the_lines_are_found() -> None:
    assert len(LINES) > 30
    assert {"pytest -n 2", "ruff check ."} <= set(LINES.values())


@pytest.mark.parametrize(
    "line",
    [
        "pytest -m sluggish",
        "python -m torchq_compat.port.guides",
        "python .ci/no_such_file.py",
        'pip install -c constraints.txt -e ".[tests]"',
        "pip install -c constraint.txt -e .",
        "flake8 .",
        ".ci/runs",
    ],
)
def test_a_wrong_command_is_seen(line: str) -> None:
    assert problems(line)
