"""Rewrite ``qconfig_dict`` to ``QConfigMapping``."""

from __future__ import annotations

from torchq_compat.port.constructs import Construct
from torchq_compat.port.legacy_api.dict_forms import DictForm, each_tuple, whole_value
from torchq_compat.port.rewrites.declaration import Rewrite

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

CONSTRUCT = Construct(
    code="TQ105",
    title="qconfig_dict",
    becomes="QConfigMapping",
    guide="""\
A dict given to `prepare_fx`, in place or through a variable that does nothing else, becomes a
`QConfigMapping`:

```python
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, default_qconfig

qconfig_dict = {
    "": default_qconfig,
    "object_type": [(nn.LSTM, None)],
    "module_name": [("head", default_qconfig)],
}
qconfig_mapping = (
    QConfigMapping()
    .set_global(default_qconfig)
    .set_object_type(nn.LSTM, None)
    .set_module_name("head", default_qconfig)
)
assert QConfigMapping.from_dict(qconfig_dict).to_dict() == qconfig_mapping.to_dict()
```

Left: a dict that is changed, annotated, built by code, or has a key FX does not know. The dict itself keeps
working.
""",
)

REWRITE = Rewrite(
    name="qconfig-dicts",
    construct=CONSTRUCT,
    summary="a qconfig_dict becomes a QConfigMapping",
    find=QCONFIG_DICT.find,
    order=30,
)
