from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, default_qconfig

from tests.port.checks import IMPORTS, check_left, check_noop, check_transformed
from torchq_compat.port.rewrites.config_dicts import OF_QCONFIGS as REWRITE
from torchq_compat.port.rewrites.config_dicts import QCONFIG_DICT
from torchq_compat.port.scanner import rewrite_text

NEEDED = "from torch.ao.quantization import QConfigMapping\n"


@pytest.mark.parametrize(
    "code",
    [
        'qconfig_dict = {"": 1}\nprint(qconfig_dict)\n',
        "prepare_fx(m, QConfigMapping(), x)\n",
        "prepare_fx(m, mapping, x)\n",
        "prepare_fx(*args)\n",
        'prepare_fx(*args, {"": q})\n',
        "mapping = make()\nprepare_fx(m, mapping, x)\n",
        'prepare_fx({"": 1}, mapping, x)\n',
    ],
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, IMPORTS + code)


def test_an_unknown_prepare_fx_is_not_fx() -> None:
    check_noop(REWRITE, 'from mine import prepare_fx\nprepare_fx(m, {"": q}, x)\n')


def test_in_the_call() -> None:
    check_transformed(
        REWRITE,
        IMPORTS + 'prepare_fx(m, {"": q}, x)\nprepare_qat_fx(m, qconfig_dict={}, example_inputs=x)\n',
        IMPORTS + NEEDED + "prepare_fx(m, QConfigMapping().set_global(q), x)\n"
        "prepare_qat_fx(m, qconfig_dict=QConfigMapping(), example_inputs=x)\n",
    )


def test_through_a_variable_with_comments() -> None:
    check_transformed(
        REWRITE,
        IMPORTS
        + """\
def f(m, x):
    qconfig_dict = {
        # first
        "": q,  # for all
        "object_type": [
            (nn.Linear, None),  # but these
            # and
            (torch.add, get(
                "x86",  # inner
            )),
        ],
        # last
    }
    return prepare_fx(m, qconfig_dict, x)
""",
        IMPORTS
        + NEEDED
        + """\
def f(m, x):
    qconfig_dict = (
        QConfigMapping()
        # first
        .set_global(q)  # for all
        .set_object_type(nn.Linear, None)  # but these
        # and
        .set_object_type(torch.add, get(
                "x86",  # inner
            ))
        # last
    )
    return prepare_fx(m, qconfig_dict, x)
""",
    )


def test_the_import_joins_one_that_is_there() -> None:
    before = "from torch.ao.quantization import (\n    default_qconfig,\n)\n" + IMPORTS
    check_transformed(
        REWRITE,
        before + 'prepare_fx(m, {"": default_qconfig}, x)\n',
        before.replace("default_qconfig,", "default_qconfig, QConfigMapping,")
        + "prepare_fx(m, QConfigMapping().set_global(default_qconfig), x)\n",
    )


def test_the_object_says_what_from_dict_would_read() -> None:
    dict_form = """{
        "": default_qconfig,
        "object_type": [(nn.Linear, None), ("reshape", default_qconfig)],
        "module_name_regex": [(r"a\\..*", None)],
        "module_name": (("b", default_dynamic_qconfig),),
        "module_name_object_type_order": [("c", nn.Conv2d, 1, None)],
    }"""
    names = {"nn": nn, "torch": torch, "default_qconfig": default_qconfig, "QConfigMapping": QConfigMapping}
    names["default_dynamic_qconfig"] = default_dynamic_qconfig
    rewritten = rewrite_text(f"{IMPORTS}prepare_fx(m, {dict_form}, x)\n", (REWRITE,))
    expression = rewritten.partition("prepare_fx(m, ")[2].removesuffix(", x)\n")
    by_rewrite, by_torch = eval(expression, names), QConfigMapping.from_dict(eval(dict_form, names))
    assert by_rewrite.to_dict() == by_torch.to_dict()
    assert len(QCONFIG_DICT.setters) == len(by_torch.to_dict())


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ('prepare_fx(m, {"": q, **more}, x)\n', "includes another dict"),
        ('prepare_fx(m, {"objct_type": []}, x)\n', 'no key "objct_type"'),
        ("prepare_fx(m, {key: q}, x)\n", "no key key"),
        ('prepare_fx(m, {"": q, "": r}, x)\n', "twice"),
        ('prepare_fx(m, {"object_type": pairs}, x)\n', "pairs is not spelled out"),
        ('prepare_fx(m, {"object_type": [*pairs]}, x)\n', "unpacks another sequence"),
        ('prepare_fx(m, {"object_type": [(a, b, c)]}, x)\n', "should have 2 parts"),
        ("prepare_fx(m, dict(a=1), x)\n", "built by code"),
        ("prepare_fx(m, {k: v for k, v in z}, x)\n", "built by code"),
        ('d = {"": q}\nd["object_type"] = []\nprepare_fx(m, d, x)\n', "also used at line 5"),
        ('d: dict = {"": q}\nprepare_fx(m, d, x)\n', "annotated"),
        ('QConfigMapping = None\nprepare_fx(m, {"": q}, x)\n', "means something else"),
    ],
)
def test_left_for_manual_review(code: str, reason: str) -> None:
    check_left(REWRITE, IMPORTS + code, reason)
