"""The cases of the parity corpus: models x mappings x backends, written as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["CASES", "Case"]

#: (models, mappings, backends), separated by spaces: every combination is a case.
GRID = (
    ("resnet", "x86 qnnpack fbgemm onednn", "default"),
    (
        "resnet",
        "x86",
        "native fbgemm x86 onednn qnnpack executorch tensorrt native_dict only_linear_and_conv",
    ),
    ("resnet", "symmetric_qnnpack per_channel_symmetric_qnnpack", "native qnnpack executorch"),
    ("resnet", "int8_activations", "native tensorrt"),
    ("resnet", "min_max x86 own_range", "range_127 range_255"),
    ("resnet", "x86 own_eps symmetric_qnnpack", "scale_min scale_min_loose"),
    (
        "resnet",
        "global none min_max symmetric moving_average histogram reduced_range own_range own_eps "
        "fp16_static fp16_dynamic dynamic linear_only conv_only add_off relu_off regex fc_off layer_off "
        "layer_off_but_conv second_conv_of_block_off mixed_dtypes mixed_static_dynamic dict_global "
        "dict_levels",
        "default",
    ),
    ("inverted_residual squeeze_excite inception conv_front functional", "x86 qnnpack", "default"),
    ("transformer", "x86 qnnpack global dynamic per_channel_dynamic fp16_dynamic fp16_static", "default"),
    ("transformer", "linear_only reshape_only methods_off second_linear_off", "default"),
    ("transformer", "x86", "qnnpack executorch"),
    (
        "embedding embedding_bag",
        "x86 weight_only_embeddings embeddings_and_static embeddings_and_dynamic",
        "default",
    ),
    ("embedding_bag", "embeddings_and_static", "executorch fbgemm"),
    ("functional", "functions_only dynamic fp16_dynamic fp16_static", "default"),
    (
        "arithmetic",
        "x86 global add_off torch_add_off operator_mul_off first_add_off fp16_static second_linear_off",
        "default",
    ),
    ("inplace_arithmetic reused_module two_inputs shapes", "x86 qnnpack", "default"),
    ("shapes", "methods_off reshape_only global", "default"),
    ("activations functional_activations", "x86 qnnpack global", "default"),
    ("activations functional_activations", "qnnpack", "qnnpack executorch"),
    ("norms", "x86 qnnpack", "default"),
    ("detector", "dict_d2go dict_d2go_regex x86", "default"),
    ("conv1 conv2 conv3 conv1_relu conv3_relu conv2_circular", "x86", "default"),
    ("conv1_bn conv2_bn conv3_bn conv1_bn_relu conv2_bn_relu conv3_bn_relu", "x86", "default"),
    (
        "conv_transpose1 conv_transpose2 conv_transpose3 conv_transpose1_bn conv_transpose2_bn "
        "conv_transpose3_bn conv_transpose2_relu",
        "qnnpack x86",
        "default",
    ),
    ("bn_relu bn3_relu linear_relu linear_bn", "x86", "default"),
    ("linear_leaky_relu linear_tanh linear_bn_leaky_relu", "onednn", "onednn default"),
    ("linear_relu", "dynamic per_channel_dynamic fp16_dynamic fp16_static", "default"),
    ("resnet conv_front inverted_residual", "qat_x86 qat_qnnpack", "default"),
    ("conv1_bn conv2_bn_relu conv3_bn conv2_relu linear_relu bn_relu", "qat_fbgemm", "default"),
)


@dataclass(frozen=True)
class Case:
    model: str
    mapping: str
    backend: str

    @property
    def id(self) -> str:
        return f"{self.model}/{self.mapping}/{self.backend}"


def _cases() -> Iterator[Case]:
    for models, mappings, backends in GRID:
        for model in models.split():
            for mapping in mappings.split():
                for backend in backends.split():
                    yield Case(model, mapping, backend)


CASES = tuple(dict.fromkeys(_cases()))
