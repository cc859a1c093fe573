"""The commands people type: ``nox`` checks and tests, ``nox -l`` lists the others."""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["checks", "tests"]

PYTHONS = ["3.11", "3.12", "3.13"]


def install(session: nox.Session, *extras: str) -> None:
    """Install the package with ``extras``, in the versions it is tested with."""
    session.install("-c", "constraints.txt", "-e", f".[{','.join(extras)}]")
    session.env["OMP_NUM_THREADS"] = "1"


@nox.session
def checks(session: nox.Session) -> None:
    """Lint, format, types, generated pages."""
    install(session, "test")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("python", "-m", "migration.generate", "--check")


@nox.session
def pyright(session: nox.Session) -> None:
    """The types as users of pyright see them: a script over the whole public API, in its strict mode."""
    install(session, "test")
    session.install("pyright")
    session.run("pyright", "tests/typing_checks/user_script.py")


@nox.session
def tests(session: nox.Session) -> None:
    """The default tests, or what is given: ``nox -s tests -- tests/parity -k resnet``."""
    install(session, "test", "executorch")
    session.run("pytest", *(session.posargs or ["-n", "2"]))


@nox.session
def smoke(session: nox.Session) -> None:
    """One case of each test that takes little time."""
    install(session, "test", "executorch")
    session.run("pytest", "--smoke", "-n", "2", *session.posargs)


@nox.session(python=PYTHONS)
def matrix(session: nox.Session) -> None:
    """The default tests with one version of Python each."""
    install(session, "test")
    session.run("pytest", *(session.posargs or ["-n", "2"]))


@nox.session
def slow(session: nox.Session) -> None:
    """The slow tests."""
    install(session, "test", "executorch")
    session.run("pytest", "-m", "slow", *session.posargs)


@nox.session
def guide(session: nox.Session) -> None:
    """Write the generated pages."""
    install(session, "test")
    session.run("python", "-m", "migration.generate")


@nox.session
def docs(session: nox.Session) -> None:
    """The guide and the API reference as a site, into build/site."""
    install(session, "docs")
    session.run("python", ".ci/site.py")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Measure beside every peer: about half an hour on a quiet machine. ``-- --quick`` tries the command."""
    install(session, "test", "report", "bench")
    session.run("python", "-m", "tests.benchmarks", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Wheels for Linux that carry the kernel for every instruction set, into dist."""
    install(session)
    session.install("build", "wheel", "twine")
    session.run("python", ".ci/kernel_libraries.py", "--into", "dist")
    session.run("twine", "check", "--strict", "dist/*")


@nox.session
def build(session: nox.Session) -> None:
    """The source distribution and the wheel, into dist."""
    session.install("build", "twine")
    session.run("python", "-m", "build")
    session.run("twine", "check", "--strict", "dist/*")
