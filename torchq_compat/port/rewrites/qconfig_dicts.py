"""Rewrite ``qconfig_dict`` to ``QConfigMapping``."""

from __future__ import annotations

from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.dict_forms import DictForm, each_tuple, whole_value

QCONFIG_DICT = DictForm(
    code="TQ105",
    module="torch.ao.quantization",
    class_name="QConfigMapping",
    parameter="qconfig_mapping",
    setters={
        "": whole_value("set_global"),
        "object_type": each_tuple("set_object_type", 2),
        "module_name_regex": each_tuple("set_module_name_regex", 2),
        "module_name": each_tuple("set_module_name", 2),
        "module_name_object_type_order": each_tuple("set_module_name_object_type_order", 4),
    },
)


REWRITE = Finder("TQ105", QCONFIG_DICT.find)
