"""Rewrite ``qconfig_dict`` to ``QConfigMapping``."""

from torchq_compat.port.finders import Finder
from torchq_compat.port.legacy_api.dict_forms import DictForm, of_tuples, whole_value

QCONFIG_DICT = DictForm(
    code="TQ105",
    module="torch.ao.quantization",
    class_name="QConfigMapping",
    parameter="qconfig_mapping",
    setters={
        "": whole_value("set_global"),
        "object_type": of_tuples("set_object_type", 2),
        "module_name_regex": of_tuples("set_module_name_regex", 2),
        "module_name": of_tuples("set_module_name", 2),
        "module_name_object_type_order": of_tuples("set_module_name_object_type_order", 4),
    },
)


REWRITE = Finder("TQ105", QCONFIG_DICT.find)
