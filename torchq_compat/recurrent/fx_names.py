"""The names FX gives the parameters and observers of a recurrent module.

``torch.ao.nn.quantizable.LSTM`` has each part's observer under the part's own name. With individually
observed parts its cell is a graph made by FX: observers are numbered in the order in which FX creates them;
scales have the name of the module that computed the value, or only a number where a function computed it. A
dynamic QConfig leaves ``nn.LSTM`` as it is, and packs one object for each layer and direction.
"""

from torch.fx import GraphModule

from torchq_compat.fx_state.numbered import Required, RequiredObserver, RequiredTensor
from torchq_compat.fx_state.states import FxState
from torchq_compat.modules import parts_handler
from torchq_compat.read.torch_ao_classes import has_fixed_qparams
from torchq_compat.recurrent.cell_graph import CellGraphModule
from torchq_compat.recurrent.cells import LSTM_GATES
from torchq_compat.recurrent.families import DynamicRecurrent
from torchq_compat.recurrent.recurrent_module import RecurrentModule

GATE_PARTS = {"input": "input_gate", "forget": "forget_gate", "cell": "cell_gate", "output": "output_gate"}
#: The parts after the gates, which functions compute, in the order of computation.
LAST_PARTS = ("fgate_cx", "igate_cgate", "fgate_cx_igate_cgate", "tanh_cy", "ogate_cy")


def required_by_observed(module: RecurrentModule, state: FxState, prefix: str) -> Required:
    """Return what a module whose parts are observed one by one needs from ``state``, a state dict of FX.

    ``prefix`` is the module's path in FX's names.
    """
    expected = Required()
    for path, cell in module.cells():
        at = f"{prefix}.{path}"
        if state.observers_at(f"{at}.") or state.scales_at(f"{at}."):
            expected += _numbered_parts(module, cell, state, at).below(path)
        else:
            expected += parts_handler.required_by_parts(cell, at).below(path)
    return expected


def required_by_dynamic(module: DynamicRecurrent, prefix: str) -> Required:
    """Return what a dynamically quantized module needs from a state dict of FX."""
    expected = Required()
    index = 0
    for layer, item in enumerate(module.contract.layers(module)):
        for direction, suffix in zip(item.directions(), ("", "_reverse"), strict=False):
            for graph in direction.graphs():
                path = next(name for name, inside in module.named_modules() if inside is graph)
                expected += _dynamic_graph(graph, prefix, layer, suffix, index).below(path)
            index += 1
    return expected


def _dynamic_graph(graph: GraphModule, prefix: str, layer: int, suffix: str, index: int) -> Required:
    tensors, observers = [], []
    for name, own in parts_handler.weights_of_parts(graph):
        role, _, kind = name.rpartition(".")
        fx = f"{kind}_{'ih' if role.endswith('igates') else 'hh'}"
        names = (
            f"{prefix}.{fx}_l{layer}{suffix}",
            f"{prefix}._all_weight_values.{index}.{fx}",
            f"{prefix}.{fx}",
        )
        tensors.append(RequiredTensor(name, names, own))
        observers += [RequiredObserver(observer, (), is_weight=True) for observer in own]
    return Required(tuple(tensors), tuple(observers))


def _numbered_parts(module: RecurrentModule, cell: CellGraphModule, state: FxState, at: str) -> Required:
    expected = _parts_in_order(module.split_gates, _requantized_gates(module, cell), state.is_converted)
    observer_of = dict(parts_handler.part_observers(cell))
    theirs = state.observers_at(f"{at}.")
    if state.is_converted:
        theirs = [name for name in state.scales_at(f"{at}.") if name.startswith(f"{at}._scale_")]
    problems: tuple[str, ...] = ()
    if len(theirs) != len(expected):
        problems = (f"it has {len(theirs)} observers in {at} where FX makes {len(expected)}",)
    name_of = {part: name for part, name in zip(expected, theirs, strict=False) if part is not None}
    observers: list[RequiredObserver] = []
    only_fx: list[str] = []
    for part, observer in observer_of.items():
        name = name_of.get(part)
        if state.is_converted:
            scales = (name,) if name else (f"{at}.{part.replace('.', '_')}_scale_0",)
            observers.append(RequiredObserver(observer, (), scales))
        elif name is not None:
            # FX has no constructor for the tanh of the cell state: its observer observes values.
            if has_fixed_qparams(cell.get_submodule(observer)) and f"{name}.min_val" in state.entries:
                only_fx.append(name)
            else:
                observers.append(RequiredObserver(observer, (name,)))
    unused: list[str] = []
    requantizing: list[str] = []
    for index, (own, name) in enumerate(zip(expected, theirs, strict=False)):
        if own is None:
            (unused if _is_input(index, state, expected) else requantizing).append(name)
    if state.is_converted:
        first = "igates_input_input_scale_0" if module.split_gates else "igates_input_scale_0"
        unused.append(f"{at}.{first}")
    of_values = Required(
        observers=tuple(observers),
        only_fx=(*only_fx, *requantizing),
        unused=tuple(unused),
        problems=problems,
    )
    return of_values + parts_handler.required_weights(cell, at)


def _is_input(index: int, state: FxState, names: list[str | None]) -> bool:
    """Return whether observer number ``index`` observes an input of the cell; inputs arrive quantized."""
    if state.is_converted:
        return index < 2
    return index == 0 or (
        index > 0 and names[index : index + 2][-1] in ("hgates", "hgates.input", "fgate_cx")
    )


def _parts_in_order(split_gates: bool, requantized: set[str], is_converted: bool) -> list[str | None]:
    """Return the parts of a cell in the order of FX's observers, or, if it ``is_converted``, of its numbered
    scales; None for one without a counterpart here."""

    def extra(gate: str) -> list[str | None]:
        return [None] if gate in requantized else []

    if is_converted:
        sums = [f"gates.{gate}" for gate in LSTM_GATES] if split_gates else ["gates"]
        inputs = [entry for gate in LSTM_GATES for entry in extra(gate)]
        return [None, None, *sums, *inputs, *inputs, *LAST_PARTS]
    projections: list[str | None] = [None, "igates", None, "hgates", "gates"]
    if split_gates:
        first, *others = LSTM_GATES
        projections = [None, f"igates.{first}", None, f"hgates.{first}", f"gates.{first}"]
        projections += [f"{part}.{gate}" for gate in others for part in ("igates", "hgates", "gates")]
    gates = [item for gate, part in GATE_PARTS.items() for item in (*extra(gate), part)]
    fgate_cx, igate_cgate, cy, tanh_cy, ogate_cy = LAST_PARTS
    return [
        *projections,
        *gates,
        *(*extra("forget"), None, fgate_cx),
        *(*extra("input"), *extra("cell"), igate_cgate),
        *(cy, tanh_cy),
        *(*extra("output"), ogate_cy),
    ]


def _requantized_gates(module: RecurrentModule, cell: CellGraphModule) -> set[str]:
    """Return the gates not in the QConfig's dtype: FX quantizes their inputs and their results again."""
    default = module.specs.op_specs.activation_dtype
    observer_of = dict(parts_handler.part_observers(cell))
    return {
        gate
        for gate, part in GATE_PARTS.items()
        if part in observer_of
        and getattr(cell.get_submodule(observer_of[part]), "dtype", None) is not default
    }
