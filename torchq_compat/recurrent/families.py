"""The one table of torch.nn's recurrent modules: the observed, converted and dynamic class of each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchq_compat.capture.checked import capture_by_structure
from torchq_compat.errors import CustomModuleError
from torchq_compat.modules.parts import DynamicPartSpecs, PartGraphModule, PartKind, PartSpecs, prepare_parts
from torchq_compat.modules.parts_handler import ModuleFamily
from torchq_compat.read.qspecs import OpSpecs
from torchq_compat.recurrent import recurrent_module
from torchq_compat.recurrent.cell_graph import CellGraphModule, float_cell
from torchq_compat.recurrent.cells import CellKind, FloatCell, kind_of
from torchq_compat.recurrent.contracts import SequenceContract, contract_of
from torchq_compat.recurrent.over_time import RecurrentDirection, RecurrentLayer
from torchq_compat.support import later_stages
from torchq_compat.support.argument_checks import FLAG, Expected, checked_arguments, optional
from torchq_compat.support.process_state import draws_kept
from torchq_compat.support.torch_ao import QConfig, quantizable, quantized

# Legacy: ``torch.ao.nn.quantizable.LSTM`` and ``LSTMCell`` (observed; FX cannot map the cell, whose result
# is a tuple) and ``torch.ao.nn.quantized.LSTM`` (converted). Our classes derive from them. GRU and RNN are
# new.


class ObservedLSTM(recurrent_module.ObservedRecurrent, quantizable.LSTM):
    """An LSTM whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.LSTM

    def _get_name(self) -> str:
        return "QuantizableLSTM"


class ConvertedLSTM(recurrent_module.ConvertedRecurrent, quantized.LSTM):
    """An LSTM of q-dq cells with folded integer weights."""

    observed = ObservedLSTM

    def _get_name(self) -> str:
        return "QuantizedLSTM"


class ObservedLSTMCell(recurrent_module.ObservedRecurrent, quantizable.LSTMCell):
    """An LSTMCell whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.LSTMCell


class ConvertedLSTMCell(recurrent_module.ConvertedRecurrent):
    """A q-dq LSTMCell with folded integer weights."""

    observed = ObservedLSTMCell


class ObservedGRU(recurrent_module.ObservedRecurrent):
    """A GRU whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.GRU


class ConvertedGRU(recurrent_module.ConvertedRecurrent):
    """A GRU of q-dq cells with folded integer weights."""

    observed = ObservedGRU


class ObservedGRUCell(recurrent_module.ObservedRecurrent):
    """A GRUCell whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.GRUCell


class ConvertedGRUCell(recurrent_module.ConvertedRecurrent):
    """A q-dq GRUCell with folded integer weights."""

    observed = ObservedGRUCell


class ObservedRNN(recurrent_module.ObservedRecurrent):
    """An RNN, with tanh or ReLU, whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.RNN


class ConvertedRNN(recurrent_module.ConvertedRecurrent):
    """An RNN of q-dq cells with folded integer weights."""

    observed = ObservedRNN


class ObservedRNNCell(recurrent_module.ObservedRecurrent):
    """An RNNCell whose parts are observed, or fake-quantized, one by one."""

    float_class = nn.RNNCell


class ConvertedRNNCell(recurrent_module.ConvertedRecurrent):
    """A q-dq RNNCell with folded integer weights."""

    observed = ObservedRNNCell


FAMILIES = (
    ModuleFamily(nn.LSTM, ObservedLSTM, ConvertedLSTM, quantizable.LSTM, quantized.LSTM),
    ModuleFamily(nn.GRU, ObservedGRU, ConvertedGRU),
    ModuleFamily(nn.RNN, ObservedRNN, ConvertedRNN),
    ModuleFamily(nn.LSTMCell, ObservedLSTMCell, ConvertedLSTMCell, quantizable.LSTMCell),
    ModuleFamily(nn.GRUCell, ObservedGRUCell, ConvertedGRUCell),
    ModuleFamily(nn.RNNCell, ObservedRNNCell, ConvertedRNNCell),
)


def family_of(module: object) -> ModuleFamily | None:
    """Return the family of a float module; None if it is not recurrent."""
    return next((family for family in FAMILIES if isinstance(module, family.float_class)), None)


# Dynamically quantized recurrent modules: integer weights, activations quantized at run time.
#
# Legacy: ``torch.ao.nn.quantized.dynamic.LSTM``, ``GRU`` and the cells, which FX inserts for a dynamic
# QConfig without a mapping. As in torch.ao, the input projection of all steps is one linear, whose input is
# quantized as a whole, and the hidden state is quantized step by step. Only the linears are quantized.


#: Arguments of the float modules' constructors.
ARGUMENTS = (
    *("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional"),
    *("proj_size", "nonlinearity"),
)


class InputProjection(nn.Module):
    """The input projection ``W_ih x + b_ih`` of all steps: (T, B, I) -> (T, B, G*H)."""

    def __init__(self, cell: FloatCell) -> None:
        super().__init__()
        self.igates = cell.igates

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.igates(x),)


class ProjectedStep(nn.Module):
    """One time step after the input projection: the cell, called with the result of ``InputProjection``."""

    def __init__(self, cell: FloatCell) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, projected: Tensor, hx: Tensor, cx: Tensor | None = None) -> tuple[Tensor, ...]:
        return self.cell.step([projected], *(state for state in (hx, cx) if state is not None))


class DynamicRecurrent(recurrent_module.RecurrentModule):
    """A dynamically quantized recurrent module: prepared, with float weights, or converted. Its results are
    floats."""

    can_be_lowered = True
    #: The float module it was made from, if it is part of an eager model.
    source: MadeFrom | None = None
    is_dynamic = True

    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        return (None,) * count

    def flatten_parameters(self) -> None:
        """Do nothing; it exists because forward methods call it on LSTM, GRU and RNN."""

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the scriptable form of the module; torch.jit.script calls this method."""
        scripted: nn.Module = later_stages.stage("scripted_recurrent")(self, self.contract)
        return scripted

    def _get_name(self) -> str:
        return f"DynamicQuantized{self.contract.kind.name}"

    def __repr__(self) -> str:
        base: Any = nn.RNNBase if isinstance(self.contract, SequenceContract) else nn.RNNCellBase
        return f"{self._get_name()}({base.extra_repr(self)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(vars(self), memo))
        return copied

    def __reduce__(self) -> Any:
        """Pickle the float module's class, arguments and QConfig: a captured cell cannot be pickled, so the
        module of an eager model is made again."""
        if self.source is None:
            return super().__reduce__()
        return _rebuild, (self.source, self.module_path, self.is_lowered, self.state_dict())


@dataclass(frozen=True)
class MadeFrom:
    """The float module that a dynamically quantized module was made from."""

    float_class: type[nn.Module]
    arguments: Mapping[str, Any]
    qconfig: QConfig

    @classmethod
    def of(cls, module: nn.Module, qconfig: QConfig) -> MadeFrom:
        given = {name: getattr(module, name) for name in ARGUMENTS if hasattr(module, name)}
        if not given.get("proj_size"):
            given.pop("proj_size", None)  # GRU and RNN refuse it, even 0.
        return cls(type(module), given, qconfig)


def quantize_recurrent(module: nn.Module, qconfig: QConfig, path: str) -> DynamicRecurrent:
    """Return a converted module made from the float ``module``, which is left unchanged.

    Args:
        path: path of the module in the model, for messages.
    """
    prepared = prepare_dynamic(module, DynamicPartSpecs(OpSpecs(qconfig)))
    prepared.module_path = path
    converted = DynamicRecurrent.converted_from(prepared).eval()
    converted.source = MadeFrom.of(module, qconfig)
    return converted


def _rebuild(source: MadeFrom, path: str, is_lowered: bool, state: dict[str, Any]) -> DynamicRecurrent:
    with draws_kept():
        module = source.float_class(**source.arguments)
    result = quantize_recurrent(module, source.qconfig, path)
    result.load_state_dict(state)
    return result.lowered() if is_lowered else result


def prepare_dynamic(module: nn.Module, specs: PartSpecs) -> DynamicRecurrent:
    """Return a prepared module with copies of the parameters of ``module``, its linears marked for dynamic
    quantization."""
    contract = contract_of(module)
    layers = [
        RecurrentLayer([_prepared_direction(module, suffix, specs) for suffix in suffixes])
        for suffixes in contract.suffixes()
    ]
    dynamic_recurrent = DynamicRecurrent(contract, layers)
    dynamic_recurrent.split_gates = False
    return dynamic_recurrent.observed_by(specs, training=module.training)


def _prepared_direction(module: nn.Module, suffix: str, specs: PartSpecs) -> RecurrentDirection:
    kind, cell = kind_of(module), float_cell(module, suffix, split_gates=False)
    x, *states = cell.example_inputs()
    if isinstance(module, nn.RNNCellBase):
        return RecurrentDirection(CellGraphModule.wrap(_prepare(kind, cell, (x, *states), specs)))
    projection = _prepare(kind, InputProjection(cell), (x.expand(3, *x.shape),), specs)
    (projected,) = (tensor.clone() for tensor in cell.project(x))
    step = _prepare(kind, ProjectedStep(cell), (projected.detach(), *states), specs, "cell.")
    return RecurrentDirection(CellGraphModule.wrap(step), PartGraphModule.wrap(projection))


def _prepare(
    kind: CellKind, module: nn.Module, example: tuple[Tensor, ...], specs: PartSpecs, prefix: str = ""
) -> GraphModule:
    linears = [part for part in kind.parts(split_gates=False, projected=True) if part.kind is PartKind.LINEAR]
    return prepare_parts(capture_by_structure(module, example), linears, specs, {}, prefix=prefix)


# Observes the parts of a recurrent module one by one, each with the constructor given for its group.


#: ``given_specs`` checks them against the module's sizes.
CELL_INPUTS = optional(
    Expected("a tuple, as (x, state)", lambda value: type(value) in (tuple, list) and bool(value))
)


@checked_arguments(example_inputs=CELL_INPUTS, split_gates=FLAG)
def get_individually_observed_parts(
    float_module: nn.Module,
    example_inputs: tuple[Any, ...] | None = None,
    backend_config: Any = None,
    *,
    split_gates: bool = False,
    **constructors: Any,
) -> recurrent_module.ObservedRecurrent:
    """Observe the parts of ``float_module``, in both directions, with the given constructors.

    A constructor is an observer or fake-quantize class of torch.ao or torchao, or ``Class.with_args(...)``.
    A part without one follows ``float_module.qconfig``; sigmoid and tanh then have fixed qparams over [0, 1)
    and [-1, 1).

    Args:
        float_module: an ``nn.LSTM``, ``GRU``, ``RNN`` or one of their cells with a ``qconfig`` attribute.
        example_inputs: ``(x, state)``, checked against the module's sizes if given.
        backend_config: the BackendConfig that lists the dtypes parts may have; default: any integer dtype.
        split_gates: one projection pair and one sum per gate instead of one for all gates.
        constructors: ``<group>_obs_ctr=constructor`` for the groups of the module's parts: ``igates``,
            ``hgates``, ``linear_output``, ``hidden_state`` and ``weight`` of every kind (RNN with ReLU has no
            ``linear_output``); ``sigmoid``, ``tanh`` and ``sigmoid_input`` of LSTM and GRU; ``tanh_input`` of
            every kind but RNN with ReLU; ``cell_state`` and ``tanh_cell_state`` of LSTM; ``hidden_product``,
            the products ``(1 - z) * n`` and ``z * h``, of GRU. None leaves a group out.

    Raises:
        ConfigError: a group the module does not have, a value that is no constructor, a dtype that
            ``backend_config`` does not allow (the message names the part), or a module without a qconfig.
        CustomModuleError: ``float_module`` is not recurrent, or ``example_inputs`` do not fit its sizes.

    Returns:
        The observed module, called like ``float_module``.

    Example:
        >>> import torch
        >>> from torch.ao.quantization import get_default_qconfig
        >>> from torchq_compat.profiles import int16_parts
        >>> from torchq_compat.recurrent_parts import get_individually_observed_parts
        >>> gru = torch.nn.GRU(4, 8).eval()
        >>> gru.qconfig = get_default_qconfig("x86")
        >>> observed = get_individually_observed_parts(gru, **int16_parts(gru))
        >>> observed(torch.randn(5, 2, 4))[0].shape
        torch.Size([5, 2, 8])
    """
    family = family_of(float_module)
    if family is None:
        raise CustomModuleError.call_failed(
            "float_module",
            f"one of {', '.join(f.float_class.__name__ for f in FAMILIES)} is needed, "
            f"got {type(float_module).__name__}",
        )
    specs = recurrent_module.given_specs(
        float_module, example_inputs, backend_config, split_gates=split_gates, constructors=constructors
    )
    observed: recurrent_module.ObservedRecurrent = family.observed.observe(
        float_module, specs, split_gates=split_gates
    )
    return observed


def with_profile(observed: type[nn.Module], profile: Callable[..., dict[str, Any]]) -> type[nn.Module]:
    """Return ``observed`` as a class whose parts a function of ``torchq_compat.profiles`` chooses."""

    def from_float(cls: type, float_module: nn.Module) -> recurrent_module.ObservedRecurrent:
        constructors = profile(float_module, fake_quantize=float_module.training)
        return get_individually_observed_parts(float_module, **constructors)

    return type(
        observed.__name__, (observed,), {"from_float": classmethod(from_float), "__module__": __name__}
    )
