"""QAT beside live FX, from the same weights, on the same batches: losses, qparams, converted models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.nn.intrinsic.qat import freeze_bn_stats
from torch.ao.quantization import (
    FakeQuantize,
    FixedQParamsFakeQuantize,
    FixedQParamsObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_fake_quant,
    default_dynamic_qconfig,
    default_embedding_qat_qconfig,
    default_embedding_qat_qconfig_4bit,
    default_fake_quant,
    default_fixed_qparams_range_neg1to1_fake_quant,
    default_fused_act_fake_quant,
    default_fused_per_channel_wt_fake_quant,
    default_fused_wt_fake_quant,
    default_histogram_fake_quant,
    default_per_channel_weight_fake_quant,
    default_weight_fake_quant,
    disable_fake_quant,
    disable_observer,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
    fused_per_channel_wt_fake_quant_range_neg_127_to_127,
    fused_wt_fake_quant_range_neg_127_to_127,
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
from torch.ao.quantization.fx.custom_config import PrepareCustomConfig
from torch.fx import GraphModule, Node

import torchq_compat as tc
from tests.helpers.captured_once import captured_once
from tests.helpers.oracle import (
    CONVERT_LSTM,
    MAP_LSTM,
    activation_qparams,
    by_fx,
    by_us,
    fx_activation_qparams,
    leaves,
    quantize_nodes,
    sqnr,
)
from tests.helpers.side_by_side import side_by_side

Batch = tuple[Any, ...]
CLASSES = 4


def prepare_both(
    model: nn.Module, mapping: QConfigMapping, example: Batch
) -> tuple[GraphModule, GraphModule]:
    """Return (by us, by FX), prepared from equal weights."""
    ours = tc.prepare_qat_fx(model, mapping, example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ours, fx.prepare_qat_fx(padded_in_numbers(model).train(), mapping, example)


def padded_in_numbers(model: nn.Module) -> nn.Module:
    """Return a copy without padding by name, with which FX's fused modules raise."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if getattr(module, "padding", None) == "same":
            module.padding = tuple(size // 2 for size in module.kernel_size)
    return model


def train(prepared: nn.Module, batches: Sequence[Batch]) -> list[float]:
    """Return the losses of one step of SGD per batch, one for each result; the targets depend only on the
    step's number."""
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        of_step = []
        for result in leaves(prepared(*batch)):
            generator = torch.Generator().manual_seed(step)
            target = torch.randint(0, CLASSES, (len(result),), generator=generator)
            of_step.append(F.cross_entropy(result, target))
        torch.stack(of_step).sum().backward()
        optimizer.step()
        losses += map(float, of_step)
    return losses


def fx_reference(prepared: GraphModule) -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fx.convert_to_reference_fx(copy.deepcopy(prepared).eval())


def rounded(qparams: set[tuple[float, int]]) -> set[tuple[float, int]]:
    return {(round(scale, 6), zero_point) for scale, zero_point in qparams}


def assert_same_qparams(converted: GraphModule, reference: GraphModule) -> None:
    mine = rounded(activation_qparams(converted))
    assert mine == rounded(fx_activation_qparams(reference))


def assert_converts_to_what_was_trained(prepared: GraphModule, batch: Batch) -> GraphModule:
    """Assert that the model converts to what was trained, with observers disabled, as scripts do; otherwise
    FX observes weights once more."""
    prepared.apply(disable_observer).eval()
    converted = tc.convert_to_reference_fx(prepared)
    plain = copy.deepcopy(prepared).apply(disable_fake_quant)
    with torch.no_grad():
        results = (leaves(model(*batch)) for model in (prepared, plain, converted))
    for index, (trained, exact, found) in enumerate(zip(*results, strict=True)):
        assert sqnr(trained, found) > 30, index
        assert sqnr(exact, found) < 60, index
    return converted


class Normalized(nn.Module):
    """An op, its batch norm with non-default constants, and a linear classifier."""

    def __init__(self, op: nn.Module, norm: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.op, self.bn = op, norm
        self.fc = nn.Linear(op(torch.zeros(shape))[0].numel(), CLASSES)
        for parameter in norm.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(F.relu(self.bn(self.op(x))).flatten(1))
        return result


#: Name -> (op with or without bias, its batch norm, shape of the input).
PAIRS: dict[str, tuple[Callable[[bool], nn.Module], type[nn.Module], tuple[int, ...]]] = {
    "linear": (lambda bias: nn.Linear(6, 8, bias=bias), nn.BatchNorm1d, (16, 6)),
    "conv1d": (lambda bias: nn.Conv1d(3, 8, 3, bias=bias), nn.BatchNorm1d, (8, 3, 9)),
    "conv1d same": (lambda bias: nn.Conv1d(3, 8, 3, padding="same", bias=bias), nn.BatchNorm1d, (8, 3, 9)),
    "conv2d": (lambda bias: nn.Conv2d(3, 8, 3, stride=2, bias=bias), nn.BatchNorm2d, (8, 3, 7, 7)),
    "conv2d same": (
        lambda bias: nn.Conv2d(4, 8, 3, padding="same", groups=2, bias=bias),
        nn.BatchNorm2d,
        (8, 4, 6, 6),
    ),
    "conv3d": (
        lambda bias: nn.Conv3d(2, 8, 3, padding=1, dilation=2, bias=bias),
        nn.BatchNorm3d,
        (4, 2, 5, 5, 5),
    ),
}


def freeze_in_fx(module: nn.Module) -> None:
    """Freeze statistics by torch.ao's freeze_bn_stats, or by the method of a fused linear, which it omits."""
    if isinstance(module, torch.ao.nn.intrinsic.qat.LinearBn1d):
        module.freeze_bn_stats()
    else:
        freeze_bn_stats(module)


@pytest.mark.parametrize("backend", ["qnnpack", "x86"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_an_op_and_its_batch_norm(bias: bool, backend: str) -> None:
    """Trained on the folded weight, as in FX, and after six steps with frozen statistics; all pairs beside
    each other."""
    torch.manual_seed(0)
    shapes = [shape for _, _, shape in PAIRS.values()]
    alone = [Normalized(make(bias), norm(8, eps=1e-2, momentum=0.3), s) for make, norm, s in PAIRS.values()]
    model = side_by_side(alone, [[index] for index in range(len(PAIRS))]).train()
    batches = [tuple(torch.randn(shape) for shape in shapes) for _ in range(10)]
    with captured_once(("an op and its batch norm", bias)):
        ours, theirs = prepare_both(model, get_default_qat_qconfig_mapping(backend), batches[0])

    def both_trained(batches: Sequence[Batch]) -> tuple[dict[str, float], ...]:
        names = [f"{pair}, step {step}" for step in range(len(batches)) for pair in PAIRS]
        return tuple(dict(zip(names, train(each, batches), strict=True)) for each in (ours, theirs))

    mine, expected = both_trained(batches[:6])
    assert mine == pytest.approx(expected, rel=1e-4)
    norms = {pair: ours.get_submodule(f"{index}.bn") for index, pair in enumerate(PAIRS)}
    statistics = {pair: norm.running_var.clone() for pair, norm in norms.items()}
    for (pair, found), each in zip(statistics.items(), alone, strict=True):
        assert not torch.equal(found, each.bn.running_var), pair
    ours.apply(freeze_bn_stats)
    theirs.apply(freeze_in_fx)
    mine, expected = both_trained(batches[6:])
    assert mine == pytest.approx(expected, rel=1e-4)
    for pair, norm in norms.items():
        assert torch.equal(statistics[pair], norm.running_var), pair
    batch = tuple(torch.randn(64, *shape[1:]) for shape in shapes)
    converted = assert_converts_to_what_was_trained(ours, batch)
    assert_same_qparams(converted, fx_reference(theirs))
    assert not any(node.target is torch.ops.aten.batch_norm.default for node in converted.graph.nodes)


@pytest.mark.parametrize("pair", ["linear", "conv2d"])
def test_a_batch_norm_that_averages_over_all_batches(pair: str) -> None:
    """momentum=None, whose factor torch.export cannot capture."""
    make, norm, shape = PAIRS[pair]
    torch.manual_seed(0)
    model = Normalized(make(True), norm(8, momentum=None), shape)
    batches = [(torch.randn(shape),) for _ in range(10)]
    ours, theirs = prepare_both(model, get_default_qat_qconfig_mapping("qnnpack"), batches[0])
    assert model.bn.momentum is None
    with torch.no_grad():  # no batch is counted yet
        assert sqnr(copy.deepcopy(model).eval()(*batches[0]), copy.deepcopy(ours).eval()(*batches[0])) > 20
    assert train(ours, batches) == pytest.approx(train(theirs, batches), rel=1e-4)
    assert int(ours.bn.num_batches_tracked) == 10
    torch.testing.assert_close(ours.bn.running_mean, theirs.op.bn.running_mean)
    torch.testing.assert_close(ours.bn.running_var, theirs.op.bn.running_var)
    converted = assert_converts_to_what_was_trained(ours, batches[0])
    assert_same_qparams(converted, fx_reference(theirs))
    torch.export.export(converted, batches[0])


class Reader(nn.Module):
    """An LSTM whose quantized output is the input of a convolution with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.conv, self.bn = nn.LSTM(4, 6), nn.Conv1d(6, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        result: Tensor = self.fc(F.relu(self.bn(self.conv(y.permute(1, 2, 0)))).mean(2))
        return result


def test_a_batch_norm_behind_what_an_lstm_quantized() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(7, 16, 4),) for _ in range(10)]
    prepared = tc.prepare_qat_fx(Reader(), get_default_qat_qconfig_mapping("qnnpack"), batches[0], MAP_LSTM)
    losses = train(prepared, batches)
    assert losses[0] != losses[-1]
    converted = assert_converts_to_what_was_trained(prepared, batches[0])
    (conv,) = (n for n in converted.graph.nodes if n.target is torch.ops.aten.conv1d.default)
    # The convolution reads the LSTM's own integers: there is no second quantize between them.
    assert not any(node in quantize_nodes(converted) for node in between(converted, "lstm", conv))
    assert not any(n.target is torch.ops.aten.batch_norm.default for n in converted.graph.nodes)


def between(converted: GraphModule, path: str, last: Node) -> list[Node]:
    """Return the nodes that the activation passes from the call of ``path`` to ``last``."""
    nodes = [last]
    while nodes[-1].target != path:
        nodes.append(nodes[-1].all_input_nodes[0])
    return nodes


def test_a_batch_norm_across_another_dimension_is_not_folded_into_the_linear() -> None:
    """Linear works on the last dimension, batch norm on the second; FX folds one into the other."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.op, self.bn = nn.Linear(6, 5), nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.bn(self.op(x)).mean(1)
            return result

    torch.manual_seed(0)
    batches = [(torch.randn(16, 5, 6) + torch.arange(5.0).view(5, 1),) for _ in range(10)]
    ours, theirs = prepare_both(Wide(), get_default_qat_qconfig_mapping("qnnpack"), batches[0])
    train(ours, batches)
    train(theirs, batches)
    converted = assert_converts_to_what_was_trained(ours, batches[0])
    assert any(node.target is torch.ops.aten.batch_norm.default for node in converted.graph.nodes)
    theirs.apply(disable_observer).eval()
    assert sqnr(theirs(*batches[0]), fx_reference(theirs)(*batches[0])) < 10


class Tail(nn.Module):
    """The last output of an LSTM, with its state given, the only form FX accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(8, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        y, _ = self.lstm(x, (h, c))
        result: Tensor = self.fc(y[-1])
        return result


@pytest.mark.parametrize("backend", ["qnnpack", "x86"])
def test_an_lstm_but_for_what_fx_does_not_train(backend: str) -> None:
    """FX trains tanh of the cell state in float and converts it to 8 bits. Without a fake-quantize for it the
    losses are FX's; with one the model converts to what was trained."""
    torch.manual_seed(0)
    batches = [(torch.randn(6, 16, 8), *torch.randn(2, 1, 16, 12)) for _ in range(10)]
    mapping, model = get_default_qat_qconfig_mapping(backend), Tail()
    with_all = tc.prepare_qat_fx(model, mapping, batches[0], MAP_LSTM)
    ours = copy.deepcopy(with_all)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = fx.prepare_qat_fx(copy.deepcopy(model).train(), mapping, batches[0], MAP_LSTM)
    cell = ours.get_submodule("lstm.layers.0.layer_fw.cell")
    (tanh,) = (node for node in cell.graph.nodes if node.name == "tanh_cy")
    (observed,) = tanh.users
    cell.get_submodule(str(observed.target)).disable_fake_quant()
    losses = train(theirs, batches)
    assert train(ours, batches) == pytest.approx(losses, rel=1e-4)
    assert train(with_all, batches) != pytest.approx(losses, rel=1e-4)
    with_all.apply(disable_observer).eval()
    theirs.apply(disable_observer).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = fx.convert_to_reference_fx(copy.deepcopy(theirs), CONVERT_LSTM)
    with torch.no_grad():
        assert sqnr(theirs(*batches[0]), reference(*batches[0])) < 35
        assert sqnr(with_all(*batches[0]), tc.convert_fx(with_all)(*batches[0])) > 60


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(20, 8), nn.Linear(8, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.fc(self.embedding(words).mean(1))
        return result


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(20, 8, mode="sum", include_last_offset=True)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        result: Tensor = self.fc(self.embedding(words, offsets))
        return result


@pytest.mark.parametrize(
    ("qconfig", "steps"),
    [(default_embedding_qat_qconfig, 255), (default_embedding_qat_qconfig_4bit, 15)],
    ids=["8 bits", "4 bits"],
)
@pytest.mark.parametrize("make", [Words, Bags])
def test_embeddings(make: type[nn.Module], qconfig: QConfig, steps: int) -> None:
    torch.manual_seed(0)
    model = make()
    shape, rest = ((16, 5), ()) if make is Words else ((80,), (torch.arange(0, 81, 5),))
    batches = [(torch.randint(0, 20, shape), *rest) for _ in range(10)]
    mapping = (
        get_default_qat_qconfig_mapping("qnnpack")
        .set_object_type(nn.Embedding, qconfig)
        .set_object_type(nn.EmbeddingBag, qconfig)
    )
    ours, theirs = prepare_both(model, mapping, batches[0])
    losses = train(ours, batches)
    assert losses == pytest.approx(train(theirs, batches), rel=1e-4)
    assert losses[0] != losses[-1]
    converted = assert_converts_to_what_was_trained(ours, batches[0])
    reference = fx_reference(theirs.apply(disable_observer))
    assert_same_qparams(converted, reference)
    integers, state = reference.embedding.get_quantized_weight(), converted.state_dict()
    assert state["embedding_weight_quantized"].max() == steps
    torch.testing.assert_close(state["embedding_weight_scales"], integers.q_per_channel_scales().float())
    zero_points = integers.q_per_channel_zero_points().float()
    torch.testing.assert_close(state["embedding_weight_zero_points"], zero_points)
    trained = ours.get_submodule(_weight_fake_quantize(ours, "embedding.weight"))(ours.embedding.weight)
    with torch.no_grad():
        torch.testing.assert_close(integers.dequantize(), trained)


def _weight_fake_quantize(prepared: GraphModule, weight: str) -> str:
    (node,) = (n for n in prepared.graph.nodes if n.target == weight)
    (user,) = node.users
    return str(user.target)


@pytest.mark.parametrize(
    ("qconfig", "expected"),
    [(float_qparams_weight_only_qconfig, 30), (float_qparams_weight_only_qconfig_4bit, 15)],
    ids=["8 bits", "4 bits"],
)
def test_embeddings_after_training(qconfig: QConfig, expected: int) -> None:
    """Four-bit weights once had the range of eight bits."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Embedding(20, 8)).eval(), [(torch.arange(20),)]
    mapping = QConfigMapping().set_global(qconfig)
    (_, converted), (_, reference) = (by(model, mapping, batches) for by in (by_us, by_fx))
    exact, mine = model(*batches[0]), converted(*batches[0])
    assert expected < sqnr(exact, mine) < 2 * expected
    torch.testing.assert_close(mine, reference(*batches[0]))


ACTIVATIONS = {
    "FakeQuantize, reduced range": default_fake_quant,
    "FakeQuantize, minimum and maximum": FakeQuantize.with_args(
        observer=MinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
    ),
    "FakeQuantize, histogram": default_histogram_fake_quant,
    "fused": default_fused_act_fake_quant,
    "fixed": default_fixed_qparams_range_neg1to1_fake_quant,
    "learnable": _LearnableFakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
    ),
}
PER_TENSOR = {
    "quant_min": -128,
    "quant_max": 127,
    "dtype": torch.qint8,
    "qscheme": torch.per_tensor_symmetric,
}
PER_CHANNEL = PER_TENSOR | {"qscheme": torch.per_channel_symmetric}
WEIGHTS = {
    "FakeQuantize": default_weight_fake_quant,
    "FakeQuantize, minimum and maximum": FakeQuantize.with_args(observer=MinMaxObserver, **PER_TENSOR),
    "FakeQuantize, per channel": default_per_channel_weight_fake_quant,
    "FakeQuantize, per channel, minimum and maximum": FakeQuantize.with_args(
        observer=PerChannelMinMaxObserver, **PER_CHANNEL
    ),
    "fused": default_fused_wt_fake_quant,
    "fused, per channel": default_fused_per_channel_wt_fake_quant,
    "fused, -127 to 127": fused_wt_fake_quant_range_neg_127_to_127,
    "fused, per channel, -127 to 127": fused_per_channel_wt_fake_quant_range_neg_127_to_127,
    "learnable": _LearnableFakeQuantize.with_args(observer=MovingAverageMinMaxObserver, **PER_TENSOR),
    "learnable, per channel": _LearnableFakeQuantize.with_args(
        observer=MovingAveragePerChannelMinMaxObserver, channel_len=8, **PER_CHANNEL
    ),
}
KINDS = {
    **{f"activation: {name}": (kind, default_weight_fake_quant) for name, kind in ACTIVATIONS.items()},
    **{f"weight: {name}": (default_fused_act_fake_quant, kind) for name, kind in WEIGHTS.items()},
}


def conv_net() -> nn.Module:
    """Return a model with eight channels everywhere, which learnable per-channel fake-quantizes are told."""
    torch.manual_seed(0)
    model = Normalized(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), (8, 3, 7, 7))
    model.fc = nn.Linear(200, 8)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_every_fake_quantize(kind: str) -> None:
    """On activations and weights, with conv-bn-relu-linear as the model."""
    model, batches = conv_net(), [(torch.randn(8, 3, 7, 7),) for _ in range(10)]
    mapping = QConfigMapping().set_global(QConfig(*KINDS[kind]))
    with captured_once("every fake-quantize"):
        ours, theirs = prepare_both(model, mapping, batches[0])
    losses = train(ours, batches)
    assert losses == pytest.approx(train(theirs, batches), rel=1e-4)
    assert losses[0] != losses[-1]
    x = torch.randn(64, 3, 7, 7)
    converted = assert_converts_to_what_was_trained(ours, (x,))
    reference = fx_reference(theirs.apply(disable_observer))
    assert_same_qparams(converted, reference)
    if "reduced range" not in kind:  # there FX converts with another range than it trained
        assert sqnr(reference(x), converted(x)) > 60


FXS_OWN_NUMBERS = {
    "fbgemm": get_default_qat_qconfig_mapping("fbgemm"),
    "x86": get_default_qat_qconfig_mapping("x86"),
    "qnnpack": get_default_qat_qconfig_mapping("qnnpack"),
    "x86, not fused": QConfigMapping().set_global(get_default_qat_qconfig("x86", version=0)),
    "learnable": QConfigMapping().set_global(
        QConfig(KINDS["activation: learnable"][0], KINDS["weight: learnable, per channel"][1])
    ),
    "reduced range per tensor": QConfigMapping().set_global(
        QConfig(default_fake_quant.with_args(quant_min=0, quant_max=127), default_fused_wt_fake_quant)
    ),
}
FROM_OBSERVER = "with its observer's qparams and the dtype's range, as in FX, not those it trained with"


@pytest.mark.parametrize("name", FXS_OWN_NUMBERS)
def test_observer_qparams(name: str) -> None:
    """FX's qparams and results, also for values beyond the reduced range of training."""
    model, batches = conv_net(), [(torch.randn(8, 3, 7, 7),) for _ in range(10)]
    with captured_once("every fake-quantize"):
        ours, theirs = prepare_both(model, FXS_OWN_NUMBERS[name], batches[0])
    train(ours, batches)
    train(theirs, batches)
    x = 2 * torch.randn(64, 3, 7, 7)
    reference = fx_reference(theirs)
    kept, found = (tc.convert_to_reference_fx(ours, observer_qparams=flag) for flag in (False, True))
    assert_same_qparams(found, reference)
    expected = reference(x)
    assert sqnr(expected, found(x)) > 60
    assert sqnr(model.eval()(x), found(x)) < 60  # it is quantized
    assert sqnr(expected, tc.convert_fx(ours, observer_qparams=True)(x)) > 40
    told = [FROM_OBSERVER in decision.reason for decision in tc.explain(found) if decision.details]
    # The range of qnnpack and of learnable ones is not reduced, and the scales of weights seldom differ.
    assert all(told) or name in ("qnnpack", "learnable")
    assert any(told) or torch.equal(found(x), kept(x))
    if name not in ("qnnpack", "learnable"):
        assert sqnr(expected, kept(x)) < 45
    assert FROM_OBSERVER not in str(tc.explain(kept))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags, self.fc = nn.Embedding(10, 8), nn.EmbeddingBag(10, 8), nn.Linear(16, CLASSES)

    def forward(self, indices: Tensor) -> Tensor:
        result: Tensor = self.fc(torch.cat([self.words(indices).mean(1), self.bags(indices)], 1))
        return result


@pytest.mark.parametrize("qconfig", [default_embedding_qat_qconfig, default_embedding_qat_qconfig_4bit])
def test_observer_qparams_beside_embeddings(qconfig: QConfig) -> None:
    torch.manual_seed(0)
    mapping = get_default_qat_qconfig_mapping("x86")
    for kind in (nn.Embedding, nn.EmbeddingBag):
        mapping.set_object_type(kind, qconfig)
    batches = [(torch.randint(0, 10, (6, 3)),) for _ in range(6)]
    ours, theirs = prepare_both(Bags(), mapping, batches[0])
    train(ours, batches)
    train(theirs, batches)
    (indices,) = batches[0]
    expected = fx_reference(theirs)(indices)
    assert sqnr(expected, tc.convert_to_reference_fx(ours, observer_qparams=True)(indices)) > 60
    assert sqnr(expected, tc.convert_to_reference_fx(ours)(indices)) < 50


def test_observer_qparams_inside_a_standalone_module() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, CLASSES))
    config = PrepareCustomConfig().set_standalone_module_name("0", None, (x,), None, None)
    prepared = tc.prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (x,), config)
    train(prepared, [(torch.randn(8, 6),) for _ in range(6)])
    told = tc.explain(tc.convert_fx(prepared, observer_qparams=True))
    assert [FROM_OBSERVER in told.find(path)[0].reason for path in ("0.0", "1")] == [True, True]


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(self.lstm(x)[0][-1])
        return result


def test_observer_qparams_leave_the_parts_of_a_cell() -> None:
    torch.manual_seed(0)
    prepared = tc.prepare_qat_fx(
        Tagger(), get_default_qat_qconfig_mapping("x86"), (torch.randn(3, 2, 6),), MAP_LSTM
    )
    train(prepared, [(torch.randn(3, 2, 6),) for _ in range(4)])
    converted = [
        tc.convert_to_reference_fx(prepared, CONVERT_LSTM, observer_qparams=flag) for flag in (False, True)
    ]
    kept, found = map(tc.explain, converted)
    assert "its parts keep the qparams they trained with" in found.find("lstm")[0].reason
    parts = [decision.details for decision in found.find("lstm") if decision.is_part]
    assert parts == [decision.details for decision in kept.find("lstm") if decision.is_part]
    assert len(parts) == 12
    of_fc = (
        [n.args[3:5] for n in model.graph.nodes if "quantize_per" in str(n.target)] for model in converted
    )
    assert [ranges[-1] for ranges in of_fc] == [(0, 127), (0, 255)]


def test_observer_qparams_of_a_calibrated_model() -> None:
    """Observers trained nothing: there is nothing to choose, and nothing is told."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES)).eval(), torch.randn(16, 6)
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,))
    prepared(x)
    found = tc.convert_fx(prepared, observer_qparams=True)
    assert torch.equal(found(3 * x), tc.convert_fx(prepared)(3 * x))
    assert "observer" not in str(tc.explain(found))
    with pytest.raises(tc.TorchQCompatError, match="observer_qparams must be one of"):
        tc.convert_fx(prepared, observer_qparams="yes")  # type: ignore[arg-type]


def test_a_whole_range_that_is_not_fused_converts_as_in_fx() -> None:
    activation = FakeQuantize.with_args(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    mapping = QConfigMapping().set_global(QConfig(activation, default_per_channel_weight_fake_quant))
    model, batches = conv_net(), [(torch.randn(8, 3, 7, 7),) for _ in range(10)]
    ours, theirs = prepare_both(model, mapping, batches[0])
    train(ours, batches)
    train(theirs, batches)
    x = torch.randn(64, 3, 7, 7)
    found = tc.convert_fx(copy.deepcopy(ours.eval()))(x)
    # FX's kernels saturate products of the whole range on a CPU without VNNI.
    assert sqnr(fx.convert_to_reference_fx(theirs.eval())(x), found) > 60
    assert sqnr(tc.convert_fx(ours.eval(), observer_qparams=True)(x), found) > 60


def test_dynamic_fake_quantize() -> None:
    """Trained on the range of each batch; the converted model chooses qparams for each input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    batches = [(torch.randn(16, 6),) for _ in range(10)]
    mapping = QConfigMapping().set_global(QConfig(default_dynamic_fake_quant, default_weight_fake_quant))
    ours, theirs = prepare_both(model, mapping, batches[0])
    assert train(ours, batches) == pytest.approx(train(theirs, batches), rel=1e-4)
    x = 3 * torch.randn(64, 6)
    trained = ours.eval()(x)
    converted = tc.convert_to_reference_fx(ours)
    choices = [n for n in converted.graph.nodes if "choose_qparams" in str(n.target)]
    assert len(choices) == 2
    assert sqnr(trained, converted(x)) > 30
    assert sqnr(fx_reference(theirs)(x), converted(x)) > 30


def test_dynamic_quantization_after_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES)).eval()
    mapping, batches = QConfigMapping().set_global(default_dynamic_qconfig), [(torch.randn(16, 6),)]
    (_, converted), (_, reference) = (by(model, mapping, batches) for by in (by_us, by_fx))
    x = 3 * torch.randn(64, 6)
    assert 30 < sqnr(model(x), reference(x)) <= sqnr(model(x), converted(x)) < 60


def test_fixed_qparams_on_weights() -> None:
    """FX's QAT modules raise: they pass such a fake-quantize a factory_kwargs that it does not accept."""
    observer = FixedQParamsObserver.with_args(
        scale=2**-7, zero_point=0, dtype=torch.qint8, quant_min=-128, quant_max=127
    )
    weight = FixedQParamsFakeQuantize.with_args(observer=observer)
    torch.manual_seed(0)
    mapping = QConfigMapping().set_global(QConfig(default_fused_act_fake_quant, weight))
    batches = [(torch.randn(16, 6),) for _ in range(10)]
    with pytest.raises(TypeError, match="factory_kwargs"):
        fx.prepare_qat_fx(nn.Sequential(nn.Linear(6, CLASSES)), mapping, batches[0])
    prepared = tc.prepare_qat_fx(nn.Sequential(nn.Linear(6, CLASSES)), mapping, batches[0])
    train(prepared, batches)
    converted = assert_converts_to_what_was_trained(prepared, batches[0])
    (scale,) = (
        n.args[1] for n in converted.graph.nodes if n.op == "call_function" and n.args[-1] is torch.int8
    )
    assert scale == 2**-7


def learn_scales(module: nn.Module) -> None:
    if isinstance(module, _LearnableFakeQuantize):
        module.enable_param_learning()


@pytest.mark.parametrize("estimated", [5, 0], ids=["after five steps of estimates", "from the start"])
def test_learnt_scales(estimated: int) -> None:
    """After ``enable_param_learning`` the scales are parameters, and conversion uses them."""
    model, batches = conv_net(), [(torch.randn(8, 3, 7, 7),) for _ in range(10)]
    activation, weight = ACTIVATIONS["learnable"], WEIGHTS["learnable, per channel"]
    start = {"scale": 0.05, "zero_point": 0.0}
    mapping = QConfigMapping().set_global(QConfig(activation.with_args(**start), weight.with_args(**start)))
    ours, theirs = prepare_both(model, mapping, batches[0])
    assert train(ours, batches[:estimated]) == pytest.approx(train(theirs, batches[:estimated]), rel=1e-4)
    for prepared in (ours, theirs):
        prepared.apply(learn_scales)
    before = {name: p.clone() for name, p in ours.named_parameters() if name.endswith("scale")}
    assert len(before) == 6
    assert train(ours, batches[estimated:]) == pytest.approx(train(theirs, batches[estimated:]), rel=1e-4)
    assert not any(torch.equal(value, ours.get_parameter(name)) for name, value in before.items())
    x = torch.randn(64, 3, 7, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted = assert_converts_to_what_was_trained(ours, (x,))
    learnt = {round(float(p), 6) for n, p in ours.named_parameters() if n in before and p.numel() == 1}
    assert learnt == {scale for scale, _ in rounded(activation_qparams(converted))}
    reference = fx_reference(theirs.apply(disable_observer))
    assert_same_qparams(converted, reference)
    assert sqnr(reference(x), converted(x)) > 60


class WeightStandardized(nn.Conv2d):
    """The convolution of NF-Nets: its weight is normalized at every call, its gain is quantized before."""

    def __init__(self) -> None:
        super().__init__(4, 8, 3)
        self.gain = nn.Parameter(torch.ones(8, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        flat, gain = self.weight.reshape(1, 8, -1), (self.gain * 0.17).view(-1)
        weight = F.batch_norm(flat, None, None, gain, training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


def test_a_weight_standardized_convolution_converts_to_what_was_trained() -> None:
    """The gain shares its observer with the scaled gain, so its moving average sinks below 1. Training clamps
    there; FX converts to twice the range (reduce_range), which training never used."""
    torch.manual_seed(0)
    model, batches = WeightStandardized().train(), [(torch.randn(4, 4, 6, 6),) for _ in range(16)]
    ours, theirs = prepare_both(model, get_default_qat_qconfig_mapping("x86"), batches[0])
    for prepared in (ours, theirs):
        for batch in batches:
            prepared(*batch)
        prepared.apply(disable_observer).eval()
    converted, reference = tc.convert_to_reference_fx(ours), fx_reference(theirs)
    trained = ours(*batches[0])
    assert torch.equal(trained, theirs(*batches[0]))
    assert_same_qparams(converted, reference)
    assert sqnr(trained, converted(*batches[0])) > 60
    assert sqnr(trained, reference(*batches[0])) < 20
