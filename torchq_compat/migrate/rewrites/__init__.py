"""The rewrites, one module each, in the order in which they run.

Every one of them recognises the FX functions under their legacy and under their new name, so the order
changes only how the result looks: names that others import are settled first, so that imports are joined.
"""

from torchq_compat.migrate.rewrites import (
    custom_config_classes,
    custom_config_dicts,
    dict_getters,
    is_reference,
    lstm_part_helpers,
    old_namespaces,
    qconfig_dicts,
    quantize_fx_functions,
    renamed_keywords,
    torchscript,
)

__all__ = ["REWRITES"]

REWRITES = (
    old_namespaces.REWRITE,
    custom_config_classes.REWRITE,
    qconfig_dicts.REWRITE,
    custom_config_dicts.REWRITE,
    dict_getters.REWRITE,
    renamed_keywords.REWRITE,
    torchscript.REWRITE,
    quantize_fx_functions.REWRITE,
    lstm_part_helpers.REWRITE,
    is_reference.REWRITE,
)
