"""The models a script quantized, and their summary at its end."""

import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from torchq_compat.codes import CODES, said
from torchq_compat.errors import QuantizationWarning, ScriptError
from torchq_compat.model.graph_module import QuantizationGraphModule
from torchq_compat.ops import preserves_values
from torchq_compat.quantize.explain import explain
from torchq_compat.support.argument_checks import listed
from torchq_compat.support.atomic_files import write_whole
from torchq_compat.support.decisions import Action, Decision, Report
from torchq_compat.support.report import counted

# Find the decisions about ops that compute nothing: ops that move values, or make constants.
#
# FX leaves them float if their input is not quantized, and nothing is lost; a summary that counted them as
# "float" would hide the modules that matter. If their input is quantized, they are quantized without
# effect, as a dropout is.


RELU = torch.ops.aten.relu.default
#: Base names of aten operators that make constants.
MAKES_CONSTANTS = ("arange", "empty", "full", "ones", "zeros")


def computes_nothing(model: nn.Module, decision: Decision) -> bool:
    """Return whether ``decision`` is about an op of ``model`` that only moves values or makes constants."""
    is_of_one_op = decision.action in (Action.FLOAT, Action.QUANTIZED) and " + " not in decision.kind
    if not is_of_one_op or not isinstance(model, GraphModule):
        return False
    name = decision.node or decision.path.rpartition("/")[2]
    captured = model.reference if isinstance(model, QuantizationGraphModule) else model
    node = next((node for node in captured.graph.nodes if node.name == name), None)
    # A relu counts as preserving values, but users count it as a layer.
    if node is None:
        return False
    kind = getattr(node.target, "__name__", "").partition(".")[0].removeprefix("new_").removesuffix("_like")
    return (node.target is not RELU and preserves_values(node)) or kind in MAKES_CONSTANTS


# The models a script quantized, and their summary at its end.


MAX_LINES = 12
MAX_PATHS = 3
MAX_KINDS = 6
#: The width of tables in a file, where each row is one line.
WIDTH = 400
#: Function -> the stage of the model it returns, in the summary; other functions are not in it.
STAGES = {
    "prepare_fx": "prepared",
    "prepare_qat_fx": "prepared for training",
    "convert_fx": "converted",
    "convert_to_reference_fx": "converted to reference",
    "prepare": "prepared in eager mode",
    "prepare_qat": "prepared for training in eager mode",
    "convert": "converted in eager mode",
    "quantize": "converted in eager mode",
    "quantize_qat": "converted in eager mode",
}

#: The function for eager models, which have no decisions.
EAGER = "quantize_dynamic"

#: Under ``run``, so that the script prints what it printed.
CONVERTS_AS_FX = (
    "as FX: converted with the qparams of its observers; convert_fx here keeps those it trained with, and so "
    "does run --trained-qparams"
)
ROUNDED = "unlike eager mode: values halfway between two integers may round to the other one [TQ576]"
#: Actions of decisions about input sizes, folded batch norms and lowering.
NOT_OF_OPS = (Action.FREE, Action.FIXED, Action.FOLDED, Action.LOWERED, Action.REFERENCE)

Function = Callable[..., Any]


@dataclass(frozen=True)
class RecordedModel:
    """The outcome for one model.

    Attributes:
        names: classes of the float models with this outcome.
        stage: the last stage it reached, in words.
        report: the report of ``explain``.
        computing: the decisions about its modules and ops, without those that compute nothing.
        moving: the number of its ops that compute nothing and stay float.
        fx_converts_otherwise: whether FX converts other qparams or ranges than were trained.
        observer_qparams: whether it was converted to those.
        warnings: what was warned about on the way, also where a filter of the script hides it.
    """

    names: tuple[str, ...]
    stage: str
    report: Report
    computing: tuple[Decision, ...]
    moving: int
    fx_converts_otherwise: bool = False
    observer_qparams: bool = False
    warnings: tuple[QuantizationWarning, ...] = ()

    @property
    def title(self) -> str:
        return f"{', '.join(self.names)}, {self.stage}"


class Recorder:
    """Records every model that passes through the wrapped functions.

    Only decisions are kept, not models: if a script frees its models, their memory must be freed. A model is
    identified by its decisions, so preparing, copying and converting it is one entry, and so are models that
    differ only in their weights.

    Args:
        strict: whether to raise a ScriptError if a module of a prepared model stays float.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._has_named_floats = False  # The ScriptError has named them.
        self._models: dict[tuple[tuple[str, str, str], ...], RecordedModel] = {}
        self._eager: list[str] = []
        self._warnings: list[QuantizationWarning] = []

    @property
    def models(self) -> tuple[RecordedModel, ...]:
        *others, last = self._models.values() or (None,)
        of_calls = () if last is None else (replace(last, warnings=(*last.warnings, *self._warnings)),)
        return (*others, *of_calls)

    def hear(self, warning: QuantizationWarning) -> None:
        """Add ``warning`` to the model that is recorded next, or to the last one."""
        self._warnings.append(warning)

    def wrap(self, function: Function) -> Function:
        """Return ``function`` so that its models are recorded. It keeps its name, module and signature."""
        first_parameter = next(iter(inspect.signature(function).parameters))

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            source = args[0] if args else kwargs[first_parameter]
            self._record(function.__name__, source, result)
            return result

        return recorded

    def note(self, line: str) -> None:
        """Add ``line`` to the summary."""
        self._eager.append(line)

    def summary(self, script: str) -> str:
        """Return what was quantized and what stayed float, in at most twelve lines."""
        if not self._models and not self._eager:
            return f"torchq-compat: {script} prepared no model with FX graph mode or eager mode quantization."
        lines = [f"torchq-compat: {script} on torch.export and torchao (PT2E)"]
        for model in self._models.values():
            heading, *floats = _lines(model)
            lines += [heading, *([] if self._has_named_floats else floats)]
        lines += dict.fromkeys(self._eager)
        if len(lines) > MAX_LINES:
            hidden = len(lines) - MAX_LINES + 1
            lines[MAX_LINES - 1 :] = [f"  ... {hidden} more lines; torchq_compat.explain(model) has them all"]
        return "\n".join(lines)

    def _record(self, function: str, source: Any, result: Any) -> None:
        if function == EAGER:
            self._eager.append(_eager_line(source, result))
        stage = STAGES.get(function)
        if stage is None:
            return
        report = explain(result)
        decisions = _own_decisions(result)
        key = tuple(sorted((d.path, d.kind, d.action.value) for d in decisions))
        known = self._models.get(key)
        names = known.names if known else ()
        is_prepared = stage.startswith("prepared")
        if known is None or is_prepared:
            names = tuple(dict.fromkeys((*names, type(source).__name__)))
        moving = [d for d in decisions if computes_nothing(result, d)]
        computing = tuple(d for d in decisions if d not in moving)
        left_float = sum(d.action is Action.FLOAT for d in moving)
        record = result.record if isinstance(result, QuantizationGraphModule) else None
        self._models[key] = RecordedModel(
            names,
            stage,
            report,
            computing,
            left_float,
            fx_converts_otherwise=bool(record and record.fx_converts_otherwise),
            observer_qparams=bool(record and record.observer_qparams),
            warnings=(*(known.warnings if known else ()), *self._warnings),
        )
        self._warnings.clear()
        if self._strict and is_prepared:
            self._has_named_floats = True
            _refuse_left_float(source, computing)
            self._has_named_floats = False


def _refuse_left_float(model: nn.Module, decisions: Iterable[Decision]) -> None:
    modules = {path for path, _ in model.named_modules()}
    if left := [d for d in decisions if d.action is Action.FLOAT and d.path in modules]:
        shown = "; ".join(f"{d.kind} {d.path!r}: {d.reason}" for d in left[:MAX_PATHS])
        more = f"; and {len(left) - MAX_PATHS} more" if len(left) > MAX_PATHS else ""
        raise ScriptError.of("TQ971", count=counted(len(left), "module"), model=model, shown=shown, more=more)


def _eager_line(source: nn.Module, result: nn.Module) -> str:
    kinds = Counter(
        name
        for module in result.modules()
        if (name := module._get_name()).startswith(("Dynamic", "Quantized"))  # type: ignore[no-untyped-call]
    )
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "nothing"
    return f"  {type(source).__name__}, quantized dynamically: {shown}"


def _own_decisions(model: nn.Module) -> tuple[Decision, ...]:
    """Return the decisions about modules and ops of ``model`` that are the same before and after convert:
    none about parts of custom modules, sizes of inputs, or lowering."""
    # For a lowered op that the configuration left float, explain shows only the lowering.
    reference = model.reference if isinstance(model, QuantizationGraphModule) else model
    decided = [d for d in explain(reference) if d.action not in NOT_OF_OPS]
    # What was dropped of a module, like a training mode, says nothing about its children.
    paths = {decision.path for decision in decided if decision.action is not Action.DROPPED}
    return tuple(
        d for d in decided if not any(d.path[:at] in paths for at, char in enumerate(d.path) if char == ".")
    )


def _lines(model: RecordedModel) -> list[str]:
    counts = Counter(decision.action for decision in model.computing)
    kinds = Counter(decision.kind for decision in model.computing if decision.action is Action.QUANTIZED)
    shown = [f"{count} {kind}" for kind, count in kinds.most_common(MAX_KINDS)]
    which = f" ({', '.join(shown)}{', ...' if len(kinds) > MAX_KINDS else ''})" if shown else ""
    moving = f", {model.moving} that only move values" if model.moving else ""
    result = f"{counts[Action.QUANTIZED]} quantized{which}, {counts[Action.FLOAT]} float{moving}"
    return [f"  {model.title}: {result}", *_unlike_fx_lines(model), *_float_lines(model.computing)]


def _unlike_fx_lines(model: RecordedModel) -> Iterator[str]:
    """Yield one line for each reason why the numbers differ from FX's, or from ``convert_fx``'s here."""
    if model.fx_converts_otherwise:
        otherwise = _unlike_fx("TQ511", said("TQ511", observers="its fake-quantizes"))
        yield f"    {CONVERTS_AS_FX}" if model.observer_qparams else otherwise
    if model.stage == STAGES["convert"]:
        yield f"    {ROUNDED}"
    groups: dict[tuple[str, str], list[str]] = {}
    for decision in model.report:
        if decision.unlike_fx:
            groups.setdefault((decision.unlike_fx, decision.code), []).append(decision.path or "(model)")
    for (sentence, code), paths in groups.items():
        yield _unlike_fx(code, f"{listed(paths, MAX_PATHS)}: {sentence}")


def _unlike_fx(code: str, what: str) -> str:
    return f"    unlike FX: {what.rstrip('.')}. {CODES[code].hint} [{code}]"


def _float_lines(decisions: tuple[Decision, ...]) -> Iterator[str]:
    """Yield one line for each reason why something stayed float, those with a warning first."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    left_float = [d for d in decisions if d.action is Action.FLOAT]
    for decision in sorted(left_float, key=lambda d: not d.warn):
        code = f" [{decision.code}]" if decision.code else ""
        groups.setdefault((decision.kind, decision.reason, code), []).append(decision.path or "(model)")
    for (kind, reason, code), paths in groups.items():
        yield f"    float: {kind} {listed(paths, MAX_PATHS)}: {reason}{code}"


def write_explanation(models: Iterable[RecordedModel], path: Path) -> None:
    """Write the decisions to ``path`` in one step: as JSON if its name ends in .json, otherwise as tables.

    Raises:
        OSError: the file cannot be written; an existing one is left as it was.
    """
    if path.suffix == ".json":
        data = [
            {
                "model": list(model.names),
                "stage": model.stage,
                "decisions": model.report.as_dicts(),
                "warnings": [
                    {"code": item.code, "severity": CODES[item.code].severity, "text": str(item)}
                    for item in model.warnings
                ],
            }
            for model in models
        ]
        content = json.dumps(data, indent=2, default=str) + "\n"
    else:
        parts = ([m.title, m.report.to_text(WIDTH), *map(str, m.warnings), ""] for m in models)
        content = "".join(map("\n\n".join, parts))
    write_whole(path, content)
