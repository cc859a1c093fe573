"""Check one spec at one point: that a tensor is there to quantize, and that torchao can make its observer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchao.quantization.pt2e.quantizer import (
    DerivedQuantizationSpec,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import QuantizationSpecBase as Spec

from torchq_compat.errors import AnnotationError, ConfigError
from torchq_compat.multi_output.edges_and_nodes import EdgeOrNode, Output, shown
from torchq_compat.qspecs.torch_ao_specs import with_torchao_observer
from torchq_compat.support.dtypes import is_integer

__all__ = ["checked_spec", "checked_value"]


def checked_spec(point: EdgeOrNode, spec: Any) -> Spec:
    """Return the ``spec`` of ``point``, with a torchao observer if it had one of torch.ao.

    Raises:
        AnnotationError: ``spec`` is not a spec, has no qscheme, or its observer cannot be made.
    """
    if not isinstance(spec, Spec):
        raise AnnotationError(
            f"the spec of {shown(point)} is a {type(spec).__name__}.",
            hint="use one of torchao's QuantizationSpec, FixedQParamsQuantizationSpec, "
            "SharedQuantizationSpec, DerivedQuantizationSpec, or None.",
        )
    if isinstance(spec, (FixedQParamsQuantizationSpec, DerivedQuantizationSpec)) and spec.qscheme is None:
        raise _without_qscheme(point, spec)
    if not isinstance(spec, QuantizationSpec):
        return spec
    try:
        translated, made = with_torchao_observer(spec, f"the spec of {shown(point)}")
    except ConfigError as cause:
        raise AnnotationError(cause.message, hint=cause.hint) from cause
    except Exception as cause:
        # torchao's observers report a qscheme of None as one that is not supported.
        if spec.qscheme is None:
            raise _without_qscheme(point, spec) from cause
        first_line = str(cause).strip().split("\n", 1)[0]
        raise AnnotationError(
            f"the observer of {shown(point)} cannot be made: {type(cause).__name__}: {first_line}",
            hint="torchao calls observer_or_fake_quant_ctr.with_args(dtype=, quant_min=, quant_max=, "
            "qscheme=, ch_axis=, is_dynamic=)(); see which of the spec's settings it refuses.",
        ) from cause
    # A block-wise observer of torchao has no qscheme, and no attribute for one.
    if getattr(made, "qscheme", spec) is None and is_integer(spec.dtype) and not spec.is_dynamic:
        raise _without_qscheme(point, spec)
    return translated


def checked_value(point: EdgeOrNode) -> None:
    """Refuse ``point`` if its value is known and is not a float tensor.

    Raises:
        AnnotationError: the value is an integer tensor, a tuple or a number.
    """
    source = point[0] if isinstance(point, tuple) else point
    node = source.node if isinstance(source, Output) else source
    value = node.meta.get("val")
    if value is None:
        return
    if isinstance(source, Output):
        value = value[source.index]
    if isinstance(value, Tensor) and value.dtype.is_floating_point:
        return
    found = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise AnnotationError(
        f"{shown(point)} is {found}, which cannot be quantized.",
        hint="give None as its spec; only floating point tensors are quantized, "
        "and of an operator with several outputs each output by itself.",
    )


def _without_qscheme(point: EdgeOrNode, spec: Spec) -> AnnotationError:
    return AnnotationError(
        f"the {type(spec).__name__} of {shown(point)} has no qscheme.",
        hint=f"give one: {type(spec).__name__}(..., qscheme=torch.per_tensor_affine).",
    )
