"""``qconfig_dict`` -> ``QConfigMapping``."""

from __future__ import annotations

from torchq_compat.migrate.dict_forms import DictForm, each_tuple, whole_value
from torchq_compat.migrate.rewrites.rewrite import Rewrite

__all__ = ["QCONFIG_DICT", "REWRITE"]

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

REWRITE = Rewrite("qconfig-dicts", "TQ105", "a qconfig_dict becomes a QConfigMapping", QCONFIG_DICT.find)
