"""The cases of the parity corpus: models x mappings x backends, written as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.parity.configs import NAMED_QCONFIGS

__all__ = ["CASES", "Case"]

#: (models, mappings, backends), separated by spaces: every combination is a case.
GRID = (
    # Backends.
    ("resnet", "x86", "default onednn executorch tensorrt native_dict"),
    ("conv_front", "x86 qnnpack", "default native fbgemm x86 onednn qnnpack executorch tensorrt"),
    ("resnet", "symmetric_qnnpack", "qnnpack"),
    ("conv_front", "per_channel_symmetric_qnnpack int8_activations", "executorch tensorrt"),
    ("resnet", "x86", "only_linear_and_conv"),
    ("conv_front", "min_max own_range", "range_127 range_255"),
    ("conv_front", "x86 own_eps", "scale_min scale_min_loose"),
    ("conv_front", "min_max fixed", "fixed"),
    ("conv_front", "min_max", "not_observed"),
    ("functional", "min_max", "without_argument_roles"),
    # Observers, dtypes.
    ("conv2_relu", " ".join(NAMED_QCONFIGS), "default"),
    ("embedding", " ".join(name for name in NAMED_QCONFIGS if "qnnpack" not in name), "default"),
    (
        "conv_front",
        "global none fbgemm onednn symmetric moving_average histogram reduced_range own_range own_eps "
        "fp16_static fp16_dynamic dynamic mixed_static_dynamic",
        "default",
    ),
    ("linear_relu conv2_relu", "per_channel_activations affine_weights weights_by_input", "default"),
    ("linear_relu", "dynamic per_channel_dynamic fp16_dynamic fp16_static", "default"),
    # Levels of the mapping.
    (
        "resnet",
        "linear_only conv_only add_off relu_off regex fc_off layer_off layer_off_but_conv "
        "second_conv_of_block_off mixed_dtypes dict_global dict_levels",
        "default",
    ),
    ("detector", "dict_d2go dict_d2go_regex x86", "default"),
    ("transformer", "linear_only reshape_only methods_off second_linear_off", "default"),
    ("functional", "functions_only dynamic fp16_dynamic fp16_static", "default"),
    ("arithmetic", "add_off torch_add_off operator_mul_off first_add_off second_linear_off", "default"),
    ("shapes", "methods_off reshape_only", "default"),
    # Models.
    ("inverted_residual squeeze_excite inception functional", "x86 qnnpack", "default"),
    ("transformer", "x86 dynamic fp16_static", "default"),
    ("transformer", "x86", "qnnpack executorch"),
    (
        "embedding embedding_bag",
        "x86 weight_only_embeddings embeddings_and_static embeddings_and_dynamic",
        "default",
    ),
    ("embedding_bag", "embeddings_and_static", "executorch fbgemm"),
    ("arithmetic", "x86 global fp16_static", "default"),
    ("inplace_arithmetic reused_module two_inputs shapes norms", "x86 qnnpack", "default"),
    ("activations functional_activations", "qnnpack global", "default"),
    ("activations functional_activations", "qnnpack", "executorch"),
    # Fused patterns.
    (
        "conv1 conv2 conv3 conv1_relu conv3_relu conv2_circular conv1_bn conv2_bn conv3_bn conv1_bn_relu "
        "conv2_bn_relu conv3_bn_relu bn_relu bn3_relu linear_relu linear_bn",
        "x86",
        "default",
    ),
    (
        "conv_transpose1 conv_transpose2 conv_transpose3 conv_transpose1_bn conv_transpose2_bn "
        "conv_transpose3_bn conv_transpose2_relu",
        "qnnpack",
        "default",
    ),
    ("conv_transpose2", "x86", "default"),
    ("linear_leaky_relu linear_tanh linear_bn_leaky_relu", "onednn", "onednn default"),
    # Training.
    ("resnet arithmetic inception shapes conv_transpose2 conv_transpose2_bn", "qat_qnnpack", "default"),
    ("conv1_bn conv2_bn_relu conv3_bn linear_relu bn_relu functional", "qat_fbgemm", "default"),
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
