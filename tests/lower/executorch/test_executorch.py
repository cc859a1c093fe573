"""Converted models on ExecuTorch's portable kernels: the reference's bits at every size in bounds."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    float16_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
)
from torch.fx import GraphModule

from tests.helpers.executorch_models import (
    IN_16_BITS,
    PER_CHANNEL,
    PER_TENSOR,
    Tagger,
    Words,
    converted,
    image_classifier,
    linear_program,
    same_bits,
    tagger,
)
from tests.helpers.marks import slow_but
from tests.helpers.oracle import leaves
from torchq_compat import convert_to_reference_fx, prepare_fx, streaming
from torchq_compat.errors import ExportError
from torchq_compat.lower.executorch.lowering import ExecutorchProgram, to_executorch
from torchq_compat.lower.executorch.passes import size_loop_results

RECURRENT: dict[str, Callable[[], GraphModule]] = {
    "lstm": lambda: tagger(nn.LSTM(8, 12)),
    "both directions": lambda: tagger(nn.LSTM(8, 12, bidirectional=True), PER_CHANNEL, 24),
    "two layers": lambda: tagger(nn.GRU(8, 12, 2), PER_CHANNEL),
    "relu rnn": lambda: tagger(nn.RNN(8, 12, nonlinearity="relu")),
    "16-bit parts": lambda: tagger(nn.LSTM(8, 12), custom=IN_16_BITS),
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Made(NamedTuple):
    """A program, its file, its model, and what the model computed from ``x`` before it was exported."""

    program: ExecutorchProgram
    path: Path
    model: GraphModule
    x: Tensor
    before: list[Tensor]


def made(name: str, folder: Path) -> Made:
    torch.manual_seed(0)
    model, x, path = RECURRENT[name](), torch.randn(3, 2, 8), folder / "tagger.pte"
    before = leaves(model(x))
    return Made(to_executorch(model, (torch.randn(12, 4, 8),), path=path), path, model, x, before)


@pytest.fixture(scope="module")
def lstm(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made("lstm", tmp_path_factory.mktemp("lstm"))


@pytest.mark.parametrize("name", slow_but(("lstm",), RECURRENT))
def test_recurrent_modules_at_every_length_and_batch(name: str, lstm: Made, tmp_path: Path) -> None:
    program, _, model, x, before = lstm if name == "lstm" else made(name, tmp_path)
    # Short after long and long after short: buffers keep values of the previous call.
    sizes = (3, 2), (12, 4), (1, 1), (7, 4), (12, 1)
    assert same_bits(model, program, *(torch.randn(*size, 8) for size in sizes))
    result = program(x)
    assert result.keys() == {"tags", "state"}
    assert type(result["state"]) is tuple
    assert all(torch.equal(a, b) for a, b in zip(before, leaves(model(x)), strict=True))


class Pair(NamedTuple):
    times: Tensor
    count: Tensor


class Counter(nn.Module):
    """Writes buffers that begin at other values than zero, and takes what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("count", torch.tensor(5))

    def forward(self, x: Tensor, state: Tensor | None, times: int, pair: Pair) -> Pair:
        y = self.fc(x) * times + pair.times
        self.mean = self.mean * 0.5 + y.mean(0) * 0.5
        self.count += 1
        return Pair(y - self.mean, self.count + pair.count)


def test_buffers_begin_where_the_models_do() -> None:
    args = (torch.randn(6, 8), None, 3, Pair(torch.randn(4), torch.tensor(1)))
    prepared = prepare_fx(Counter().eval(), PER_TENSOR, args)
    prepared(*args)
    model = convert_to_reference_fx(prepared)
    program = to_executorch(model, args)
    for size in 6, 3, 1:
        given = (torch.randn(size, 8), *args[1:])
        expected, result = model(*given), program(*given)
        assert type(result) is Pair
        assert torch.equal(result.times, expected.times)
        assert torch.equal(result.count, expected.count)
    assert result.count > 8
    with pytest.raises(ExportError, match="set_inputs"):
        program(args[0], None, 4, args[3])


@dataclass
class Scores:
    boxes: list[Tensor]
    classes: Tensor
    names: Tensor | None = None


class Captioned(nn.Module):
    """A network of images and one of words, without recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.words = image_classifier(), Words()

    def forward(self, images: Tensor, words: Tensor) -> Scores:
        return Scores([self.images(images), self.words(words)], images.sum(1))


def test_networks_without_recurrence_a_quantized_embedding_and_a_dataclass_of_lists() -> None:
    mapping = copy.deepcopy(PER_CHANNEL).set_object_type(nn.Embedding, float_qparams_weight_only_qconfig)
    args = torch.randn(8, 3, 8, 8), torch.randint(0, 100, (12, 4))
    prepared = prepare_fx(Captioned().eval(), mapping, args)
    for _ in range(2):
        prepared(torch.randn(16, 3, 8, 8), torch.randint(0, 100, (12, 4)))
    model = convert_to_reference_fx(prepared)
    program = to_executorch(model, args)
    assert program.report is not None
    assert ("quantized_decomposed.embedding_byte", "") in program.report.left
    # A transposed view: the runtime reads memory in the order of the dimensions.
    for images, size in (args[0], (12, 4)), (args[0][:1], (1, 1)), (args[0][:5].transpose(2, 3), (5, 2)):
        words = torch.randint(0, 100, size)
        expected, result = model(images, words), program(images, words)
        assert type(result) is Scores
        assert result.names is None
        assert torch.equal(result.boxes[0], expected.boxes[0])
        assert torch.equal(result.boxes[1], expected.boxes[1])
        assert torch.equal(result.classes, images.sum(1))


def test_a_streaming_model() -> None:
    x, stream = torch.randn(5, 2, 8), streaming(tagger(nn.RNN(8, 12)))
    program = to_executorch(stream, (x[:1],))
    for row in x.split(1):
        assert all(torch.equal(*pair) for pair in zip(leaves(stream(row)), leaves(program(row)), strict=True))


DYNAMIC = {"int8": default_dynamic_qconfig, "float16": float16_dynamic_qconfig}


@pytest.mark.parametrize("name", slow_but(("int8",), DYNAMIC))
def test_dynamic_qparams_up_to_the_rounding_of_floats(name: str) -> None:
    """ExecuTorch computes a scale in float64 where torch uses float32, and sums in another order."""
    model = tagger(nn.LSTM(8, 12), QConfigMapping().set_global(DYNAMIC[name]))
    program = to_executorch(model, (torch.randn(12, 4, 8),))
    for x in (torch.randn(12, 4, 8), torch.randn(5, 1, 8)):
        for ours, theirs in zip(leaves(model(x)), leaves(program(x)), strict=True):
            assert (ours - theirs).abs().max() < 1e-6


@pytest.mark.slow
def test_neither_file_nor_loop_grow_with_the_length() -> None:
    model = tagger(nn.LSTM(8, 12))
    short = to_executorch(model, (torch.randn(8, 4, 8),))
    long = to_executorch(model, (torch.randn(2048, 4, 8),))
    assert abs(len(long.pte) - len(short.pte)) < 64
    x = torch.randn(300, 4, 8)
    assert same_bits(model, long, x, x[:5])
    inside = operators_in_loops(short.pte)
    assert inside == operators_in_loops(long.pte)
    # One dequantize for each part: weights are dequantized in front of the loop.
    assert inside.count("quantized_decomposed::dequantize_per_tensor") == 11
    assert inside.count("aten::linear") == 1
    assert "aten::permute_copy" not in inside


@pytest.mark.slow
def test_weights_are_stored_as_int8() -> None:
    model = Tagger(nn.LSTM(128, 256), 256)
    floats = sum(4 * parameter.numel() for parameter in model.parameters())
    model = converted(model, PER_CHANNEL, lambda: torch.randn(3, 2, 128))
    program = to_executorch(model, (torch.randn(12, 1, 128),))
    assert 0.25 * floats < len(program.pte) < 0.30 * floats
    assert same_bits(model, program, torch.randn(9, 1, 128))


def test_a_program_without_loops_is_left_as_it_is() -> None:
    pte = linear_program().pte
    assert size_loop_results(pte) is pte


def test_a_file_is_read_and_run(lstm: Made) -> None:
    assert lstm.path.read_bytes() == lstm.program.pte
    read = ExecutorchProgram.read(lstm.path)
    assert same_bits(lstm.model, read, torch.randn(12, 4, 8), torch.randn(2, 1, 8))
    assert isinstance(read(torch.randn(2, 1, 8)), tuple)


def test_a_failed_write_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, x = tmp_path / "relu.pte", torch.randn(6, 8)
    path.write_bytes(b"of yesterday")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        to_executorch(converted(nn.ReLU(), PER_TENSOR, lambda: x), (x,), path=path)
    assert path.read_bytes() == b"of yesterday"
    assert list(tmp_path.iterdir()) == [path]


def operators_in_loops(pte: bytes) -> list[str]:
    """Return the names of the operators called between a backward jump and its target."""
    from executorch.exir import _serialize
    from executorch.exir.schema import JumpFalseCall, KernelCall

    names = []
    for plan in _serialize._deserialize_pte_binary(pte).program.execution_plan:
        calls = [instruction.instr_args for instruction in plan.chains[0].instructions]
        for index, call in enumerate(calls):
            if isinstance(call, JumpFalseCall) and call.destination_instruction < index:
                inside = calls[call.destination_instruction : index]
                names += [
                    plan.operators[each.op_index].name for each in inside if isinstance(each, KernelCall)
                ]
    return names
