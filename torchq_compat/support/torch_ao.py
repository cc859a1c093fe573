"""The names of ``torch.ao.quantization`` and ``torch.ao.nn`` that this package uses, imported only here.

Both are deprecated. The configuration a legacy script builds (QConfigs, mappings, observers, BackendConfigs,
custom configs) is data; its classes must exist, and torchao 0.18 reads them too. The FX engine is called only
by ``compare``, which shows FX's results beside ours and works without them: names of the engine may be
absent, and are then replaced by something that matches nothing.
"""

import importlib
from types import ModuleType
from typing import Any

import torch.ao.quantization.backend_config.utils
import torch.ao.quantization.fx._decomposed  # it registers the q-dq operators
from torch.ao.nn import intrinsic, quantizable, quantized
from torch.ao.nn.intrinsic.modules.fused import _FusedModule as fused_module
from torch.ao.nn.intrinsic.qat import freeze_bn_stats, update_bn_stats
from torch.ao.nn.quantized import FloatFunctional, FXFloatFunctional, QFunctional
from torch.ao.quantization import (
    DeQuantStub,
    FakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    NoopObserver,
    PlaceholderObserver,
    QConfig,
    QConfigMapping,
    QuantStub,
    QuantWrapper,
    default_dynamic_qconfig,
    default_per_channel_weight_observer,
    default_qconfig,
    disable_fake_quant,
    fake_quantize,
    float16_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
    get_default_custom_config_dict,
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
    observer,
)
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
    backend_config,
    get_native_backend_config,
)
from torch.ao.quantization.fake_quantize import FakeQuantizeBase
from torch.ao.quantization.fuse_modules import fuse_known_modules, fuse_modules, fuse_modules_qat
from torch.ao.quantization.fx.custom_config import (
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    StandaloneModuleConfigEntry,
)
from torch.ao.quantization.observer import ObserverBase
from torch.ao.quantization.qconfig import qconfig_equals
from torch.ao.quantization.qconfig_mapping import (
    _FIXED_QPARAMS_OP_TO_OBSERVER as FIXED_QPARAMS_OP_TO_OBSERVER,
)
from torch.ao.quantization.quant_type import QuantType
from torch.ao.quantization.quantization_mappings import (
    DEFAULT_MODULE_TO_ACT_POST_PROCESS,
    get_default_dynamic_quant_module_mappings,
    get_default_qat_module_mappings,
    get_default_qconfig_propagation_list,
    get_default_static_quant_module_mappings,
)
from torch.ao.quantization.quantize import _observer_forward_hook as observe_result
from torch.ao.quantization.quantize import _observer_forward_pre_hook as observe_input
from torch.ao.quantization.utils import MatchAllNode

from torchq_compat.support.versions import warn_of_untested_pair

# BackendConfig uses this module of its package, which the package does not import.


# Every module that quantizes imports this one, so the warning is given once.
warn_of_untested_pair()

#: The module of FX's entry points.
FX_ENGINE = "torch.ao.quantization.quantize_fx"
#: The module of those of eager mode.
EAGER_ENGINE = "torch.ao.quantization.quantize"


class _Absent:
    """A stand-in for a class of the FX engine that this torch no longer has; nothing is an instance of it."""


def _of_engine(module: str, name: str) -> Any:
    return getattr(_engine_module(module), name, _Absent)


def _engine_module(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"torch.ao.quantization.fx.{module}")
    except ImportError:
        return None


#: The tracer of FX's prepare and fuse.
QuantizationTracer: type = _of_engine("tracer", "QuantizationTracer")
#: The class of the model that FX's convert returns.
QuantizedGraphModule: type = _of_engine("graph_module", "QuantizedGraphModule")
#: Functions of the engine that torchao calls; one of them has a cache that keeps models alive.
fx_utils: ModuleType | None = _engine_module("utils")


def fx_engine() -> ModuleType:
    """Return the module of FX's entry points, for tools that show what FX does with a model.

    Raises:
        ImportError: this torch has no FX engine.
    """
    module = importlib.import_module(FX_ENGINE)
    if module.__spec__ is None:
        # This is a stand-in: the process runs a legacy script, with our functions in place of FX's.
        raise ImportError(f"this torch has no {FX_ENGINE}")
    return module
