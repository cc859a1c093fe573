"""One case through FX live and through us, and everything in which they differ."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import torchq_compat as tc
from tests.helpers.oracle import activation_qparams, fx_activation_qparams, leaves
from tests.parity.cases import Case
from tests.parity.configs import BACKENDS, MAPPINGS, QAT_MAPPINGS
from tests.parity.fx_decisions import quantized_by_fx, quantized_by_us
from tests.parity.models import MODELS
from torchq_compat.errors import TorchQCompatError

__all__ = ["differences"]

BATCHES = 3
SHARE_WITHIN_ONE_STEP = 0.999


def differences(case: Case) -> set[str]:
    """In what the two sides differ: "refusal", "ops", "qparams", "outputs", or nothing."""
    torch.manual_seed(0)
    entry = MODELS[case.model]
    is_qat = case.mapping in QAT_MAPPINGS
    make_mapping = {**MAPPINGS, **QAT_MAPPINGS}[case.mapping]
    model = _with_statistics(entry.make()).train(is_qat)
    batches = [entry.batch() for _ in range(BATCHES)]
    sides: dict[str, tuple[GraphModule, GraphModule] | None] = {}
    for name, engine, refusals in (("fx", fx, Exception), ("ours", tc, TorchQCompatError)):
        try:
            sides[name] = _run(engine, model, batches, make_mapping(), BACKENDS[case.backend](), is_qat)
        except refusals:
            sides[name] = None
    theirs, ours = sides["fx"], sides["ours"]
    if theirs is None or ours is None:
        return {"refusal"} if theirs is not ours else set()
    found = set()
    if quantized_by_fx(theirs[0]) != quantized_by_us(ours[0]):
        found.add("ops")
    if not _same_qparams(theirs[1], ours[1], 1e-4 if is_qat else 1e-6):
        found.add("qparams")
    if not _same_outputs(theirs[1], ours[1], batches[0]):
        found.add("outputs")
    return found


def _run(
    engine: Any, model: nn.Module, batches: list[Any], mapping: Any, backend: Any, is_qat: bool
) -> tuple[GraphModule, GraphModule]:
    """(prepared, converted to its reference form) by ``engine``: FX's module, or ours."""
    prepare = engine.prepare_qat_fx if is_qat else engine.prepare_fx
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare(copy.deepcopy(model), mapping, batches[0], backend_config=backend)
        with torch.no_grad():
            for batch in batches:
                prepared(*batch)
        return prepared, engine.convert_to_reference_fx(
            copy.deepcopy(prepared).eval(), backend_config=backend
        )


def _with_statistics(model: nn.Module) -> nn.Module:
    """Batch norms as after training, so that folding them is no identity."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.2)
            nn.init.normal_(module.running_mean, 0.0, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def _same_qparams(theirs: GraphModule, ours: GraphModule, tolerance: float) -> bool:
    """Equal zero points; scales to ``tolerance``, since training sums in another order."""
    a, b = sorted(fx_activation_qparams(theirs)), sorted(activation_qparams(ours))
    return len(a) == len(b) and all(
        abs(p[0] - q[0]) <= tolerance * p[0] + 1e-9 and p[1] == q[1] for p, q in zip(a, b, strict=True)
    )


def _same_outputs(theirs: GraphModule, ours: GraphModule, batch: tuple[Tensor, ...]) -> bool:
    with torch.no_grad():
        a, b = leaves(theirs(*batch)), leaves(ours(*batch))
    shares = itertools.starmap(_share_within, zip(_output_steps(theirs, a), a, b, strict=True))
    return all(share >= SHARE_WITHIN_ONE_STEP for share in shares)


def _output_steps(converted: GraphModule, results: list[Tensor]) -> Iterator[float]:
    """One quantization step of each result: of the quantize behind it, or 1/255 of a float's range."""
    (output,) = [node for node in converted.graph.nodes if node.op == "output"]
    nodes: list[Node] = []
    torch.fx.node.map_arg(output.args[0], lambda node: nodes.append(node))
    for node, result in zip(nodes, results, strict=True):
        quantize = node.args[0] if node.op == "call_method" and node.target == "dequantize" else None
        if isinstance(quantize, Node) and quantize.target is torch.quantize_per_tensor:
            yield float(getattr(converted, str(quantize.args[1].target)))
        else:
            yield float(result.max() - result.min()) / 255


def _share_within(step: float, theirs: Tensor, ours: Tensor) -> float:
    if theirs.shape != ours.shape:
        return 0.0
    return float(((theirs - ours).abs() <= 1.01 * step).double().mean())
