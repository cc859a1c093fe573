"""Lower the opaque modules that a graph calls, and the floats that they round themselves."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from torchq_compat.capture.opaque_calls import OpaqueModule, layout_index, opaque_modules
from torchq_compat.custom_modules import handler_of
from torchq_compat.lower.integers import lowered_graph
from torchq_compat.lower.integers.operators import DEQUANTIZE, QUANTIZE
from torchq_compat.lower.integers.rewrite import Rewriter
from torchq_compat.model.graph_module import ConvertedGraphModule, QuantizationGraphModule
from torchq_compat.modules.parts import PartOwner
from torchq_compat.read import qdq
from torchq_compat.read.qparams import PerTensorQParams, QParams
from torchq_compat.recurrent.python_loops import OpaqueLoop
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.dtypes import KERNEL_DTYPES
from torchq_compat.support.graph_nodes import position_of

# Lower the opaque modules that a graph calls, each by the handler of its kind.
#
# A converted model that is itself an opaque module (a standalone module) is lowered like the model around
# it.


#: Lower a nested converted model.
LowerInside = Callable[[ConvertedGraphModule], QuantizationGraphModule]


@dataclass(frozen=True)
class LoweredOpaqueModule:
    """The lowered form of the opaque module at ``path``; ``module`` is None if it is not lowered."""

    path: str
    module: OpaqueModule | None
    decisions: tuple[Decision, ...]


def lower_opaque_modules(
    reference: ConvertedGraphModule, lower_inside: LowerInside
) -> list[LoweredOpaqueModule]:
    """Lower every opaque module that ``reference`` calls; ``reference`` stays as it is."""
    result = []
    for path, opaque in opaque_modules(reference).items():
        if isinstance(opaque, ConvertedGraphModule):
            result.append(_lower_model(path, opaque, lower_inside))
        elif isinstance(opaque, OpaqueLoop):
            result.append(_lower_loop(path, opaque, lower_inside))
        else:
            result.append(_lower_by_its_kind(path, opaque))
    return result


def _lower_model(path: str, opaque: Any, lower_inside: LowerInside) -> LoweredOpaqueModule:
    lowered = lower_inside(opaque)
    reason = "is lowered as a model of its own"
    decision = _decision(path, "standalone module", Action.LOWERED, reason)
    decisions = (decision, *(replace(item, path=f"{path}.{item.path}") for item in lowered.lowering))
    assert isinstance(lowered, OpaqueModule)
    return LoweredOpaqueModule(path, lowered, decisions)


def _lower_loop(path: str, loop: OpaqueLoop, lower_inside: LowerInside) -> LoweredOpaqueModule:
    assert isinstance(loop.step, ConvertedGraphModule)
    step = lower_inside(loop.step)
    decision = _decision(path, "loop over time", Action.LOWERED, "its step is lowered as a model")
    return LoweredOpaqueModule(path, loop.with_step(step), (decision, *step.lowering))


def _lower_by_its_kind(path: str, opaque: OpaqueModule) -> LoweredOpaqueModule:
    handler, kind = handler_of(opaque), type(opaque).__name__
    if handler is not None and handler.lowers_graphs and isinstance(opaque, PartOwner):
        return LoweredOpaqueModule(path, *_with_lowered_graphs(opaque, path))
    result = "its kind is unknown" if handler is None else handler.lower(opaque)
    if isinstance(result, str):
        reason = f"runs as in the reference graph: {result}"
        return LoweredOpaqueModule(path, None, (_decision(path, kind, Action.REFERENCE, reason),))
    reason = "runs on the integer kernels of its kind"
    return LoweredOpaqueModule(path, result, (_decision(path, kind, Action.LOWERED, reason),))


def _with_lowered_graphs(opaque: PartOwner, path: str) -> tuple[PartOwner, tuple[Decision, ...]]:
    """Return a copy of ``opaque`` whose graphs are lowered, and the decisions about them; it calls them as it
    called its q-dq graphs, and shares its state."""
    decisions: list[Decision] = []
    result: dict[str, nn.Module] = {}
    all_qparams = opaque.named_input_qparams().items()
    taken = {name: qparams for name, qparams in all_qparams if qparams.dtype in KERNEL_DTYPES}
    results = max((layout.output_qparams for layout in opaque.opaque_layouts), key=len, default=())
    returned = {
        name for name, qparams in zip(opaque.graphs_of_results, results, strict=False) if qparams is not None
    }
    for name, graph in opaque.graphs():
        rewriter = Rewriter(graph, taken, {}, {})
        rewriter.run(returns_integers=name in returned)
        decisions += [
            replace(decision, path=f"{path}.{name}/{decision.node}", node="")
            for decision in rewriter.decisions()
        ]
        module = GraphModule(nn.Module(), Graph())
        lowered_graph.share_state(module, graph)
        vars(module)["_modules"] = {
            **module._modules,
            lowered_graph.CONSTANTS: lowered_graph.Constants(rewriter.lowered.constants),
        }
        module.graph = rewriter.lowered.graph
        result[name] = module
    lowered = type(opaque).__new__(type(opaque))
    vars(lowered).update(vars(opaque))
    vars(lowered)["_modules"] = lowered_graph.with_modules(opaque, result)
    lowered.is_lowered, lowered.integer_inputs, lowered.integer_results = True, taken, results
    lowered.opaque_layouts = opaque.layouts_of_integers(taken)
    return lowered, tuple(decisions)


def _decision(path: str, kind: str, action: Action, reason: str) -> Decision:
    return Decision(f"{path}/lowering", kind, action, reason)


# Hand floats to and from modules that round them to their qparams themselves, where nothing reads integers.
#
# A lowered recurrent module takes floats or integers, and returns floats on the steps of their qparams, or
# integers where ``leaf_quantized`` asks for them: a quantize before it or a dequantize behind it would only
# take time.


def hand_over_floats(
    graph: Graph, modules: Mapping[str, OpaqueModule], stands_for: MutableMapping[Node, Any]
) -> None:
    """Drop the conversions around calls of ``modules`` (path -> module) that the modules make superfluous.

    Args:
        stands_for: see ``Rewriter``; kept up to date.
    """
    calls = {
        node: module
        for node in graph.find_nodes(op="call_module")
        if (module := modules.get(str(node.target))) is not None and module.leaf_quantizes
    }
    for call, module in calls.items():
        layout = module.opaque_layouts[layout_index(call)]
        pairs = zip(call.args, layout.input_qparams, strict=False)
        given = [_before_quantize(arg, qparams) for arg, qparams in pairs]
        call.args = (*given, *call.args[len(given) :])
        asked = []
        for result in list(call.users):
            position = position_of(result)
            readers = [user for user in result.users if user.target not in (DEQUANTIZE, *qdq.DEQUANTIZES)]
            if readers and layout.output_qparams and layout.output_qparams[position] is not None:
                asked.append(position)
                continue
            for dequantize in list(result.users):
                if dequantize not in readers:
                    stands_for[result] = stands_for[dequantize]
                    dequantize.replace_all_uses_with(result, propagate_meta=False)
                    graph.erase_node(dequantize)
        if asked:
            call.kwargs = {**call.kwargs, "leaf_quantized": tuple(sorted(asked))}


def _before_quantize(arg: object, qparams: QParams | None) -> object:
    """Return the floats that ``arg`` quantizes with ``qparams`` for one call alone; else ``arg``."""
    if not isinstance(arg, Node) or arg.target is not QUANTIZE or len(arg.users) > 1:
        return arg
    is_same = isinstance(qparams, PerTensorQParams) and arg.args[1:] == lowered_graph.of_result(qparams)
    return arg.args[0] if is_same else arg
