from __future__ import annotations

import pytest

from tests.migrate.checks import IMPORTS, check_left, check_noop, check_transformed
from torchq_compat.migrate.rewrites.torchscript import REWRITE

QUANTIZE = IMPORTS + "x, y = data\np = prepare_fx(m, c, (x, y))\nq = convert_fx(p)\n"


def exported(model: str, inputs: str, indent: str = "") -> str:
    arguments = (
        model,
        inputs,
        f"dynamic_shapes=tuple(dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO) for x in {inputs})",
    )
    lines = "".join(f"{indent}    {argument},\n" for argument in arguments)
    return f"torch.export.export(\n{lines}{indent})"


def saved(model: str, inputs: str, path: str, indent: str = "") -> str:
    inner = exported(model, inputs, f"{indent}    ")
    return f"torch.export.save(\n{indent}    {inner},\n{indent}    {path},\n{indent})"


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.jit.save(torch.jit.script(m), 'f.pt')\n",
        QUANTIZE + "torch.jit.script(m)\n",
        QUANTIZE + "torch.jit.save(torch.jit.script(p), 'f.pt')\n",
        QUANTIZE + "torch.export.save(torch.export.export(q, (x, y)), 'f.pt2')\n",
    ],
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, code)


@pytest.mark.parametrize(
    "saving",
    [
        "torch.jit.save(torch.jit.script(q), path)\n",
        "torch.jit.script(q).save(path)\n",
        "torch.jit.save(torch.jit.trace(q, (x, y)), path)\n",
    ],
)
def test_saving_at_once(saving: str) -> None:
    check_transformed(REWRITE, QUANTIZE + saving, QUANTIZE + saved("q", "(x, y)", "path") + "\n")


@pytest.mark.parametrize("save", ["torch.jit.save(s, 'a.pt')", "s.save('a.pt')"])
def test_through_a_variable_and_loading_again(save: str) -> None:
    check_transformed(
        REWRITE,
        QUANTIZE + f"s = torch.jit.script(q)\n{save}\nagain = torch.jit.load('a.pt')\n",
        QUANTIZE + f"s = {exported('q', '(x, y)')}\ntorch.export.save(s, 'a.pt')\n"
        "again = torch.export.load('a.pt').module()\n",
    )


def test_one_name_for_every_stage() -> None:
    check_transformed(
        REWRITE,
        IMPORTS
        + """\
def f(m, x, path):
    m = prepare_fx(m.eval(), c, (x,))
    m(x)
    m = convert_fx(m)
    torch.jit.save(torch.jit.script(m), path)
""",
        IMPORTS
        + f"""\
def f(m, x, path):
    m = prepare_fx(m.eval(), c, (x,))
    m(x)
    m = convert_fx(m)
    {saved("m", "(x,)", "path", "    ")}
""",
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (QUANTIZE + "s = torch.jit.script(q)\ns(x)\ns.save('a')\n", "used for more"),
        (QUANTIZE + "torch.jit.script(q)(x)\n", "used for more"),
        (QUANTIZE + "torch.jit.load('a.pt')\n", "not saved in this file"),
        (QUANTIZE + "torch.jit.save(  # small\n    torch.jit.script(q), 'a')\n", "comments"),
        (
            IMPORTS + "try:\n    q = convert_fx(p)\nexcept E:\n    q = m\ntorch.jit.script(q).save('a')\n",
            "the way through the code",
        ),
        (
            IMPORTS + "q = convert_fx(p)\ntorch.jit.save(torch.jit.script(q), 'a')\n",
            "example inputs",
        ),
        (
            IMPORTS
            + "p = prepare_fx(m, c, (torch.ones(1),))\nq = convert_fx(p)\ntorch.jit.script(q).save('a')\n",
            "example inputs",
        ),
    ],
)
def test_left_for_manual_review(code: str, reason: str) -> None:
    check_left(REWRITE, code, reason)
