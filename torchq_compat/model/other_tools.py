"""Tell tools that walk, trace or quantize graphs that they find no FX model here."""

from __future__ import annotations

import linecache
import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from types import FrameType
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Interpreter, Tracer
from torch.fx.passes.split_module import split_module

from torchq_compat.errors import ConvertError, ModuleAttributeError, ScriptError
from torchq_compat.support.torch_ao import EAGER_ENGINE, FX_ENGINE, QuantizationTracer
from torchq_compat.support.upstream import get_node_name_to_scope
from torchq_compat.support.user_warnings import warn_user

# Telling code that walks the graph of one of our models that it finds no layers there.
#
# Legacy: FX's graphs call modules, so scripts and toolkits look for ``call_module`` nodes of layers; those
# of torch.export have operators. ``torchq-compat run`` enables this, for code that was written for FX's
# graphs.


OWN = "torchq_compat."
#: The packages that read graphs for their own purposes.
READERS = (OWN, "torch.", "torchao.")
_TELLS: list[bool] = []


def tell_graph_readers() -> None:
    """Warn whoever reads the graph of one of our models, from now on in this process."""
    _TELLS[:] = [True]


def tell_of_layers(stage: str) -> None:
    """Warn the code that reads the graph of a model, unless it is a library's, or only prints it.
    It is called in the property ``graph`` of our models."""
    if not _TELLS:
        return
    frame: FrameType | None = sys._getframe(1)
    shows = ("graph", "shown_graph")
    while frame is not None and _name(frame).startswith(OWN) and frame.f_code.co_name in shows:
        frame = frame.f_back
    if frame is None or _name(frame).startswith(READERS):
        return
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    if "print" not in line or ".nodes" in line:
        warn_user("TQ706", stage=stage)


def _name(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def _caller(frame: FrameType | None, between: str | tuple[str, ...] = OWN) -> FrameType | None:
    """Return the first frame from ``frame`` on whose module does not begin with one of ``between``."""
    while frame is not None and _name(frame).startswith(between):
        frame = frame.f_back
    return frame


def is_asked_by_torch_jit() -> bool:
    """Return whether torch.jit is what called this package."""
    caller = _caller(sys._getframe(1), (OWN, "torch.fx.graph_module"))
    return _name(caller).startswith(("torch.jit", "torch._jit_internal"))


# Refuse torch.ao's tools that look for torch.ao's modules, or for their names in a state_dict: they would
# find nothing in a model of this package. So the models, and the states they return, check the calling frame.


#: The packages of the tools -> what torch calls them.
TOOLS = {"torch.ao.ns.": "the Numeric Suite", "torch.ao.quantization.fx._model_report.": "ModelReport"}
#: Frames between a tool and our methods: children() calls named_children(), modules() calls
#: named_modules(), and our methods call those of the base class; a tool calls eager mode's prepare. After
#: torch.compile was used, torch._dynamo wraps ``Tracer.trace``.
BETWEEN = ("torch.nn.modules.module", "torchq_compat.", "torch._dynamo.", EAGER_ENGINE)


#: The last names of keys in the states of FX's models that views answer.
OF_FX = re.compile(r"weight|bias|running_\w+|scale|zero_point|.*_(scale|zero_point)_\d+")


class StateOfCaptured(OrderedDict[str, Any]):
    """The state_dict of a captured model; it is pickled as a plain OrderedDict.

    Args:
        model: answers FX's keys, as ``conv1.scale``, by its views; the state itself has none of them.
    """

    def __init__(self, items: Any = (), model: GraphModule | None = None) -> None:
        super().__init__(items)
        self._model = (lambda: None) if model is None else weakref.ref(model)

    def __missing__(self, key: str) -> Any:
        path, _, name = key.rpartition(".")
        model = self._model() if OF_FX.fullmatch(name) else None
        try:
            value = getattr(model.get_submodule(path), name)  # type: ignore[union-attr]
        except AttributeError:
            raise KeyError(key) from ModuleAttributeError.of("TQ970.fx_key", name=key)
        return value() if callable(value) else torch.as_tensor(value)

    def __iter__(self) -> Iterator[str]:
        refuse_tools(sys._getframe(1))
        return super().__iter__()

    def __copy__(self) -> StateOfCaptured:
        copied = StateOfCaptured(self.items())
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> Any:
        _, arguments, attributes, *items = cast("tuple[Any, ...]", super().__reduce__())
        kept = {name: value for name, value in attributes.items() if name != "_model"}
        return (OrderedDict, arguments, kept, *items)


def refuse_tools(frame: FrameType | None) -> None:
    """Raise if one of torch.ao's tools reads the modules of a model, or the keys of a state, from ``frame``.

    Raises:
        ScriptError: the tool is the caller.
    """
    frame, called = _caller(frame, BETWEEN), ""
    tool = next((tool for package, tool in TOOLS.items() if _name(frame).startswith(package)), "")
    while frame is not None and _name(frame).startswith(tuple(TOOLS)):
        called, frame = frame.f_code.co_name, frame.f_back
    if called:
        raise tool_error(called, tool)


def tool_error(function: str, tool: str = TOOLS["torch.ao.ns."]) -> ScriptError:
    """Return the error for a ``function`` of ``tool``, which was given a model of this package."""
    return ScriptError.of("TQ972.tool", function=function, tool=tool)


# Keep other engines from preparing, converting or tracing the models of this package.
#
# FX's ``convert_fx`` and torchao's ``convert_pt2e`` accept any GraphModule whose ``meta`` has what a
# prepare wrote. In a model prepared by this package they would silently leave custom modules observed and
# batch norms unfolded: a half-ported script would go on with a float model.


#: The key of ``GraphModule.meta`` that torch.ao's and torchao's prepare write, and their convert reads first.
OBSERVED_KEY = "_observed_graph_module_attrs"
CALLERS_OF_TRACE = 4
OBSERVER = "activation_post_process_"
#: A ``__module__`` by which torch.fx takes a module for a leaf.
LEAF = "torch.nn.torchq_compat"


def guard(graph_module: GraphModule, stage: str) -> None:
    """Make every other convert fail on ``graph_module`` with a ConvertError."""
    kept = graph_module.meta.get(OBSERVED_KEY)
    if not isinstance(kept, _Guard):
        graph_module.meta[OBSERVED_KEY] = _Guard(kept, stage)


def unguard(graph_module: GraphModule) -> None:
    """Undo ``guard``, before this package passes the model to torchao."""
    kept = graph_module.meta.get(OBSERVED_KEY)
    if isinstance(kept, _Guard):
        graph_module.meta[OBSERVED_KEY] = vars(kept)["kept"]
        if vars(kept)["kept"] is None:
            del graph_module.meta[OBSERVED_KEY]


def leaves_for_tracers(model: GraphModule) -> None:
    """Make the modules that ``model`` calls leaves of torch.fx's tracers, which look at the ``__module__`` of
    each: what a recurrent module does cannot be traced."""
    for node in model._graph.find_nodes(op="call_module"):
        vars(model.get_submodule(str(node.target))).setdefault("__module__", LEAF)


def refuse_fx_tracer(model: GraphModule, stage: str) -> None:
    """Raise if FX's prepare or fuse is the caller, or a tracer would trace observers; called from a method
    that torch.fx's tracers call first.

    Raises:
        ConvertError: FX's ``prepare_fx`` or ``fuse_fx`` was given a model of this package, or a tracer a
            prepared one.
        ScriptError: one of torch.ao's tools was given a model of this package.
    """
    frame: FrameType | None = sys._getframe(2)
    tracer = frame and frame.f_locals.get("self")
    if isinstance(tracer, Tracer):
        refuse_tools(frame and frame.f_back)
        if stage == "converted":
            leaves_for_tracers(model)
    if frame is not None and isinstance(frame.f_locals.get("self"), QuantizationTracer):
        raise _other_engine(stage)
    # fuse_fx calls the tracer through torch.fx.symbolic_trace.
    for _ in range(CALLERS_OF_TRACE):
        if frame is not None and frame.f_globals.get("__name__") == FX_ENGINE:
            raise _other_engine(stage)
        frame = frame and frame.f_back
    if isinstance(tracer, Tracer):
        observers = ((n, m) for n, m in model._modules.items() if n.startswith(OBSERVER) and m is not None)
        name, observer = next(observers, ("", None))
        if observer is not None and not tracer.is_leaf_module(observer, name):
            raise ConvertError.of("TQ961.observers", name=name)


def refuse_reader(stage: str, graph: Graph) -> None:
    """Raise if the reader of a model's ``graph`` is torchao's prepare, or would lose how arguments nest.

    Raises:
        ConvertError: ``prepare_pt2e`` or ``prepare_qat_pt2e`` was given a model of this package, or
            ``split_module`` one that takes nested arguments.
    """
    frame = _caller(sys._getframe(1))
    # This is the function of torchao's prepare that reads the graph first (torchao 0.18).
    if frame is not None and frame.f_code is get_node_name_to_scope.__code__:
        raise _other_engine(stage)
    if frame is not None and frame.f_code is split_module.__code__:
        info = getattr(graph._codegen, "pytree_info", None)
        is_flat = info is None or all(spec.is_leaf() for spec in info.in_spec.child(0).children())
        if not is_flat:
            raise ConvertError.of("TQ961.nested")


def is_read_by_an_interpreter() -> bool:
    """Return whether an interpreter reads the graph of a model; it is called in the property ``graph``."""
    frame = _caller(sys._getframe(1))
    return frame is not None and frame.f_code is Interpreter.__init__.__code__


def is_called_by_a_user() -> bool:
    """Return whether ``forward``, where it is called, is called itself, not by ``nn.Module.__call__``."""
    return not _name(sys._getframe(2)).startswith((OWN, "torch.nn.modules.module"))


class _Guard:
    """A stand-in for the value that torchao's prepare left; reading any attribute raises a ConvertError."""

    #: torchao's convert reads this of every submodule; a standalone module is one, and is converted before.
    is_observed_standalone_module = False

    def __init__(self, kept: Any, stage: str) -> None:
        self.kept = kept
        self.stage = stage

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name == "is_observed_standalone_module":
            return object.__getattribute__(self, name)
        raise _other_engine(vars(self)["stage"])


def _other_engine(stage: str) -> ConvertError:
    return ConvertError.of("TQ950.other_engine", stage=stage)
