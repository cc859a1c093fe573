"""For users of torchao Quantizers: PT2E's flow with every annotation carried out, or refused by name.

``prepare_pt2e``, ``prepare_qat_pt2e`` and ``convert_pt2e`` take and return what those of torchao do. torchao
silently drops an ``output_qspec`` of an operator with several outputs, a spec on an edge that it does not
observe, and observers of torch.ao; here each becomes an observer, or an error that names the edge. The other
names annotate and check operators with several outputs, and the recurrent operators of exported programs.
"""

import copy
from collections import Counter
from functools import partial
from types import MethodType
from typing import Any

from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
from torchao.quantization.pt2e.quantizer import Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from torchq_compat.annotate.outputs import annotate_outputs, check_annotations, check_sharing
from torchq_compat.annotate.quantizers import (
    QuantizerFailedError,
    UserQuantizer,
    is_annotated,
    quantizer_from,
)
from torchq_compat.annotate.sharing import Output
from torchq_compat.annotate.tuple_rerouting import reroute_tuples
from torchq_compat.ops import preserves_values
from torchq_compat.recurrent.exported_lstm.decompose import (
    convert_decomposed_lstm,
    decompose_lstm,
    decompose_recurrent,
    prepare_decomposed_lstm,
)
from torchq_compat.recurrent.exported_lstm.whole_op import (
    whole_op_lstm_quantizer,
    whole_op_recurrent_quantizer,
)
from torchq_compat.support import process_state
from torchq_compat.support.argument_checks import FLAG, checked_arguments, instance_of
from torchq_compat.support.decisions import warn_of_decisions
from torchq_compat.support.graph_nodes import tensors_in
from torchq_compat.support.user_warnings import warn_user

__all__ = [
    "Output",
    "annotate_outputs",
    "check_annotations",
    "check_sharing",
    "convert_decomposed_lstm",
    "convert_pt2e",
    "decompose_lstm",
    "decompose_recurrent",
    "prepare_decomposed_lstm",
    "prepare_pt2e",
    "prepare_qat_pt2e",
    "quantizer_from",
    "reroute_tuples",
    "whole_op_lstm_quantizer",
    "whole_op_recurrent_quantizer",
]

GRAPH = instance_of(GraphModule, what="a GraphModule, as torch.export.export(...).module() returns")
QUANTIZER = instance_of(Quantizer, what="a torchao Quantizer")
#: How many places a warning names.
NAMED = 5


@checked_arguments(model=GRAPH, quantizer=QUANTIZER)
def prepare_pt2e(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Return ``model`` with the observers that ``quantizer`` annotates, for calibration.

    An ``output_qspec`` on an operator with several outputs means each float output; a sequence means one by
    one. Specs may share with points that are annotated later, and have torch.ao's observers.

    Args:
        model: an exported module, as ``torch.export.export(...).module()`` returns. It keeps an equal graph;
            the result has its parameters and buffers, and the Quantizer is given its nodes, as by torchao.
        quantizer: any torchao Quantizer; its ``transform_for_annotation`` and ``validate`` are called.

    Raises:
        AnnotationError: an annotation cannot be carried out; the message names node or edge.
        ArgumentError: an argument is of another type.

    Warns:
        QuantizationWarning: TQ415, torchao observes nothing where a spec is; TQ423, ops without annotation.

    Example:
        >>> import torch
        >>> from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        ...     X86InductorQuantizer, get_default_x86_inductor_quantization_config as config)
        >>> from torchq_compat.pt2e import convert_pt2e, prepare_pt2e
        >>> x = torch.randn(3, 4)
        >>> exported = torch.export.export(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), (x,)).module()
        >>> prepared = prepare_pt2e(exported, X86InductorQuantizer().set_global(config()))
        >>> _ = prepared(x)
        >>> convert_pt2e(prepared)(x).shape
        torch.Size([3, 2])
    """
    return _prepare(model, quantizer, is_qat=False)


@checked_arguments(model=GRAPH, quantizer=QUANTIZER)
def prepare_qat_pt2e(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Return ``model`` with fake-quantizes, for training; otherwise as ``prepare_pt2e``.

    Raises:
        AnnotationError: an annotation cannot be carried out; the message names node or edge.
        ArgumentError: an argument is of another type.

    Example:
        >>> import torch
        >>> from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        ...     X86InductorQuantizer, get_default_x86_inductor_quantization_config as config)
        >>> from torchq_compat.pt2e import prepare_qat_pt2e
        >>> x = torch.randn(3, 4)
        >>> exported = torch.export.export(torch.nn.Sequential(torch.nn.Linear(4, 2)), (x,)).module()
        >>> prepared = prepare_qat_pt2e(exported, X86InductorQuantizer().set_global(config(is_qat=True)))
        >>> prepared(x).sum().backward()
    """
    return _prepare(model, quantizer, is_qat=True)


@checked_arguments(model=GRAPH, use_reference_representation=FLAG, fold_quantize=FLAG)
def convert_pt2e(
    model: GraphModule, use_reference_representation: bool = False, fold_quantize: bool = True
) -> GraphModule:
    """Return the q-dq form of a calibrated or trained ``model``; torchao's ``convert_pt2e``.

    Args:
        use_reference_representation: as in torchao.
        fold_quantize: whether weights are stored as integers.

    Raises:
        ArgumentError: an argument is of another type.
    """
    converted = process_state.convert_pt2e(
        model, use_reference_representation=use_reference_representation, fold_quantize=fold_quantize
    )
    return _switching_modes(converted)


def _switching_modes(model: GraphModule) -> GraphModule:
    """Let ``train()`` and ``eval()``, which torchao refuses, switch dropouts and batch norms of ``model``."""

    def train(self: GraphModule, mode: bool = True) -> GraphModule:
        with process_state.alone():
            (move_exported_model_to_train if mode else move_exported_model_to_eval)(self)
        return self

    vars(model)["train"] = MethodType(train, model)
    vars(model)["eval"] = MethodType(partial(train, mode=False), model)
    return model


def _prepare(model: GraphModule, quantizer: Quantizer, *, is_qat: bool) -> GraphModule:
    checked = _CheckedQuantizer(quantizer, model)
    try:
        prepared = process_state.prepare_pt2e(_with_nodes_of(model), checked, is_qat=is_qat)
    except QuantizerFailedError as failed:
        raise failed.raised from failed.raised.__cause__
    assert checked.outer is not None
    checked.outer.show_checks(prepared)
    warn_of_decisions(checked.decisions(prepared))
    if left := checked.without_annotation:
        shown = ", ".join(f"{target} x{count}" for target, count in left.most_common(NAMED))
        more = f" and {len(left) - NAMED} other operators" if len(left) > NAMED else ""
        warn_user("TQ423", quantizer=type(quantizer).__name__, ops=f"{shown}{more}")
    return _switching_modes(prepared)


def _with_nodes_of(model: GraphModule) -> GraphModule:
    """Return a module with the tensors of ``model``, which an optimizer may hold, and its nodes, which its
    Quantizer may; ``model`` gets copies of its graphs."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied: GraphModule = copy.deepcopy(model, tensors)
    for path, module in copied.named_modules():
        if isinstance(module, GraphModule):
            given: Any = model.get_submodule(path)
            given.graph, module.graph = module.graph, given.graph
    return copied


class _CheckedQuantizer(UserQuantizer):
    """A user's ``quantizer``, whose annotations are checked, and that counts what it does not annotate."""

    def __init__(self, quantizer: Quantizer, model: GraphModule) -> None:
        super().__init__(quantizer, {}, model)
        self.without_annotation: Counter[str] = Counter()

    def validate(self, model: GraphModule) -> None:
        super().validate(model)
        self.without_annotation += Counter(
            str(node.target)
            for node in model.graph.nodes
            if node.op == "call_function"
            and node.all_input_nodes
            and any(value.is_floating_point() for value in tensors_in(node.meta.get("val")))
            and not preserves_values(node)
            and not is_annotated(node)
            and not any(_is_fused_into(node, user) for user in node.users)
        )


def _is_fused_into(node: Node, user: Node) -> bool:
    """Return whether ``user`` is annotated, and not where it reads ``node``: as the last op of a pattern."""
    return is_annotated(user) and user.meta[Q_ANNOTATION_KEY].input_qspec_map.get(node) is None
