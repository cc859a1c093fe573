"""Register the operators that exported programs call. Import it where a saved program is loaded:

import torchq_compat.operators
program = torch.export.load("model.pt2")
"""

# Importing registers: quantized_decomposed, and torchq_compat::quantized_recurrent.
import torchao.quantization.pt2e  # noqa: F401

import torchq_compat.custom_modules.recurrent.exported_op.recurrent_op  # noqa: F401

__all__: list[str] = []
