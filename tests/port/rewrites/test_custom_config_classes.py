from __future__ import annotations

import pytest

from tests.port.checks import check_left, check_noop, check_transformed
from torchq_compat.port.rewrites.moved import CUSTOM_CONFIG_CLASSES as REWRITE

LEGACY = "torch.ao.quantization.fx.custom_config"


@pytest.mark.parametrize(
    "code",
    [
        "from torchq_compat.custom_config import PrepareCustomConfig\n",
        "from torch.ao.quantization.quantize_fx import prepare_fx\n",
        "from torch.ao.quantization import quantize_fx\nquantize_fx.prepare_fx(m)\n",
    ],
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, code)


def test_import() -> None:
    check_transformed(
        REWRITE,
        f"from {LEGACY} import ConvertCustomConfig, PrepareCustomConfig as P\n",
        "from torchq_compat.custom_config import ConvertCustomConfig, PrepareCustomConfig as P\n",
    )


def test_names_that_quantize_fx_only_happens_to_have() -> None:
    check_transformed(
        REWRITE,
        "from torch.ao.quantization.quantize_fx import PrepareCustomConfig, prepare_fx\n",
        "from torch.ao.quantization.quantize_fx import prepare_fx\n"
        "from torchq_compat.custom_config import PrepareCustomConfig\n",
    )
    check_transformed(
        REWRITE,
        "from torch.ao.quantization import quantize_fx\nquantize_fx.PrepareCustomConfig()\n",
        "from torch.ao.quantization import quantize_fx\nimport torchq_compat.custom_config\n"
        "torchq_compat.custom_config.PrepareCustomConfig()\n",
    )


def test_module() -> None:
    check_transformed(
        REWRITE,
        "from torch.ao.quantization.fx import custom_config\ncustom_config.FuseCustomConfig()\n",
        "from torchq_compat import custom_config\ncustom_config.FuseCustomConfig()\n",
    )


def test_left_for_manual_review() -> None:
    check_left(REWRITE, f"from {LEGACY} import *\n", "import *")
