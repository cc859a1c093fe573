"""Where a lowered graph may run, and its run beside its reference, node by node."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchq_compat.capture.opaque_calls import OpaqueModule
from torchq_compat.capture.torch_export import copied_inputs
from torchq_compat.capture.trial_runs import alone_and_seeded, kept_buffers
from torchq_compat.lower.integers.operators import CONVOLUTION, LINEAR, forget_weights
from torchq_compat.lower.integers.qdq_graph import Counterpart
from torchq_compat.model.graph_module import ConvertedModel
from torchq_compat.ops import those
from torchq_compat.read.qdq import DEQUANTIZES, WeightByWeight, dequantizes_constant
from torchq_compat.recurrent.kernel.direct_calls import LINEAR_OPERATOR
from torchq_compat.recurrent.kernel.op import drop_forgotten, forget
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.graph_nodes import give_back_freed
from torchq_compat.support.upstream import data_address, pytree

# Run a lowered graph beside its reference, node by node, on the trial inputs of prepare.
#
# Every node gets the values that the reference has at its inputs, in the memory layouts of the lowered
# graph, so that each is judged by itself: a kernel is only as good as the library and the CPU it runs on,
# and a float op may read memory in another order than the reference has.


#: Kernels round where the q-dq op rounds, but ties may round to the other side.
MOST_STEPS = 1.001
#: The relative error of float sums in another order.
EPSILON = 1e-4
#: The positions of arguments of the kernels.
WEIGHT_OF_KERNEL, OWNER_OF_KERNEL = 3, 8

StandsFor = Mapping[Node, Counterpart]


def faults_of(
    reference: GraphModule, lowered: GraphModule, stands_for: StandsFor, args: tuple[Any, ...]
) -> tuple[dict[str, str], Any] | None:
    """Return name of a node of ``reference`` -> what is wrong with the value that ``lowered`` has for it; and
    the flat results of ``reference``.

    None means that the reference does not run on ``args``, as its own trials say.

    Args:
        args: the flat inputs.
        stands_for: see ``Rewriter``.

    Raises:
        Exception: what a node of ``lowered`` raises that stands for none of ``reference``.
    """
    # Of a constant there is one value, by whose address kernels know what they packed.
    judged = (stands_for[node].node for node in lowered.graph.nodes if node in stands_for)
    recorder = _Recorder(reference, {n for n in judged if n.op != "get_attr" and not dequantizes_constant(n)})
    try:
        with alone_and_seeded():  # As ``fault_of_whole``.
            results = recorder.run(*copied_inputs(args), enable_io_processing=False)
    except Exception:
        return None
    judge = _Judge(lowered, stands_for, recorder.recorded)
    with torch.no_grad():
        judge.run(*args, enable_io_processing=False)
    return judge.faults, results


class _Recorder(WeightByWeight):
    """Keeps the values of some nodes of a q-dq graph."""

    def __init__(self, reference: GraphModule, nodes: set[Node]) -> None:
        super().__init__(reference)
        self.nodes = nodes
        self.recorded: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n in self.nodes:
            self.recorded[n] = value
        return value


class Forgetful(WeightByWeight):
    """Runs a lowered graph, and drops what each kernel packed: a second copy of each weight."""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.forget_packed(n, self.fetch_args_kwargs_from_env(n)[0])
        return value

    def forget_packed(self, node: Node, args: Any) -> None:
        """Drop what the kernel at ``node`` packed."""
        if node.op == "call_module":
            for module in self.fetch_attr(str(node.target)).modules():
                if isinstance(module, OpaqueModule):
                    module.opaque_forget_packed()
            give_back_freed()
        elif node.target in (CONVOLUTION, LINEAR):
            forget_weights([data_address(args[WEIGHT_OF_KERNEL])])
        elif node.target is LINEAR_OPERATOR:
            forget(args[OWNER_OF_KERNEL])
            drop_forgotten()


class _Judge(Forgetful):
    """Runs a lowered graph, each node on what the reference has at its inputs.

    Attributes:
        faults: name of a node of the reference -> what is wrong with its value.
    """

    def __init__(self, lowered: GraphModule, stands_for: StandsFor, expected: Mapping[Node, Any]) -> None:
        super().__init__(lowered)
        self.stands_for = stands_for
        self.expected = expected
        self.faults: dict[str, str] = {}

    def run_node(self, n: Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        expected = None if n.op in ("placeholder", "output") else self._expected(n)
        try:
            result = getattr(self, n.op)(n.target, args, kwargs)
        except Exception as error:
            if expected is None:
                raise
            self.faults[self.stands_for[n].name] = f"fails ({first_line(error)})"
            result = expected
        is_filled = n.op == "call_function" and n.target not in those("unfilled")
        if expected is not None and is_filled and self.stands_for[n].is_judged:
            fault = _fault(result, expected, n)
            # Random numbers, say, differ in the reference's order too.
            if fault is not None and not self._is_the_same_in_order(n, args, kwargs):
                self.faults[self.stands_for[n].name] = fault
        self.forget_packed(n, args)
        return result if expected is None else _taught(result, expected)

    def _is_the_same_in_order(self, node: Node, args: Any, kwargs: Any) -> bool:
        """Return whether an op of the reference is as wrong in the reference's own memory layouts."""
        place = self.stands_for[node]
        if node.target is not place.node.target or place.qparams is not None:
            return False
        with torch.no_grad():
            plain, named = pytree.tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))
            again = self.call_function(node.target, plain, named)
        return _fault(again, self.expected[place.node], node) is not None

    def _expected(self, node: Node) -> Any:
        """Return the value that ``node`` should have; None if it is not known."""
        if node not in self.stands_for or self.stands_for[node].node not in self.expected:
            return None
        place = self.stands_for[node]
        value = self.expected[place.node]
        if place.qparams is None:
            return value
        return place.qparams.quantize(value) if isinstance(value, Tensor) else None


def _fault(value: Any, expected: Any, node: Node) -> str | None:
    pairs = zip(pytree.tree_leaves(value), pytree.tree_leaves(expected), strict=True)
    for one, other in pairs:
        if not isinstance(one, Tensor):
            continue
        if one.shape != other.shape:
            return f"gives another shape than its q-dq op ({tuple(one.shape)} for {tuple(other.shape)})"
        if not one.numel() or one.dtype != other.dtype:
            continue
        steps = _steps(one, other)
        if not steps <= MOST_STEPS:
            return f"{node.target} is {steps:.0f} steps off its q-dq op on this CPU"
    return None


def _steps(tensor: Tensor, expected: Tensor) -> float:
    """Return the largest difference: in integers, or relative to what float sums in another order make, 0 if
    it is less."""
    if torch.equal(tensor, expected):
        return 0.0
    if tensor.is_complex():
        return max(_steps(tensor.real, expected.real), _steps(tensor.imag, expected.imag))
    if not tensor.is_floating_point():
        wide = torch.int16 if tensor.dtype.itemsize == expected.dtype.itemsize == 1 else torch.int64
        return float((tensor.to(wide) - expected.to(wide)).abs().max())
    size = expected.abs()
    most = EPSILON * (size + size.mean()) + 1e-9
    if bool(((tensor - expected).abs() <= most).all()):
        return 0.0
    apart = (tensor.double() - expected.double()).abs()
    same = (tensor == expected) | (tensor.isnan() & expected.isnan())
    return float(torch.where(same, 0.0, apart / most).nan_to_num(nan=float("inf")).max())


def _taught(value: Any, expected: Any) -> Any:
    """Return ``expected`` in the memory layout of ``value``."""
    if not isinstance(value, Tensor) or not isinstance(expected, Tensor) or value.shape != expected.shape:
        return value
    if value.dtype != expected.dtype:
        return value
    return torch.empty_like(value).copy_(expected)


def fault_of_whole(
    expected: Any, reference: GraphModule, lowered: ConvertedModel, args: tuple[Any, ...]
) -> str:
    """Return what is wrong with the results of ``lowered``, called as the user calls it with ``args``.

    Nodes are judged apart: here results of another form are wrong, and noise above the signal. An empty
    string means that nothing is.

    Args:
        expected: the flat results of ``reference``.

    Raises:
        Exception: what ``lowered`` raises.
    """
    with kept_buffers(reference, but=torch.int8), alone_and_seeded(), lowered.saving_memory():
        result = lowered(*copied_inputs(args))
    (results, form), (others, expected_form) = map(
        pytree.tree_flatten, (result, reference.graph.process_outputs(expected))
    )
    if form != expected_form:
        return "its results have another structure than the reference's"
    for one, other in zip(results, others, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"it returns {tuple(one.shape)} of {one.dtype} for {tuple(other.shape)} of {other.dtype}"
        if one.is_floating_point() and bool(other.isfinite().all()):
            noise, signal = (value.double().pow(2).sum() for value in (one - other, other))
            if signal and not noise < signal:
                return "its results differ from the reference's by more than these are"
    return ""


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# Whether a model can run on integers where its state is, and in the dtype it computes in.


def why_not_here(reference: GraphModule) -> Decision | None:
    """Return the decision to run ``reference`` as it is; None if it can run on integers."""
    elsewhere = {str(tensor.device) for tensor in (*reference.parameters(), *reference.buffers())} - {"cpu"}
    others = _float_dtypes(reference) - {torch.float32}
    if not elsewhere and not others:
        return None
    reason = f"it computes in {', '.join(sorted(map(str, others)))}; the kernels take torch.float32"
    if elsewhere:
        reason = f"its state is on {', '.join(sorted(elsewhere))}; the kernels run on the CPU"
    return Decision("", "convert_fx", Action.REFERENCE, reason)


def _float_dtypes(reference: GraphModule) -> set[torch.dtype]:
    """Return the float dtypes of the inputs and of the dequantized values."""
    placeholders = reference.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in placeholders]
    given = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    result = {node.kwargs.get("out_dtype") for node in reference.graph.nodes if node.target in DEQUANTIZES}
    return {dtype for dtype in given | result if isinstance(dtype, torch.dtype) and dtype.is_floating_point}
