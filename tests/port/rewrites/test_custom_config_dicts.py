from __future__ import annotations

import pytest
from torch import nn
from torch.ao.quantization import QConfigMapping
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, FuseCustomConfig, PrepareCustomConfig

from tests.port.checks import IMPORTS, check_left, check_noop, check_transformed
from torchq_compat.port.rewrites.config_dicts import CONVERT, FUSE, PREPARE
from torchq_compat.port.rewrites.config_dicts import OF_CUSTOM_CONFIGS as REWRITE
from torchq_compat.port.scanner import rewrite_text

NAMES = {
    "nn": nn,
    "QConfigMapping": QConfigMapping,
    "ConvertCustomConfig": ConvertCustomConfig,
    "FuseCustomConfig": FuseCustomConfig,
    "PrepareCustomConfig": PrepareCustomConfig,
}


@pytest.mark.parametrize(
    "code",
    [
        "prepare_fx(m, c, x, config)\n",
        "convert_fx(m, None)\n",
        'fuse_fx(m, backend_config={"a": 1})\n',
        'config = {"preserved_attributes": []}\n',
    ],
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, IMPORTS + code)


def test_in_the_call() -> None:
    check_transformed(
        REWRITE,
        IMPORTS + 'fuse_fx(m, {"preserved_attributes": ["a"]})\n',
        IMPORTS + "from torchq_compat.custom_config import FuseCustomConfig\n"
        'fuse_fx(m, FuseCustomConfig().set_preserved_attributes(["a"]))\n',
    )


def test_one_variable_for_two_calls() -> None:
    check_transformed(
        REWRITE,
        IMPORTS
        + """\
def port(m, x):
    config = {"observed_to_quantized_custom_module_class": {"static": {A: B}}}
    convert_fx(m, config)
    return convert_fx(m, convert_custom_config_dict=config)
""",
        IMPORTS
        + """\
from torchq_compat.custom_config import ConvertCustomConfig
def port(m, x):
    config = ConvertCustomConfig().set_observed_to_quantized_mapping(A, B)
    convert_fx(m, config)
    return convert_fx(m, convert_custom_config_dict=config)
""",
    )


PREPARE_DICT = """{
    "standalone_module_name": [("s", {"": None}, (1,), {"preserved_attributes": ["z"]}, None)],
    "standalone_module_class": [(nn.GRU, None, (2,), None, None)],
    "float_to_observed_custom_module_class": {"static": {nn.LSTM: nn.RNN, nn.GRU: nn.RNN}},
    "non_traceable_module_name": ["a"],
    "non_traceable_module_class": [nn.Linear],
    "input_quantized_idxs": [0],
    "output_quantized_idxs": [1],
    "preserved_attributes": ["b"],
}"""
CONVERT_DICT = """{
    "observed_to_quantized_custom_module_class": {"static": {nn.RNN: nn.GRU}},
    "preserved_attributes": ["b"],
}"""


@pytest.mark.parametrize(
    ("call", "dict_form", "form", "config_class"),
    [
        ("prepare_fx(m, c, x, ", PREPARE_DICT, PREPARE, PrepareCustomConfig),
        ("convert_fx(m, ", CONVERT_DICT, CONVERT, ConvertCustomConfig),
        ("fuse_fx(m, ", '{"preserved_attributes": ["b", "c"]}', FUSE, FuseCustomConfig),
    ],
)
def test_the_object_says_what_from_dict_would_read(call, dict_form, form, config_class) -> None:
    rewritten = rewrite_text(f"{IMPORTS}{call}{dict_form})\n", (REWRITE,))
    by_rewrite = eval(rewritten.partition(call)[2].removesuffix(")\n"), NAMES)
    value = eval(dict_form, NAMES)
    assert set(value) == set(form.setters)
    assert _as_text(by_rewrite) == _as_text(config_class.from_dict(value))


def _as_text(config: object) -> str:
    """Return ``config`` as text, because entries of standalone modules compare their objects by identity."""
    return repr(config)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            'prepare_fx(m, c, x, {"float_to_observed_custom_module_class": {"dynamic": {A: B}}})\n',
            "not the static mode",
        ),
        ('prepare_fx(m, c, x, {"float_to_observed_custom_module_class": mapping})\n', "not spelled out"),
        ('prepare_fx(m, c, x, {"additional_object_mapping": {}})\n', "FX knows no key"),
        ('prepare_fx(m, c, x, {"standalone_module_name": [("s", q, i, None, None)]})\n', "dict or an object"),
        ('prepare_fx(m, c, x, {"standalone_module_name": [("s", None, i, None)]})\n', "5 parts"),
        (
            'prepare_fx(m, c, x, {"standalone_module_name": [("s", None,  # c\n i, None, None)]})\n',
            "comments",
        ),
    ],
)
def test_left_for_manual_review(code: str, reason: str) -> None:
    check_left(REWRITE, IMPORTS + code, reason)
