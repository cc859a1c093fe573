"""The toolkits that were run: a table of ``migration/support.md``."""

from __future__ import annotations

HEAD = """
## Toolkits

Their own code, where it runs on torch 2.13 by itself, under `torchq-compat run`, beside the same without it:

| toolkit | verdict |
|---|---|
"""
#: Toolkit -> what came of it.
TOOLKITS = {
    "torchvision's `references/classification`": (
        "runs, eager mode and FX, also without examples, where FX fails; prepared and trained as there, "
        "bit for bit; converted MobileNetV2 trained for qnnpack: 18 to 24 dB, FX 0.6"
    ),
    "d2go, its quantization callbacks": "runs, FX's bits",
    "TinyNeuralNetwork, `QATQuantizer` and `PostQuantizer`": "runs, eager mode's bits",
    "coremltools 9.0, `LinearQuantizer`": (
        "prepares, trains and finalizes; only its first loss is FX's: its BackendConfig fuses batch "
        "norms in classes of its own, and here they stay ops"
    ),
    "torch-tensorrt's `fx` path": (
        "its reference models agree with FX's to 54 dB and more; its converters look for FX's reference "
        "modules in the graph and find none (TQ706): take [ONNX](guide/devices.md#as-an-onnx-file)"
    ),
    "MQBench, mmrazor": (
        "built on FX's internals, `_fuse_fx` and `fx.prepare` (TQ203, TQ708): run them without this "
        "package. MQBench itself imports a module that torch 2.13 has not; mmrazor was read, not run"
    ),
    "Sparsebit": "quantizes by itself: nothing to find or change",
    "neural-compressor": (
        "3: on PT2E, found (TQ112). 2.6, on FX: not run here, it does not import without `pkg_resources`"
    ),
}


def toolkits_table() -> str:
    """Return the section."""
    return HEAD + "".join(f"| {name} | {verdict} |\n" for name, verdict in TOOLKITS.items())
