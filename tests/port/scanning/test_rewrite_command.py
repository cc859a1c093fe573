"""``torchq-compat rewrite`` as a command: what it prints, what it writes, and that it never loses a file."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from torchq_compat.cli import main
from torchq_compat.port.rewrites import REWRITES
from torchq_compat.port.source import files as source_files

BEFORE = "from torch.ao.quantization.quantize_fx import prepare_fx\n"
AFTER = "from torchq_compat.quantize_fx import prepare_fx\n"
Capture = pytest.CaptureFixture[str]


def rewrite(*args: object) -> int:
    return main(["rewrite", *map(str, args)])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(BEFORE)
    return path


def test_it_prints_a_diff_that_patch_takes(script: Path, capsys: Capture, tmp_path: Path) -> None:
    script.write_text("import torch\n" + BEFORE.rstrip("\n"))
    assert rewrite(script) == 0
    captured = capsys.readouterr()
    assert script.read_text() == "import torch\n" + BEFORE.rstrip("\n")
    assert (
        captured.err
        == "torchq-compat: 1 file to rewrite (--write does it), 0 places left for manual review\n"
    )
    assert "\x1b" not in captured.out
    copy = tmp_path / "copy.py"
    shutil.copy(script, copy)
    subprocess.run(["patch", "-s", str(copy)], input=captured.out, text=True, check=True, cwd=tmp_path)
    assert copy.read_text() == "import torch\n" + AFTER.rstrip("\n")


@pytest.mark.parametrize("indent", [1, None])
def test_the_diff_of_a_notebook_is_that_of_its_file(
    tmp_path: Path, capsys: Capture, indent: int | None
) -> None:
    cell = {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip install torch\n", BEFORE]}
    notebook = tmp_path / "notebook.ipynb"
    notebook.write_text(json.dumps({"cells": [cell], "metadata": {}}, indent=indent) + "\n")
    copy = tmp_path / "copy"
    shutil.copy(notebook, copy)
    assert rewrite(notebook) == 0
    diff = capsys.readouterr().out
    assert "<torchq-compat" not in diff
    subprocess.run(["patch", "-s", str(copy)], input=diff, text=True, check=True, cwd=tmp_path)
    assert rewrite(notebook, "--write") == 0
    assert copy.read_bytes() == notebook.read_bytes()
    assert json.dumps(AFTER)[1:-1] in copy.read_text()


def test_write_and_again(script: Path, capsys: Capture) -> None:
    assert rewrite(script, "--write") == 0
    assert script.read_text() == AFTER
    assert capsys.readouterr() == ("", "torchq-compat: 1 file rewritten, 0 places left for manual review\n")
    status = script.stat()
    assert rewrite(script, "--write") == 0
    assert (script.stat().st_ino, script.stat().st_mtime_ns) == (status.st_ino, status.st_mtime_ns)


@pytest.mark.parametrize(
    ("prefix", "newline", "encoding"),
    [
        ("", "\n", "utf-8"),
        ("", "\r\n", "utf-8"),
        ("", "\r\n", "utf-8-sig"),
        ("# -*- coding: latin-1 -*-\n# é\n", "\n", "latin-1"),
        ("# é\n\f\ntext = '''\\\n\t'''  \n", "\r\n", "utf-8"),
    ],
)
def test_bytes_that_are_not_rewritten_stay(script: Path, prefix: str, newline: str, encoding: str) -> None:
    code = prefix + "import torch\n{}d = {{'': q}}\nprepare_fx(m, {}, x)"
    before = code.format(BEFORE, "d")
    after = code.format(AFTER + "from torch.ao.quantization import QConfigMapping\n", "d")
    after = after.replace("{'': q}", "QConfigMapping().set_global(q)")
    script.write_bytes(before.replace("\n", newline).encode(encoding))
    assert rewrite(script, "--write") == 0
    assert script.read_bytes() == after.replace("\n", newline).encode(encoding)


def test_mode_and_links_stay(script: Path, tmp_path: Path) -> None:
    script.chmod(0o754)
    link = tmp_path / "link.py"
    link.symlink_to(script)
    assert rewrite(link, "--write") == 0
    assert link.is_symlink()
    assert script.read_text() == AFTER
    assert stat.S_IMODE(script.stat().st_mode) == 0o754


def test_what_lies_outside_or_has_other_names_is_left(script: Path, tmp_path: Path, capsys: Capture) -> None:
    given = tmp_path / "given"
    (given / "inner").mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    for path in (outside / "away.py", given / "own.py", given / "first.py", given / "kept.py"):
        path.write_text(BEFORE)
    (given / "file.py").symlink_to(script)
    (given / "folder").symlink_to(outside)
    (given / "inside.py").symlink_to(given / "own.py")
    os.link(given / "first.py", tmp_path / "second.py")
    (given / "kept.py").chmod(0o444)
    (given / "own.py").chmod(0o600)
    assert rewrite(given, "--write") == 2
    told = capsys.readouterr().err
    for name, reason in (
        ("file.py", "is a link that leads out"),
        ("folder/away.py", "is a link that leads out"),
        ("first.py", "has 2 names by hard links"),
        ("kept.py", "is read-only"),
    ):
        assert f"{given / name} {reason}" in told
    for path in (script, outside / "away.py", given / "first.py", tmp_path / "second.py", given / "kept.py"):
        assert path.read_text() == BEFORE
    assert (given / "own.py").read_text() == AFTER
    assert (given / "inside.py").is_symlink()
    assert stat.S_IMODE((given / "own.py").stat().st_mode) == 0o600
    # A link that is given is what the user means, and so is a folder by a link.
    linked = tmp_path / "linked"
    linked.symlink_to(outside)
    assert rewrite(linked, "--write") == 0
    assert (outside / "away.py").read_text() == AFTER
    assert sorted(path.name for path in given.iterdir()) == sorted(
        ["file.py", "folder", "inside.py", "own.py", "first.py", "kept.py", "inner"]
    )


def test_only_and_skip(script: Path, capsys: Capture) -> None:
    script.write_text(BEFORE + "prepare_fx(m, qconfig_dict=q, example_inputs=x)\n")
    rewrite(script, "--only", "renamed-keywords")
    only = capsys.readouterr().out
    rewrite(script, "--skip", "renamed-keywords")
    skip = capsys.readouterr().out
    assert "+prepare_fx(m, qconfig_mapping=q" in only
    assert AFTER not in only
    assert f"+{AFTER}" in skip
    assert "qconfig_mapping" not in skip


def test_a_rewrite_that_does_not_exist(script: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as error:
        rewrite(script, "--only", "everything")
    assert error.value.code == 2
    assert "renamed-keywords" in capsys.readouterr().err


def test_list(capsys: Capture) -> None:
    assert rewrite("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[r.construct.name, r.code] for r in REWRITES]


def test_no_path(capsys: Capture) -> None:
    assert rewrite() == 2
    assert capsys.readouterr().err.startswith("torchq-compat: error: there is no PATH to rewrite. Hint: ")


def test_what_is_left_is_listed_with_its_code(script: Path, capsys: Capture) -> None:
    script.write_text(BEFORE + "prepare_fx(m, c)\n")
    assert rewrite(script) == 1
    finding, last = capsys.readouterr().err.splitlines()[-2:]
    assert re.fullmatch(rf"{script}:2:1: TQ201 prepare_fx -> .* \[by hand: .*\]", finding)
    assert last == "  torchq-compat explain TQ201"


def test_a_bad_file_does_not_keep_the_others(script: Path, tmp_path: Path, capsys: Capture) -> None:
    bad = {"syntax.py": BEFORE.encode() + b"def (:\n", "binary.py": b"\0prepare_fx", "nb.ipynb": b"{"}
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    assert rewrite(tmp_path, "--write") == 2
    assert script.read_text() == AFTER
    assert capsys.readouterr().err.count("torchq-compat: problem: ") == 3
    for name, content in bad.items():
        assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_file(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, function: str, error: BaseException
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(source_files.os, function, fail)
    if isinstance(error, OSError):
        assert rewrite(script, "--write") == 2
        assert "cannot be written: No space left on device" in capsys.readouterr().err
    else:
        assert rewrite(script, "--write") == 130
        assert capsys.readouterr().err == "torchq-compat: interrupted\n"
    assert script.read_text() == BEFORE
    assert [path.name for path in script.parent.iterdir()] == ["script.py"]


def test_a_file_that_changed_meanwhile_is_not_overwritten(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    access = os.access

    def edit_first(path: Path, mode: int) -> bool:
        script.write_text("# an editor saved this\n")
        return access(path, mode)

    monkeypatch.setattr(source_files.os, "access", edit_first)
    assert rewrite(script, "--write") == 2
    assert script.read_text() == "# an editor saved this\n"
    assert "has changed since it was read" in capsys.readouterr().err


def test_a_read_only_file_is_not_overwritten(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    # The user who runs the tests may be allowed to write everything.
    monkeypatch.setattr(source_files.os, "access", lambda path, mode: False)
    assert rewrite(script, "--write") == 2
    assert script.read_text() == BEFORE
    assert "is read-only" in capsys.readouterr().err


def test_a_notebook_laid_out_by_hand_is_left(tmp_path: Path, capsys: Capture) -> None:
    notebook = tmp_path / "hand.ipynb"
    content = '{"cells":   [{"cell_type": "code", "source": "' + BEFORE.strip() + '"}], "metadata": {}}'
    notebook.write_text(content)
    assert rewrite(notebook, "--write") == 2
    assert notebook.read_text() == content
    assert "would not keep" in capsys.readouterr().err
