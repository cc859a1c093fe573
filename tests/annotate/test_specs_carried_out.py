"""Random graphs with random specs of the four kinds in random order: the converted graph has exactly the q-dq
that the specs ask for, or an error is raised; no spec is dropped silently.

Every spec has its own integer range, by which its q-dq is recognized in the converted graph.
"""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torchao.quantization.pt2e.fake_quantize import FusedMovingAvgObsFakeQuantize
from torchao.quantization.pt2e.observer import MinMaxObserver
from torchao.quantization.pt2e.quantizer import (
    ComposableQuantizer,
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

import torchq_compat as tc
from tests.helpers.chunked_models import product_of_scales
from torchq_compat import Output, annotate_outputs
from torchq_compat.errors import AnnotationError

OPS = torch.ops.quantized_decomposed
QUANTIZE, DEQUANTIZE = OPS.quantize_per_tensor.default, OPS.dequantize_per_tensor.default
KEY = "quantization_annotation"

#: ("node",) or ("node", index) for an output; ("source", index or None, "node") for an edge.
Name = tuple[Any, ...]


class Program(nn.Module):
    """A few ops in random order, most of them with several outputs; all values are returned."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        self.steps = [
            (
                choose.choice(["relu", "add", "chunk", "split", "topk", "max"]),
                choose.random(),
                choose.random(),
            )
            for _ in range(choose.randint(3, 6))
        ]

    def forward(self, x: Tensor) -> list[Tensor]:
        values, results = [x], []
        for op, first, second in self.steps:
            a, b = (values[int(each * len(values))] for each in (first, second))
            if op == "relu":
                values.append(torch.relu(a))
            elif op == "add":
                values.append(a + b)
            elif op == "topk":
                values.append(a.topk(8)[0])
            elif op == "max":
                largest, _ = a.max(1, keepdim=True)
                results.append(largest)
                values.append(b + largest)
            else:
                parts = a.chunk(2, 1) if op == "chunk" else a.split([3, 5], 1)
                results.extend(parts)
                values.append(torch.cat(parts, 1))
        return [*results, *values[1:]]


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def sources(node: Node) -> list[Node]:
    found: list[Node] = []
    map_arg(node.args, found.append)
    return found


def output_name(node: Node) -> Name:
    """Return the name of the output that ``node`` is."""
    if node.target is operator.getitem:
        producer, index = node.args
        return (producer.name, index)  # type: ignore[union-attr]
    return (node.name,)


def computing(graph_module: GraphModule) -> list[Node]:
    return [
        node
        for node in graph_module.graph.nodes
        if node.op == "call_function" and str(node.target).startswith("aten.")
    ]


def points(graph_module: GraphModule) -> dict[Name, Any]:
    """Return every point of the graph that can be quantized, by name: an Output, a node, or an edge from one
    of these."""
    found: dict[Name, Any] = {}
    for node in computing(graph_module):
        if not isinstance(node.meta["val"], (Tensor, tuple, list)):
            continue
        for source in sources(node):
            if is_float(source.meta.get("val")):
                name = output_name(source)
                stands = Output(source.args[0], name[1]) if len(name) == 2 else source  # type: ignore[arg-type]
                found[(name, node.name)] = (stands, node)
        if isinstance(node.meta["val"], Tensor):
            found[(node.name,)] = node
        else:
            for index, value in enumerate(node.meta["val"]):
                if is_float(value):
                    found[(node.name, index)] = Output(node, index)
    return found


class Told(Quantizer):
    """Writes ``specs`` on its share of the points, through plain annotations or with annotate_outputs."""

    def __init__(self, plan: Plan, share: int, shares: int) -> None:
        super().__init__()
        self.plan, self.share, self.shares = plan, share, shares

    def annotate(self, model: GraphModule) -> GraphModule:
        if self.share == 0:
            self.plan.decide(model)
        nodes = computing(model)
        self.plan.choose.shuffle(nodes)
        for node in nodes:
            if sum(map(ord, node.name)) % self.shares == self.share:
                self._annotate(node)
        return model

    def _annotate(self, node: Node) -> None:
        mine = {name: spec for name, spec in self.plan.specs.items() if self.plan.consumer(name) == node.name}
        if not mine:
            return
        several = isinstance(node.meta["val"], (tuple, list))
        edges = {self.plan.points[name][0]: spec for name, spec in mine.items() if isinstance(name[0], tuple)}
        count = len(node.meta["val"]) if several else 1
        outputs = [mine.get((node.name, index) if several else (node.name,)) for index in range(count)]
        if self.plan.choose.random() < 0.5:
            annotate_outputs(node, edges, outputs, allow_implicit_sharing=False)
            return
        by_node = {
            source: spec for source, spec in zip(sources(node), self._of(node, edges), strict=True) if spec
        }
        node.meta[KEY] = QuantizationAnnotation(
            input_qspec_map=by_node,
            output_qspec=outputs if several else outputs[0],
            allow_implicit_sharing=False,
            _annotated=True,
        )

    @staticmethod
    def _of(node: Node, edges: dict[Any, Any]) -> list[Any]:
        named = {}
        for source, spec in edges.items():
            named[(source.node.name, source.index) if isinstance(source, Output) else (source.name,)] = spec
        return [named.get(output_name(source)) for source in sources(node)]

    def validate(self, model: GraphModule) -> None:
        pass


class Plan:
    """Which points have which specs, drawn when the first graph is seen."""

    def __init__(self, seed: int, *, is_qat: bool) -> None:
        self.choose = random.Random(seed)
        self.seed = seed
        self.is_qat = is_qat

    def decide(self, model: GraphModule) -> None:
        self.choose = random.Random(self.seed)
        self.points = points(model)
        chosen = [name for name in self.points if self.choose.random() < 0.6]
        self.choose.shuffle(chosen)
        self.specs = {name: self._spec(number, name, chosen) for number, name in enumerate(chosen)}

    def _spec(self, number: int, name: Name, chosen: list[Name]) -> Any:
        kind = self.choose.choice(["own", "own", "own", "fixed", "shared", "shared", "derived"])
        others = [other for other in chosen if other != name]
        if kind == "fixed":
            return FixedQParamsQuantizationSpec(
                torch.int8, 1 / 16, number, -128, 127, torch.per_tensor_affine
            )
        if kind == "shared" and others:
            return SharedQuantizationSpec(self.points[self.choose.choice(others)])
        if kind == "derived" and others:
            return DerivedQuantizationSpec(
                [self.points[self.choose.choice(others)]],
                product_of_scales,
                torch.int32,
                -1000 - number,
                1000,
                torch.per_tensor_affine,
            )
        constructor = FusedMovingAvgObsFakeQuantize if self.is_qat else MinMaxObserver
        return QuantizationSpec(torch.int8, constructor, -127 + number, 127, torch.per_tensor_affine)

    @staticmethod
    def consumer(name: Name) -> str:
        return name[1] if isinstance(name[0], tuple) else name[0]

    def name_of(self, point: Any) -> Name:
        return next(name for name, each in self.points.items() if each == point)

    def root(self, name: Name) -> Name | None:
        """Return the point whose spec ``name`` uses; None in a circle."""
        seen: set[Name] = set()
        while isinstance(self.specs[name], SharedQuantizationSpec):
            if name in seen:
                return None
            seen.add(name)
            name = self.name_of(self.specs[name].edge_or_node)
        return name

    def mark(self, name: Name) -> tuple[Any, ...]:
        """Return what the q-dq of ``name`` is recognized by: (dtype, quant_min, zero point or None)."""
        root = self.root(name)
        assert root is not None
        spec = self.specs[root]
        if isinstance(spec, FixedQParamsQuantizationSpec):
            return spec.dtype, spec.quant_min, spec.zero_point
        return spec.dtype, spec.quant_min, None

    @property
    def may_be_refused(self) -> bool:
        has_derived = any(isinstance(spec, DerivedQuantizationSpec) for spec in self.specs.values())
        return has_derived or any(self.root(name) is None for name in self.specs)


def marks_before(node: Node, fixed: set[Any]) -> tuple[list[Any], Node]:
    """Return the marks of the q-dq pairs that end at ``node``, last first, and the node in front of them."""
    found = []
    while node.target is DEQUANTIZE:
        quantize = node.args[0]
        assert isinstance(quantize, Node)
        _, _, zero_point, low, _, dtype = quantize.args
        mark = (dtype, low, zero_point)
        found.append(mark if mark in fixed else (dtype, low, None))
        node = quantize.args[0]  # type: ignore[assignment]
    return found, node


def check(plan: Plan, converted: GraphModule) -> int:
    """Assert that ``converted`` has the q-dq of ``plan`` at every place; return the number of specs."""
    fixed = {mark for name in plan.specs if (mark := plan.mark(name))[2] is not None}

    def compare(reader: Node, consumer: str | None) -> None:
        found, source = marks_before(reader, fixed)
        if not is_float(source.meta.get("val")):
            return
        name = output_name(source)
        expected = [plan.mark(name)] if name in plan.specs else []
        edge = (name, consumer)
        if edge in plan.specs and plan.mark(edge) not in expected:
            expected.insert(0, plan.mark(edge))
        # An observer shared by both ends of an edge may leave one pair or two.
        assert found in (expected, expected + expected[:1] if edge in plan.specs else expected), (edge, found)

    for node in computing(converted):
        for reader in sources(node):
            compare(reader, node.name)
    for reader in converted.graph.output_node().all_input_nodes:
        compare(reader, None)
    return len(plan.specs)


SEEDS = [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 120))]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_q_dq_found_is_the_q_dq_asked_for(seed: int) -> None:
    is_qat, shares = bool(seed % 2), 1 + seed // 2 % 2
    plan = Plan(seed, is_qat=is_qat)
    quantizers: list[Quantizer] = [Told(plan, share, shares) for share in range(shares)]
    quantizer = quantizers[0] if shares == 1 else ComposableQuantizer(quantizers)
    model, x = Program(seed), torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
    prepare = tc.prepare_qat_fx if is_qat else tc.prepare_fx
    fixed = torch.export.Dim.STATIC
    refusal = None
    try:
        prepared = prepare(model.train(is_qat), quantizer, (x,), dynamic_shapes=([fixed, fixed],))
    except AnnotationError as error:
        refusal = error
    if refusal is not None:
        assert plan.may_be_refused, refusal
        assert refusal.hint
        return
    prepared(x)
    assert all(plan.root(name) is not None for name in plan.specs)
    assert check(plan, tc.convert_to_reference_fx(prepared)) > 0
