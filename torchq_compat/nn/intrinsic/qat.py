"""``torch.ao.nn.intrinsic.qat.freeze_bn_stats`` and ``update_bn_stats``, for captured models as well.

torch.ao's functions check the class of the module they are given, and do nothing unless it is a fused
convolution. A captured model has no such modules: its ``apply`` recognizes torch.ao's functions, but a loop
over its modules has no effect. The functions here act on the whole model; ``torchq-compat run`` puts them in
place of torch.ao's.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from torchq_compat.capture.training import freeze_batch_norm
from torchq_compat.model.graph_module import BATCH_NORM_SWITCHES, QuantizationGraphModule
from torchq_compat.model.views import PreparedView
from torchq_compat.support.argument_checks import checked_arguments, instance_of

__all__ = ["freeze_bn_stats", "update_bn_stats"]


LEGACY: dict[bool, Callable[[nn.Module], Any]] = {
    frozen: function for function, frozen in BATCH_NORM_SWITCHES.items()
}


MODULE = instance_of(nn.Module, what="an nn.Module")


@checked_arguments(mod=MODULE)
def freeze_bn_stats(mod: nn.Module) -> None:
    """Freeze the running statistics of every batch norm of ``mod``.

    Args:
        mod: a model prepared by this package; any other module is passed to torch.ao's function.

    Raises:
        ArgumentError: ``mod`` is no module.
    """
    _switch(mod, frozen=True)


@checked_arguments(mod=MODULE)
def update_bn_stats(mod: nn.Module) -> None:
    """Undo ``freeze_bn_stats``.

    Args:
        mod: as for ``freeze_bn_stats``.

    Raises:
        ArgumentError: ``mod`` is no module.
    """
    _switch(mod, frozen=False)


def _switch(module: nn.Module, *, frozen: bool) -> None:
    if isinstance(module, QuantizationGraphModule):
        freeze_batch_norm(module, frozen)
    elif isinstance(module, PreparedView):
        module.freeze(frozen)
    else:
        LEGACY[frozen](module)
