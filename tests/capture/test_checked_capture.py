"""The prepared model computes what the float model does, at the example's sizes and others, or is refused."""

from __future__ import annotations

import copy
import math
import operator
import random
import re
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
import torchao
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping, get_default_qconfig_mapping
from torch.fx import GraphModule

import torchq_compat as tc
from tests.helpers.oracle import sqnr
from torchq_compat.capture.checked import compare_runs
from torchq_compat.capture.opaque_stub import StubRegistry
from torchq_compat.capture.trial_runs import FloatRun, Runs, difference, with_sizes
from torchq_compat.errors import CaptureError, InputError, QuantizationWarning
from torchq_compat.support.decisions import Action

assert torchao
MAPPING = get_default_qconfig_mapping()


def prepared(model: nn.Module, *args: Any, **options: Any) -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tc.prepare_fx(model.eval(), MAPPING, args, **options)


def assert_as_float(model: nn.Module, graph_module: nn.Module, *args: Any) -> None:
    with torch.no_grad():
        assert difference(model(*args), graph_module(*args), 80) is None


def fixed(model: nn.Module, label: str) -> dict[str, Action]:
    found = tc.explain(model).find(f"input {label}")
    return {d.kind: d.action for d in found if d.kind != "rank"}


class PythonLoop(nn.Module):
    """Its steps differ: a loop whose steps are alike takes any size."""

    def forward(self, x: Tensor) -> Tensor:
        total = x[0] * 0
        for i in range(x.size(0)):
            total = total + (x[i] if i % 2 else x[i].exp())
        return total


class Iterated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.exp() if i % 2 else row * 2 for i, row in enumerate(x)]).sum(0)


class Unbound(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(x.unbind(0), 0)


class DividedByFloat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / float(x.size(0))


def test_a_float_of_a_size_stays_free() -> None:
    ours = prepared(DividedByFloat(), torch.randn(4, 5))
    for batch in (4, 7, 1):
        assert_as_float(DividedByFloat(), ours, torch.randn(batch, 5))


@pytest.mark.parametrize("model", [PythonLoop(), Iterated(), Unbound()], ids=repr)
def test_size_that_python_fixes_is_remembered(model: nn.Module) -> None:
    with pytest.warns(QuantizationWarning, match=r"dimension 0 at 'input x' is fixed: at 4 by test_checked"):
        ours = tc.prepare_fx(model.eval(), MAPPING, (torch.randn(4, 5),))
    assert_as_float(model, ours, torch.randn(4, 5))
    assert_as_float(model, ours, torch.randn(4, 9))
    forms = [ours, tc.convert_to_reference_fx(ours), tc.convert_fx(ours), copy.deepcopy(ours)]
    forms[0].load_state_dict(copy.deepcopy(ours.state_dict()))
    for form in forms:
        message = r"argument 'x' has size 6 in dimension 0, .* fixed to 4 .*test_checked_capture.py:\d+ \("
        with pytest.raises(InputError, match=message):
            form(torch.randn(6, 5))
    assert fixed(ours, "x") == {"dimension 0": Action.FIXED, "dimension 1": Action.FREE}


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.size(0) > 6 else x * 3


def as_integer(size: float) -> int:
    """``int`` would be seen in a function, too; what Python's C code asks for is fixed."""
    return operator.index(math.trunc(size))


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: as_integer(x.size(0) * 0.5)]


@pytest.mark.parametrize(
    ("model", "right", "wrong"), [(Branch(), 5, 7), (Half(), 5, 6)], ids=["branch", "half"]
)
def test_other_branch_is_refused(model: nn.Module, right: int, wrong: int) -> None:
    ours = prepared(model, torch.randn(4, 5))
    assert_as_float(model, ours, torch.randn(right, 5))
    with pytest.raises(
        InputError, match=rf"has size {wrong} in dimension 0, .* needs .*test_checked_capture"
    ):
        ours(torch.randn(wrong, 5))


class Buckets(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part.mean(0) for part in x.split(2)])


def test_how_many_parts_there_are_is_told() -> None:
    message = r"'input x' is free: as long as it is 5 to 6 \(test_checked_capture.py:\d+ .*split"
    with pytest.warns(QuantizationWarning, match=message):
        ours = tc.prepare_fx(Buckets().eval(), MAPPING, (torch.randn(6, 5),))
    assert_as_float(Buckets(), ours, torch.randn(5, 5))
    with pytest.raises(InputError, match="has size 7 in dimension 0"):
        ours(torch.randn(7, 5))


class CountsElements(nn.Module):
    """Decides by a size that no read of sizes shows."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.fc, self.most = nn.Linear(8, 8), most

    def forward(self, x: Tensor) -> Tensor:
        made = self.fc(x)
        return made * 2 if x.nbytes // x.element_size() > self.most else made


@pytest.mark.parametrize(("most", "taken", "refused"), [(36, [4], [1, 3, 5]), (10, [2, 4, 7], [1])])
def test_sizes_at_which_a_trial_differs_are_refused(most: int, taken: list[int], refused: list[int]) -> None:
    torch.manual_seed(0)
    model = CountsElements(most).eval()
    with pytest.warns(QuantizationWarning, match="computes? something else at other sizes"):
        ours = tc.prepare_fx(model, MAPPING, (torch.randn(4, 8),))
    for batch in taken:
        x = torch.randn(batch, 8)
        torch.testing.assert_close(ours(x), model(x))
    for batch in refused:
        with pytest.raises(InputError, match="dimension 0"):
            ours(torch.randn(batch, 8))


class Nested(nn.Module):
    def forward(self, pair: list[Tensor], named: dict[str, Tensor], *rest: Tensor) -> Tensor:
        total = pair[0]
        for i in range(named["k"].size(1)):
            column = named["k"][:, i : i + 1]
            total = total + (column if i % 2 else column.exp())
        return total + rest[0][: as_integer(rest[0].size(0))]


def test_nested_arguments_are_named() -> None:
    ours = prepared(Nested(), [torch.randn(4, 1)], {"k": torch.randn(4, 3)}, torch.randn(4, 1))
    with pytest.raises(InputError, match=r"argument \"named\['k'\]\" has size 2 in dimension 1"):
        ours([torch.randn(4, 1)], {"k": torch.randn(4, 2)}, torch.randn(4, 1))
    with pytest.raises(InputError, match=r"argument 'rest\[0\]' has size 3 in dimension 0"):
        ours([torch.randn(4, 1)], {"k": torch.randn(4, 3)}, torch.randn(3, 1))


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y[::2]) * x.size(0)


def test_related_sizes_are_checked() -> None:
    ours = prepared(TwoInputs(), torch.randn(3, 4), torch.randn(6, 4))
    assert_as_float(TwoInputs(), ours, torch.randn(2, 5), torch.randn(4, 5))
    assert_as_float(TwoInputs(), ours, torch.randn(1, 4), torch.randn(6, 4))
    with pytest.raises(tc.TorchQCompatError, match="size of tensor a"):
        ours(torch.randn(2, 4), torch.randn(6, 4))


class Bags(nn.Module):
    """A batch, the begins of its bags, and those of others with the end: two sizes alike, and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)
        self.bag = nn.EmbeddingBag(9, 8)
        self.with_end = nn.EmbeddingBag(9, 8, include_last_offset=True)

    def forward(self, x: Tensor, words: Tensor, begins: Tensor, bounds: Tensor) -> Tensor:
        return self.fc(x) + self.bag(words, begins) + self.with_end(words, bounds) + bounds[1:, None]


def test_several_sizes_that_depend_on_another_one() -> None:
    def inputs(*begins: int) -> tuple[Tensor, ...]:
        bounds = torch.tensor([*begins, 7])
        return torch.randn(len(begins), 4), torch.randint(9, (7,)), bounds[:-1], bounds

    model = Bags().eval()
    ours = prepared(model, *inputs(0, 3, 5))
    for other in inputs(0, 4), inputs(0, 1, 2, 2, 6):
        assert_as_float(model, ours, *other)
    x, words, begins, bounds = inputs(0, 3, 5, 6)
    with pytest.raises(InputError, match="'begins' has size 3 in dimension 0"):
        ours(x, words, begins[1:] - 3, bounds)
    with pytest.raises(tc.TorchQCompatError, match="size of tensor a"):
        ours(x, words, begins, bounds[1:] - 3)


class Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.squeeze(1)
        return y * 2 if y.dim() == 2 else y * 5


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)

    def forward(self, x: Tensor, flag: Tensor) -> Tensor:
        y = self.fc(x) * flag
        return y + y.size(1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k = (f(x).view(b, t, 2, 4).transpose(1, 2) for f in (self.q, self.k))
        scores = (q @ k.transpose(-1, -2)).masked_fill(mask == 0, -1e9).softmax(-1)
        return (scores @ q).transpose(1, 2).reshape(b, t, c)


class Recognizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(F.relu(self.conv(x)), (1, None)).squeeze(2)
        b, c, w = y.size()
        return self.fc(y.permute(2, 0, 1).reshape(w * b, c))


class Broadcast(nn.Module):
    """A function of torch written in Python asks whether sizes are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).expand(torch.broadcast_shapes(x.shape, (1, 1, 6))) * x.size(1)


OF_ONE: list[tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]] = [
    (Squeezed(), (torch.randn(1, 1, 6),), (torch.randn(3, 1, 4),)),
    (Flagged(), (torch.randn(1, 6), torch.ones(1, 1)), (torch.randn(3, 6), torch.rand(3, 1))),
    (
        Masked(),
        (torch.randn(1, 5, 8), torch.ones(1, 1, 1, 5)),
        (torch.randn(2, 7, 8), torch.ones(2, 1, 1, 7)),
    ),
    (Recognizer(), (torch.randn(1, 1, 8, 12),), (torch.randn(2, 1, 8, 17),)),
    (Broadcast(), (torch.randn(2, 4, 6),), (torch.randn(1, 3, 6),)),
    (Broadcast(), (torch.randn(3, 5, 6),), (torch.randn(2, 1, 6),)),
]


@pytest.mark.parametrize(("model", "example", "other"), OF_ONE, ids=lambda v: type(v).__name__)
def test_size_of_one_is_right_and_the_batch_stays_free(
    model: nn.Module, example: tuple[Tensor, ...], other: tuple[Tensor, ...]
) -> None:
    ours = prepared(model, *example)
    assert_as_float(model, ours, *example)
    assert_as_float(model, ours, *other)
    assert fixed(ours, "x")["dimension 0"] is Action.FREE
    for args in (example, other):
        ours(*args)
    reference = tc.convert_to_reference_fx(ours)
    with torch.no_grad():
        assert sqnr(model(*other), reference(*other)) > 15


def test_size_of_one_against_fx() -> None:
    torch.manual_seed(0)
    model, args = Flagged().eval(), (torch.randn(4, 6), torch.rand(4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_fx = fx.prepare_fx(copy.deepcopy(model), MAPPING, args)
        by_fx(*args)
        theirs = fx.convert_to_reference_fx(by_fx)
    ours = prepared(model, *args)
    ours(*args)
    reference = tc.convert_to_reference_fx(ours)
    with torch.no_grad():
        floats = model(*args)
        assert 20 < sqnr(floats, reference(*args)) < 70
        assert abs(sqnr(floats, reference(*args)) - sqnr(floats, theirs(*args))) < 1


class Blocks(nn.Module):
    def __init__(self, context: Any) -> None:
        super().__init__()
        self.a, self.b, self.c, self.context = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            y = self.a(x)
            with torch.enable_grad():
                y = self.b(y.float())
        return self.c(y.float())


CONTEXTS = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast off": lambda: torch.autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_block_is_inlined_and_quantized(name: str) -> None:
    torch.manual_seed(0)
    model, x = Blocks(CONTEXTS[name]).eval(), torch.randn(16, 8)
    ours = prepared(model, x)
    nodes = list(ours.graph.nodes)
    assert not [node for node in nodes if "wrap_with" in str(node.target)]
    assert not [m for m in ours.children() if isinstance(m, GraphModule)]
    ours(x)
    reference = tc.convert_to_reference_fx(ours)
    assert str(reference.code).count("aten.linear.default") == 3
    assert (
        str(reference.code).count("dequantize_per_channel")
        + str(reference.code).count("dequantize_per_tensor")
        >= 6
    )
    with torch.no_grad():
        assert 20 < sqnr(model(x), reference(x)) < 60


def test_the_callers_autocast_is_no_part_of_a_graph() -> None:
    x = torch.randn(2, 4, 6)
    converted = {}
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            made = prepared(nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Linear(4, 3), nn.Softmax(-1)), x)
        made(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            converted[enabled] = tc.convert_fx(made)
    expected = converted[False](x)
    assert torch.equal(converted[True](x), expected)
    assert expected.dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        program = tc.to_executorch(converted[True], (x,))
        assert tc.to_onnx(converted[True], (x,)).free_sizes
        assert torch.equal(tc.export(converted[True], (x,)).module()(x), converted[True].reference(x))
    torch.testing.assert_close(program(x), expected, rtol=0, atol=1e-6)


def test_lstm_under_no_grad() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fc = nn.LSTM(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y, _ = self.lstm(x)
            return self.fc(y)

    x = torch.randn(5, 3, 6)
    ours = prepared(Encoder(), x, prepare_custom_config=tc.get_default_prepare_custom_config())
    ours(x)
    reference = tc.convert_to_reference_fx(ours, tc.get_default_convert_custom_config())
    assert any(d.path.startswith("lstm") and d.action is Action.QUANTIZED for d in tc.explain(reference))


def float_block(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight) + x * 2


torch.fx.wrap("float_block")


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(float_block(self.a(x), self.a.weight))


def test_wrapped_function_is_one_float_call_as_in_fx() -> None:
    torch.manual_seed(0)
    model, x = Wrapped().eval(), torch.randn(64, 8)
    function = float_block
    ours = prepared(model, x)
    assert float_block is function
    by_fx = fx.prepare_fx(copy.deepcopy(model), MAPPING, (x,))
    for form in (ours, by_fx):
        form(x)
    theirs, reference = fx.convert_to_reference_fx(by_fx), tc.convert_to_reference_fx(ours)
    with torch.no_grad():
        assert abs(sqnr(model(x), theirs(x)) - sqnr(model(x), reference(x))) < 1
    calls = [d for d in tc.explain(reference) if d.kind == "float_block"]
    assert [d.action for d in calls] == [Action.FLOAT]
    assert "torch.fx.wrap" in calls[0].reason


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.drop(self.bn(self.fc(x))) + torch.rand(x.size(0), 8) + self.calls


@pytest.mark.parametrize("is_qat", [False, True])
def test_model_inputs_and_generators_stay_as_they_were(is_qat: bool) -> None:
    model, x = Stateful().train(is_qat), torch.randn(4, 8)
    before, kept = copy.deepcopy(model.state_dict()), x.clone()
    torch.manual_seed(3)
    random.seed(3)
    state, python = torch.get_rng_state(), random.getstate()
    prepare = tc.prepare_qat_fx if is_qat else tc.prepare_fx
    mapping = get_default_qat_qconfig_mapping() if is_qat else MAPPING
    ours = prepare(model, mapping, (x,))
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert torch.equal(x, kept)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)
    assert model.training is is_qat
    assert dict(ours.named_buffers())["calls"].item() == 0


@pytest.mark.parametrize("is_qat", [False, True])
def test_no_step_draws_from_the_generators(is_qat: bool) -> None:
    """Numbers that a script draws later are the same with and without quantization, unlike with FX."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    x = torch.randn(2, 3, 6, 6)
    mapping = get_default_qat_qconfig_mapping() if is_qat else MAPPING
    torch.manual_seed(3)
    random.seed(3)
    state, python = torch.get_rng_state(), random.getstate()
    prepared = (tc.prepare_qat_fx if is_qat else tc.prepare_fx)(model.train(is_qat), mapping, (x,))
    prepared(x)
    converted = tc.convert_fx(prepared.eval())
    torch.jit.script(converted)
    tc.fuse_fx(model.eval())
    tc.convert_to_reference_fx(prepared)(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python


def test_no_node_has_the_texts_of_the_stack_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = Mock(wraps=torch.fx.proxy.CapturedTraceback)
    monkeypatch.setattr(torch.fx.proxy, "CapturedTraceback", looked_up)
    model = nn.Sequential(nn.Linear(4, 4), DividedByFloat())
    graph_module = prepared(model, torch.randn(2, 4))
    looked_up.extract.assert_not_called()
    [divided] = (node for node in graph_module.graph.nodes if node.target is torch.ops.aten.div.Tensor)
    assert "return x / float(x.size(0))" in divided.stack_trace
    torch.export.export(model, (torch.randn(2, 4),))
    looked_up.extract.assert_called()


def test_arguments_that_are_no_tensors_are_fixed() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, factor: int) -> Tensor:
            return x * factor

    ours = prepared(Scaled(), torch.randn(2, 3), 4)
    assert_as_float(Scaled(), ours, torch.randn(2, 3), 4)
    with pytest.raises(InputError, match="argument 'factor' is int 5, but the captured model is fixed to 4"):
        ours(torch.randn(2, 3), 5)
    for given in (torch.ones(3), torch.ones(2, 2).to_sparse(), np.ones(3)):
        with pytest.raises(InputError, match=rf"'factor' is .*{type(given).__name__}.* fixed to 4"):
            ours(torch.randn(2, 3), given)


def test_defaults_that_the_example_left_are_fixed() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, factor: float = 2.0) -> Tensor:
            return x * factor

    ours = prepared(Scaled(), torch.randn(2, 3))
    assert_as_float(Scaled(), ours, torch.randn(2, 3), 2.0)
    for given in (torch.tensor(2.0), np.ones(3), 3.0):
        with pytest.raises(InputError, match=r"'factor' was not in example_inputs.* fixed to 2\.0"):
            ours(torch.randn(2, 3), given)


class Forgetful(nn.Module):
    """Captured wrongly by design: it behaves differently while torch.export traces it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 7 if torch.compiler.is_exporting() else x * 2


class DownToOneRow(nn.Module):
    """Heights of 8 to 15 are pooled to one row, which is squeezed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.max_pool2d(self.conv(x), (8, 2))
        assert rows.size(2) == 1
        return rows.squeeze(2).permute(2, 0, 1)


def test_sizes_beside_one_that_has_to_be_fixed_stay_free() -> None:
    model = DownToOneRow()
    ours = prepared(model, torch.randn(2, 1, 8, 12))
    assert fixed(ours, "x") == {
        "dimension 0": Action.FREE,
        "dimension 1": Action.FIXED,
        "dimension 2": Action.FREE,
        "dimension 3": Action.FREE,
    }
    for batch, height, width in ((1, 8, 12), (3, 15, 20), (5, 11, 7)):
        assert_as_float(model, ours, torch.randn(batch, 1, height, width))
    why = r"size 16 in dimension 2, .* needs 8 to 15, because of test_checked_capture.py:\d+ .*== 1"
    with pytest.raises(InputError, match=why):
        ours(torch.randn(2, 1, 16, 12))


def test_graph_that_differs_everywhere_is_refused() -> None:
    model = Forgetful()
    with pytest.raises(CaptureError, match=r"Forgetful cannot be quantized: .* something else .* dB"):
        prepared(model, torch.randn(2, 3))


class Counting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        COUNTED.append(len(COUNTED))
        return x * len(COUNTED)


COUNTED: list[int] = []


def test_a_model_that_differs_from_itself_is_told_as_random() -> None:
    with pytest.raises(CaptureError, match=r"Counting .* other results on each run") as caught:
        prepared(Counting(), torch.randn(2, 3))
    assert "defect" not in str(caught.value)


class OnlyHere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 if isinstance(x.size(0), torch.SymInt) else float(x.size(0)) / 4
        return x * scale


def test_size_at_which_the_graph_differs_is_fixed() -> None:
    with pytest.warns(QuantizationWarning, match="dimension 0 at 'input x' is fixed"):
        ours = tc.prepare_fx(OnlyHere().eval(), MAPPING, (torch.randn(4, 3),))
    assert_as_float(OnlyHere(), ours, torch.randn(4, 5))
    with pytest.raises(InputError, match="has size 8 in dimension 0"):
        ours(torch.randn(8, 3))


def test_dynamic_shapes_of_star_arguments_says_how() -> None:
    class Summed(nn.Module):
        def forward(self, *x: Tensor) -> Tensor:
            return x[0] + x[1]

    free = {0: torch.export.Dim.AUTO}
    args = (torch.randn(2, 3), torch.randn(2, 3))
    with pytest.raises(CaptureError, match="nested once more"):
        prepared(Summed(), *args, dynamic_shapes=(free, free))
    assert_as_float(Summed(), prepared(Summed(), *args, dynamic_shapes=((free, free),)), *args)


def test_data_dependent_control_flow_keeps_its_hint() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    with pytest.raises(CaptureError, match=r"test_checked_capture.py:\d+[^\n]*[\s\S]*torch.where"):
        prepared(Looks(), torch.randn(2, 3))


def _over_weights(x: Tensor) -> Tensor:
    return torch.vmap(lambda weight: x @ weight)(torch.ones(3, 3, 4)).sum(0)


def _over_positions(x: Tensor) -> Tensor:
    def mask(row: Tensor, column: Tensor) -> Tensor:
        return row >= column

    over_columns = torch.vmap(mask, (None, 0))
    return x * torch.vmap(over_columns, (0, None))(torch.arange(len(x)), torch.arange(x.size(1)))


def _derivative(x: Tensor) -> Tensor:
    result: Tensor = torch.func.jvp(torch.tanh, (x,), (x,))[1]
    return result


@pytest.mark.parametrize("function", [_over_weights, _over_positions, _derivative])
def test_transforms_of_functions_are_refused(function: Callable[[Tensor], Tensor]) -> None:
    """A graph in which a call fails would leave the process inside of the transform."""

    class Transforms(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    x = torch.randn(2, 3)
    with pytest.raises(CaptureError, match=r"a transform of torch.func, such as torch.vmap"):
        prepared(Transforms(), x)
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert function(x).shape[0] == 2


def test_equal_means_equal() -> None:
    x = torch.randn(100)
    assert difference(x, x + 1e-6, 80) is None
    assert "dB" in str(difference(x, x + 1e-3, 80))
    assert "dB" in str(difference(x, torch.zeros(100), 60))
    assert "dB" in str(difference(torch.zeros(100), x, 60))
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3]), 60) == "other integers"
    holes = x.clone()
    holes[3] = torch.nan
    assert difference(holes, holes, 80) is None
    assert difference(holes, x, 80) == "NaN or infinity in other places"
    assert "shape" in str(difference(x, x[None], 80))


class NotInFloat64(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(4, 4)


def test_what_kept_float64_from_deciding_is_said() -> None:
    """A difference of 40 dB may be rounding: float64 decides, where the model runs in it."""
    x = torch.randn(8, 4)
    noisy = x @ torch.ones(4, 4) * (1 + 1e-2)
    runs = Runs(NotInFloat64(), StubRegistry(), {})
    problem = compare_runs(runs, runs.of_float_model((x,)), lambda double: noisy, 80)
    assert problem is not None
    assert re.fullmatch(r".*40\.0 dB; in float64 the float model fails: RuntimeError: .*dtype.*", problem)

    def fails_in_float64(*, double: bool) -> Tensor:
        if double:
            raise KeyError("wide")
        return noisy.relu()

    runs = Runs(nn.Sequential(nn.ReLU()), StubRegistry(), {})
    run = FloatRun((x,), (x @ torch.ones(4, 4)).relu())
    problem = compare_runs(runs, run, fails_in_float64, 80)
    assert problem is not None
    assert problem.endswith("40.0 dB; in float64 it fails: KeyError: 'wide'")


@pytest.mark.parametrize("made_of", [torch.ones, torch.zeros])
def test_an_example_of_one_value_is_no_difference(made_of: Any) -> None:
    """In training this batch norm divides zero by zero: the result in float32 is rounding."""
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.ReLU())
    mapping, example, x = (
        get_default_qat_qconfig_mapping("qnnpack"),
        made_of(1, 1, 28, 28),
        torch.randn(4, 1, 9, 9),
    )
    theirs = fx.prepare_qat_fx(copy.deepcopy(model).train(), mapping, (example,))
    ours = tc.prepare_qat_fx(model, mapping, (example,))
    expected = theirs(x)
    assert sqnr(expected, ours(x)) > 100
    assert expected.std() > 0.1


def test_rounding_excuses_no_other_computation() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.ReLU()).train()
    runs, example = Runs(model, StubRegistry(), {}), (torch.ones(1, 1, 28, 28),)
    run = runs.of_float_model(example)

    def other(*, double: bool) -> Tensor:
        return torch.full_like(run.value, 1e-3, dtype=torch.float64 if double else torch.float32)

    assert "dB" in str(compare_runs(runs, run, other, 60))
    # Values above rounding: 20 dB and less are another computation, and float64 is not tried.
    run = runs.of_float_model((torch.randn(4, 1, 9, 9),))
    assert "dB" in str(compare_runs(runs, run, lambda double: run.value * (1.5 if not double else 1.0), 60))


@pytest.mark.parametrize("shape", [(), (2,), (2, 1)])
def test_squares_of_a_length_grow_along_the_diagonal(shape: tuple[int, ...]) -> None:
    def squares(length: int) -> list[Tensor]:
        at = torch.arange(length)
        away = at - at[:, None]
        tables = [away > 0, torch.where(away > 0, -torch.inf, 0.0), away.abs() > 1, away.clamp(-2, 2)]
        return [table.expand(*shape, length, length) for table in tables]

    for length in (4, 7, 2):
        labels = [f"mask{index}" for index in range(4)]
        sizes = {(label, len(shape) + index): length for label in labels for index in (0, 1)}
        grown = with_sizes(tuple(squares(3)), dict(zip(labels, squares(3), strict=True)), sizes)
        assert all(torch.equal(*pair) for pair in zip(grown, squares(length), strict=True))
