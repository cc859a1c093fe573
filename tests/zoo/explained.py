"""Where a model of the zoo falls short of a bar, and why it has to be so."""

from __future__ import annotations

__all__ = ["EXPLAINED"]

#: Model -> kind of the shortfall (see ``verdict.KINDS``) -> the reason, a sentence for the page.
EXPLAINED: dict[str, dict[str, str]] = {
    "dcgan_generator": {
        "ops": "FX quantizes batch norm + ReLU apart from the transposed convolution; here the batch "
        "norm is folded.",
    },
    "pointnet": {
        "ops": "FX computes torch.eye(3).flatten().view(1, 9) while it traces; torch.export keeps the "
        "calls, and the view shares the constant's observer.",
    },
    "tcn": {
        "ops": "The same ops: FX's contiguous is named by the float convolution under weight_norm before it.",
    },
    "wavenet": {
        "ops": "FX quantizes the last layer's residual branch, which nothing reads; torch.export drops it.",
    },
}
