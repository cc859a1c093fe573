"""The handler of all other modules: any float class with an observed and a quantized class.

Legacy: ``PrepareCustomConfig.set_float_to_observed_mapping`` and ``ConvertCustomConfig``. FX quantized the
first positional input and the one output of such a module; this package quantizes all inputs and outputs, see
``boundary_settings``. As in FX the quantized module computes with torch.ao's quantized tensors. If its class
has ``takes_floats = True``, it gets floats rounded to the qparams of its inputs, and its results are
quantized after the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.annotate.call_boundary import OpaqueBoundary
from torchq_compat.custom_modules.registry import (
    ConvertRequest,
    CustomModuleHandler,
    ObserveRequest,
    handler_of,
    handlers,
    register,
)
from torchq_compat.custom_modules.user.boundary_settings import check_keys, choose_specs
from torchq_compat.custom_modules.user.covering_observer import observer_of_all_calls
from torchq_compat.custom_modules.user.fake_shapes import fake_call_of
from torchq_compat.custom_modules.user.opaque_user_module import (
    OpaqueUserModule,
    as_opaque_module,
    as_users_module,
)
from torchq_compat.errors import TorchQCompatError, UserModuleError
from torchq_compat.opaque_calls.capture_stub import FakeCall
from torchq_compat.opaque_calls.layouts import CallLayout
from torchq_compat.opaque_calls.opaque_module import OpaqueModule
from torchq_compat.opaque_calls.tensor_labels import input_labels, output_labels
from torchq_compat.support.dtypes import dtype_name
from torchq_compat.support.user_warnings import warn_user

__all__ = ["UserModuleHandler", "made_by"]


class UserModuleHandler(CustomModuleHandler):
    """Calls ``from_float`` and ``from_observed`` of the user's classes. A registered subclass can override
    more for a class, such as ``fake_call`` and ``boundary``."""

    is_fallback = True

    def takes(self, float_class: type[nn.Module], observed_class: type[nn.Module]) -> bool:
        return True

    def is_opaque(self, module: nn.Module) -> bool:
        return False

    def fake_call(self, module: nn.Module, path: str) -> FakeCall:
        knowing = next((handler for handler in handlers() if handler.is_opaque(module)), None)
        return fake_call_of(module, path) if knowing is None else knowing.fake_call(module, path)

    def observe(self, request: ObserveRequest) -> OpaqueModule:
        for module in request.module.modules():
            # FX sets it there. Submodules have it too, for from_float of custom modules inside.
            module.qconfig = request.qconfig  # type: ignore[assignment]
        observed = made_by(request.observed_class, "from_float", request.module, request.path)
        if isinstance(observed, OpaqueModule) and handler_of(observed) is not None:
            return observed
        if getattr(observed, "qconfig", None) is None:
            observed.qconfig = request.qconfig  # type: ignore[assignment]
        return as_opaque_module(observed, request.path, takes_floats=True)

    def owns(self, opaque: nn.Module) -> bool:
        return isinstance(opaque, OpaqueUserModule)

    def mapping_hint(self, module: nn.Module) -> str | None:
        return None

    def boundary(self, opaque: OpaqueModule, request: ObserveRequest, layout: CallLayout) -> OpaqueBoundary:
        """Return the boundary that ``quantized_inputs`` and ``quantized_outputs`` of the class describe."""
        assert isinstance(opaque, OpaqueUserModule)
        if not request.specs.is_static:
            return OpaqueBoundary.floats(layout.inputs.count(), layout.outputs.count())
        users_class, path = opaque.opaque_users_class, request.path
        calls = opaque.opaque_layouts
        inputs: dict[Any, Any] = getattr(opaque, "quantized_inputs", {})
        outputs: dict[Any, Any] = getattr(opaque, "quantized_outputs", {})
        check_keys(inputs, _all(input_labels(users_class, c.inputs) for c in calls), path, "quantized_inputs")
        check_keys(outputs, _all(output_labels(c.outputs) for c in calls), path, "quantized_outputs")
        return OpaqueBoundary(
            input_specs=choose_specs(
                inputs, input_labels(users_class, layout.inputs), request.specs, path, "quantized_inputs"
            ),
            output_dtypes=(None,) * layout.outputs.count(),
            output_specs=choose_specs(
                outputs, output_labels(layout.outputs), request.specs, path, "quantized_outputs"
            ),
        )

    def check_call(
        self, opaque: OpaqueModule, path: str, layout: int, arguments: list[Any], expected: list[Tensor]
    ) -> None:
        assert isinstance(opaque, OpaqueUserModule)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                results = opaque(*arguments, opaque_layout=layout)
        except TorchQCompatError:
            raise
        except Exception as cause:
            raise _call_raised(path, opaque.opaque_users_class, cause) from cause
        for wanted, found in zip(map(_shown, expected), map(_shown, results), strict=True):
            if wanted != found:
                raise UserModuleError.other_results(path, opaque.opaque_users_class, wanted, found)

    def convert(self, request: ConvertRequest) -> OpaqueModule:
        opaque, path = request.observed, request.path
        assert isinstance(opaque, OpaqueUserModule)
        if request.quantized_class is None:
            warn_user(
                f"{opaque.opaque_users_class.__name__} at {path!r} stays observed and computes in floats: "
                "observed_to_quantized_mapping has no entry for its class."
            )
            return opaque
        layouts = opaque.opaque_layouts
        observed = as_users_module(opaque)
        if request.output_observers:
            # FX sets it there; legacy classes read their output qparams from it.
            first, *more = (observer_of_all_calls(each) for each in request.output_observers)
            observed.activation_post_process = nn.ModuleList([first, *more]) if more else first
        quantized = made_by(request.quantized_class, "from_observed", observed, path)
        if isinstance(quantized, OpaqueModule) and handler_of(quantized) is not None:
            converted: OpaqueModule = quantized
        else:
            converted = as_opaque_module(
                quantized, path, takes_floats=getattr(quantized, "takes_floats", False)
            )
        converted.opaque_layouts = list(layouts)
        return converted


def made_by(owner: type[nn.Module], method: str, module: nn.Module, path: str) -> nn.Module:
    """Call ``from_float`` or ``from_observed`` of the user's ``owner`` on ``module``.

    Raises:
        UserModuleError: if the method raises, or does not return a module.
    """
    try:
        made = getattr(owner, method)(module)
    except TorchQCompatError:
        raise
    except Exception as cause:
        raise _method_raised(path, owner, method, cause) from cause
    if not isinstance(made, nn.Module):
        raise UserModuleError(
            f"{owner.__qualname__}.{method} for the module at {path!r} returned {type(made).__name__}.",
            hint=f"{method} has to return the nn.Module to use instead.",
        )
    return made


def _all(label_lists: Any) -> list[str]:
    return [label for labels in label_lists for label in labels]


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {dtype_name(tensor.dtype)}"


register(UserModuleHandler())


def _call_raised(path: str, owner: type, cause: BaseException) -> UserModuleError:
    first_line = str(cause).strip().split("\n", 1)[0]
    return UserModuleError(
        f"{owner.__qualname__} at {path!r} cannot be called as the float module is: "
        f"{type(cause).__name__}: {first_line}",
        hint="its forward has to take the arguments of the float module's.",
    )


def _method_raised(path: str, owner: type, method: str, cause: BaseException) -> UserModuleError:
    first_line = str(cause).strip().split("\n", 1)[0]
    return UserModuleError(
        f"{owner.__qualname__}.{method} failed for the module at {path!r}: "
        f"{type(cause).__name__}: {first_line}",
        hint=f"{method} gets the module to replace and has to return the nn.Module to use instead.",
    )
