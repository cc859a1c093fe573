# pyright: strict
"""A user's script over the whole public API, under mypy strict and pyright."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

import torchq_compat as tc
from torchq_compat import (
    ConvertedModel,
    QuantizationGraphModule,
    TorchQCompatError,
    convert_fx,
    convert_to_reference_fx,
    explain,
    get_default_convert_custom_config,
    get_default_prepare_custom_config,
    prepare_fx,
    prepare_qat_fx,
)
from torchq_compat.checkpoints import load_fx_state
from torchq_compat.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torchq_compat.lstm_utils import get_lstm_with_individually_observed_parts
from torchq_compat.nn import quantizable
from torchq_compat.profiles import int8_with_int16_cell
from torchq_compat.recurrent_parts import get_individually_observed_parts


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.head(self.rnn(x)[0]))


def quantize(model: nn.Module, batches: list[torch.Tensor], folder: Path) -> ConvertedModel:
    mapping, example = get_default_qconfig_mapping("x86"), (batches[0],)
    custom: PrepareCustomConfig = get_default_prepare_custom_config()
    at_convert: ConvertCustomConfig = get_default_convert_custom_config()
    prepared: QuantizationGraphModule = prepare_fx(model, mapping, example, custom)
    for batch in batches:
        prepared(batch)
    load_fx_state(prepared, prepared.state_dict())
    reference: ConvertedModel = convert_to_reference_fx(prepared, at_convert)
    quantized: ConvertedModel = convert_fx(prepared, at_convert)
    taken, given = quantized.input_qparams(), quantized.reference.output_qparams()
    print(explain(quantized).summary, len(taken), len(given), tc.__version__)
    rows: list[dict[str, Any]] = explain(quantized).to_dict()["rows"]
    program = tc.export(reference, example, recurrent="rolled")
    tc.to_onnx(reference, example, path=folder / "m.onnx", dynamic_lstm="loop")
    tc.to_executorch(reference, example, backend="portable", path=folder / "m.pte")
    tc.streaming(quantized).reset()
    found = tc.compare(model, mapping, example, batches, fx="auto")
    found.write_html(folder / "page.html")
    tc.calibrate(prepared, batches)
    tc.suggest(model, mapping, example, batches, n=1, instead="16-bit")
    tc.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    tc.fuse_fx(nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval())
    print(len(rows), program, tc.quantizer_from(mapping), tc.Output, tc.reroute_tuples)
    print(get_individually_observed_parts, get_lstm_with_individually_observed_parts, quantizable.LSTM)
    return quantized


def train(model: nn.Module, batch: torch.Tensor) -> QuantizationGraphModule:
    try:
        print(int8_with_int16_cell())
        return prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping("x86"), (batch,))
    except TorchQCompatError as error:
        raise SystemExit(error.message) from error
