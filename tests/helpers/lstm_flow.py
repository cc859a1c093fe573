"""The documented 16-bit LSTM flow of torch.ao, shared by several tests."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.ao.quantization.fx.lstm_utils as fx_lstm_utils
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import FixedQParamsFakeQuantize, FixedQParamsObserver, get_default_qconfig_mapping
from torch.ao.quantization.backend_config import BackendConfig, DTypeConfig, get_qnnpack_backend_config
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torch.fx import GraphModule, Node

import torchq_compat as tc
from tests.helpers.oracle import calibrate
from torchq_compat import lstm_utils
from torchq_compat.modules.parts import part_nodes

INPUTS, HIDDEN = 8, 16


QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default


DEQUANTIZE = torch.ops.quantized_decomposed.dequantize_per_tensor.default


Constructors = dict[str, Any]


QParams = tuple[float, int, torch.dtype]


def backend_with_32_bits() -> BackendConfig:
    """Return qnnpack's backend config with 32-bit sigmoid, tanh, add and mul."""
    backend_config = get_qnnpack_backend_config()
    for config in backend_config.configs:
        if config.pattern in (nn.Sigmoid, nn.Tanh, torch.add, torch.mul):
            config.add_dtype_config(DTypeConfig(input_dtype=torch.qint32, output_dtype=torch.qint32))
    return backend_config


def fixed(scale: float, zero_point: int, dtype: torch.dtype, *, fake_quantize: bool = False) -> Any:
    """Return a constructor of torch.ao's observers, or fake-quantizes, with the given qparams."""
    observer = FixedQParamsObserver.with_args(scale=scale, zero_point=zero_point, dtype=dtype)
    return FixedQParamsFakeQuantize.with_args(observer=observer) if fake_quantize else observer


DOCUMENTED_QPARAMS: dict[str, QParams] = {
    "linear_output_obs_ctr": (2**-11, 2**15, torch.qint32),
    "sigmoid_obs_ctr": (2**-16, 0, torch.qint32),
    "tanh_obs_ctr": (2**-15, 2**15, torch.qint32),
    "cell_state_obs_ctr": (2**-11, 0, torch.qint32),
    "hidden_state_obs_ctr": (2**-7, 2**7, torch.quint8),
}


def documented(*, fake_quantize: bool = False) -> Constructors:
    return {
        name: fixed(*qparams, fake_quantize=fake_quantize) for name, qparams in DOCUMENTED_QPARAMS.items()
    }


def user_classes(utils: ModuleType, **arguments: Any) -> tuple[type[nn.Module], type[nn.Module]]:
    """Return a script's observed and quantized class; ``utils`` is torch.ao's ``lstm_utils`` or ours."""
    backend_config = arguments.pop("backend_config", None)
    give_examples = arguments.pop("give_examples", True)

    class UserObservedLSTM(torch.ao.nn.quantizable.LSTM):
        @classmethod
        def from_float(cls, float_lstm: nn.LSTM) -> Any:
            assert isinstance(float_lstm, cls._FLOAT_MODULE)
            sizes = float_lstm.input_size, float_lstm.proj_size or float_lstm.hidden_size
            examples = torch.rand(5, 3, sizes[0]), (torch.rand(1, 3, sizes[1]), torch.rand(1, 3, HIDDEN))
            return utils._get_lstm_with_individually_observed_parts(
                float_lstm=float_lstm,
                example_inputs=examples if give_examples else None,
                backend_config=backend_config,
                **arguments,
            )

    class UserQuantizedLSTM(torch.ao.nn.quantized.LSTM):
        @classmethod
        def from_observed(cls, observed_lstm: torch.ao.nn.quantizable.LSTM) -> Any:
            assert isinstance(observed_lstm, torch.ao.nn.quantizable.LSTM)
            return utils._get_reference_quantized_lstm_module(
                observed_lstm=observed_lstm, backend_config=backend_config
            )

    return UserObservedLSTM, UserQuantizedLSTM


@dataclass(frozen=True)
class Engine:
    """The functions and the module that a script imports."""

    utils: ModuleType
    prepare: Callable[..., GraphModule]
    convert: Callable[..., GraphModule]

    def __str__(self) -> str:
        return "fx" if self is FX else "ours"


OURS = Engine(lstm_utils, tc.prepare_fx, tc.convert_to_reference_fx)


FX = Engine(fx_lstm_utils, fx.prepare_fx, fx.convert_to_reference_fx)


def run_flow(
    engine: Engine, model: nn.Module, batches: Sequence[tuple[Any, ...]], **arguments: Any
) -> tuple[GraphModule, GraphModule]:
    """Return (prepared, converted) by the script above; ``arguments`` are those of ``user_classes``."""
    arguments.setdefault("backend_config", backend_with_32_bits())
    backend_config = arguments["backend_config"]
    observed, quantized = user_classes(engine.utils, **arguments)
    prepare_config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, observed)
    convert_config = ConvertCustomConfig().set_observed_to_quantized_mapping(
        torch.ao.nn.quantizable.LSTM, quantized
    )
    with warnings.catch_warnings():
        if engine is FX:
            warnings.simplefilter("ignore")
        prepared = engine.prepare(
            copy.deepcopy(model),
            get_default_qconfig_mapping("qnnpack"),
            batches[0],
            prepare_config,
            backend_config=backend_config,
        )
        calibrate(prepared, batches)
        given = copy.deepcopy(prepared) if engine is FX else prepared  # FX uses up what it is given.
        return prepared, engine.convert(given, convert_config, backend_config=backend_config)


def map_to_parts(**arguments: Any) -> PrepareCustomConfig:
    """Return a mapping of nn.LSTM to an observed class with these constructors and no example inputs."""
    observed, _ = user_classes(lstm_utils, give_examples=False, **arguments)
    return PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, observed)


def uniform(limit: float, *shape: int) -> Tensor:
    """Return bounded random values, so that calibration sees the whole range."""
    return limit * (2 * torch.rand(shape) - 1)


class MyModel(nn.Module):
    def __init__(self, num_layers: int = 1, **kwargs: Any) -> None:
        super().__init__()
        self.my_lstm = nn.LSTM(INPUTS, HIDDEN, num_layers, **kwargs)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.my_lstm(x, (h, c))

    def batch(self, steps: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        lstm = self.my_lstm
        rows = lstm.num_layers * (2 if lstm.bidirectional else 1)
        x = uniform(1.7, *((size, steps, INPUTS) if lstm.batch_first else (steps, size, INPUTS)))
        h = uniform(0.9, rows, size, lstm.proj_size or HIDDEN)
        return x, h, uniform(1.5, rows, size, HIDDEN)


def build(num_layers: int = 1, *, gain: float = 1.0, **kwargs: Any) -> MyModel:
    """Return a model; ``gain`` scales its parameters relative to nn.LSTM's own."""
    torch.manual_seed(0)
    model = MyModel(num_layers, **kwargs).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(gain)
    return model


def batches_of(model: MyModel) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [model.batch(6, 16) for _ in range(3)]


def quantize_behind(node: Node) -> Node:
    """Return the only reader of ``node``, a quantize; assert that its dequantizes have its qparams."""
    (quantize,) = node.users
    assert quantize.target is QUANTIZE
    assert quantize.users
    for reader in quantize.users:
        assert reader.target is DEQUANTIZE
        assert reader.args[1:6] == quantize.args[1:6]
    return quantize


def qparams_of(quantize: Node) -> QParams:
    _, scale, zero_point, quant_min, quant_max, dtype = quantize.args
    info = torch.iinfo(dtype)
    assert (quant_min, quant_max) == (info.min, info.max)
    return scale, zero_point, dtype


def part_qparams(cell: GraphModule) -> dict[str, QParams]:
    return {name: qparams_of(quantize_behind(node)) for name, node in part_nodes(cell)}
