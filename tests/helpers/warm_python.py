"""Python processes without their imports: one process imports torch and this package, and forks for commands.

Importing takes ten times as long as most scripts run. A fork is a process too: what a command redirects,
prints and leaves behind, and how it ends, is its own. What is shown while torch is imported, what the
interpreter knows of its start, and signals are for tests that start a process of their own.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import IO

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from torchq_compat.port.process import import_noise_held_back

__all__ = ["ENVIRONMENT", "Ran", "warm_python"]

ROOT = Path(__file__).parents[2]
#: One thread: the numbers of two runs have to be comparable, and other tests may run at the same time.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SECONDS = 600
SERVE = "from tests.helpers.warm_python import serve; serve()"
RUNNING = "torchq_compat.port.running"
#: What ``run`` and ``compare`` import before the script.
IMPORTED = (
    "torchq_compat.cli",
    "torchq_compat.comparison.collect",
    f"{RUNNING}.fx_draws",
    f"{RUNNING}.recorder",
    f"{RUNNING}.redirections",
    f"{RUNNING}.script_process",
)
Ran = subprocess.CompletedProcess[str]


def warm_python(
    *args: object, cwd: Path | None = None, env: Mapping[str, str] = ENVIRONMENT, bare: bool = False
) -> Ran:
    """Do what ``python ARGS`` does, with SCRIPT, -m MODULE or -c CODE; a process for each ``env`` imports.

    Args:
        bare: whether only torch and torchao are imported, and nothing of this package that imports torch.
    """
    server = _server(tuple(env.items()))
    assert server.stdin
    assert server.stdout
    command = [*map(str, args)]
    with TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        print(json.dumps((bare, command, str(cwd or Path.cwd()), files)), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(command, code, *(Path(file).read_text() for file in files))


@functools.cache
def _server(env: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-P", "-c", SERVE], subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=dict(env))
    atexit.register(server.communicate)  # it ends with its input
    return server


def serve() -> None:
    """Import, then run each command that a line of standard input names, and print its exit code."""
    gc.disable()  # while millions of objects are made that live long
    with import_noise_held_back():
        importlib.import_module("torchao.quantization.pt2e.quantize_pt2e")
    commands, answers = _bare_server()
    with import_noise_held_back():
        for name in IMPORTED:
            importlib.import_module(name)
    torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))  # its first call imports
    for name in ("port.run_command", "comparison.compare_command"):
        module = importlib.import_module(f"torchq_compat.{name}")
        vars(module)["subprocess"] = SimpleNamespace(Popen=Fork, TimeoutExpired=subprocess.TimeoutExpired)
    vars(subprocess_handler)["Popen"] = Fork
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        if json.loads(line)[0]:
            print(line, end="", file=commands, flush=True)
            print(answers.readline(), end="", flush=True)
        else:
            print(_code_of_command(line), flush=True)


def _bare_server() -> tuple[IO[str], IO[str]]:
    """Fork a process that does what this one does, with what is imported by now; return its two pipes."""
    (reading, commands), (answers, writing) = os.pipe(), os.pipe()
    if not os.fork():
        os.close(commands)
        os.close(answers)
        gc.freeze()
        gc.enable()
        for line in os.fdopen(reading):
            os.write(writing, f"{_code_of_command(line)}\n".encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    return os.fdopen(commands, "w"), os.fdopen(answers)


def _code_of_command(line: str) -> int:
    """Run the command of ``line`` in a fork, and return its exit code."""
    _, command, cwd, files = json.loads(line)
    pid = os.fork()
    if not pid:
        os.chdir(cwd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        _run_and_exit(command)
    return _code_of(pid)


class Fork:
    """What commands and torchrun use of ``subprocess.Popen``; it has what the new process would import."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if not self.pid:
            if start_new_session:
                os.setsid()
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            for descriptor, file in ((1, stdout), (2, stderr)):
                if file is not None:
                    os.dup2(file if isinstance(file, int) else file.fileno(), descriptor)
            _run_and_exit(args[1:])

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (SECONDS if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired([], SECONDS if timeout is None else timeout)
            time.sleep(0.01)
        return code

    def poll(self) -> int | None:
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code


def _code_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _run_and_exit(command: Sequence[str]) -> None:
    """Run ``command`` and end as the interpreter does, with no frame of this process unwound."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(SECONDS)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders of the process above
    code: object = 0
    try:
        _run(*command)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit((int(code or 0) if isinstance(code, int | None) else 1) & 0xFF)


def _run(first: str, *args: str) -> None:
    sys.modules["__main__"] = ModuleType("__main__")
    if first in ("-P", "-u"):
        _run(*args)
    elif first == "-c":
        sys.argv = ["-c", *args[1:]]
        exec(args[0], vars(sys.modules["__main__"]))
    elif first == "-m":
        sys.argv = list(args)
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    else:
        from torchq_compat.port.running.script_process import execute_script

        sys.path.insert(0, "")
        execute_script(first, list(args))
