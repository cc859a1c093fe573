"""What can be wrong with annotations of outputs and with sharing, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from torchq_compat.errors import TorchQCompatError

__all__ = ["AnnotationError"]


class AnnotationError(TorchQCompatError, ValueError):
    """Specs that cannot be carried out on the graph they are for."""

    @classmethod
    def no_value(cls, node: Node) -> AnnotationError:
        return cls(
            f"node {node.name!r} ({node.target}) carries no example value, so its outputs are not known.",
            hint="annotate a graph captured by torch.export, whose nodes have meta['val'].",
        )

    @classmethod
    def output_count(cls, node: Node, expected: int, given: int) -> AnnotationError:
        return cls(
            f"{given} output specs were given for node {node.name!r} ({node.target}), "
            f"which has {expected} outputs.",
            hint="give one spec per output, in order; None leaves an output alone.",
        )

    @classmethod
    def no_such_output(cls, node: Node, index: int, count: int) -> AnnotationError:
        return cls(
            f"output {index} of node {node.name!r} ({node.target}) does not exist: it has {count}.",
            hint=f"outputs are numbered from 0 to {count - 1}.",
        )

    @classmethod
    def not_quantizable(cls, point: str, found: str) -> AnnotationError:
        return cls(
            f"{point} is {found}, which cannot be quantized.",
            hint="give None as its spec; only floating point tensors lie on a quantization grid.",
        )

    @classmethod
    def not_an_input(cls, node: Node, given: str) -> AnnotationError:
        return cls(
            f"{given} is no positional input of node {node.name!r} ({node.target}).",
            hint="its inputs are: "
            + ", ".join(argument.name for argument in node.all_input_nodes)
            + ". torchao observes positional arguments only.",
        )

    @classmethod
    def not_a_spec(cls, point: str, found: object) -> AnnotationError:
        return cls(
            f"the spec of {point} is a {type(found).__name__}.",
            hint="use one of torchao's QuantizationSpec, FixedQParamsQuantizationSpec, "
            "SharedQuantizationSpec, DerivedQuantizationSpec, or None.",
        )

    @classmethod
    def erased(cls, name: str) -> AnnotationError:
        return cls(
            f"a spec refers to node {name!r}, which is no longer in the graph.",
            hint="refer to an output as Output(node, index): getitem nodes of the same output are merged.",
        )

    @classmethod
    def cycle(cls, points: Sequence[str]) -> AnnotationError:
        chain = "; ".join(
            f"{point} takes its qparams from {source}"
            for point, source in zip(points, [*points[1:], points[0]], strict=True)
        )
        return cls(
            f"the specs go round in a circle: {chain}.",
            hint="give one of them a QuantizationSpec or FixedQParamsQuantizationSpec of its own.",
        )

    @classmethod
    def conflict(cls, point: str, told: str, already: str) -> AnnotationError:
        return cls(
            f"two specs meet at {point}: it is told {told}, but it already has {already}.",
            hint="leave one of the two specs out, or put a quantizer first that skips annotated nodes.",
        )

    @classmethod
    def unobserved(cls, point: str, source: str) -> AnnotationError:
        return cls(
            f"{point} takes its qparams from {source}, which no spec observes.",
            hint=f"annotate {source} as well; an edge is (producer, node), an output Output(node, index).",
        )

    @classmethod
    def too_late(cls, point: str, source: str) -> AnnotationError:
        return cls(
            f"the qparams of {point} are derived from {source}, which comes later in the graph.",
            hint="torchao makes observers in graph order; derive from points before it, or let an earlier "
            "point share the observer of the later one and derive from that.",
        )
