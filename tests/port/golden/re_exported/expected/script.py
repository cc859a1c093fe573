import pkg
from torch.ao.quantization import QConfigMapping

prepared = pkg.prep(model, QConfigMapping(), example_inputs)
