"""Every public function with every kind of wrong argument, one parameter at a time.

The functions are found by inspection: one without an entry in ``GOOD`` fails the test.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    default_qconfig,
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_observer_state_dict,
    quantize_fx,
)
from torch.fx import GraphModule, symbolic_trace
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

import torchq_compat as tc
from tests.fuzz.outcomes import OF_USER, Case
from tests.support.test_public_names import PUBLIC
from torchq_compat import pt2e, quantize_eager
from torchq_compat.comparison.cases import Case as ComparedCase
from torchq_compat.custom_modules import UserModuleHandler
from torchq_compat.lower.executorch.lowering import ExecutorchProgram
from torchq_compat.lower.onnx.lowering import OnnxModel
from torchq_compat.pt2e import decompose_lstm, prepare_decomposed_lstm
from torchq_compat.recurrent.exported_lstm.whole_op import whole_op_lstm_quantizer

__all__ = ["EntryPoint", "cases", "entry_points"]

#: What users import.
MODULES = tuple(PUBLIC)
#: torch.ao's own, which are read by prepare and convert: see ``bad_settings``; and a base class.
NOT_OURS_TO_CHECK = ("torchq_compat.custom_config", "CustomModuleHandler", "UserModuleHandler")
SIZE = 4
MAPPING = QConfigMapping().set_global(default_qconfig)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Splits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2)
        return a + b


class NoQuantizer(Quantizer):
    def annotate(self, model: GraphModule) -> GraphModule:
        return model

    def validate(self, model: GraphModule) -> None:
        pass


class Adds(NoQuantizer):
    def annotate(self, model: GraphModule) -> GraphModule:
        (add,) = model.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        spec = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
        add.meta["quantization_annotation"] = QuantizationAnnotation({}, spec, _annotated=True)
        return model


class Kind:
    """A kind of wrong argument: a name for people, and a function that makes the value."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name, self.make = name, make


KINDS = (
    Kind("None", lambda: None),
    Kind("int", lambda: 5),
    Kind("negative", lambda: -1),
    Kind("nan", lambda: float("nan")),
    Kind("str", lambda: "junk"),
    Kind("bytes", lambda: b"junk"),
    Kind("object", object),
    Kind("lambda", lambda: lambda *args, **kwargs: None),
    Kind("class", lambda: nn.Linear),
    Kind("wrong class", lambda: torch.device("cpu")),
    Kind("empty tuple", tuple),
    Kind("empty dict", dict),
    Kind("list of objects", lambda: [object(), object()]),
    Kind("nested", lambda: {"junk": [{"junk": object()}]}),
    Kind("torch.Size", lambda: torch.Size([2, 3])),
)


def inputs() -> tuple[Tensor]:
    return (torch.ones(2, SIZE),)


@cache
def prepared() -> GraphModule:
    model = tc.prepare_fx(Model(), MAPPING, inputs())
    model(*inputs())
    return model


@cache
def converted() -> GraphModule:
    return tc.convert_to_reference_fx(prepared())


def lstm() -> nn.LSTM:
    module = nn.LSTM(SIZE, SIZE)
    module.qconfig = default_qconfig
    return module


def float_module(name: str) -> nn.Module:
    arguments = (SIZE, 2) if name == "MultiheadAttention" else (SIZE, SIZE)
    module: nn.Module = getattr(nn, name)(*arguments)
    module.qconfig = default_qconfig
    return module


@cache
def _observed(name: str) -> nn.Module:
    return getattr(import_module("torchq_compat.nn.quantizable"), name).from_float(float_module(name))


def observed(name: str) -> nn.Module:
    return copy.deepcopy(_observed(name))


@cache
def exported_lstm() -> Any:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(SIZE, SIZE)

        def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Any:
            return self.lstm(x, (h, c))

    h = torch.zeros(1, 2, SIZE)
    return torch.export.export(Whole(), (torch.ones(3, 2, SIZE), h, h))


@cache
def recurrent() -> GraphModule:
    torch.manual_seed(0)
    model, example = nn.Sequential(nn.GRU(SIZE, SIZE)).eval(), (torch.ones(3, 2, SIZE),)
    prepared = tc.prepare_fx(model, MAPPING, example, tc.get_default_prepare_custom_config())
    prepared(*example)
    return tc.convert_fx(prepared)


@cache
def decomposed_lstm() -> GraphModule:
    return decompose_lstm(exported_lstm())


@cache
def prepared_decomposed_lstm() -> GraphModule:
    return prepare_decomposed_lstm(decomposed_lstm(), whole_op_lstm_quantizer())


def exported_splits() -> GraphModule:
    return torch.export.export(Splits(), inputs()).module()


def chunk_node() -> Any:
    return next(
        n for n in exported_splits().graph.nodes if "chunk" in str(n.target) or "split" in str(n.target)
    )


def temporary(name: str) -> Path:
    return Path(tempfile.mkdtemp()) / name


def checkpoint() -> Path:
    path = temporary("checkpoint.pt")
    torch.save(prepared().state_dict(), path)
    return path


def fx_state() -> dict[str, Any]:
    model = quantize_fx.prepare_fx(Model().eval(), MAPPING, inputs())
    model(*inputs())
    return model.state_dict()


def prepare_arguments() -> dict[str, Any]:
    return {"model": Model(), "qconfig_mapping": MAPPING, "example_inputs": inputs()}


def compare_arguments() -> dict[str, Any]:
    return {**prepare_arguments(), "calibration_data": [inputs()], "fx": False}


@cache
def comparison() -> Any:
    return tc.compare(**compare_arguments())


def case_to_compare() -> ComparedCase:
    return ComparedCase(**prepare_arguments(), calibration_data=[inputs()]).checked()


def node_arguments() -> dict[str, Any]:
    return {"node": chunk_node(), "input_specs": {}, "output_specs": [None, None]}


@cache
def observed_wrapper() -> nn.Module:
    """Return an observed and calibrated model of eager mode."""
    prepared = quantize_eager.prepare(wrapper())
    prepared(*inputs())
    return prepared


def wrapper() -> nn.Module:
    model = quantize_eager.QuantWrapper(nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU())).eval()
    model.qconfig = default_qconfig
    return model


def trainable_wrapper() -> nn.Module:
    model = wrapper().train()
    model.qconfig = get_default_qat_qconfig("x86")
    return model


def running(model: nn.Module) -> dict[str, Any]:
    return {"model": model, "run_fn": lambda model, *args: model(*args), "run_args": inputs()}


Arguments = Callable[[], dict[str, Any]]
#: Valid arguments of each function; parameters not listed keep their defaults.
GOOD: dict[str, Arguments] = {
    "annotate_outputs": node_arguments,
    "decompose_lstm": lambda: {"program": exported_lstm()},
    "decompose_recurrent": lambda: {"program": exported_lstm()},
    "check_annotations": lambda: {"model": exported_splits()},
    "check_sharing": lambda: {"model": exported_splits()},
    "compare": compare_arguments,
    "compare_case": lambda: {"case": case_to_compare(), "fx": False},
    "convert_fx": lambda: {"graph_module": prepared()},
    "convert_decomposed_lstm": lambda: {"prepared": prepared_decomposed_lstm()},
    "convert_to_reference_fx": lambda: {"graph_module": prepared()},
    "explain": lambda: {"model": converted()},
    "export": lambda: {"converted": converted(), "example_inputs": inputs()},
    "freeze_bn_stats": lambda: {"mod": prepared()},
    "fuse_fx": lambda: {"model": Model().eval()},
    "get_default_convert_custom_config": dict,
    "get_default_prepare_custom_config": dict,
    "get_individually_observed_parts": lambda: {"float_module": lstm()},
    "get_lstm_with_individually_observed_parts": lambda: {"float_lstm": lstm()},
    "get_reference_quantized_lstm_module": lambda: {"observed_lstm": observed("LSTM")},
    "int8_parts": lambda: {"module": lstm()},
    "int8_products": lambda: {"module": lstm()},
    "int8_with_int16_cell": lambda: {"module": lstm()},
    "int16_parts": lambda: {"module": lstm()},
    "load_fx_state": lambda: {"prepared": prepared(), "state_dict": fx_state()},
    "load_checkpoint": lambda: {"path": checkpoint(), "model": copy.deepcopy(prepared())},
    "native_library": dict,
    "Output": lambda: {"node": chunk_node(), "index": 0},
    "prepare_fx": prepare_arguments,
    "prepare_decomposed_lstm": lambda: {"model": decomposed_lstm(), "quantizer": whole_op_lstm_quantizer()},
    "prepare_qat_fx": lambda: {**prepare_arguments(), "qconfig_mapping": get_default_qat_qconfig_mapping()},
    "quantize_dynamic": lambda: {"model": nn.Sequential(nn.Linear(4, 4)).eval()},
    "whole_range_dynamic": lambda: {"qconfig": default_dynamic_qconfig},
    "convert_pt2e": lambda: {"model": pt2e.prepare_pt2e(exported_splits(), Adds())},
    "prepare_pt2e": lambda: {"model": exported_splits(), "quantizer": Adds()},
    "prepare_qat_pt2e": lambda: {"model": exported_splits(), "quantizer": Adds()},
    "merge_observers": lambda: {"prepared": prepared(), "states": [get_observer_state_dict(prepared())]},
    "streaming": lambda: {"converted": recurrent()},
    "calibrate": lambda: {"prepared": prepared(), "batches": [inputs()]},
    "suggest": lambda: {key: value for key, value in compare_arguments().items() if key != "fx"},
    "quantizer_from": lambda: {"qconfig_mapping": MAPPING},
    "register": lambda: {"handler": UserModuleHandler()},
    "reroute_tuples": lambda: {"graph": symbolic_trace(Splits()).graph},
    "save_checkpoint": lambda: {"state": prepared(), "path": temporary("new.pt")},
    "to_executorch": lambda: {"converted": converted(), "example_inputs": inputs()},
    "to_onnx": lambda: {"converted": converted(), "example_inputs": inputs()},
    "update_bn_stats": lambda: {"mod": prepared()},
    "add_quant_dequant": lambda: {"module": wrapper()},
    "convert": lambda: {"module": observed_wrapper()},
    "fuse_modules": lambda: {"model": wrapper(), "modules_to_fuse": ["module.0", "module.1"]},
    "fuse_modules_qat": lambda: {"model": trainable_wrapper(), "modules_to_fuse": ["module.0", "module.1"]},
    "lower": lambda: {
        "converted": quantize_eager.convert(observed_wrapper()),
        "example_inputs": inputs(),
    },
    "prepare": lambda: {"model": wrapper()},
    "prepare_qat": lambda: {"model": trainable_wrapper()},
    "propagate_qconfig_": lambda: {"module": wrapper()},
    "quantize": lambda: running(wrapper()),
    "quantize_qat": lambda: running(trainable_wrapper()),
    "swap_module": lambda: {
        "mapping": {},
        "mod": observed_wrapper(),
        "custom_module_class_mapping": {},
    },
    "whole_op_lstm_quantizer": dict,
    "whole_op_recurrent_quantizer": dict,
}


@dataclass(frozen=True)
class EntryPoint:
    """A public function or constructor, and valid arguments for it."""

    name: str
    function: Callable[..., Any]
    good: Arguments | None


@cache
def entry_points() -> list[EntryPoint]:
    """Return every callable in ``__all__`` of the public modules, each once."""
    found: dict[int, EntryPoint] = {}
    for module_name in MODULES:
        module = import_module(module_name)
        for name in module.__all__:
            value = getattr(module, name)
            for entry_point in _of_value(module_name, name, value):
                found.setdefault(id(entry_point.function), entry_point)
    by_name = {entry_point.name: entry_point for entry_point in found.values()}
    return [*by_name.values(), *_methods()]


def _methods() -> Iterator[EntryPoint]:
    """Methods with arguments, of what public functions return."""
    yield EntryPoint("Report.find", tc.explain(converted()).find, lambda: {"path": "linear"})
    yield EntryPoint("Report.to_text", tc.explain(converted()).to_text, lambda: {"width": 80})
    yield EntryPoint("Comparison.write_html", comparison().write_html, lambda: {"path": temporary("a.html")})
    program, onnx_model = ExecutorchProgram(b"content", ()), OnnxModel(onnx.ModelProto(), 18, ())
    yield EntryPoint("ExecutorchProgram.save", program.save, lambda: {"path": temporary("a.pte")})
    yield EntryPoint("OnnxModel.save", onnx_model.save, lambda: {"path": temporary("a.onnx")})
    streams = tc.streaming(recurrent())

    def two_of_them() -> dict[str, Any]:
        streams.reset()
        streams(torch.ones(3, 2, SIZE))
        return {"indices": [0, 1]}

    yield EntryPoint("StreamingModel.reset", streams.reset, two_of_them)


def _of_value(module: str, name: str, value: Any) -> Iterator[EntryPoint]:
    if module in NOT_OURS_TO_CHECK or name in NOT_OURS_TO_CHECK:
        return
    if value.__module__.startswith("torch.ao."):
        return
    if isinstance(value, type) and issubclass(value, (BaseException, GraphModule)):
        return  # raised and returned by functions, not called by users
    if module == "torchq_compat.nn.quantizable":
        yield EntryPoint(
            f"{module}.{name}.from_float", value.from_float, lambda: {"other": float_module(name)}
        )
    elif module == "torchq_compat.nn.quantized":
        yield EntryPoint(
            f"{module}.{name}.from_observed", value.from_observed, lambda: {"other": observed(name)}
        )
    elif callable(value):
        yield EntryPoint(name, value, GOOD.get(name))


#: Calls that may succeed: (function, parameter, kind) -> why. "*" stands for any function or kind.
ACCEPTED: dict[tuple[str, str, str], str] = {
    ("Output", "index", "int"): "the graph says which outputs there are: annotate_outputs refuses it",
    ("Output", "index", "negative"): "counts from the end, as in Python",
    ("annotate_outputs", "input_specs", "empty dict"): "leaves every input alone",
    ("compare", "calibration_data", "empty tuple"): "dynamic quantization needs no calibration",
    ("compare", "evaluation_data", "empty tuple"): "nothing is measured, and the verdict says so",
    (
        "*",
        "qconfig_mapping",
        "empty dict",
    ): "the legacy dict form of a mapping without rules; explain says so",
    ("*", "prepare_custom_config", "empty dict"): "the legacy dict form of the default",
    ("*", "convert_custom_config", "empty dict"): "the legacy dict form of the default",
    ("*", "fuse_custom_config", "empty dict"): "the legacy dict form of the default",
    ("*", "backend_config", "empty dict"): "the legacy dict form of a backend that takes nothing",
    ("*", "_equalization_config", "empty dict"): "asks for nothing, as FX's own default does",
    ("*", "dynamic_shapes", "empty tuple"): "to torch.export: no size is free",
    ("*", "dynamic_shapes", "empty dict"): "to torch.export: no size is free",
    ("save_checkpoint", "state", "nested"): "a mapping of values by name",
    ("*", "path", "str"): "a relative path, or a path of a module",
    ("Report.to_text", "width", "int"): "a narrow table",
    ("get_default_prepare_custom_config", "profile", "lambda"): "prepare calls it with a module",
    ("*", "prepare_custom_config_dict", "empty dict"): "maps no class",
    ("*", "convert_custom_config_dict", "empty dict"): "maps no class",
    ("*", "fuse_custom_config_dict", "empty dict"): "asks for nothing",
    ("*", "mapping", "empty dict"): "maps no class",
    ("*", "custom_module_class_mapping", "empty dict"): "maps no class",
    ("*", "qconfig_dict", "empty dict"): "sets none",
    ("propagate_qconfig_", "qconfig_dict", "nested"): "names no module, as torch.ao allows",
    ("prepare", "allow_list", "empty tuple"): "observes no type",
    ("prepare", "observer_non_leaf_module_list", "empty tuple"): "the default",
    ("*", "run_fn", "class"): OF_USER,
    ("*", "run_args", "*"): OF_USER,
    ("*", "fuser_func", "class"): OF_USER,
    ("StreamingModel.reset", "indices", "negative"): "counts from the end, as in Python",
    ("StreamingModel.reset", "indices", "empty tuple"): "no stream begins again",
}


def accepted(entry_point: EntryPoint, parameter: inspect.Parameter, kind: Kind) -> str:
    if kind.name == "None" and parameter.default is None:
        return "None is the default"
    keys = [
        (entry_point.name, parameter.name, kind.name),
        ("*", parameter.name, kind.name),
        (entry_point.name, parameter.name, "*"),
        ("*", parameter.name, "*"),
    ]
    return next((ACCEPTED[key] for key in keys if key in ACCEPTED), "")


def cases() -> Iterator[Case]:
    """Yield every entry point with every kind of argument, one at a time, and with arguments swapped."""
    for entry_point in entry_points():
        assert entry_point.good is not None, f"{entry_point.name} has no arguments in GOOD"
        parameters = list(inspect.signature(entry_point.function).parameters.values())
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        for parameter in named:
            for kind in KINDS:
                yield Case(
                    f"{entry_point.name}({parameter.name}={kind.name})",
                    lambda entry_point=entry_point, parameter=parameter, kind=kind: entry_point.function(
                        **{**entry_point.good(), parameter.name: kind.make()}
                    ),
                    accepted=accepted(entry_point, parameter, kind),
                )
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            yield from _constructors(entry_point)
        yield from _swapped(entry_point)


def _constructors(entry_point: EntryPoint) -> Iterator[Case]:
    for kind in KINDS[1:]:
        yield Case(
            f"{entry_point.name}(sigmoid_obs_ctr={kind.name})",
            lambda kind=kind: entry_point.function(**entry_point.good(), sigmoid_obs_ctr=kind.make()),
        )


def _swapped(entry_point: EntryPoint) -> Iterator[Case]:
    def call(first: str, second: str) -> Any:
        given = entry_point.good()
        return entry_point.function(**{**given, first: given[second], second: given[first]})

    names = list(entry_point.good()) if entry_point.good else []
    for first, second in pairwise(names):
        yield Case(f"{entry_point.name}({first} and {second} swapped)", lambda a=first, b=second: call(a, b))
