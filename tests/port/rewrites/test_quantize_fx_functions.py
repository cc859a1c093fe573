from __future__ import annotations

import pytest

from tests.port.checks import check_left, check_noop, check_transformed
from torchq_compat.port.rewrites.moved import FX_FUNCTIONS as REWRITE


@pytest.mark.parametrize(
    "code",
    [
        "",
        "from torchq_compat.quantize_fx import prepare_fx\n",
        "def prepare_fx(model):\n    return model\n\nprepare_fx(1)\n",
        "from elsewhere import prepare_fx\nprepare_fx(1)\n",
        "from torch.ao.quantization.quantize_fx import QuantizationTracer\n",
        "import torch\ntorch.ao.quantization.prepare(1)\n",
        "# from torch.ao.quantization.quantize_fx import prepare_fx\n",
        "x = 'import torch.ao.quantization.quantize_fx'\n",
    ],
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, code)


@pytest.mark.parametrize("module", ["torch.ao.quantization.quantize_fx", "torch.quantization.quantize_fx"])
def test_names_of_an_import(module: str) -> None:
    check_transformed(
        REWRITE,
        f"from {module} import prepare_fx, convert_fx as convert  # both\n",
        "from torchq_compat.quantize_fx import prepare_fx, convert_fx as convert  # both\n",
    )


def test_a_long_import_keeps_its_lines_and_comments() -> None:
    names = "(\n    prepare_fx,  # first\n    convert_fx,\n)\nprepare_fx(1)\n"
    check_transformed(
        REWRITE,
        f"from torch.ao.quantization.quantize_fx import {names}",
        f"from torchq_compat.quantize_fx import {names}",
    )


def test_names_that_have_not_moved_stay_where_they_are() -> None:
    check_transformed(
        REWRITE,
        """
        def f():
            from torch.ao.quantization.quantize_fx import QuantizationTracer, fuse_fx
            return fuse_fx, QuantizationTracer
        """,
        """
        def f():
            from torch.ao.quantization.quantize_fx import QuantizationTracer
            from torchq_compat.quantize_fx import fuse_fx
            return fuse_fx, QuantizationTracer
        """,
    )
    check_transformed(
        REWRITE,
        "x = 1; from torch.ao.quantization.quantize_fx import Scope, fuse_fx\n",
        "x = 1; from torch.ao.quantization.quantize_fx import Scope; "
        "from torchq_compat.quantize_fx import fuse_fx\n",
    )


def test_the_module_under_a_name() -> None:
    check_transformed(
        REWRITE,
        """
        import torch.ao.quantization.quantize_fx as qfx
        from torch.ao.quantization import quantize_fx
        from torch.quantization import quantize_fx as old
        p = qfx.prepare_fx(quantize_fx.fuse_fx(m), c, x)
        old.convert_fx(p)
        """,
        """
        import torchq_compat.quantize_fx as qfx
        from torchq_compat import quantize_fx
        from torchq_compat import quantize_fx as old
        p = qfx.prepare_fx(quantize_fx.fuse_fx(m), c, x)
        old.convert_fx(p)
        """,
    )


def test_the_module_among_other_names() -> None:
    check_transformed(
        REWRITE,
        "from torch.ao.quantization import QConfigMapping, quantize_fx\nquantize_fx.fuse_fx(m)\n",
        "from torch.ao.quantization import QConfigMapping\nfrom torchq_compat import quantize_fx\n"
        "quantize_fx.fuse_fx(m)\n",
    )


def test_dotted_uses() -> None:
    check_transformed(
        REWRITE,
        """
        import torch
        import torch.ao.quantization as tq
        torch.ao.quantization.quantize_fx.prepare_fx(m, c, x)
        tq.quantize_fx.convert_fx(p)
        """,
        """
        import torch
        import torch.ao.quantization as tq
        import torchq_compat.quantize_fx
        torchq_compat.quantize_fx.prepare_fx(m, c, x)
        torchq_compat.quantize_fx.convert_fx(p)
        """,
    )


def test_a_dotted_import_still_binds_torch() -> None:
    check_transformed(
        REWRITE,
        "import torch.ao.quantization.quantize_fx\ntorch.ao.quantization.quantize_fx.fuse_fx(torch.f())\n",
        "import torch\nimport torchq_compat.quantize_fx\ntorchq_compat.quantize_fx.fuse_fx(torch.f())\n",
    )


def test_an_alias_by_assignment() -> None:
    check_transformed(
        REWRITE,
        "import torch\nprepare = torch.ao.quantization.quantize_fx.prepare_fx\nprepare(m, c, x)\n",
        "import torch\nimport torchq_compat.quantize_fx\n"
        "prepare = torchq_compat.quantize_fx.prepare_fx\nprepare(m, c, x)\n",
    )


def test_a_fallback_import() -> None:
    check_transformed(
        REWRITE,
        """
        try:
            from torch.ao.quantization.quantize_fx import prepare_fx
        except ImportError:
            from torch.quantization.quantize_fx import prepare_fx
        """,
        """
        try:
            from torchq_compat.quantize_fx import prepare_fx
        except ImportError:
            from torchq_compat.quantize_fx import prepare_fx
        """,
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("from torch.ao.quantization.quantize_fx import *\n", "import *"),
        ("from torch.ao.quantization import quantize_fx\nf(quantize_fx)\n", "itself is used at line 2"),
        ("import torch\n(torch.ao  # c\n .quantization.quantize_fx.fuse_fx)(m)\n", "a comment"),
        ("from torch.ao.quantization import quantize_fx\nquantize_fx.Scope\n", "Scope has no counterpart"),
        (
            "import torch\ntorchq_compat = 1\ntorch.ao.quantization.quantize_fx.fuse_fx(m)\n",
            "means something",
        ),
        (
            "from torch.ao.quantization.quantize_fx import (\n    Scope,  # why\n    fuse_fx,\n)\n",
            "comments",
        ),
    ],
)
def test_left_for_manual_review(code: str, reason: str) -> None:
    check_left(REWRITE, code, reason)
