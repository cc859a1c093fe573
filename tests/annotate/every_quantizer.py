"""Every Quantizer that can be imported, on six models: plain ``prepare_pt2e`` beside ours and ``prepare_fx``.

``python -m tests.annotate.every_quantizer [NAME ...]`` measures those that import and writes their rows into
``migration/quantizers.json``, of which ``python -m migration.generate`` makes a table of support.md.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchao.quantization.pt2e import quantize_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

import torchq_compat as tc
from tests.helpers.oracle import leaves, sqnr
from tests.helpers.xnnpack import xnnpack_quantizer
from torchq_compat import pt2e
from torchq_compat.errors import QuantizationNote, QuantizationWarning

ROWS = Path(__file__).parents[2] / "migration" / "quantizers.json"
TORCHAO, BACKENDS = "torchao.quantization.pt2e.quantizer", "executorch.backends"


def configured(path: str, name: str, config: str) -> Callable[[], Quantizer]:
    """Return a function that makes the Quantizer ``name`` with its own default configuration."""

    def make() -> Quantizer:
        module = importlib.import_module(path)
        quantizer: Quantizer = getattr(module, name)().set_global(getattr(module, config)())
        return quantizer

    return make


def plainly(path: str, name: str) -> Callable[[], Quantizer]:
    def make() -> Quantizer:
        quantizer: Quantizer = getattr(importlib.import_module(path), name)()
        return quantizer

    return make


def composable() -> Quantizer:
    module = importlib.import_module(TORCHAO)
    quantizer: Quantizer = module.ComposableQuantizer([QUANTIZERS["Embedding"](), QUANTIZERS["XNNPACK"]()])
    return quantizer


def of_arm(name: str, target: Callable[[Any], Any], home: str) -> Callable[[], Quantizer]:
    def make() -> Quantizer:
        module = importlib.import_module(f"{BACKENDS}.arm.quantizer.arm_quantizer")
        made = getattr(module, name)(target(importlib.import_module(f"{BACKENDS}.arm.{home}")))
        quantizer: Quantizer = made.set_global(module.get_symmetric_quantization_config())
        return quantizer

    return make


def core_ml() -> Quantizer:
    config = importlib.import_module("coremltools.optimize.torch.quantization").LinearQuantizerConfig
    settings = {"quantization_scheme": "symmetric", "milestones": [0, 0, 10, 10]}
    module = importlib.import_module(f"{BACKENDS}.apple.coreml.quantizer")
    quantizer: Quantizer = module.CoreMLQuantizer(config.from_dict({"global_config": settings}))
    return quantizer


def neuropilot() -> Quantizer:
    """MediaTek's converter is no public package; its Quantizer does not call it."""
    for name in ("mtk_neuron", "mtk_converter", "mtk_converter.python", "mtk_converter.python.converters"):
        sys.modules.setdefault(name, MagicMock())
    sys.modules.setdefault("mtk_converter.python.converters.pytorch", MagicMock())
    return plainly(f"{BACKENDS}.mediatek.quantizer", "NeuropilotQuantizer")()


def neutron() -> Quantizer:
    """NXP's converter is no public package; its Quantizer asks it for the properties of the target."""
    sdk = MagicMock()
    units = SimpleNamespace(subsystem=False, hwVersion=2, numUnits=4, numPipes=4, numMacs=16)
    sdk.neutron_converter.getNeutronTarget = lambda name: units
    sys.modules.setdefault("eiq_neutron_sdk", sdk)
    targets = importlib.import_module(f"{BACKENDS}.nxp.backend.neutron_target_spec")
    spec = targets.NeutronTargetSpec("imxrt700")
    module = importlib.import_module(f"{BACKENDS}.nxp.quantizer.neutron_quantizer")
    quantizer: Quantizer = module.NeutronQuantizer(spec)
    return quantizer


X86 = "get_default_x86_inductor_quantization_config"
SYMMETRIC = "get_symmetric_quantization_config"
QUANTIZERS: dict[str, Callable[[], Quantizer]] = {
    "X86Inductor": configured(f"{TORCHAO}.x86_inductor_quantizer", "X86InductorQuantizer", X86),
    "ArmInductor": configured(
        f"{TORCHAO}.arm_inductor_quantizer",
        "ArmInductorQuantizer",
        "get_default_arm_inductor_quantization_config",
    ),
    "XPUInductor": configured(
        f"{TORCHAO}.xpu_inductor_quantizer",
        "XPUInductorQuantizer",
        "get_default_xpu_inductor_quantization_config",
    ),
    "Embedding": plainly(f"{TORCHAO}.embedding_quantizer", "EmbeddingQuantizer"),
    "Composable (Embedding, XNNPACK)": composable,
    "XNNPACK": xnnpack_quantizer,
    "Core ML": core_ml,
    "Vulkan": configured(f"{BACKENDS}.vulkan.quantizer.vulkan_quantizer", "VulkanQuantizer", SYMMETRIC),
    "Cadence": plainly(f"{BACKENDS}.cadence.aot.quantizer.quantizer", "CadenceDefaultQuantizer"),
    "QNN": plainly(f"{BACKENDS}.qualcomm.quantizer.quantizer", "QnnQuantizer"),
    "Samsung Enn": plainly(f"{BACKENDS}.samsung.quantizer.quantizer", "EnnQuantizer"),
    "Example": plainly(f"{BACKENDS}.example.example_quantizer", "ExampleQuantizer"),
    "Cortex-M": plainly(f"{BACKENDS}.cortex_m.quantizer.quantizer", "CortexMQuantizer"),
    "Arm TOSA": of_arm(
        "TOSAQuantizer", lambda m: m.TosaSpecification.create_from_string("TOSA-1.0+INT"), "tosa"
    ),
    "Arm Ethos-U": of_arm("EthosUQuantizer", lambda m: m.EthosUCompileSpec("ethos-u55-128"), "ethosu"),
    "Arm VGF": of_arm("VgfQuantizer", lambda m: m.VgfCompileSpec(), "vgf"),
    "OpenVINO": plainly(f"{BACKENDS}.openvino.quantizer", "OpenVINOQuantizer"),
    "MediaTek Neuropilot": neuropilot,
    "NXP Neutron": neutron,
}


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2) / 8**0.5, -1) @ self.v(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0])


class SeveralOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.fc(x).chunk(2, -1)
        return self.out(torch.sigmoid(a) * b + x), a


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, indices: Tensor) -> Tensor:
        return self.fc(self.embedding(indices))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)),
        lambda: torch.randn(6, 8),
    ),
    "convolution, batch norm": (Convolutional, lambda: torch.randn(2, 3, 8, 8)),
    "attention": (Attention, lambda: torch.randn(2, 5, 8)),
    "LSTM": (Recurrent, lambda: torch.randn(5, 2, 8)),
    "several outputs": (SeveralOutputs, lambda: torch.randn(6, 8)),
    "embedding": (Embedded, lambda: torch.randint(0, 20, (3, 6))),
}

Flow = Callable[[nn.Module, Quantizer, list[Tensor]], GraphModule]


def plain(model: nn.Module, quantizer: Quantizer, batches: list[Tensor]) -> GraphModule:
    exported: Any = torch.export.export(model, (batches[0],)).module(check_guards=False)
    return calibrated(quantize_pt2e.prepare_pt2e(exported, quantizer), batches, quantize_pt2e.convert_pt2e)


def ours(model: nn.Module, quantizer: Quantizer, batches: list[Tensor]) -> GraphModule:
    exported: Any = torch.export.export(model, (batches[0],)).module()
    return calibrated(pt2e.prepare_pt2e(exported, quantizer), batches, pt2e.convert_pt2e)


def in_fx(model: nn.Module, quantizer: Quantizer, batches: list[Tensor]) -> GraphModule:
    prepared = tc.prepare_fx(model, quantizer, (batches[0],))
    return calibrated(prepared, batches, tc.convert_to_reference_fx)


def mapped(model: nn.Module, quantizer: Quantizer, batches: list[Tensor]) -> GraphModule:
    config = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(model, quantizer, (batches[0],), config)
    return calibrated(prepared, batches, tc.convert_to_reference_fx)


def calibrated(prepared: Any, batches: list[Tensor], convert: Any) -> GraphModule:
    for batch in batches:
        prepared(batch)
    converted: GraphModule = convert(prepared)
    return converted


def quantizes(converted: GraphModule) -> int:
    """Return how many nodes quantize, in the graph and in those inside it."""
    graphs = (module.graph for module in converted.modules() if isinstance(module, GraphModule))
    targets = [str(node.target) for graph in graphs for node in graph.nodes]
    return sum(".quantize_per" in target or ".quantize_affine" in target for target in targets)


def measured(flow: Flow, model_name: str, make: Callable[[], Quantizer]) -> dict[str, Any]:
    """Return the quantize nodes, the worst SQNR and the codes of warnings of one flow; or its error."""
    torch.manual_seed(0)
    model_class, batch = MODELS[model_name]
    model, batches = model_class().eval(), [batch() for _ in range(4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            converted = flow(model, make(), batches[:3])
            pairs = [
                pair
                for each in batches
                for pair in zip(leaves(model(each)), leaves(converted(each)), strict=True)
            ]
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:80]}"}
    told = (QuantizationWarning, QuantizationNote)
    codes = {getattr(each.message, "code", "") for each in caught if issubclass(each.category, told)}
    worst = min(sqnr(*pair) for pair in pairs)
    return {"q": quantizes(converted), "dB": round(min(worst, 99.0), 1), "codes": sorted(codes - {""})}


def rows_of(name: str, models: Any = tuple(MODELS)) -> Iterator[dict[str, Any]]:
    """Yield the rows of one Quantizer; none if it cannot be imported."""
    make = QUANTIZERS[name]
    try:
        make()
    except ImportError:
        return
    for model in models:
        row: dict[str, Any] = {"quantizer": name, "model": model}
        flows: dict[str, Flow] = {"plain": plain, "pt2e": ours, "prepare_fx": in_fx}
        if model == "LSTM":
            flows["mapped"] = mapped
        yield row | {key: measured(flow, model, make) for key, flow in flows.items()}


def is_as_plain(row: dict[str, Any]) -> bool:
    """Return whether ours run where plain PT2E does, with its dB; or quantize more than it finds."""
    expected = row["plain"]
    if "error" in expected:
        return True
    results = [row[key] for key in ("pt2e", "prepare_fx")]
    if any("error" in each for each in results) or results[0]["q"] != expected["q"]:
        return False
    return all(each["dB"] >= expected["dB"] - 0.3 or each["q"] > expected["q"] for each in results)


def main(names: list[str]) -> None:
    kept = json.loads(ROWS.read_text()) if ROWS.exists() else []
    for name in names or QUANTIZERS:
        made = list(rows_of(name))
        print(name, *made, sep="\n  ", flush=True)
        kept = [row for row in kept if row["quantizer"] != name or not made] + made
        order = {each: at for at, each in enumerate(QUANTIZERS)}
        kept.sort(key=lambda row: order[row["quantizer"]])
        ROWS.write_text("[\n" + ",\n".join(json.dumps(row) for row in kept) + "\n]\n")


if __name__ == "__main__":
    main(sys.argv[1:])
