"""A wheel, built from this tree and installed away from it, has all that the package needs to run."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import venv
import zipfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.guide.test_docs import BLOCK

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchq_compat"
#: What pyproject.toml, MANIFEST.in and a build read.
SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
#: Beside Python: the kernels' sources and headers, the page of ``compare``, the mark of a typed package.
DATA = {".cpp", ".h", ".j2", ".typed"}
SCRIPT = ROOT / ".ci" / "kernel_libraries.py"
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
#: This one, and those that there is a compiler for.
MACHINES = [
    machine
    for machine in ELF_MACHINES
    if machine == platform.machine() or shutil.which(f"{machine.replace('_', '-')}-linux-gnu-g++")
]
#: Run in front of README's example: nothing of the checkout may be found.
WHERE = """\
import sys
import torchq_compat
assert torchq_compat.__file__.startswith(sys.prefix), torchq_compat.__file__
"""


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def copied_sources(folder: Path) -> Path:
    """Return a copy of what a build reads, without libraries."""
    source = folder / "source"
    shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in SOURCES:
        shutil.copy(ROOT / name, source)
    return source


def build_wheel(source: Path, folder: Path) -> Path:
    # Isolated, pip fetches setuptools from an index; pyproject.toml says which it needs.
    found = importlib.util.find_spec("setuptools") and int(version("setuptools").split(".")[0])
    here = ["--no-build-isolation"] if found and found >= 77 else []
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", *here, "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Return the ``bin`` of a new environment that has ``wheel``, and what this environment has below it."""
    venv.create(folder, symlinks=True)
    binaries = folder / "bin"
    run(sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--no-deps", wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Behind the environment's own; files with .pth in them, as of editable packages, are not read.
    here = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "other_packages.pth").write_text("\n".join(here))
    return binaries


@pytest.mark.slow
def test_a_wheel_in_an_environment_of_its_own(tmp_path: Path) -> None:
    wheel = build_wheel(copied_sources(tmp_path), tmp_path)
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.suffix in {".py", *DATA} and "__pycache__" not in path.parts
    }
    assert expected <= names
    assert {Path(name).suffix for name in expected} == {".py", *DATA}
    assert not {name for name in names if name.startswith(("tests", "migration"))}
    binaries = install(wheel, tmp_path / "environment")
    # The kernel of recurrent modules is compiled from the sources in the wheel.
    cache = tmp_path / "cache"
    outside = partial(run, cwd=tmp_path, TORCHQ_COMPAT_CACHE_DIR=str(cache))
    (example,) = BLOCK.findall((ROOT / "README.md").read_text())
    told = outside(binaries / "python", "-c", WHERE + example)
    assert "runs on the integer kernels of its kind" in told
    assert list(cache.rglob("*.so"))
    command = binaries / "torchq-compat"
    assert outside(command, "--version").startswith("torchq-compat ")
    script = ROOT / "migration" / "legacy" / "lstm_16bit_parts.py"
    printed = outside(command, "run", script)
    assert {line.split()[0] for line in printed.splitlines()} >= {"float", "quantized"}


def platform_of(*texts: bytes, folder: Path) -> str:
    """Return the tag that a release gives a wheel with libraries of these contents."""
    spec = importlib.util.spec_from_file_location("kernel_libraries", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    paths = [folder / f"{index}.so" for index in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text)
    tag: str = script.platform_of(paths, "aarch64")
    return tag


def test_the_platform_is_that_of_the_symbols(tmp_path: Path) -> None:
    old = b"GLIBC_2.17\0GLIBC_2.4\0GLIBCXX_3.4.29\0GLIBCXX_3.4\0"
    assert platform_of(old, folder=tmp_path) == "manylinux_2_34_aarch64"
    assert platform_of(old, old + b"GLIBC_2.38\0", folder=tmp_path) == "manylinux_2_38_aarch64"
    assert platform_of(old + b"GLIBCXX_3.4.30\0", folder=tmp_path) == "manylinux_2_35_aarch64"
    assert platform_of(old + b"GLIBCXX_3.4.33\0", folder=tmp_path) == "manylinux_2_39_aarch64"


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_a_wheel_of_each_machine_has_its_library(machine: str, tmp_path: Path) -> None:
    source = copied_sources(tmp_path)
    shutil.copytree(ROOT / ".ci", source / ".ci")
    run(
        sys.executable, source / ".ci" / SCRIPT.name, "--machine", machine, cwd=source, PYTHONPATH=str(source)
    )
    wheel = build_wheel(source, tmp_path)
    carried = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert [Path(name).name for name in carried] == [f"recurrent_{machine}.so"]
    library = zipfile.ZipFile(wheel).read(carried[0])
    assert int.from_bytes(library[18:20], "little") == ELF_MACHINES[machine]
    tag = platform_of(library, folder=tmp_path).replace("aarch64", machine)
    tagged = wheel.rename(tmp_path / wheel.name.replace("-any", f"-{tag}"))
    pip = [sys.executable, "-m", "pip", "install", "--target", tmp_path / "installed", "--platform", tag]
    run(*pip, "--only-binary", ":all:", "--no-deps", tagged)
    assert (tmp_path / "installed" / carried[0]).read_bytes() == library


@pytest.mark.slow
def test_a_wheel_that_carries_the_kernel_compiles_nothing(tmp_path: Path) -> None:
    source = copied_sources(tmp_path)
    shutil.copytree(ROOT / ".ci", source / ".ci")
    script, machine = source / ".ci" / SCRIPT.name, platform.machine()
    run(sys.executable, script, "--machine", machine, cwd=source, PYTHONPATH=str(source))
    wheel = build_wheel(source, tmp_path)
    carried = [Path(name).name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert carried == [f"recurrent_{machine}.so"]
    binaries = install(wheel, tmp_path / "environment")
    cache, (example,) = tmp_path / "cache", BLOCK.findall((ROOT / "README.md").read_text())
    # Where no compiler is on the path.
    outside = {"TORCHQ_COMPAT_CACHE_DIR": str(cache), "PATH": str(binaries), "CXX": ""}
    told = run(binaries / "python", "-c", WHERE + example, cwd=tmp_path, **outside)
    assert "runs on the integer kernels of its kind" in told
    assert not list(cache.rglob("*.so"))


@pytest.mark.slow
def test_an_sdist_is_a_checkout_and_installs(tmp_path: Path) -> None:
    checkout, unpacked = tmp_path / "checkout", tmp_path / "unpacked"
    made = (".git", "__pycache__", "*.so", "*.egg-info", "build", "dist", ".*_cache", ".hypothesis")
    skipped = shutil.ignore_patterns(*made)
    shutil.copytree(ROOT, checkout, ignore=skipped)
    files = {path.relative_to(checkout) for path in checkout.rglob("*") if path.is_file()}
    build = "import sys, setuptools.build_meta as backend; backend.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, tmp_path, cwd=checkout)
    (sdist,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(sdist, unpacked, filter="data")
    (root,) = unpacked.iterdir()
    packed = {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    assert {str(path) for path in files - packed} == {".gitignore"}
    binaries = install(build_wheel(root, tmp_path), tmp_path / "environment")
    assert run(binaries / "torchq-compat", "--version", cwd=tmp_path).startswith("torchq-compat ")
    smoke = [sys.executable, "-m", "pytest", "-q", "--smoke", "tests/support", "tests/read"]
    assert " passed" in run(*smoke, cwd=root, PYTHONPATH=str(root))
