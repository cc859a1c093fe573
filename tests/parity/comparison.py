"""One case by this package, and all its differences from FX's result; and FX's result, run live."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import torchq_compat as tc
from tests.helpers.captured_once import captured_once
from tests.helpers.oracle import activation_qparams, fx_activation_qparams, leaves
from tests.parity.cases import Case
from tests.parity.configs import BACKENDS, MAPPINGS, QAT_MAPPINGS
from tests.parity.fx_decisions import quantized_by_fx, quantized_by_us
from tests.parity.fx_results import FxOutput, FxResult
from tests.parity.models import MODELS
from torchq_compat.errors import TorchQCompatError

__all__ = [
    "converted_outputs",
    "differences",
    "differences_of_fx",
    "fx_result",
    "same_outputs",
    "same_qparams",
    "with_statistics",
]

BATCHES = 3
SHARE_WITHIN_ONE_STEP = 0.999

QParams = tuple[float, int]


def differences(case: Case, theirs: FxResult | None) -> set[str]:
    """Return how our result differs from FX's: "refusal", "ops", "qparams", "outputs", or nothing."""
    sides = _sides(case, tc, TorchQCompatError)
    if theirs is None or sides is None:
        return {"refusal"} if (theirs is None) != (sides is None) else set()
    prepared, converted, batch = sides
    found = set()
    if theirs.ops != quantized_by_us(prepared):
        found.add("ops")
    if not same_qparams(theirs.qparams, activation_qparams(converted), _tolerance(case)):
        found.add("qparams")
    with torch.no_grad():
        ours = leaves(converted(*batch))
    if not same_outputs(theirs.outputs, ours):
        found.add("outputs")
    return found


def fx_result(case: Case) -> FxResult | None:
    """Return the result of FX for ``case``, run live; None if FX refuses it.

    Raises:
        ImportError: this torch has no FX engine.
    """
    import torch.ao.quantization.quantize_fx as fx

    sides = _sides(case, fx, Exception)
    if sides is None:
        return None
    prepared, converted, batch = sides
    qparams = tuple(sorted(fx_activation_qparams(converted)))
    return FxResult(quantized_by_fx(prepared), qparams, converted_outputs(converted, batch))


def converted_outputs(converted: GraphModule, batch: tuple[Tensor, ...]) -> tuple[FxOutput, ...]:
    """Return the output of FX's converted reference model for ``batch``."""
    with torch.no_grad():
        results = leaves(converted(*batch))
    steps = _output_steps(converted, results)
    return tuple(FxOutput.of(result, step) for step, result in zip(steps, results, strict=True))


def differences_of_fx(case: Case, live: FxResult | None, before: FxResult | None) -> set[str]:
    """Return how two results of FX for the same case differ: that of a live run, and the stored one."""
    if live is None or before is None:
        return set() if live is before else {"refusal"}
    found = {"ops"} if live.ops != before.ops else set()
    if not same_qparams(before.qparams, live.qparams, _tolerance(case)):
        found.add("qparams")
    tensors = [torch.tensor(output.values).double().reshape(output.shape) for output in live.outputs]
    if not same_outputs(before.outputs, tensors):
        found.add("outputs")
    return found


def _sides(
    case: Case, engine: Any, refusals: type[Exception]
) -> tuple[GraphModule, GraphModule, tuple[Tensor, ...]] | None:
    """Return (prepared, converted, a batch) by ``engine``; None if it refuses. All get the same model."""
    torch.manual_seed(0)
    entry = MODELS[case.model]
    is_qat = case.mapping in QAT_MAPPINGS
    make_mapping = {**MAPPINGS, **QAT_MAPPINGS}[case.mapping]
    model = with_statistics(entry.make()).train(is_qat)
    batches = [entry.batch() for _ in range(BATCHES)]
    try:
        with captured_once((case.model, is_qat)):
            sides = _run(engine, model, batches, make_mapping(), BACKENDS[case.backend](), is_qat)
    except refusals:
        return None
    return *sides, batches[0]


def _run(
    engine: Any, model: nn.Module, batches: list[Any], mapping: Any, backend: Any, is_qat: bool
) -> tuple[GraphModule, GraphModule]:
    """Return (prepared, converted to its reference form) by ``engine``: FX's module, or this package."""
    prepare = engine.prepare_qat_fx if is_qat else engine.prepare_fx
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare(copy.deepcopy(model), mapping, batches[0], backend_config=backend)
        with torch.no_grad():
            for batch in batches:
                prepared(*batch)
        # FX changes what it converts.
        given = prepared if engine is tc else copy.deepcopy(prepared)
        return prepared, engine.convert_to_reference_fx(given.eval(), backend_config=backend)


def with_statistics(model: nn.Module) -> nn.Module:
    """Set batch norms as after training, so that folding them changes weights."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.2)
            nn.init.normal_(module.running_mean, 0.0, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def _tolerance(case: Case) -> float:
    """Return the relative tolerance of scales: in training sums are in another order."""
    return 1e-4 if case.mapping in QAT_MAPPINGS else 1e-6


def same_qparams(theirs: Iterable[QParams], ours: Iterable[QParams], tolerance: float) -> bool:
    """Return whether zero points are equal, and scales equal within ``tolerance``."""
    a, b = sorted(theirs), sorted(ours)
    return len(a) == len(b) and all(
        abs(p[0] - q[0]) <= tolerance * p[0] + 1e-9 and p[1] == q[1] for p, q in zip(a, b, strict=True)
    )


def same_outputs(theirs: Sequence[FxOutput], ours: Sequence[Tensor]) -> bool:
    if len(theirs) != len(ours):
        return False
    shares = [a.share_within_one_step(b) for a, b in zip(theirs, ours, strict=True)]
    return all(share >= SHARE_WITHIN_ONE_STEP for share in shares)


def _output_steps(converted: GraphModule, results: list[Tensor]) -> Iterator[float]:
    """Yield one quantization step for each result: of the quantize behind it, or 1/255 of a float's range."""
    (output,) = [node for node in converted.graph.nodes if node.op == "output"]
    nodes: list[Node] = []
    torch.fx.node.map_arg(output.args[0], lambda node: nodes.append(node))
    for node, result in zip(nodes, results, strict=True):
        quantize = node.args[0] if node.op == "call_method" and node.target == "dequantize" else None
        if isinstance(quantize, Node) and quantize.target is torch.quantize_per_tensor:
            yield float(getattr(converted, str(quantize.args[1].target)))
        else:
            yield float(result.max() - result.min()) / 255
