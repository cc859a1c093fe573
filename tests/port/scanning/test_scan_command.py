"""``torchq-compat scan`` as a command: what it prints, its exit codes, and invalid input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import torchq_compat
from torchq_compat.cli import main
from torchq_compat.port import scanner
from torchq_compat.port.constructs import CONSTRUCTS
from torchq_compat.port.scanner import scan_paths
from torchq_compat.port.source import files as source_files

ROOT = Path(torchq_compat.__file__).parents[1]
FX = "from torch.ao.quantization.quantize_fx import prepare_fx\n"
Capture = pytest.CaptureFixture[str]


def scan(*args: object) -> int:
    return main(["scan", *map(str, args)])


def test_nothing_found(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.py").write_text("import torch\n")
    assert scan(tmp_path) == 0
    assert capsys.readouterr().out == "1 file, 0 findings: 0 for rewrite, 0 for manual review\n"


def test_one_finding_a_line(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "a.py"
    path.write_text(FX + "é = 1; prepare_fx(m, {'object_type': pairs[0]}, x)\n")
    assert scan(path) == 1
    first, second, *end = capsys.readouterr().out.splitlines()
    becomes = "the function of the same name in torchq_compat.quantize_fx"
    assert first == f"{path}:1:47: TQ101 prepare_fx -> {becomes}"
    assert second.startswith(f"{path}:2:22: TQ105 a dict for qconfig_mapping -> QConfigMapping [by hand: ")
    assert second.endswith("pairs[0] is not spelled out]")
    assert end[:2] == [
        "1 file, 2 findings: 1 for rewrite, 1 for manual review",
        "  torchq-compat explain TQ101 TQ105",
    ]


def test_a_place_in_a_notebook(tmp_path: Path, capsys: Capture) -> None:
    cells = [{"cell_type": "code", "source": source} for source in ("x = 1", f"y = 2\n{FX}")]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4}))
    assert scan(path) == 1
    assert capsys.readouterr().out.startswith(f"{path}:cell 2:2:47: TQ101 prepare_fx -> ")


@pytest.mark.parametrize("flag", [("--json",), ("--format", "json")])
def test_json(tmp_path: Path, capsys: Capture, flag: tuple[str, ...]) -> None:
    path = tmp_path / "a.py"
    path.write_text("import torch\n\n" + FX)
    assert scan(path, *flag) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding == {
        "file": str(path),
        "line": 3,
        "cell": None,
        "code": "TQ101",
        "construct": "quantize_fx functions",
        "found": "prepare_fx",
        "becomes": "the function of the same name in torchq_compat.quantize_fx",
        "by": "rewrite",
        "remark": "",
        "guide": "migration/guide/findings.md#tq101",
    }


def test_the_guide_has_every_anchor() -> None:
    for construct in CONSTRUCTS.values():
        page, _, anchor = construct.link.partition("#")
        assert f'<a id="{anchor}"></a>' in (ROOT / page).read_text()


def test_paths_that_do_not_exist(tmp_path: Path, capsys: Capture) -> None:
    assert scan(tmp_path / "missing.py") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"torchq-compat: error: there is no '.*missing\.py'\. Hint: ", line)


def test_no_path_is_an_error_of_usage() -> None:
    with pytest.raises(SystemExit) as error:
        scan()
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("binary.py", b"\x00\x01\x02", "is a binary file"),
        ("syntax.py", FX.encode() + b"def (:\n", "line 2: invalid syntax"),
        ("encoding.py", b"# \xff\xfe\n", "cannot be decoded"),
        ("cookie.py", b"# coding: nonsense\n", "unknown encoding"),
        ("deep.py", FX.encode() + b"x = " + b"(" * 5000 + b")" * 5000, ""),
        ("not_json.ipynb", b"{", "is not a notebook"),
        ("no_cells.ipynb", b"[]", "it has no cells"),
        (
            "julia.ipynb",
            b'{"cells": [], "metadata": {"kernelspec": {"language": "julia"}}}',
            "is a notebook of julia",
        ),
    ],
)
def test_a_bad_file_is_reported_and_the_rest_goes_on(
    tmp_path: Path, capsys: Capture, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.py").write_text(FX)
    assert scan(tmp_path, "--json") == 2
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert [finding["file"] for finding in data["findings"]] == [str(tmp_path / "good.py")]
    assert [problem["file"] for problem in data["problems"]] == [str(tmp_path / name)]
    assert reason in data["problems"][0]["reason"]
    assert captured.err.startswith(f"torchq-compat: problem: {tmp_path / name}: ")
    assert ". Hint: " in captured.err
    assert captured.err.endswith(" [TQ984]\n")
    assert data["problems"][0]["code"] == "TQ984"
    assert captured.err.count("\n") == 1
    assert (tmp_path / name).read_bytes() == content


def test_what_cannot_concern_it_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.py").write_text("def (: # quantity\n")
    (tmp_path / "good.py").write_text(FX)
    parsed = []
    original = source_files.parse
    monkeypatch.setattr(source_files, "parse", lambda code: parsed.append(code) or original(code))
    result = scan_paths([tmp_path])
    assert (len(parsed), result.files, len(result.findings), result.problems) == (1, 4, 1, [])
    words = {word for word in scanner._words() if not scanner.may_concern(f"x = {word}(1)".encode())}
    assert words == set()


def test_one_file_that_takes_too_long_is_a_finding(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "long.py").write_text(FX + "x = [f(1, 2), g(3)]\n" * 1000)
    (tmp_path / "good.py").write_text(FX)
    assert scan(tmp_path, "--json", "--timeout", "0.2", "--jobs", "1") == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    codes = {Path(each["file"]).name: each["code"] for each in findings}
    assert codes == {"good.py": "TQ101", "long.py": "TQ214"}
    assert "took longer than 0.2 s" in findings[-1]["remark"]
    assert main(["explain", "TQ214"]) == 0


def test_several_processes_find_what_one_finds(tmp_path: Path, capsys: Capture) -> None:
    for number in range(9):
        (tmp_path / f"m{number}.py").write_text(FX)
    (tmp_path / "users.py").write_text("from m1 import prepare_fx as p\np(model, {'': q}, x)\n")
    results = []
    for jobs in (1, 2):
        assert scan(tmp_path, "--json", "--jobs", jobs) == 1
        results.append(capsys.readouterr().out)
    assert results[0] == results[1]


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The user who runs the tests may be allowed to read everything.
    def refuse(self: Path) -> bytes:
        if self.name == "secret.py":
            raise PermissionError(13, "Permission denied")
        return original(self)

    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", refuse)
    (tmp_path / "secret.py").write_text(FX)
    (tmp_path / "good.py").write_text(FX)
    result = scan_paths([tmp_path])
    (problem,) = result.problems
    assert str(problem).startswith(f"{tmp_path / 'secret.py'}: cannot be read: Permission denied. Hint: look")
    assert len(result.findings) == 1


def test_links(tmp_path: Path) -> None:
    """A folder that links to itself, links that point at each other, and an ordinary link."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "a.py").write_text(FX)
    (package / "loop").symlink_to(package, target_is_directory=True)
    (tmp_path / "x.py").symlink_to(tmp_path / "y.py")
    (tmp_path / "y.py").symlink_to(tmp_path / "x.py")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    (tmp_path / "other.py").symlink_to(package / "a.py")
    result = scan_paths([tmp_path])
    assert {problem.path.name for problem in result.problems} == {"loop", "x.py", "y.py", "itself"}
    assert {finding.path.name for finding in result.findings} == {"a.py", "other.py"}


def test_folders_that_hold_no_source_of_the_user(tmp_path: Path) -> None:
    for name in (".git", "__pycache__", "node_modules", "environment"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(FX)
    (tmp_path / "environment" / "pyvenv.cfg").touch()
    assert scan_paths([tmp_path]).files == 0
    assert scan_paths([tmp_path / "environment" / "a.py"]).files == 1


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(FX)
    assert len(scan_paths([path, tmp_path, path]).findings) == 1


def test_cyclic_imports(tmp_path: Path) -> None:
    """``quantize_fx`` is imported in a circle and has no meaning; ``prepare_fx`` resolves to its import."""
    (tmp_path / "a.py").write_text("from b import prepare_fx, quantize_fx\nfrom b import *\n")
    (tmp_path / "b.py").write_text("from a import prepare_fx, quantize_fx\nfrom a import *\nimport b\n" + FX)
    found = [(f.path.name, f.place.line, f.site.what) for f in scan_paths([tmp_path]).findings]
    re_exported = "prepare_fx, re-exported by another file"
    assert found == [("a.py", 1, re_exported), ("b.py", 1, re_exported), ("b.py", 4, "prepare_fx")]


def test_a_name_of_the_trees_own_is_followed(tmp_path: Path) -> None:
    """Neither file that uses the name spells a legacy name."""
    (tmp_path / "home.py").write_text(FX.replace("prepare_fx", "prepare_fx as ready"))
    (tmp_path / "middle.py").write_text("from home import ready as set_go\n")
    (tmp_path / "user.py").write_text("from middle import set_go\nset_go(m, {'': q}, x)\n")
    codes = {(finding.path.name, finding.construct.code) for finding in scan_paths([tmp_path]).findings}
    assert codes == {("home.py", "TQ101"), ("middle.py", "TQ101"), ("user.py", "TQ101"), ("user.py", "TQ105")}


def test_names_of_the_package_itself_are_followed(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text(FX.replace("prepare_fx", "prepare_fx as ready"))
    for name, names in (("named", "ready"), ("star", "*")):
        (tmp_path / f"{name}.py").write_text(f"from . import {names}\nready(m, {{'': q}}, x)\n")
    found = {(finding.path.stem, finding.construct.code) for finding in scan_paths([tmp_path]).findings}
    assert found == {("__init__", "TQ101"), ("named", "TQ101"), ("named", "TQ105"), ("star", "TQ105")}


@pytest.mark.slow
def test_the_time_of_a_scan_grows_with_its_files(tmp_path: Path) -> None:
    """Files of realistic size; one in ten uses FX, through a name of another file."""
    filler = "".join(f"def f{i}(x):\n    return [x + {i} for x in range(x)]\n\n" for i in range(50))
    times = []
    for count in (20, 80):
        folder = tmp_path / str(count)
        folder.mkdir()
        for number in range(count):
            (folder / f"m{number}.py").write_text(filler + (FX if number % 10 == 0 else ""))
        takes = []
        for _ in range(3):
            # Processor time, because other tests may run at the same time.
            start = time.process_time()
            result = scan_paths([folder])
            takes.append(time.process_time() - start)
            assert (result.files, len(result.findings)) == (count, count // 10)
        times.append(min(takes))
    # Four times the files; comparing each file with each would take sixteen times as long.
    assert times[1] < 8 * times[0], times


def test_what_takes_long_to_import_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(FX)
    code = (
        "import sys; from torchq_compat.cli import main\n"
        f"main(['scan', {str(tmp_path)!r}]); main(['rewrite', {str(tmp_path)!r}])\n"
        "print(sys.modules.keys() & {'torch', 'libcst.matchers'})"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert result.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("command", ["scan", "rewrite", "run"])
def test_help_has_examples(capsys: Capture, command: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    assert f"torchq-compat {command} " in capsys.readouterr().out.partition("examples:")[2]
