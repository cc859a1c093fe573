"""From a converted model to an ONNX file: a graph of QuantizeLinear and DequantizeLinear, loops over time as
Scan.

Legacy: none. FX's converted models do not export; ``torch.onnx`` took torch.ao's eager kernels for Caffe2
alone.
"""

from torchq_compat.lower.onnx.lowering import to_onnx

__all__ = ["to_onnx"]
