"""Models whose example inputs do not run, which FX accepts because it never runs them.

``torch.export`` captures a model by running it. If it cannot, ``run`` warns at the line of the call and
returns a model that waits: its first call has arguments that do run. The model is then prepared with these
arguments, and becomes the prepared model, or the converted model if the script has converted it meanwhile.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchq_compat.errors import InputError
from torchq_compat.port.legacy_api.names import CONVERTING, PREPARING
from torchq_compat.support.graph_nodes import copied_model
from torchq_compat.support.upstream import pytree
from torchq_compat.support.user_warnings import warn_user

EXAMPLES = "example_inputs"
#: Methods refused while a model for training waits: an optimizer would get the parameters of the float model.
OF_TRAINING = ("parameters", "named_parameters")
#: Methods that only the captured model can have -> the name of the operation in the error.
OF_THE_CAPTURED = {
    "state_dict": "state_dict",
    "load_state_dict": "load_state_dict",
    "__prepare_scriptable__": "torch.jit.script",
    "__reduce_ex__": "pickling",
}

Function = Callable[..., Any]


def waiting_for_first_call(function: Function) -> Function:
    """Return ``function``, which prepares or converts, so that it returns and accepts models that wait."""
    if function.__name__ in PREPARING:
        return _preparing(function)
    return _converting(function) if function.__name__ in CONVERTING else function


def _preparing(function: Function) -> Function:
    @functools.wraps(function)
    def prepare(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except InputError as error:
            bound = _bound(function, args, kwargs)
            if bound is None or error.code != "TQ902":
                raise
            warn_user(
                "TQ316",
                f"{error.message.rstrip('.')}. FX does not look at them; here the model is captured at its "
                "first call, from the arguments of that call. Give example_inputs that run: without "
                "`torchq-compat run` this is an error.",
            )
            model = next(iter(bound.arguments.values()))
            is_qat = function.__name__ == "prepare_qat_fx" or bool(bound.arguments.get("is_qat"))
            return WaitingModel(
                copied_model(model), _Preparation(function, bound), error.message, is_qat=is_qat
            )

    return prepare


def _converting(function: Function) -> Function:
    @functools.wraps(function)
    def convert(*args: Any, **kwargs: Any) -> Any:
        first_parameter = next(iter(inspect.signature(function).parameters))
        source = args[0] if args else kwargs.get(first_parameter)
        if not isinstance(source, WaitingModel):
            return function(*args, **kwargs)
        others = {key: value for key, value in kwargs.items() if key != first_parameter}
        make = _Conversion(source.make, function, args[1:], others)
        return WaitingModel(source.float_model, make, source.problem)

    return convert


def _bound(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments | None:
    """Return the arguments by name; None if the script uses keywords of older releases."""
    try:
        return inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return None


@dataclass(frozen=True)
class _Preparation:
    function: Function
    bound: inspect.BoundArguments

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> nn.Module:
        named = {**self.bound.arguments, next(iter(self.bound.arguments)): model, EXAMPLES: args}
        kwargs = named.pop("kwargs", {})
        prepared: nn.Module = self.function(**named, **kwargs)
        return prepared


@dataclass(frozen=True)
class _Conversion:
    prepare: Function
    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> nn.Module:
        converted: nn.Module = self.function(self.prepare(model, args), *self.args, **self.kwargs)
        return converted


class WaitingModel(nn.Module):
    """A model that is captured at its first call, and then becomes the model ``make`` returns.

    Args:
        float_model: a copy of the script's model.
        make: (float model, positional arguments) -> the prepared or converted model.
        problem: why the example inputs did not run.
        is_qat: whether the model is to be trained.
    """

    def __init__(
        self,
        float_model: nn.Module,
        make: Callable[[nn.Module, tuple[Any, ...]], nn.Module],
        problem: str,
        *,
        is_qat: bool = False,
    ) -> None:
        super().__init__()
        self.float_model, self.make, self.problem, self.is_qat = float_model, make, problem, is_qat
        super().train(is_qat)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Capture the model with these arguments, become the model that is made, and call it."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            self._refuse("torch.jit.trace")
        positional = inspect.signature(self.float_model.forward).bind(*args, **kwargs).args
        with torch.inference_mode(mode=False), torch.enable_grad():
            made = self.make(self.float_model, pytree.tree_map(_out_of_inference_mode, positional))
        if self.is_qat and not self.training:
            made.eval()
        hooks, pre_hooks = self._forward_hooks, self._forward_pre_hooks
        self._become(made)
        result = made(*args, **kwargs)
        # Add the hooks only now: torch calls those of this first call around this method.
        made._forward_hooks.update(hooks)
        made._forward_pre_hooks.update(pre_hooks)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> WaitingModel:
        return WaitingModel(copied_model(self.float_model), self.make, self.problem, is_qat=self.is_qat)

    def _become(self, made: nn.Module) -> None:
        self.__class__ = type(made)  # type: ignore[assignment]
        object.__setattr__(self, "__dict__", made.__dict__)

    def __getattribute__(self, name: str) -> Any:
        if name in OF_THE_CAPTURED or (name in OF_TRAINING and self.is_qat):
            self._refuse(OF_THE_CAPTURED.get(name, name))
        return super().__getattribute__(name)

    def _refuse(self, what: str) -> NoReturn:
        raise InputError(
            f"{what}: {self.problem.rstrip('.')}, and the model was not called since.",
            hint="give example_inputs that model(*example_inputs) takes; the first batch of the calibration "
            "loader will do, without its targets.",
            code="TQ902",
        )

    def __repr__(self) -> str:
        return f"{type(self.float_model).__name__}, captured at its first call: {self.problem}"


def _out_of_inference_mode(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
