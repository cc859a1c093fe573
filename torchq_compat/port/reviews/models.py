"""Find models of FX that are prepared without inputs, equalized, pickled whole, or exported to ONNX through
TorchScript; code that inspects a converted model, uses the classes of FX's converted models, or edits a
prepared one; names that no rewrite carries over, of FX's engine, the Numeric Suite, and quantized modules and
kernels that a script calls by hand; and legacy names in string literals."""

import re
from collections.abc import Iterator
from functools import partial

import libcst as cst

from torchq_compat.port import names as legacy
from torchq_compat.port.constructs import Site
from torchq_compat.port.finders import Finder
from torchq_compat.port.rewrites.config_dicts import PREPARE
from torchq_compat.port.source.fx_calls import fx_call, fx_calls, last_value, sure_value, uses_pt2e
from torchq_compat.port.source.parsed import ParsedSource, names_in_import

OLD_EXPORTER = "torch.onnx.utils.export"
EXPORTERS = {"torch.onnx.export", OLD_EXPORTER}
MISSING = "torch.export captures the model by running it once"
MAX_STEPS = 8
#: The keys of a custom config dict.
OLD_KEYS = (
    *PREPARE.setters,
    *(f"additional_{name}" for name in ("quant_pattern", "fuser_method_mapping", "qat_module_mapping")),
)


def find_equalized(source: ParsedSource) -> Iterator[Site]:
    """Yield ``_equalization_config``, which has no counterpart."""
    for call in fx_calls(source):
        arg = call.arg("_equalization_config")
        if arg is not None and source.code(arg.value) != "None":
            refusal = "PT2E has none; equalize the float model before, as the guide shows"
            yield Site("TQ202", source.start(arg), source.code(arg), refusal=refusal)


def find_saved(source: ParsedSource) -> Iterator[Site]:
    """Yield ``torch.save(model)`` and ``torch.save({"model": model})`` of a prepared or converted model."""
    for call in source.nodes(cst.Call):
        if source.names(call.func) != {"torch.save"} or not call.args:
            continue
        saved = call.args[0].value
        values = [e.value for e in saved.elements] if isinstance(saved, cst.Dict) else [saved]
        if any(_is_result(source, value, call) for value in values):
            refusal = "a quantized model cannot be pickled; where it is loaded has to change with it"
            yield Site("TQ205", source.start(call), source.code(call), refusal=refusal)


def find_exported(source: ParsedSource) -> Iterator[Site]:
    for call in source.nodes(cst.Call):
        names = source.names(call.func)
        is_exporter = bool(names) and names <= EXPORTERS and bool(call.args) and _is_old(call, names)
        if is_exporter and _is_result(source, call.args[0].value, call):
            refusal = (
                "the exporter on TorchScript has no ops for it; give dynamo=True and the reference conversion"
            )
            yield Site("TQ207", source.start(call), source.code(call.func), refusal=refusal)


def _is_old(call: cst.Call, names: frozenset[str]) -> bool:
    """Return whether ``call`` exports through TorchScript; ``dynamo`` is True by default."""
    for arg in call.args:
        match arg:
            case cst.Arg(cst.Name("False"), keyword=cst.Name("dynamo")):
                return True
    return names <= {OLD_EXPORTER}


def _is_result(source: ParsedSource, model: cst.BaseExpression, at: cst.CSTNode) -> bool:
    result = fx_call(source, last_value(source, model, at) if isinstance(model, cst.Name) else model)
    return result is not None and result.function != "fuse_fx"


def find_without_inputs(source: ParsedSource) -> Iterator[Site]:
    """Yield calls that prepare without ``example_inputs``, or with some that no model runs on."""
    for call in fx_calls(source):
        if call.function not in legacy.PREPARING or call.has_stars:
            continue
        arg = call.arg("example_inputs")
        refusal = MISSING if arg is None else _refusal(source, _value(source, arg.value, call.node))
        if refusal:
            yield Site("TQ201", source.start(call.node), call.function, refusal=refusal)


def _value(source: ParsedSource, value: cst.BaseExpression, at: cst.CSTNode) -> cst.BaseExpression:
    """Return what a variable surely holds, through several; ``value`` itself where that is not known."""
    for _ in range(MAX_STEPS):
        if not isinstance(value, cst.Name):
            break
        assigned = sure_value(source, value, at)
        if assigned is None:
            break
        value, at = assigned, assigned
    return value


def _refusal(source: ParsedSource, value: cst.BaseExpression) -> str:
    """Return why no model runs on ``value``; empty where it may."""
    if isinstance(value, cst.Name) and value.value == "None":
        return "example_inputs is None; the first batch of the calibration loader will do"
    if isinstance(value, cst.Dict) and _is_config(value):
        return "before torch 1.13 the third argument was a custom config; now it is example_inputs"
    if _holds_no_tensor(value):
        return "it holds no tensor: write torch.rand(shape) for a shape, torch.tensor(data) for data"
    if isinstance(value, cst.Call) and source.code(value.func) == "next":
        return "a batch of a loader has targets too, which are no argument of the model: (batch[0],)"
    return ""


def _holds_no_tensor(value: cst.BaseExpression) -> bool:
    """Return whether ``value`` is spelled out, and all of it is numbers, strings and shapes."""
    if isinstance(value, (cst.Tuple, cst.List)):
        return all(_holds_no_tensor(element.value) for element in value.elements)
    if isinstance(value, cst.UnaryOperation):
        return _holds_no_tensor(value.expression)
    match value:
        case (
            cst.BaseNumber()
            | cst.BaseString()
            | cst.Attribute(attr=cst.Name("shape"))
            | cst.Call(cst.Attribute(attr=cst.Name("size")), [])
        ):
            return True
    return False


def _is_config(value: cst.Dict) -> bool:
    """Return whether the keys of a dict are settings, and not the parameters of a model."""
    keys = [e.key for e in value.elements if isinstance(e, cst.DictElement)]
    names = [key.raw_value for key in keys if isinstance(key, cst.SimpleString)]
    return not names or all(name in OLD_KEYS for name in names)


SAVED = Finder("TQ205", find_saved)
EXPORTED = Finder("TQ207", find_exported)
EQUALIZED = Finder("TQ202", find_equalized)
WITHOUT_INPUTS = Finder("TQ201", find_without_inputs)


INSIDE_CODE = "TQ208"
#: Methods and attributes of a model by which code walks its modules or reads its weights.
WALKS = frozenset(
    {
        "_modules",
        "_packed_params",
        "_weight_bias",
        "children",
        "get_submodule",
        "modules",
        "named_children",
        "named_modules",
    }
)
MODULE_NAMES = """
add_module apply bfloat16 buffers code compile cpu cuda delete_all_unused_submodules double eval extra_repr
float forward get_buffer get_extra_state get_parameter graph half input_qparams load_state_dict lowering meta
named_buffers named_parameters output_qparams parameters print_readable qconfig recompile record reference
register_backward_hook register_buffer register_forward_hook register_forward_pre_hook
register_full_backward_hook register_full_backward_pre_hook register_load_state_dict_post_hook
register_module register_parameter register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule
share_memory state_dict to to_empty to_folder train training type xpu zero_grad
"""
#: Attributes of every module or GraphModule, with the same meaning here as in FX.
OF_EVERY_MODULE = frozenset(MODULE_NAMES.split())
CALLED_BY_HAND = ("torch.ao.nn.quantized.", "torch.nn.quantized.", "torch.ao.nn.intrinsic.quantized.")
PRESERVED = "set_preserved_attributes"
#: The modules of the classes in FX's converted models; FloatFunctional is a class of float models.
QUANTIZED_CLASSES = (*CALLED_BY_HAND, "torch.nn.intrinsic.quantized.")
#: A key of the qparams in the state of FX's converted model, or a pattern of such keys.
KEY_OF_FX = re.compile(r"\S*_(scale|zero_point)_\d+")
INSIDE = (
    "the module is a view: it has weight(), bias(), scale and zero_point; the values are in the graph, "
    "the state_dict and explain"
)
KEYS = "the keys are those of a captured graph; load_state_dict takes FX's, and a view has the weight"
#: The name of an observer in FX's graph.
OBSERVER = re.compile(r"activation_post_process_\d+")
OBSERVERS = "observers have other numbers here, and those of weights are among them; explain names their ops"
LAYERS = "its layers are aten operators here, not call_module nodes; the observers are called as in FX"
CLASSES = "the ops of a converted model are in its graph; the modules are views, not of this class"


def find_reading_inside(source: ParsedSource) -> Iterator[Site]:
    """Yield attributes that only FX's converted model has in this form, keys of its state, and checks of its
    class; and the graphs and observers of prepared models."""
    functions = {call.function for call in fx_calls(source)}
    if not functions.isdisjoint(legacy.PREPARING):
        yield from _in_prepared(source)
    if functions.isdisjoint(legacy.CONVERTING):
        return
    own = _names_of_the_script(source)
    for attribute in source.nodes(cst.Attribute):
        if attribute.attr.value not in own and _reads_inside(source, attribute):
            yield Site(INSIDE_CODE, source.start(attribute), source.code(attribute), refusal=INSIDE)
    for subscript in source.nodes(cst.Subscript):
        state = subscript.value.func if isinstance(subscript.value, cst.Call) else None
        if not isinstance(state, cst.Attribute) or state.attr.value != "state_dict":
            continue
        if _is_converted(source, state.value):
            yield Site(INSIDE_CODE, source.start(subscript), source.code(subscript), refusal=KEYS)
    if uses_pt2e(source):
        return  # Whose models the rest is about is not known.
    for string in source.nodes(cst.SimpleString):
        if KEY_OF_FX.fullmatch(string.raw_value):
            yield Site(INSIDE_CODE, source.start(string), source.code(string), refusal=KEYS)
        elif f"{string.raw_value}.".startswith(QUANTIZED_CLASSES):
            yield Site(INSIDE_CODE, source.start(string), source.code(string), refusal=CLASSES)
    for call in source.nodes(cst.Call):
        if source.code(call.func) == "getattr" and call.args and _is_converted(source, call.args[0].value):
            yield Site(INSIDE_CODE, source.start(call), source.code(call), refusal=INSIDE)


def _names_of_the_script(source: ParsedSource) -> set[str]:
    """Return the attributes that the script gives models itself, or has preserved: they are as in FX."""
    preserved = (c for c in source.nodes(cst.Call) if source.code(c.func).endswith(PRESERVED))
    names = {
        element.value.raw_value
        for call in preserved
        for arg in call.args
        if isinstance(arg.value, (cst.List, cst.Tuple))
        for element in arg.value.elements
        if isinstance(element.value, cst.SimpleString)
    }
    for assign in source.nodes(cst.Assign):
        # A call may make a module, to stand in place of one of the model's.
        if not isinstance(assign.value, cst.Call):
            targets = (item.target for item in assign.targets)
            names |= {target.attr.value for target in targets if isinstance(target, cst.Attribute)}
    return names


def _in_prepared(source: ParsedSource) -> Iterator[Site]:
    for attribute in source.nodes(cst.Attribute):
        graph_of = _graph_of(attribute)
        if graph_of is not None and _is_result_of(source, graph_of, legacy.PREPARING):
            yield Site(INSIDE_CODE, source.start(attribute), source.code(attribute), refusal=LAYERS)
        elif OBSERVER.fullmatch(attribute.attr.value) and not uses_pt2e(source):
            yield Site(INSIDE_CODE, source.start(attribute), source.code(attribute), refusal=OBSERVERS)
    for string in () if uses_pt2e(source) else source.nodes(cst.SimpleString):
        if OBSERVER.fullmatch(string.raw_value):
            yield Site(INSIDE_CODE, source.start(string), source.code(string), refusal=OBSERVERS)


def _graph_of(attribute: cst.Attribute) -> cst.BaseExpression | None:
    """Return ``model`` of ``model.graph.nodes``."""
    graph = attribute.value
    if attribute.attr.value != "nodes" or not isinstance(graph, cst.Attribute):
        return None
    return graph.value if graph.attr.value == "graph" else None


def _reads_inside(source: ParsedSource, attribute: cst.Attribute) -> bool:
    name, graph_of = attribute.attr.value, _graph_of(attribute)
    if graph_of is not None:
        return _is_converted(source, graph_of)
    is_known = name in OF_EVERY_MODULE or name.startswith("__")
    return (name in WALKS or not is_known) and _is_converted(source, attribute.value)


def _is_converted(source: ParsedSource, node: cst.BaseExpression) -> bool:
    """Return whether ``node`` is a variable that holds a converted model at this point."""
    return _is_result_of(source, node, legacy.CONVERTING)


def _is_result_of(source: ParsedSource, node: cst.BaseExpression, functions: tuple[str, ...]) -> bool:
    result = fx_call(source, sure_value(source, node, node)) if isinstance(node, cst.Name) else None
    return result is not None and result.function in functions


READING_INSIDE = Finder(INSIDE_CODE, find_reading_inside)


#: Functions of two tensors in the Numeric Suite, which any code may call.
METRICS = (
    "compute_cosine_similarity",
    "compute_error",
    "compute_normalized_l2_error",
    "compute_sqnr",
)
#: Code -> the modules and functions that it is about, and why they are left.
LEFT = {
    "TQ203": (legacy.ENGINE_INTERNALS, "it is part of FX's own engine"),
    "TQ206": (
        legacy.NUMERIC_SUITE,
        "it finds nothing in a captured graph; torchq_compat.compare and suggest measure every place",
    ),
}
KERNELS = "torch.ops.quantized."
#: Names of these modules that compute on floats, or carry a custom config.
OTHERS = ("FloatFunctional", "FXFloatFunctional", "QFunctional", "dynamic", "reference", "modules")


def find_uses(code: str, source: ParsedSource) -> Iterator[Site]:
    """Yield imports and dotted uses; uses of an imported name are not listed again."""
    prefixes, refusal = LEFT[code]

    def is_left(name: str) -> bool:
        is_metric = code == "TQ206" and name.rpartition(".")[2] in METRICS
        return not is_metric and any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)

    def names_left(names: frozenset[str]) -> bool:
        return bool(names) and all(map(is_left, names))

    for node in source.imports():
        for name in names_in_import(node):
            if is_left(source.follow(name)):
                yield Site(code, source.start(node), name, refusal=refusal)
    for attribute in source.nodes(cst.Attribute):
        if names_left(source.names(attribute)) and not names_left(source.names(attribute.value)):
            yield Site(code, source.start(attribute), source.code(attribute), refusal=refusal)


def find_in_strings(source: ParsedSource) -> Iterator[Site]:
    for string in source.nodes(cst.SimpleString):
        if string.raw_value in legacy.LEGACY_NAMES | legacy.LEGACY_MODULES:
            refusal = "a name in a text: only its user knows what it is for"
            yield Site("TQ204", source.start(string), source.code(string), refusal=refusal)


def find_by_hand(source: ParsedSource) -> Iterator[Site]:
    """Yield calls such as ``nnq.Conv2d(...)``, ``nnq.Linear.from_float(m)``, ``torch.ops.quantized.add``."""
    for call in source.nodes(cst.Call):
        names = source.names(call.func)
        if names and all(map(_is_by_hand, names)):
            refusal = "it works on quantized tensors, which torch removes; leave it to convert"
            yield Site("TQ209", source.start(call), source.code(call.func), refusal=refusal)


def _is_by_hand(name: str) -> bool:
    if name.startswith(KERNELS):
        return True
    prefix = next((module for module in CALLED_BY_HAND if name.startswith(module)), None)
    return prefix is not None and name.removeprefix(prefix).split(".")[0] not in OTHERS


ENGINE = Finder("TQ203", partial(find_uses, "TQ203"))
SUITE = Finder("TQ206", partial(find_uses, "TQ206"))
IN_STRINGS = Finder("TQ204", find_in_strings)
BY_HAND = Finder("TQ209", find_by_hand, ("quantized",))
