from __future__ import annotations

import importlib

import pytest

from tests.port.checks import check_left, check_noop, check_transformed
from torchq_compat.port.names import REMOVED_CAPTURES
from torchq_compat.port.rewrites import moved
from torchq_compat.port.rewrites.removed_captures import REWRITE
from torchq_compat.port.scanner import rewrite_text


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.export.export(model, args)\n",
        "from torch.export import export\n",
        "def capture_pre_autograd_graph(model, args): ...\ncapture_pre_autograd_graph(model, args)\n",
    ],
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, code)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "import torch\nm = torch._export.capture_pre_autograd_graph(model, *[x], kwargs=None)\n",
            "import torch\nm = torch._export.capture_pre_autograd_graph(model, *[x], kwargs=None)\n",
        ),
        (
            "import torch\nm = torch._export.capture_pre_autograd_graph(model, (x,), dynamic_shapes=s)\n",
            "import torch\nm = torch.export.export(model, (x,), dynamic_shapes=s, strict=True).module()\n",
        ),
        (
            "from torch._export import capture_pre_autograd_graph\n"
            "m = capture_pre_autograd_graph(model, (x,),)\n",
            "from torch.export import export\nm = export(model, (x,), strict=True,).module()\n",
        ),
        (
            "from torch._export import aot_compile, capture_pre_autograd_graph as capture\n"
            "m = capture(a, (x,)); n = capture(b, (x,))\n",
            "from torch._export import aot_compile\nfrom torch.export import export as capture\n"
            "m = capture(a, (x,), strict=True).module(); n = capture(b, (x,), strict=True).module()\n",
        ),
        (
            "from torch.export import export_for_training\nm = export_for_training(model, (x,)).module()\n",
            "from torch.export import export\nm = export(model, (x,)).module()\n",
        ),
    ],
)
def test_transformed(before: str, after: str) -> None:
    check_transformed(REWRITE, before, after)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import torch\ntorch._export.capture_pre_autograd_graph(m, a, {}, shapes)\n", "by keyword"),
        ("import torch\ntorch._export.capture_pre_autograd_graph(m, a, constraints=c)\n", "no constraints"),
        ("import torch\ncapture = torch._export.capture_pre_autograd_graph\n", "not called at line 2"),
        (
            "from torch._export import (\n    capture_pre_autograd_graph,  # old\n    aot_compile,\n)\n",
            "comments",
        ),
    ],
)
def test_left(code: str, reason: str) -> None:
    check_left(REWRITE, code, reason)


@pytest.mark.parametrize("name", REMOVED_CAPTURES)
def test_torch_has_lost_it(name: str) -> None:
    module, _, function = name.rpartition(".")
    if REMOVED_CAPTURES[name]:
        assert not hasattr(importlib.import_module(module), function)


def test_removed_modules_written_out() -> None:
    """A name goes to where it is now; PT2E's functions are left to their own rewrite."""
    before = """\
import torch
x86 = torch.ao.quantization.quantizer.X86InductorQuantizer(), torch.ao.quantization.quantizer.QuantizationSpec
torch.ao.quantization._quantize_pt2e.prepare_pt2e_quantizer(m, x86)
"""
    after = """\
import torch
import torchq_compat.pt2e
import torchao.quantization.pt2e.quantizer
import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer
x86 = NEW.x86_inductor_quantizer.X86InductorQuantizer(), NEW.QuantizationSpec
torchq_compat.pt2e.prepare_pt2e(m, x86)
""".replace("NEW", "torchao.quantization.pt2e.quantizer")
    both = (moved.REMOVED_MODULES, moved.PT2E_FLOW)
    assert rewrite_text(before, both) == after
    assert rewrite_text(after, both) == after
    gone = "import torch\ntorch.ao.quantization.pt2e.nonsense\n"
    check_left(moved.REMOVED_MODULES, gone, "has no nonsense")
