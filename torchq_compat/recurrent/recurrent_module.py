"""Recurrent modules: a contract, layers of cells, and a runner chosen for each call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchq_compat.capture.call_layouts import CallLayout
from torchq_compat.capture.opaque_calls import BoundCall
from torchq_compat.errors import ConfigError, CustomModuleError
from torchq_compat.model.other_tools import OBSERVED_KEY
from torchq_compat.modules.parts import (
    PartOwner,
    PartSpecs,
    check_part_dtypes,
)
from torchq_compat.read.backend_configs import read_backend_config
from torchq_compat.read.observers import translate_constructor
from torchq_compat.read.qparams import QParams
from torchq_compat.read.qspecs import OpSpecs
from torchq_compat.recurrent import over_time
from torchq_compat.recurrent.cell_graph import CellGraphModule, prepared_cell, weights_of
from torchq_compat.recurrent.cells import kind_of
from torchq_compat.recurrent.contracts import (
    RecurrentContract,
    SequenceContract,
    as_given,
    check_devices,
    check_example_inputs,
    check_same_dtype,
    contract_of,
)
from torchq_compat.recurrent.kernel.direct_calls import BoundModule, DirectCall, direct_call
from torchq_compat.recurrent.kernel.op import drop_forgotten, forget
from torchq_compat.recurrent.kernel.program import qparams_of_call
from torchq_compat.recurrent.over_time import LoopShape, RecurrentDirection, RecurrentLayer
from torchq_compat.recurrent.states import active_streams
from torchq_compat.support import argument_checks
from torchq_compat.support.process_state import is_compiling, is_exporting
from torchq_compat.support.torch_ao import PlaceholderObserver, QConfig

# Reads the constructors given for groups of parts, and checks the other arguments given with them.


SUFFIX = "_obs_ctr"


def given_specs(
    float_module: nn.Module,
    example_inputs: tuple[Any, ...] | None,
    backend_config: Any,
    *,
    split_gates: bool,
    constructors: dict[str, Any],
) -> PartSpecs:
    """Return the specs that the arguments of ``get_individually_observed_parts`` give for ``float_module``.

    Raises:
        ConfigError: as ``get_individually_observed_parts`` does; also if the module has no qconfig.
        CustomModuleError: if the example inputs do not fit the module's sizes.
    """
    kind = kind_of(float_module)
    qconfig = getattr(float_module, "qconfig", None)
    if qconfig is None:
        raise ConfigError.of("TQ911.no_qconfig", kind=kind.name)
    allowed = {f"{group}{SUFFIX}" for group in kind.groups}
    for name in constructors:
        if name not in allowed:
            raise ConfigError.of(
                "TQ911.no_such_part", name=name, kind=kind.name, allowed=", ".join(sorted(allowed))
            )
    if split_gates and not kind.float_cell.gate_names:
        raise ConfigError.of("TQ911.no_gates", kind=kind.name)
    by_group = {
        name.removesuffix(SUFFIX): translate_constructor(value, name)
        for name, value in constructors.items()
        if value is not None
    }
    specs = PartSpecs(OpSpecs(qconfig), by_group)
    if backend_config is not None:
        parts = kind.parts(split_gates=split_gates, projected=getattr(float_module, "proj_size", 0) > 0)
        check_part_dtypes(parts, specs, read_backend_config(backend_config))
    if example_inputs is not None:
        check_example_inputs(float_module, example_inputs)
    return specs


# Recurrent modules: a contract, layers of cells, and a runner chosen for each call.
#
# Observed, converted and dynamically quantized modules differ in the cells they hold and in how their inputs
# and results are quantized, not in how they run.


#: The buffer of a lowered module with the program of the native operator.
PROGRAM = "operator_program"
IN_FLOATS: Any = QConfig(activation=PlaceholderObserver, weight=PlaceholderObserver)  # type: ignore[no-untyped-call]


class RecurrentModule(PartOwner):
    """A recurrent module of prepared or converted cells.

    Args:
        contract: how the module is called, and the paths of its cells.
        layers: the layers that hold the cells.

    Attributes:
        split_gates: whether each gate has its own projection pair.
        is_lowered: whether calls run in the compiled cell loop.
    """

    split_gates: bool
    is_lowered = False
    #: A lowered module accepts and returns floats: so does the cell loop.
    opaque_in_floats = property(lambda self: self.is_lowered)
    #: A lowered module quantizes its float inputs itself.
    leaf_quantizes = opaque_in_floats

    def __init__(self, contract: RecurrentContract, layers: list[RecurrentLayer]) -> None:
        super().__init__()
        self.contract = contract
        vars(self).update(contract.attributes())
        contract.place(self, layers)
        self._bound: BoundModule | None = None
        self._direct: dict[Any, DirectCall] = {}
        self._bind()
        # Qparams are literals of the graphs; loading a state changes them.
        self.register_load_state_dict_post_hook(_bind_again)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, and bind the copy's own arguments."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._bind()

    def _bind(self) -> None:
        """Bind the arguments of the native operator, if every cell has a program. A copy made in a capture,
        which would trace the numbers, binds at its first call outside of the capture."""
        binds = self.can_be_lowered and not is_compiling()
        layers = self.contract.layers(self) if binds else []
        bound = [[direction.bound() for direction in layer.directions()] for layer in layers]
        known = [[item for item in layer if item is not None] for layer in bound]
        self._bound, self._direct = None, {}
        if known and list(map(len, known)) == list(map(len, bound)):
            width = known[0][0].program.slots[1].width
            columns = [layer.output_columns(width) for layer in layers[:-1]]
            self._bound = BoundModule(known, columns, self._homes_of_cells())

    def _homes_of_cells(self) -> list[tuple[dict[str, Any], str, nn.Module]]:
        """Return, for every cell and every module around it, the dictionary that holds it, its name in the
        dictionary and the module."""
        names = [path.split(".") for path, _ in self.cells()]
        paths = {".".join(of_cell[:end]) for of_cell in names for end in range(1, len(of_cell) + 1)}
        homes = []
        for path in sorted(paths):
            home, _, name = path.rpartition(".")
            homes.append((self.get_submodule(home)._modules, name, self.get_submodule(path)))
        return homes

    def bound(self) -> BoundModule | None:
        """Return the bound arguments of the native operator; None if a cell cannot run in it as it is now."""
        if self._bound is None or not self._bound.is_current():
            if is_compiling():
                return None
            self._bind()
        return self._bound

    def forward(
        self,
        *args: Any,
        opaque_layout: int | None = None,
        leaf_quantized: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> Any:
        """Run a call, see ``opaque_call``; a lowered module calls the operator directly if it can."""
        if self.is_lowered and not kwargs and not is_compiling():
            call = self._direct_call(opaque_layout, leaf_quantized)
            bound = self._bound_for(call, opaque_layout)
            tensors = None if bound is None else call.tensors(args)
            if bound is not None and tensors is not None and (len(tensors) > 1 or bound.starts_at_zero()):
                results = call.run(bound, tensors)
                if results is not None:
                    return results
        results = super().forward(*args, opaque_layout=opaque_layout, **kwargs)
        if not leaf_quantized:
            return results
        assert opaque_layout is not None
        all_qparams = self.opaque_layouts[opaque_layout].output_qparams
        return tuple(
            qparams.quantize(result)
            if index in leaf_quantized and (qparams := all_qparams[index])
            else result
            for index, result in enumerate(results)
        )

    def _as_floats(self, tensor: Tensor, qparams: QParams | None) -> Tensor:
        if qparams is None or not (self.is_lowered and tensor.is_floating_point()):
            return super()._as_floats(tensor, qparams)
        return qparams.dequantize(qparams.quantize(tensor), tensor.dtype)

    def _direct_call(self, opaque_layout: int | None, leaf_quantized: tuple[int, ...]) -> DirectCall:
        key = (opaque_layout, leaf_quantized)
        call = self._direct.get(key)
        layout = None if opaque_layout is None else self.opaque_layouts[opaque_layout]
        if call is None or call.layout is not layout:
            call = self._direct[key] = direct_call(self.contract, layout, leaf_quantized)
        return call

    def _bound_for(self, call: DirectCall, opaque_layout: int | None) -> BoundModule | None:
        """Return the bound arguments for ``call``; None if it needs more, such as dropout or a kept state."""
        if not call.is_possible or (self.training and self.contract.has_dropout):
            return None
        streams = active_streams()
        if streams is not None and (self.module_path, opaque_layout) in streams.kept:
            return None
        return self.bound()

    def opaque_bound(self, index: int, quantized: tuple[int, ...]) -> BoundCall | None:
        """See ``OpaqueModule``."""
        call = self._direct_call(index, quantized)
        is_possible = self.is_lowered and call.is_possible
        return BoundCall(call.places, call.batch_first) if is_possible else None

    def opaque_ticket(self, index: int, quantized: tuple[int, ...]) -> int:
        """See ``OpaqueModule``."""
        call = self._direct_call(index, quantized)
        bound = self._bound_for(call, index)
        if bound is not None and (len(call.places) > 1 or bound.starts_at_zero()):
            call.bind(bound)
            if call.bound_to is not None:
                return call.ticket
        return super().opaque_ticket(index, quantized)

    def opaque_call(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the float module: ``rnn(x)``, ``rnn(x, state)``, ``rnn(x, hx=state)``. If x is a
        PackedSequence, so is the output.

        Raises:
            CustomModuleError: if the float module would refuse the arguments.
        """
        arguments = self.contract.arguments_of(self.module_path, args, kwargs)
        check_devices(self.contract.kind, self.module_path, arguments, self._device())
        check_same_dtype(self.contract.kind, self.module_path, arguments)
        return self.contract.call(self, self.runner(), args, kwargs)

    def opaque_call_from_graph(
        self, layout: CallLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        arguments = self.contract.arguments_of(self.module_path, args, kwargs)
        check_devices(self.contract.kind, self.module_path, arguments, self._device())
        if not self.can_be_lowered:
            # No dequantize has turned a state into float32 yet: dtypes that differ come from the caller.
            check_same_dtype(self.contract.kind, self.module_path, arguments)
        qparams, _ = self.contract.arguments_of(self.module_path, *qparams_of_call(layout))
        # Dynamo cannot read a ContextVar; a streaming model keeps Dynamo from tracing this call.
        streams = None if torch.compiler.is_dynamo_compiling() else active_streams()
        key = None if streams is None else (self.module_path, self._index_of(layout))
        if streams is None or key not in streams.kept:
            return self.contract.call(self, self.runner(), args, kwargs, qparams)
        x, hidden = arguments
        assert isinstance(self.contract, SequenceContract)  # Streams keep no states of cells.
        return streams.call(
            key,
            partial(self.contract.initial_state, self, x, hidden),
            lambda state: self.contract.call(self, self.runner(), (x, as_given(state)), {}, qparams),
        )

    def _index_of(self, layout: CallLayout) -> int:
        return next(index for index, known in enumerate(self.opaque_layouts) if known is layout)

    def _device(self) -> torch.device | None:
        """Return the device of the weights; None in a capture, which checks devices itself."""
        if is_compiling():
            return None
        return next((tensor.device for tensor in chain(self.parameters(), self.buffers())), None)

    def _is_on_cpu(self) -> bool:
        return all(buffer.device.type == "cpu" for buffer in self.buffers())

    def runner(self) -> over_time.Runner:
        """Return the runner for the next call."""
        if is_exporting():
            shape = LoopShape.OPAQUE if self.is_lowered else over_time.shape_in_export()
            bound = self.bound() if shape is LoopShape.OPAQUE and self.can_be_lowered else None
            if bound is not None:
                return over_time.OpaqueRunner(bound, self._buffers.get(PROGRAM))
            is_onnx = shape is LoopShape.DYNAMIC_QUANTIZE_LSTM and self._is_dynamic_lstm()
            return over_time.DynamicQuantizeLSTMRunner() if is_onnx else over_time.TracedRunner()
        if self.is_lowered or (is_compiling() and self.can_be_lowered and self._is_on_cpu()):
            return over_time.NativeRunner(self.bound())
        return over_time.PythonRunner()

    #: Whether its linears choose qparams from their inputs, and nothing else is quantized.
    is_dynamic = False

    def _is_dynamic_lstm(self) -> bool:
        contract = self.contract
        if not self.is_dynamic or not isinstance(contract, SequenceContract):
            return False
        return len(contract.kind.states) == 2 and not contract.proj_size

    def opaque_forget_packed(self) -> None:
        """See ``OpaqueModule``."""
        if self._bound is not None:
            for call in self._direct.values():
                call.bound_to = None
            forget(self._bound.owner)
            drop_forgotten()

    #: Whether the cells can be converted cells, which the compiled cell loop runs.
    can_be_lowered = False

    def lowered(self) -> Self:
        """Return this module run by the compiled cell loop. A cell that the loop cannot run runs as before.

        The lowered module replaces this module in a lowered model: it shares state, submodules and hooks with
        this module, also those added later.
        """
        lowered = type(self).__new__(type(self))
        vars(lowered).update(vars(self))
        lowered.is_lowered = True
        lowered._direct = {}  # Direct calls are bound to the weights as they are now.
        if self._bound is not None:
            # A buffer: the loop of an exported program is handed the buffers of the modules that it calls.
            vars(lowered)["_buffers"] = {**self._buffers, PROGRAM: self._bound.program}
            names = {*self._non_persistent_buffers_set, PROGRAM}
            vars(lowered)["_non_persistent_buffers_set"] = names
        return lowered

    def __copy__(self) -> Self:
        """Return another module with the same cells; what is registered or set on one is not on the other."""
        copied = type(self).__new__(type(self))
        own = vars(nn.Module()).keys() | {"opaque_layouts"}
        for name, value in vars(self).items():
            is_container = isinstance(value, (dict, list, set))
            vars(copied)[name] = copy.copy(value) if name in own and is_container else value
        copied._bind()
        return copied

    def program_problems(self) -> list[str]:
        """Return the reasons why cells cannot run in the compiled cell loop."""
        directions = [direction for layer in self.contract.layers(self) for direction in layer.directions()]
        return [problem for item in directions if (problem := item.program_problem())]

    def cells(self) -> Iterator[tuple[str, CellGraphModule]]:
        """Return (path inside the module, cell) for every layer and direction."""
        return self.contract.cells(self)

    def graphs(self) -> Iterator[tuple[str, CellGraphModule]]:
        return self.cells()

    def result_dtypes(self, count: int) -> tuple[torch.dtype | None, ...]:
        output, *states = (self.specs.group_dtype(group) for group in self.contract.result_groups())
        # Between the output and the states are the indices of a PackedSequence.
        return output, *(None,) * (count - 1 - len(states)), *states

    @classmethod
    def converted_from(cls, other: RecurrentModule) -> Self:
        """Return a module of q-dq copies of the cells of ``other``, which is left unchanged."""
        converted = cls(other.contract, [layer.converted() for layer in other.contract.layers(other)])
        converted.take_over(other)
        converted.split_gates = other.split_gates
        return converted


class ObservedRecurrent(RecurrentModule):
    """A recurrent module whose parts are observed, or fake-quantized, one by one."""

    #: The class of torch.nn it observes.
    float_class: type[nn.Module]

    def __init__(self, *args: Any, split_gates: bool = False, **kwargs: Any) -> None:
        """Make a module with new weights that nothing observes yet, as torch.ao's constructor does.

        ``prepare_fx`` of a model that contains it observes it by its QConfig; its ``state_dict`` and shapes
        are those of the observed module.

        Args:
            args: arguments of the float class: input size, hidden size and so on.
            split_gates: one projection pair and one sum per gate instead of one for all gates.
            kwargs: keyword arguments of the float class.

        Raises:
            ConfigError: ``split_gates`` for a module without gates.
        """
        if args and isinstance(args[0], RecurrentContract):
            super().__init__(*args, **kwargs)
            return
        argument_checks.check_arguments(
            type(self).__name__, {"split_gates": argument_checks.FLAG}, {"split_gates": split_gates}
        )
        value: Any = self.float_class(*args, **kwargs)
        value.qconfig = IN_FLOATS
        specs = given_specs(value, None, None, split_gates=split_gates, constructors={})
        contract = contract_of(value)
        super().__init__(contract, prepared_layers(contract, value, specs, split_gates=split_gates))
        self.split_gates, self.specs, self.qconfig = split_gates, specs, None
        for _, cell in self.cells():
            cell.meta.pop(OBSERVED_KEY, None)  # torchao's prepare has marked the cell, but observes nothing.
        self.eval()  # As torch.ao's constructor does.

    def as_float(self) -> nn.Module:
        """Return a float module with copies of the weights of the cells."""
        module: nn.Module = self.contract.float_module(self.float_class)
        cells = chain.from_iterable(layer.directions() for layer in self.contract.layers(self))
        with torch.no_grad():
            for suffix, direction in zip(chain.from_iterable(self.contract.suffixes()), cells, strict=True):
                for name, value in weights_of(direction.cell).items():
                    module.get_parameter(f"{name}{suffix}").copy_(value)
        return module.train(self.training)

    @classmethod
    def observe(cls, module: nn.Module, specs: PartSpecs, *, split_gates: bool = False) -> Self:
        """Return an observed module with copies of the parameters of the float ``module``."""
        contract = contract_of(module)
        observed = cls(contract, prepared_layers(contract, module, specs, split_gates=split_gates))
        observed.split_gates = split_gates
        return observed.observed_by(specs, training=module.training)

    @classmethod
    @argument_checks.checked_arguments(
        other=argument_checks.instance_of(nn.Module, what="an nn.Module"),
        qconfig=argument_checks.optional(argument_checks.instance_of(QConfig)),
        split_gates=argument_checks.FLAG,
    )
    def from_float(cls, other: nn.Module, qconfig: Any = None, split_gates: bool = False) -> Any:
        """Observe the float module ``other`` by its own qconfig, or else by ``qconfig``. Legacy signature.

        Raises:
            ConfigError: if there is no qconfig.
            CustomModuleError: if ``other`` is of another class.
        """
        # A user's subclass may have another constructor.
        bases = [base for base in cls.__mro__ if issubclass(base, ObservedRecurrent)]
        observed = next(base for base in bases if "float_class" in vars(base))
        if not isinstance(other, cls.float_class):
            raise CustomModuleError.call_failed(
                "other", f"an nn.{cls.float_class.__name__} is needed, got {type(other).__name__}"
            )
        if getattr(other, "qconfig", None) is None:
            other = copy.copy(other)
            other.qconfig = qconfig
        specs = given_specs(other, None, None, split_gates=split_gates, constructors={})
        return observed.observe(other, specs, split_gates=split_gates)


class ConvertedRecurrent(RecurrentModule):
    """A recurrent module of q-dq cells with folded integer weights."""

    #: The observed class it is converted from.
    observed: type[ObservedRecurrent]
    can_be_lowered = True

    @property
    def opaque_shows_result_qparams(self) -> bool:  # type: ignore[override]
        return self.contract.shows_qparams_in_export

    @classmethod
    def from_observed(cls, other: nn.Module) -> Self:
        """Convert every cell of ``other``, which is left unchanged.

        Raises:
            CustomModuleError: ``other`` was not observed by this package.
        """
        if not isinstance(other, cls.observed):
            raise CustomModuleError.of(
                "TQ941.unusable_result", method="from_float", path="the observed module", value=other
            )
        return cls.converted_from(other)

    def opaque_output_qparams(self, results: list[Tensor]) -> tuple[QParams | None, ...]:
        return self.contract.output_qparams(self, results)


def _bind_again(module: RecurrentModule, _incompatible_keys: object) -> None:
    module._bind()


def prepared_layers(
    contract: RecurrentContract, module: nn.Module, specs: PartSpecs, *, split_gates: bool
) -> list[RecurrentLayer]:
    """Return layers of prepared cells with copies of the parameters of ``module``."""
    hidden = specs.group_dtype(contract.kind.states[0].group)

    def direction(layer: int, suffix: str) -> RecurrentDirection:
        input_dtype = hidden if layer else None
        cell = prepared_cell(module, specs, split_gates=split_gates, suffix=suffix, input_dtype=input_dtype)
        return RecurrentDirection(cell)

    return [
        RecurrentLayer([direction(layer, suffix) for suffix in suffixes])
        for layer, suffixes in enumerate(contract.suffixes())
    ]
