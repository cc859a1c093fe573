"""The process in which ``torchq-compat run`` redirects the FX names and then runs the script.

It is started as ``python -P -c ... PACKAGE_PARENT OPTIONS SCRIPT ARGS...`` by ``port.run_command``. What
a script can see of its start (arguments, ``sys.path[0]``, ``__main__``, ``__file__``) is the same as under
``python SCRIPT ARGS...``.
"""

import atexit
import builtins
import contextlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import Any

from torchq_compat.errors import QuantizationNote
from torchq_compat.port.names import CONVERTING, PREPARING
from torchq_compat.port.process import import_noise_held_back, stopping_cleanly
from torchq_compat.port.run_command import RunOptions

SCRIPT_RAISED = 1
#: The folders of the frames above the script's own, and of those below its calls.
PACKAGE = str(Path(__file__).parents[2])
TOOL = tuple(str(Path(__file__).parents[2] / room) for room in ("port", "comparison"))


def main() -> int:
    """Run the script that ``sys.argv`` names; its ``SystemExit`` and ``KeyboardInterrupt`` are not caught."""
    _, _, options, script, *args = sys.argv
    # _finish runs at interpreter exit, after the script's own atexit functions, however the script ends.
    report = _redirect(RunOptions(**json.loads(options)))
    # torchrun starts several processes, of which the first reports.
    if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0":
        atexit.register(_finish, report, Path(script).name)
    try:
        execute_script(script, args)
    except Exception as error:
        if getattr(error, "code", "") == "TQ971":
            # --strict requested this error: the script is not at fault.
            print(f"torchq-compat: {_script_line(error)}{' '.join(str(error).splitlines())}", file=sys.stderr)
        else:
            show_script_error(error)
        return SCRIPT_RAISED
    return 0


def show_script_error(error: Exception) -> None:
    """Print the traceback that ``python SCRIPT`` would print."""
    traceback = _from_script_on(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)


def _redirect(options: RunOptions) -> Callable[[str], str]:
    """Redirect the FX names and return the function that reports the recorded models."""
    with import_noise_held_back():
        from torchq_compat.model.other_tools import tell_graph_readers
        from torchq_compat.port.running import fx_draws, redirections
        from torchq_compat.port.running.recorder import Recorder, write_explanation
        from torchq_compat.quantize.first_call import at_once, takes_waiting_models, waits_for_first_call
        from torchq_compat.support.user_warnings import LISTENERS

        # The summary tells where FX gives other numbers.
        warnings.filterwarnings("ignore", message=r".*\[TQ5", category=QuantizationNote)
        recorder = Recorder(strict=options.strict)
        LISTENERS.append(recorder.hear)

        def wrapped(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
            function = at_once(function)
            converting = function if options.trained_qparams else redirections.converting_as_fx(function)
            recorded = recorder.wrap(fx_draws.remembering_prepared(converting))
            if function.__name__ in PREPARING:
                recorded = redirections.training_as_fx(waits_for_first_call(recorded))
            elif function.__name__ in CONVERTING:
                recorded = takes_waiting_models(recorded)
            return fx_draws.drawing_as_fx(recorded, original)

        instead = dict.fromkeys(CONVERTING, options.convert) if options.convert else {}
        redirections.redirect(wrapped, instead)
        redirections.redirect_pt2e(recorder.note)
        redirections.refuse_numeric_suite()
        tell_graph_readers()
        redirections.redirect_removed_imports()
        redirections.restore_removed_captures()
        fx_draws.accept_checkpoints()

    def report(script: str) -> str:
        if options.explain:
            with stopping_cleanly():
                write_explanation(recorder.models, Path(options.explain))
        return recorder.summary(script)

    return report


def execute_script(script: str, args: list[str]) -> None:
    """Execute the file as ``__main__``, which is kept for functions that run at interpreter exit."""
    sys.argv = [script, *args]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    path = os.path.join(os.getcwd(), script)
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace.update(dict.fromkeys(("__package__", "__spec__", "__doc__")))
    namespace.update(__name__="__main__", __file__=path, __builtins__=builtins)
    namespace["__loader__"] = SourceFileLoader("__main__", path)
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), namespace)


def _script_line(error: Exception) -> str:
    """Return the line of the script, or of a module it imports, that led to ``error``, as ``file:line: ``."""
    traceback = _from_script_on(error.__traceback__)
    while traceback is not None and (below := traceback.tb_next) is not None:
        if below.tb_frame.f_code.co_filename.startswith(PACKAGE):
            break
        traceback = below
    return f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}: " if traceback else ""


def _from_script_on(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(TOOL):
        traceback = traceback.tb_next
    return traceback


def _finish(report: Callable[[str], str], script: str) -> None:
    # If standard output is closed or broken, the summary is printed nevertheless.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    try:
        print(report(script), file=sys.stderr)
    except SystemExit:
        # Python would print an exception at interpreter exit, and exit with the script's code.
        os.kill(os.getpid(), signal.SIGTERM)
    except OSError as error:
        print(f"torchq-compat: problem: the explanation was not written: {error}", file=sys.stderr)
