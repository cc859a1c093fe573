"""What to_executorch and its programs refuse, with a message."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qconfig_mapping
from torch.export import Dim
from torch.fx import GraphModule
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torchq_compat as tc
from tests.helpers import executorch_models
from tests.helpers.executorch_models import PER_TENSOR, converted
from torchq_compat.errors import (
    ArgumentError,
    ExportError,
    InputError,
    QuantizationWarning,
)
from torchq_compat.lower.executorch.lowering import ExecutorchProgram, to_executorch


def rows(count: int = 16) -> Tensor:
    return torch.randn(count, 8)


@pytest.fixture
def linear() -> GraphModule:
    return executorch_models.linear()


@pytest.fixture
def program() -> ExecutorchProgram:
    return executorch_models.linear_program()


def test_inputs_the_program_was_not_made_for(program: ExecutorchProgram) -> None:
    with pytest.raises(ExportError, match=r"size 17 in dimension 0.* at most 16.\nHint: .*larg"):
        program(rows(17))
    with pytest.raises(ExportError, match="size 9 in dimension 1"):
        program(torch.randn(4, 9))
    with pytest.raises(ExportError, match="2 inputs were given"):
        program(rows(), rows())
    with pytest.raises(ExportError, match=r"input 0 is \[8\].\nHint: .*input: float32\[1..16, 8\]"):
        program(torch.randn(8))
    with pytest.raises(ExportError, match="float64"):
        program(rows().double())
    assert program(rows(3)).shape == (3, 4)


def test_a_read_program_knows_its_bounds(program: ExecutorchProgram, tmp_path: Path) -> None:
    program.save(tmp_path / "linear.pte")
    read = ExecutorchProgram.read(tmp_path / "linear.pte")
    with pytest.raises(ExportError, match="at most 16"):
        read(rows(17))
    (tmp_path / "cut.pte").write_bytes(program.pte[:100])
    with pytest.raises(ExportError, match=r"cut.pte is no ExecuTorch program"):
        ExecutorchProgram.read(tmp_path / "cut.pte")
    with pytest.raises(ArgumentError, match="read: path must be"):
        ExecutorchProgram.read(5)  # type: ignore[arg-type]


def test_arguments_of_to_executorch(linear: GraphModule) -> None:
    with pytest.raises(ExportError, match=r"'coreml'.*\nHint: choose one of 'portable', 'xnnpack'"):
        to_executorch(linear, (rows(),), backend="coreml")
    with pytest.raises(InputError, match="must be a tuple"):
        to_executorch(linear, "rows")  # type: ignore[arg-type]
    with pytest.warns(QuantizationWarning, match="is a single Tensor, taken as the only argument"):
        assert to_executorch(linear, rows())(rows(3)).shape == (3, 4)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="example_inputs is missing"):
        to_executorch(linear)
    with pytest.raises(ExportError, match="Linear"):
        to_executorch(nn.Linear(8, 4), (rows(),))
    with pytest.raises(ExportError, match=r"dimension 0 of input 'input' has no.* bound.*\nHint: .*max="):
        to_executorch(linear, (rows(),), dynamic_shapes=({0: Dim("rows")},))


def test_bounds_of_ones_own(linear: GraphModule) -> None:
    program = to_executorch(linear, (rows(4),), dynamic_shapes=({0: Dim("rows", max=64)},))
    assert program(rows(64)).shape == (64, 4)
    with pytest.raises(ExportError, match="at most 64"):
        program(rows(65))


def test_an_operator_without_kernel_is_named() -> None:
    class Inverse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.erfinv(self.head(x))

    with pytest.raises(ExportError, match=r"aten::erfinv.*\nHint: "):
        to_executorch(converted(Inverse(), PER_TENSOR, rows), (rows(),))


class Float(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.rnn(x)[0]
        return outputs


@pytest.mark.filterwarnings("error::FutureWarning")
def test_a_recurrent_module_that_was_not_mapped_is_not_unrolled_in_silence() -> None:
    x = torch.randn(2, 3, 8)
    with pytest.warns(QuantizationWarning, match="'rnn' stays float"):
        prepared = tc.prepare_fx(Float().eval(), PER_TENSOR, (x,))
    prepared(x)
    model = tc.convert_to_reference_fx(prepared)
    with pytest.warns(QuantizationWarning) as told:
        to_executorch(model, (x,))
    # The context that decorates ``to_executorch`` has frames of its own around it.
    of_ours = [each for each in told if each.category is QuantizationWarning]
    assert {each.filename for each in of_ours} == {__file__}
    said = [str(each.message) for each in of_ours]
    assert any(re.search("fixes sizes .* x in dimension 0 to 2", each) for each in said)
    assert any("computes these in floats: rnn" in each for each in said)


def test_without_the_extra(linear: GraphModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "executorch.kernels.quantized", None)
    with pytest.raises(ExportError, match=r"Hint: .*pip install -e '\.\[executorch\]"):
        to_executorch(linear, (rows(),))


def test_the_model_and_the_file_are_as_they_were_after_a_failure(linear: GraphModule, tmp_path: Path) -> None:
    path = tmp_path / "linear.pte"
    path.write_bytes(b"of yesterday")
    before = linear(rows(2).fill_(1))
    with pytest.raises(ExportError):
        to_executorch(linear, (rows(),), dynamic_shapes=({0: Dim("rows")},), path=path)
    assert path.read_bytes() == b"of yesterday"
    assert torch.equal(linear(rows(2).fill_(1)), before)


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return pad_packed_sequence(packed, batch_first=True)[0]


def test_sizes_that_depend_on_values_are_named_as_the_cause() -> None:
    args = torch.randn(3, 7, 4), torch.tensor([7, 5, 3])
    mapped = tc.get_default_prepare_custom_config()
    prepared = tc.prepare_fx(Packs(), get_default_qconfig_mapping("x86"), args, mapped)
    prepared(*args)
    with pytest.raises(ExportError, match=r"Hint: .* packed sequences do: give it padded sequences"):
        to_executorch(tc.convert_fx(prepared), args)
