"""Write a converted model as an ONNX file: a graph of QuantizeLinear and DequantizeLinear, with loops over
time as Scan.

Legacy: none. FX's converted models cannot be exported; ``torch.onnx`` supported torch.ao's eager kernels only
for Caffe2.
"""
