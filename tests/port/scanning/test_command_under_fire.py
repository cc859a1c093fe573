"""Broken files, broken notebooks, full output: the command reports them and goes on with the rest."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from torchq_compat.cli import main
from torchq_compat.port.scanner import scan_paths
from torchq_compat.port.source.parsed import ParsedSource, ScopesWithoutUses

GOOD = (
    "from torch.ao.quantization.quantize_fx import prepare_fx\nprepared = prepare_fx(model, mapping, (x,))\n"
)
CELL = {"cell_type": "code", "source": GOOD}


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    code = [sys.executable, "-m", "torchq_compat", *arguments]
    return subprocess.run(code, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **options)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"cells": [' + "[" * 100_000, "nested too deeply"),
        ("", "is not a notebook"),
        ("[]", "is not a notebook"),
        ('{"cells": {}}', "it has no cells"),
        ('{"cells": [5]}', "one of its cells is none"),
        ('{"cells": [null]}', "one of its cells is none"),
        (json.dumps({"cells": [{"cell_type": "code", "source": 5}]}), "one of its cells is none"),
        (json.dumps({"cells": [{"cell_type": "code", "source": [5]}]}), "one of its cells is none"),
        (json.dumps({"cells": [CELL], "metadata": {"kernelspec": {"language": 5}}}), "language"),
        (json.dumps({"cells": [CELL], "metadata": {"kernelspec": {"language": "julia"}}}), "julia"),
    ],
)
def test_a_notebook_that_is_none(
    tmp_path: Path, content: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.ipynb").write_text(content)
    (tmp_path / "b.py").write_text(GOOD)
    assert main(["scan", str(tmp_path), "--json"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert [problem in each["reason"] for each in data["problems"]] == [True]
    assert {Path(each["file"]).name for each in data["findings"]} == {"b.py"}


@pytest.mark.parametrize("metadata", [None, 5, [], {"kernelspec": 5}, {"kernelspec": None}, {}])
def test_metadata_that_say_nothing_are_no_reason_to_leave_a_notebook_out(
    tmp_path: Path, metadata: Any
) -> None:
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [CELL], "metadata": metadata}))
    assert main(["scan", str(tmp_path)]) == 1


#: Name -> content, where it is no special file, and a word of the problem that is told.
NO_PYTHON: dict[str, tuple[bytes | None, str]] = {
    "pipe.py": (None, "is a device, a pipe"),
    "device.py": (None, "is a device, a pipe"),
    "huge.py": (None, "is larger than"),
    "binary.py": (b"\xff\xfe\x00", "binary"),
    "latin.py": (b"x = '\xff'\n", "decoded"),
    "coding.py": (b"# coding: no-such-coding\n", "decoded"),
    "parentheses.py": (b"prepare_fx = " + b"(" * 5000 + b")" * 5000, ""),
    "signs.py": (b"prepare_fx = " + b"-" * 50_000 + b"1", ""),
    "sums.py": (b"prepare_fx = " + b"1+" * 50_000 + b"1", ""),
    "attributes.py": (b"prepare_fx = a" + b".a" * 20_000, ""),
    "calls.py": (b"prepare_fx" + b"()" * 20_000, ""),
}


def test_files_that_are_no_python(tmp_path: Path) -> None:
    """In a process of its own: a parser that overflows the stack would end this one."""
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "device.py").symlink_to("/dev/zero")
    with (tmp_path / "huge.py").open("wb") as file:
        file.truncate(1 << 40)
    for name, (content, _) in NO_PYTHON.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    (tmp_path / "good.py").write_text(GOOD)
    done = command("scan", str(tmp_path), "--json", stdout=subprocess.PIPE)
    data = json.loads(done.stdout)
    assert done.returncode == 2
    told = {Path(each["file"]).name: each["reason"] for each in data["problems"]}
    assert len(told) == len(data["problems"])
    assert {name: NO_PYTHON[name][1] in reason for name, reason in told.items()} == dict.fromkeys(
        NO_PYTHON, True
    )
    assert {Path(each["file"]).name for each in data["findings"]} == {"good.py"}


@pytest.mark.parametrize("arguments", [("scan",), ("scan", "--json"), ("rewrite",)])
def test_standard_output_that_is_full(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "b.py").write_text(GOOD)
    with Path("/dev/full").open("w") as full:
        done = command(*arguments, str(tmp_path), stdout=full)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_standard_output_that_is_closed(tmp_path: Path) -> None:
    script = tmp_path / "b.py"
    script.write_text(GOOD)
    shell = f"{sys.executable} -m torchq_compat rewrite --write {script} >&-"
    done = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "standard output is closed" in done.stderr
    assert script.read_text() == GOOD


def test_a_reader_that_has_enough(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text(GOOD * 200)  # The findings fill the pipe.
    shell = (
        f"{{ {sys.executable} -m torchq_compat scan --json {tmp_path}; echo $? >&2; }} | head -c 5 >/dev/null"
    )
    done = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.stderr.split() == ["141"]


SLOW_WRITE = """
import os, sys, time
real = os.fsync
def slow(descriptor):
    print("writing", flush=True)
    time.sleep(30)
    real(descriptor)
os.fsync = slow
from torchq_compat.cli import main
sys.exit(main(["rewrite", "--write", sys.argv[1]]))
"""


def test_a_signal_in_a_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    script = tmp_path / "b.py"
    script.write_text(GOOD)
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITE, str(script)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    process.stdout.close()
    assert script.read_text() == GOOD
    assert os.listdir(tmp_path) == ["b.py"]


def test_a_disk_that_is_full_while_files_are_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = [tmp_path / "a.py", tmp_path / "b.py"]
    for script in scripts:
        script.write_text(GOOD)
        script.chmod(0o640)
    real, calls = os.fsync, []

    def full_at_first(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full_at_first)
    assert main(["rewrite", "--write", str(tmp_path)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert scripts[0].read_text() == GOOD
    assert "torchq_compat" in scripts[1].read_text()
    assert stat.S_IMODE(scripts[1].stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["a.py", "b.py"]


FIVE_LINES = """\
import torch
from torch.ao.quantization.quantize_fx import prepare_fx, convert_fx
qconfig_dict = {"": torch.ao.quantization.get_default_qconfig("fbgemm")}
prepared = prepare_fx(model, qconfig_dict, (x,))
converted = convert_fx(prepared)
"""


def test_scanning_takes_time_in_proportion_to_what_is_found(tmp_path: Path) -> None:
    seconds = {}
    for copies in (12, 96):
        path = tmp_path / f"copies_{copies}.py"
        path.write_text(FIVE_LINES * copies)
        takes = []
        for _ in range(2):
            begin = time.process_time()
            found = scan_paths([path]).findings
            takes.append(time.process_time() - begin)
            assert len(found) == 3 * copies  # two calls, and a dict that is written several times
        seconds[copies] = min(takes)
    # Eight times the text; quadratic work would take 64 times as long.
    assert seconds[96] < 20 * seconds[12]


def test_names_without_uses_mean_what_they_meant() -> None:
    """The oracle is LibCST's own scopes: the same assignments for every node."""
    from libcst.metadata import MetadataWrapper, ScopeProvider

    text = GOOD + (
        "from typing import cast\ndef f(a):\n    b = cast('prepare_fx', a)\n    return [b for b in a]\n"
    )
    source = ParsedSource(text)
    wrapper = MetadataWrapper(source.module, unsafe_skip_copy=True)
    theirs, ours = wrapper.resolve(ScopeProvider), wrapper.resolve(ScopesWithoutUses)
    # Each provider parses type annotations in strings into nodes of its own.
    shared = theirs.keys() & ours.keys()
    assert len(shared) > 70
    for node in shared:
        scope, mine = theirs[node], ours[node]
        assert type(mine) is type(scope)
        if scope is not None and mine is not None:
            names = {each.name for each in scope.assignments}
            assert {each.name for each in mine.assignments} == names


def test_parents_are_those_of_libcst() -> None:
    from libcst.metadata import MetadataWrapper, ParentNodeProvider

    source = ParsedSource(
        "# first\n" + FIVE_LINES + "def f(a, *b: int) -> str:  # last\n    return a[1:], (b)\n"
    )
    theirs = MetadataWrapper(source.module, unsafe_skip_copy=True).resolve(ParentNodeProvider)
    assert len(theirs) > 200
    assert source._parents == theirs


def test_a_tree_is_walked_for_expressions_and_for_scopes(monkeypatch: pytest.MonkeyPatch) -> None:
    from libcst.metadata import MetadataWrapper

    walks, walk = [], MetadataWrapper.visit_batched
    monkeypatch.setattr(MetadataWrapper, "visit_batched", lambda *args: walks.append(args) or walk(*args))
    ParsedSource(GOOD)
    assert len(walks) == 2


def children_of(process: int) -> list[Path]:
    children = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # It has ended.
            if f"\nPPid:\t{process}\n" in status.read_text():
                children.append(status.parent)
    return children


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="processes are listed in /proc")
def test_a_scan_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"m{number}.py").write_text(GOOD * 2_000)
    code = [sys.executable, "-m", "torchq_compat", "scan", str(tmp_path), "--jobs", "2"]
    running = subprocess.Popen(code, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    # Two that scan, and the one that cleans up behind them.
    while len(started := children_of(running.pid)) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    running.kill()
    running.wait()
    while any(folder.exists() for folder in started) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(started) == 3
    assert not [folder.name for folder in started if folder.exists()]
