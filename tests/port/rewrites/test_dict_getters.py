from __future__ import annotations

import importlib

import pytest

from tests.port.checks import IMPORTS, check_left, check_noop, check_transformed
from torchq_compat.port.names import DICT_GETTERS
from torchq_compat.port.rewrites.config_dicts import GETTERS as REWRITE

GET = "from torch.ao.quantization import get_default_qconfig_dict\n"
GET_NEW = "from torch.ao.quantization import get_default_qconfig_mapping\n"


@pytest.mark.parametrize(
    "code",
    [GET_NEW, "from mine import get_default_qconfig_dict\n", "get_default_qconfig_dict('x86')\n"],
)
def test_noop(code: str) -> None:
    check_noop(REWRITE, IMPORTS + code)


def test_in_the_call_and_through_a_variable() -> None:
    check_transformed(
        REWRITE,
        IMPORTS + GET + "prepare_fx(m, get_default_qconfig_dict('x86'), x)\n"
        "def f(m, x):\n    d = get_default_qconfig_dict()\n    return prepare_fx(m, d, x)\n",
        IMPORTS + GET_NEW + "prepare_fx(m, get_default_qconfig_mapping('x86'), x)\n"
        "def f(m, x):\n    d = get_default_qconfig_mapping()\n    return prepare_fx(m, d, x)\n",
    )


def test_dotted() -> None:
    check_transformed(
        REWRITE,
        IMPORTS + "prepare_fx(m, torch.ao.quantization.get_default_qat_qconfig_dict(), x)\n",
        IMPORTS + "prepare_fx(m, torch.ao.quantization.get_default_qat_qconfig_mapping(), x)\n",
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("d = get_default_qconfig_dict()\nd['object_type'] = []\nprepare_fx(m, d, x)\n", "used at line 6"),
        ("print(get_default_qconfig_dict())\n", "used at line 5"),
        ("f = get_default_qconfig_dict\n", "itself is used"),
    ],
)
def test_left_for_manual_review(code: str, reason: str) -> None:
    check_left(REWRITE, IMPORTS + GET + code, reason)


@pytest.mark.parametrize("name", DICT_GETTERS)
def test_the_table_against_torch(name: str) -> None:
    module, _, function = name.rpartition(".")
    home = importlib.import_module(module)
    as_dict = getattr(home, function)()
    assert isinstance(as_dict, dict)
    assert type(getattr(home, DICT_GETTERS[name])()).from_dict(as_dict).to_dict().keys() == as_dict.keys()
