"""The group rules of torchao's prepare, on operators with several outputs: one test for every example in the
docstrings and comments of its source (torch/ao/quantization/pt2e/prepare.py), then circles and conflicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.observer import MinMaxObserver, PlaceholderObserver
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

from tests.helpers.chunked_models import ATEN, FIXED, UINT8, X, derived, export, int8
from torchq_compat import Output, annotate_outputs, check_sharing
from torchq_compat.errors import AnnotationError

INT8 = int8()
DYNAMIC = QuantizationSpec(
    torch.int8, PlaceholderObserver.with_args(eps=2**-12), -128, 127, torch.per_tensor_affine, is_dynamic=True
)
Shared = SharedQuantizationSpec
Nodes = dict[str, Node]


class Written(Quantizer):
    """A quantizer whose annotations ``write`` makes, given the graph's nodes by name."""

    def __init__(self, write: Callable[[Nodes], None]) -> None:
        super().__init__()
        self.write = write
        self.observers: dict[Any, Any] = {}

    def annotate(self, model: GraphModule) -> GraphModule:
        self.write({node.name: node for node in model.graph.nodes})
        return model

    def validate(self, model: GraphModule) -> None:
        check_sharing(model)

    def prepare_obs_or_fq_callback(self, model: GraphModule, observers: dict[Any, Any]) -> None:
        self.observers = observers


def groups(function: Callable[..., Any], write: Callable[[Nodes], None]) -> list[set[str]]:
    """Return the groups of points that share an observer, each point as "a", or "a->b" for an edge."""
    quantizer = Written(write)
    prepared = prepare_pt2e(export(function, X), quantizer)
    prepared(X)
    by_observer: dict[int, set[str]] = {}
    for point, observer in quantizer.observers.items():
        name = f"{point[0].name}->{point[1].name}" if isinstance(point, tuple) else point.name
        by_observer.setdefault(id(observer), set()).add(name)
    return sorted(by_observer.values(), key=sorted)


def prepared_with(
    function: Callable[..., Any], write: Callable[[Nodes], None], x: Tensor = X, modules: Any = ()
) -> GraphModule:
    prepared: GraphModule = prepare_pt2e(export(function, x, modules), Written(write))
    prepared(x)
    return prepared


def observer_nodes(prepared: GraphModule) -> list[Node]:
    return [n for n in prepared.graph.nodes if n.op == "call_module" and "post_process" in str(n.target)]


# -- _update_shared_with: "qspec for a = SharedQuantizationSpec(b) means `a` points to `b`"


def test_a_points_to_b() -> None:
    def write(n: Nodes) -> None:
        annotate_outputs(n["chunk"], {n["x"]: INT8}, [Shared((n["x"], n["chunk"])), UINT8])

    found = groups(lambda x: x.chunk(2), write)
    assert found == [{"getitem", "x->chunk"}, {"getitem_1"}]


# -- _unwrap_shared_qspec: "recursively find the root qspec based on the qspec for the root node"


def test_shared_of_shared_finds_the_root() -> None:
    """To share the last point of a chain implicitly with its consumer, the chain's end must have the spec."""

    def write(n: Nodes) -> None:
        chunk, relu = n["chunk"], n["relu"]
        annotate_outputs(chunk, {}, [INT8, Shared(Output(chunk, 0)), Shared(Output(chunk, 1))])
        annotate_outputs(relu, {Output(chunk, 2): INT8}, [None])

    found = groups(lambda x: (*x.chunk(3)[:2], x.chunk(3)[2].relu()), write_on_one_chunk(write))
    assert found == [{"getitem", "getitem_1", "getitem_2", "getitem_2->relu"}]


def write_on_one_chunk(write: Callable[[Nodes], None]) -> Callable[[Nodes], None]:
    """Call ``write`` on a graph with the second chunk merged into the first: one op with three outputs."""

    def merged(n: Nodes) -> None:
        if "chunk_1" in n:
            n["chunk_1"].replace_all_uses_with(n["chunk"])
            n["chunk_1"].graph.erase_node(n["chunk_1"])
        write(n)

    return merged


# -- _get_edge_or_node_to_group_id: "op1 -> op2 ... we'll assume sharing between the output of op1 and input
#    of (op1 -> op2) since these are the same Tensor"


def op1_op2(spec1: Any, spec2: Any, **options: Any) -> list[set[str]]:
    def write(n: Nodes) -> None:
        annotate_outputs(n["chunk"], {}, [spec1, None])
        annotate_outputs(n["relu"], {Output(n["chunk"], 0): spec2}, [None], **options)

    return groups(lambda x: x.chunk(2)[0].relu(), write)


def test_implicit_sharing_of_an_output_with_its_consumer() -> None:
    assert op1_op2(INT8, INT8) == [{"getitem", "getitem->relu"}]


def test_no_implicit_sharing_when_told_not_to() -> None:
    assert op1_op2(INT8, INT8, allow_implicit_sharing=False) == [{"getitem"}, {"getitem->relu"}]


# -- _has_same_dtype, _has_same_is_dynamic


@pytest.mark.parametrize("other", [UINT8, DYNAMIC, FIXED], ids=["dtype", "is_dynamic", "fixed"])
def test_no_implicit_sharing_of_different_settings(other: Any) -> None:
    assert op1_op2(INT8, other) == [{"getitem"}, {"getitem->relu"}]


# -- The example of _get_edge_or_node_to_group_id:
#        op2 -> cat1 -> cat2
#           op1 /        /
#                     op3


def cats(x: Tensor) -> Tensor:
    op1, op2, op3 = x.chunk(3)
    return torch.cat([torch.cat([op1, op2]), op3])


def cat_specs(n: Nodes, cat1: Any, cat2: Any) -> None:
    op1, op2, op3 = (Output(n["chunk"], index) for index in range(3))
    annotate_outputs(n["chunk"], {}, [INT8, INT8, None])
    annotate_outputs(n["cat"], {op1: INT8, op2: Shared((op1, n["cat"]))}, [cat1])
    annotate_outputs(n["cat_1"], {op3: INT8, n["cat"]: Shared((op3, n["cat_1"]))}, [cat2])


def test_everything_around_two_cats_is_one_group() -> None:
    """op1, op2 and op3 are outputs of one operator."""

    def write(n: Nodes) -> None:
        op1, op3 = Output(n["chunk"], 0), Output(n["chunk"], 2)
        cat_specs(n, Shared((op1, n["cat"])), Shared((op3, n["cat_1"])))

    assert groups(cats, write) == [
        {
            "getitem",
            "getitem_1",
            "getitem->cat",
            "getitem_1->cat",
            "cat",
            "getitem_2->cat_1",
            "cat->cat_1",
            "cat_1",
        }
    ]


def test_without_the_implicit_link_the_cats_are_two_groups() -> None:
    """The same graph with another dtype behind cat1: nothing connects the two groups."""

    def write(n: Nodes) -> None:
        op3 = Output(n["chunk"], 2)
        cat_specs(n, UINT8, Shared((op3, n["cat_1"])))

    assert groups(cats, write) == [
        {"cat"},
        {"cat->cat_1", "cat_1", "getitem_2->cat_1"},
        {"getitem", "getitem->cat", "getitem_1", "getitem_1->cat"},
    ]


# -- "node1 -> node2, \-> node3": the order in which edges of one tensor are joined must not make a circle


def node1_node2_node3(x: Tensor) -> tuple[Tensor, Tensor]:
    node1 = x.chunk(2)[0]
    return node1.relu(), node1.sigmoid()


@pytest.mark.parametrize("order", [("relu", "sigmoid"), ("sigmoid", "relu")])
@pytest.mark.parametrize("output", [INT8, None])
def test_two_consumers_share_with_each_other_and_the_producer(order: tuple[str, str], output: Any) -> None:
    def write(n: Nodes) -> None:
        for name in order:
            annotate_outputs(n[name], {Output(n["chunk"], 0): INT8}, [None])
        annotate_outputs(n["chunk"], {}, [output, None])

    edges = {"getitem->relu", "getitem->sigmoid"}
    assert groups(node1_node2_node3, write) == [edges | ({"getitem"} if output else set())]


@pytest.mark.parametrize("first", ["relu", "sigmoid"])
def test_consumers_that_point_at_each_other_and_the_producer(first: str) -> None:
    """Explicit on top of implicit, in either direction: still one group."""
    second = {"relu": "sigmoid", "sigmoid": "relu"}[first]

    def write(n: Nodes) -> None:
        node1 = Output(n["chunk"], 0)
        annotate_outputs(n[first], {node1: Shared((node1, n[second]))}, [None])
        annotate_outputs(n[second], {node1: Shared(node1)}, [None])
        annotate_outputs(n["chunk"], {}, [INT8, None])

    assert groups(node1_node2_node3, write) == [{"getitem", "getitem->relu", "getitem->sigmoid"}]


# -- _maybe_insert_input_observer_for_arg_or_kwarg


def test_inputs_inside_a_list_are_observed() -> None:
    """ "for ops such as torch.cat([x0, x1]), traverse through the list" """

    def write(n: Nodes) -> None:
        x0, x1 = Output(n["chunk"], 0), Output(n["chunk"], 1)
        annotate_outputs(n["cat"], {x0: INT8, x1: UINT8}, [None])

    prepared = prepared_with(lambda x: torch.cat(x.chunk(2)), write)
    (cat,) = [n for n in prepared.graph.nodes if n.target is ATEN.cat.default]
    dtypes = [prepared.get_submodule(str(arg.target)).dtype for arg in cat.args[0]]
    assert dtypes == [torch.int8, torch.uint8]


def test_an_input_that_shares_with_its_producer_has_no_second_observer() -> None:
    """ "we'll reuse the inserted observer" """
    prepared = prepared_with(
        lambda x: x.chunk(2)[0].relu(),
        lambda n: (
            annotate_outputs(n["chunk"], {}, [INT8, None]),
            annotate_outputs(n["relu"], {Output(n["chunk"], 0): INT8}, [None]),
        )[0],
    )
    (observer,) = observer_nodes(prepared)
    assert [user.name for user in observer.users] == ["relu"]


def test_an_existing_observer_is_reused_for_another_consumer() -> None:
    """conv1 -> obs1 -> existing_obs -> conv2, and conv3 behind existing_obs: no second existing_obs."""
    conv1, conv2, conv3 = (nn.Conv1d(4, 4, 1) for _ in range(3))
    modules = (conv1, conv2, conv3)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = conv1(x.chunk(2, 1)[0])
        return conv2(y), conv3(y)

    def write(n: Nodes) -> None:
        annotate_outputs(n["conv1d"], {}, [UINT8])
        for name in ("conv1d_1", "conv1d_2"):
            annotate_outputs(n[name], {n["conv1d"]: INT8}, [None])

    prepared = prepared_with(function, write, torch.randn(2, 8, 5), modules)
    obs1, existing = observer_nodes(prepared)
    assert existing.args == (obs1,)
    assert {user.name for user in existing.users} == {"conv1d_1", "conv1d_2"}
    assert list(obs1.users) == [existing]


def test_the_same_for_the_consumers_of_an_output() -> None:
    def write(n: Nodes) -> None:
        annotate_outputs(n["chunk"], {}, [UINT8, None])
        for name in ("relu", "sigmoid"):
            annotate_outputs(n[name], {Output(n["chunk"], 0): INT8}, [None])

    prepared = prepared_with(node1_node2_node3, write)
    obs1, existing = observer_nodes(prepared)
    assert existing.args == (obs1,)
    assert {user.name for user in existing.users} == {"relu", "sigmoid"}


# -- _maybe_insert_input_observers_for_node: "prev_node -> cur_node" to "prev_node -> obs -> cur_node"


def test_an_observer_goes_between_an_output_and_its_consumer() -> None:
    write = lambda n: annotate_outputs(n["relu"], {Output(n["chunk"], 0): INT8}, [None])  # noqa: E731
    prepared = prepared_with(lambda x: x.chunk(2)[0].relu(), write)
    (observer,) = observer_nodes(prepared)
    assert (observer.args[0].name, next(iter(observer.users)).name) == ("getitem", "relu")


def test_keywords_of_clone_and_gelu_persist() -> None:
    """ "Clone has a memory_format kwarg ... and gelu has an approximate kwarg that persist" """

    def function(x: Tensor) -> tuple[Tensor, ...]:
        first, second = x.chunk(2)
        return first.clone(memory_format=torch.contiguous_format), nn.functional.gelu(
            second, approximate="tanh"
        )

    def write(n: Nodes) -> None:
        annotate_outputs(n["clone"], {Output(n["chunk"], 0): INT8}, [None])
        annotate_outputs(n["gelu"], {Output(n["chunk"], 1): INT8}, [INT8])

    prepared = prepared_with(function, write)
    keywords = {n.name: dict(n.kwargs) for n in prepared.graph.nodes if n.name in ("clone", "gelu")}
    assert keywords == {
        "clone": {"memory_format": torch.contiguous_format},
        "gelu": {"approximate": "tanh"},
    }


# -- _maybe_insert_input_and_output_observers_for_node: "cur_node -> obs", "next_node" behind obs


def test_every_consumer_of_an_output_moves_behind_its_observer() -> None:
    prepared = prepared_with(node1_node2_node3, lambda n: annotate_outputs(n["chunk"], {}, [INT8, None]), X)
    (observer,) = observer_nodes(prepared)
    assert {user.name for user in observer.users} == {"relu", "sigmoid"}
    assert list(observer.args[0].users) == [observer]


# -- one observer for a group: its range covers all points of the group


def test_a_group_has_one_range() -> None:
    def write(n: Nodes) -> None:
        chunk = n["chunk"]
        annotate_outputs(chunk, {}, [INT8, Shared(Output(chunk, 0))])

    prepared = prepared_with(lambda x: x.chunk(2), write)
    observers = {id(m): m for m in prepared.modules() if isinstance(m, MinMaxObserver)}
    (observer,) = observers.values()
    assert (observer.min_val, observer.max_val) == (X.min(), X.max())


# -- circles


def refused(write: Callable[[Nodes], None], function: Callable[..., Any] = node1_node2_node3) -> str:
    graph_module = export(function, X)
    with pytest.raises(AnnotationError) as error:
        prepare_pt2e(graph_module, Written(write))
    assert "\nHint: " in str(error.value)
    return str(error.value)


def test_two_outputs_that_share_with_each_other() -> None:
    def write(n: Nodes) -> None:
        chunk = n["chunk"]
        annotate_outputs(chunk, {}, [Shared(Output(chunk, 1)), Shared(Output(chunk, 0))])

    message = refused(write)
    assert "output 0 of chunk takes its qparams from output 1 of chunk" in message
    assert "output 1 of chunk takes its qparams from output 0 of chunk" in message


def test_two_edges_that_share_with_each_other() -> None:
    def write(n: Nodes) -> None:
        node1 = Output(n["chunk"], 0)
        annotate_outputs(n["relu"], {node1: Shared((node1, n["sigmoid"]))}, [None])
        annotate_outputs(n["sigmoid"], {node1: Shared((node1, n["relu"]))}, [None])

    message = refused(write)
    assert "the edge (output 0 of chunk -> relu)" in message
    assert "the edge (output 0 of chunk -> sigmoid)" in message


def test_an_edge_that_shares_with_itself() -> None:
    message = refused(lambda n: annotate_outputs(n["relu"], {}, [Shared(n["relu"])]))
    assert "the output of relu takes its qparams from the output of relu" in message


def test_a_circle_through_a_derived_spec() -> None:
    def write(n: Nodes) -> None:
        chunk = n["chunk"]
        annotate_outputs(chunk, {}, [derived(Output(chunk, 1)), Shared(Output(chunk, 0))])

    message = refused(write)
    assert "output 0 of chunk takes its qparams from output 1 of chunk" in message


# -- conflicts


def test_an_output_told_to_share_that_has_another_dtype() -> None:
    """Two quantizers: the first set uint8 for the output, the second shares the input's int8 qparams."""

    def write(n: Nodes) -> None:
        chunk, x = n["chunk"], n["x"]
        annotate_outputs(chunk, {}, [UINT8, None])
        annotate_outputs(chunk, {x: INT8}, [Shared((x, chunk)), None])

    message = refused(write)
    assert "output 0 of chunk" in message
    assert "to share the observer of the edge (x -> chunk) (a QuantizationSpec of int8)" in message
    assert "already has a QuantizationSpec of uint8" in message


def test_an_edge_told_to_share_that_has_another_dtype() -> None:
    def write(n: Nodes) -> None:
        node1 = Output(n["chunk"], 0)
        annotate_outputs(n["sigmoid"], {node1: UINT8}, [None])
        annotate_outputs(n["relu"], {node1: INT8}, [None])
        annotate_outputs(n["relu"], {node1: Shared((node1, n["sigmoid"]))}, [None])

    message = refused(write)
    assert "the edge (output 0 of chunk -> relu)" in message
    assert "the edge (output 0 of chunk -> sigmoid) (a QuantizationSpec of uint8)" in message
    assert "a QuantizationSpec of int8" in message


def test_getitems_of_one_output_with_different_dtypes() -> None:
    """The getitems are one tensor, so they share; two handwritten specs for it contradict each other."""
    graph_module = export(node1_node2_node3, X)
    chunk = next(n for n in graph_module.graph.nodes if n.target is ATEN.chunk.default)
    getitem = next(iter(chunk.users))
    with graph_module.graph.inserting_after(getitem):
        duplicate = graph_module.graph.node_copy(getitem)
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

    for node, spec in ((getitem, INT8), (duplicate, UINT8)):
        node.meta["quantization_annotation"] = QuantizationAnnotation(output_qspec=spec)
    with pytest.raises(AnnotationError, match="output 0 of chunk: it is given a QuantizationSpec of uint8"):
        annotate_outputs(chunk, {}, [None, INT8])


def test_a_reference_to_what_nothing_observes() -> None:
    message = refused(lambda n: annotate_outputs(n["relu"], {}, [Shared(Output(n["chunk"], 1))]))
    assert "the output of relu takes its qparams from output 1 of chunk, which no spec observes" in message


def test_a_reference_into_another_graph() -> None:
    """The nodes of that graph have the same names."""
    other = next(node for node in export(node1_node2_node3, X).graph.nodes if node.name == "relu")
    message = refused(lambda n: annotate_outputs(n["relu"], {Output(n["chunk"], 0): Shared(other)}, [INT8]))
    assert "takes its qparams from the output of relu of another graph" in message


def test_a_derived_spec_cannot_look_ahead() -> None:
    def write(n: Nodes) -> None:
        annotate_outputs(n["relu"], {}, [UINT8])
        annotate_outputs(n["chunk"], {n["x"]: derived(n["relu"])}, [INT8, None])

    message = refused(write)
    assert "the edge (x -> chunk) are derived from the output of relu, which comes later" in message
