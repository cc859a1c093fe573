"""Where a model of the zoo misses a bar, and why this cannot be avoided."""

from __future__ import annotations

__all__ = ["EXPLAINED"]

TIMM_NORMS = (
    "FX quantizes convolution and batch norm apart, for the norm is timm's own class; here it is folded, and "
    "the result is nearer to float."
)
#: Model -> kind of the shortfall (see ``verdict.KINDS``) -> the reason, a sentence for the page.
EXPLAINED: dict[str, dict[str, str]] = {
    "botnet26t_256": {
        "ops": "FX's reshape behind a float matmul takes the observer of the matmul's input, which has other "
        "values; here it stays float.",
    },
    "dcgan_generator": {
        "ops": "FX quantizes batch norm + ReLU apart from the transposed convolution; here the batch "
        "norm is folded.",
    },
    "hardcorenas_a": {
        "qparams": TIMM_NORMS,
    },
    "mobilenetv4_conv_small": {
        "qparams": TIMM_NORMS,
    },
    "pointnet": {
        "ops": "FX quantizes the repeat of torch.eye(3); here what is computed of sizes and constants alone "
        "stays float.",
    },
    "r3d_18": {
        "ops": "FX does not see that a subclass of Conv3d has a batch norm to fold, and quantizes both "
        "apart; here it is folded.",
    },
    "swin_v2_t": {
        "qparams": "FX cuts the inputs of three sigmoids to the range of their results; here they are "
        "observed.",
    },
    "tcn": {
        "ops": "The same ops: FX's contiguous is named by the float convolution under weight_norm before it.",
    },
    "wavenet": {
        "ops": "FX quantizes the last layer's residual branch, which nothing reads; torch.export drops it.",
    },
}
