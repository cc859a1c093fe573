"""States saved by live FX, loaded here: equal qparams, outputs within one step, in every form of the
model."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as fx
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfig,
    QConfigMapping,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.fx import GraphModule

import torchq_compat as tc
from tests.fx_state.pairs import DEFAULT, SLOW, differences_of, saved_by_fx, saved_from, tensors_of
from tests.helpers.engines import with_exact_sums
from tests.helpers.once import made_once
from tests.helpers.oracle import activation_qparams, fx_activation_qparams, sqnr
from torchq_compat.checkpoints import load_fx_state
from torchq_compat.errors import ArgumentError, CheckpointError
from torchq_compat.fx_state.states import FxState

FORMS = ("prepared", "reference", "lowered")
X86 = get_default_qconfig_mapping("x86")


@pytest.mark.parametrize("pair", DEFAULT)
def test_equal_qparams_and_outputs(pair: str) -> None:
    saved = saved_by_fx(pair)
    assert {form: differences_of(saved, form) for form in FORMS} == {form: set() for form in FORMS}


@pytest.mark.slow
@pytest.mark.parametrize("pair", SLOW)
def test_equal_qparams_and_outputs_of_more(pair: str) -> None:
    test_equal_qparams_and_outputs(pair)


def test_there_are_enough_pairs() -> None:
    assert len({*DEFAULT, *SLOW}) >= 25


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.relu(self.bn(self.conv(x))).mean((2, 3)))


X = (torch.randn(4, 3, 6, 6),)


@made_once
def calibrated_by_fx(is_qat: bool = False) -> GraphModule:
    torch.manual_seed(1)
    mapping = get_default_qat_qconfig_mapping("x86") if is_qat else X86
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = (fx.prepare_qat_fx if is_qat else fx.prepare_fx)(ConvNet().train(is_qat), mapping, X)
        for _ in range(3):
            prepared(torch.randn(4, 3, 6, 6))
    return prepared


@made_once
def prepared_here(is_qat: bool = False) -> GraphModule:
    torch.manual_seed(2)
    mapping = get_default_qat_qconfig_mapping("x86") if is_qat else X86
    return (tc.prepare_qat_fx if is_qat else tc.prepare_fx)(ConvNet().train(is_qat), mapping, X)


def losses(model: nn.Module, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for _ in range(steps):
        x, y = torch.randn(8, 3, 6, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


def test_training_goes_on_with_the_next_losses_of_fx() -> None:
    theirs, ours = calibrated_by_fx(is_qat=True), prepared_here(is_qat=True)
    losses(theirs, 3)
    load_fx_state(ours, copy.deepcopy(theirs.state_dict()))
    expected = losses(theirs, 5)
    assert losses(ours, 5) == pytest.approx(expected, rel=1e-5)
    assert losses(prepared_here(is_qat=True), 5) != pytest.approx(expected, rel=1e-2)


def learned_by_fx() -> tuple[GraphModule, Any]:
    """Return a model with learned fake-quantize scales; one of them is negative until its next call."""
    from migration.legacy import learnable_qat as legacy

    torch.manual_seed(0)
    mapping = QConfigMapping().set_global(QConfig(legacy.learnable, legacy.learnable_weight))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = fx.prepare_qat_fx(legacy.Net().train(), mapping, (torch.randn(32, 8),))
    learnable = legacy.fake_quantizes(prepared)
    for each in learnable:
        each.enable_static_estimate()
    prepared(torch.randn(32, 8))
    for each in learnable:
        each.enable_param_learning()
    learning(prepared, 3)
    return prepared, mapping


def learning(model: nn.Module, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = []
    for _ in range(steps):
        x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(float(loss))
    return found


@pytest.mark.filterwarnings("ignore:.*other quantized tensor creation functions:UserWarning")
def test_learned_scales() -> None:
    from migration.legacy import learnable_qat as legacy

    theirs, mapping = learned_by_fx()
    x = torch.randn(32, 8)
    ours = tc.prepare_qat_fx(legacy.Net().train(), mapping, (x,))
    converted = copy.deepcopy(ours)
    load_fx_state(ours, copy.deepcopy(theirs.state_dict()))
    expected = learning(theirs, 5)
    assert learning(ours, 5) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]
    reference = fx.convert_to_reference_fx(theirs.eval())
    load_fx_state(converted, reference.state_dict())
    for model in (ours, converted):
        found = tc.convert_to_reference_fx(model.eval())
        assert activation_qparams(found) == fx_activation_qparams(reference)
        torch.testing.assert_close(found(x), reference(x), rtol=0, atol=1e-6)


def test_converted_training_state_makes_the_batch_norm_an_identity() -> None:
    trained, ours = calibrated_by_fx(is_qat=True), prepared_here(is_qat=True)
    reference = fx.convert_to_reference_fx(trained.eval())
    load_fx_state(ours, reference.state_dict())
    converted = tc.convert_to_reference_fx(ours.eval())
    assert activation_qparams(converted) == fx_activation_qparams(reference)
    # Inside the calibrated range: FX's reference model drops the quant_max of a reduced range.
    x = torch.randn(64, 3, 6, 6).clamp(-2, 2)
    assert sqnr(reference(x), converted(x)) > 40


def test_loaded_qparams_stay_until_the_observers_see_data() -> None:
    reference, ours = fx.convert_to_reference_fx(calibrated_by_fx()), prepared_here()
    load_fx_state(ours, reference.state_dict())
    expected = fx_activation_qparams(reference)
    again = prepared_here()
    again.load_state_dict(ours.state_dict())
    copied = copy.deepcopy(ours)
    for model in (ours, again, copied):
        assert activation_qparams(tc.convert_to_reference_fx(model)) == expected
    weights = [v for name, v in tc.convert_to_reference_fx(ours).state_dict().items() if "frozen" in name]
    ours(10 * X[0])
    calibrated = tc.convert_to_reference_fx(ours)
    assert activation_qparams(calibrated).isdisjoint(expected)
    kept = [value for name, value in calibrated.state_dict().items() if "frozen" in name]
    assert all(torch.equal(a, b) for a, b in zip(weights, kept, strict=True))
    again.load_state_dict(calibrated_here().state_dict())
    assert activation_qparams(tc.convert_to_reference_fx(again)) != expected


@made_once
def calibrated_here() -> GraphModule:
    prepared = prepared_here()
    prepared(3 * X[0])
    return prepared


def old_form(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with observers as saved before torch 1.8, and fused conv-bn modules as before 1.6."""
    v1 = {"bn.weight": "gamma", "bn.bias": "beta", "bn.running_mean": "running_mean"}
    v1 |= {"bn.running_var": "running_var", "bn.num_batches_tracked": "num_batches_tracked"}
    renamed = OrderedDict()
    for name, value in state.items():
        for new, old in v1.items():
            name = name.replace(f"conv.{new}", f"conv.{old}")
        if name.endswith(".eps"):
            continue
        renamed[name.replace("min_val", "min_vals").replace("max_val", "max_vals")] = value
    return renamed


def test_old_forms_of_observers_and_fused_batch_norms() -> None:
    theirs = calibrated_by_fx(is_qat=True)
    new, old = prepared_here(is_qat=True), prepared_here(is_qat=True)
    load_fx_state(new, theirs.state_dict())
    state = old_form(theirs.state_dict())
    assert "conv.gamma" in state
    assert any(name.endswith("min_vals") for name in state)
    load_fx_state(old, state)
    assert all(
        torch.equal(a, b) for a, b in zip(tensors_of(new).values(), tensors_of(old).values(), strict=True)
    )


@pytest.mark.parametrize("version", [1, 2])
def test_old_forms_of_packed_linears(version: int) -> None:
    state = fx.convert_fx(calibrated_by_fx()).state_dict()
    new, old = prepared_here(), prepared_here()
    load_fx_state(new, state)
    weight, bias = state.pop("fc._packed_params._packed_params")
    state.pop("fc._packed_params.dtype")
    prefix = "fc._packed_params" if version == 2 else "fc"
    state |= {f"{prefix}.weight": weight, f"{prefix}.bias": bias}
    load_fx_state(old, state)
    assert all(
        torch.equal(a, b) for a, b in zip(tensors_of(new).values(), tensors_of(old).values(), strict=True)
    )


def before_1_12(prepared: GraphModule) -> dict[str, Any]:
    """Name observers as FX did before torch 1.12: after the observed nodes, in the order of the graph."""
    renamed = {
        str(node.target): f"{node.args[0]}_activation_post_process_0"
        for node in prepared.graph.nodes
        if str(node.target).startswith("activation_post_process_")
    }
    state = prepared.state_dict()
    named: dict[str, Any] = {}
    for old, new in renamed.items():
        named |= {
            name.replace(f"{old}.", f"{new}.", 1): value
            for name, value in state.items()
            if name.startswith(f"{old}.")
        }
    return {name: value for name, value in state.items() if name.partition(".")[0] not in renamed} | named


@pytest.mark.parametrize("is_qat", [False, True])
def test_observers_named_after_what_they_observe(is_qat: bool) -> None:
    theirs = calibrated_by_fx(is_qat)
    new, old = prepared_here(is_qat), prepared_here(is_qat)
    load_fx_state(new, theirs.state_dict())
    state = before_1_12(theirs)
    assert "x_activation_post_process_0.min_val" in state or "x_activation_post_process_0.scale" in state
    load_fx_state(old, state)
    assert all(
        torch.equal(a, b) for a, b in zip(tensors_of(new).values(), tensors_of(old).values(), strict=True)
    )
    with pytest.raises(CheckpointError, match="load_fx_state"):
        old.load_state_dict(state)


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.fc(x))


def test_observers_of_fixed_qparams_were_fake_quantizes() -> None:
    """In FX before torch 1.12, in calibration as well; and ranges without values were empty before 1.8."""
    x = (torch.randn(8, 4),)
    theirs = fx.prepare_fx(Bounded().eval(), X86, x)
    theirs(*x)
    state = dict(theirs.state_dict())
    assert torch.equal(state["activation_post_process_2.scale"], torch.tensor([1 / 256]))
    state |= {
        f"activation_post_process_2.{each}_enabled": torch.ones(1) for each in ("fake_quant", "observer")
    }
    ours = tc.prepare_fx(Bounded().eval(), X86, x)
    load_fx_state(ours, state)
    assert activation_qparams(tc.convert_to_reference_fx(ours)) == fx_activation_qparams(
        fx.convert_to_reference_fx(theirs)
    )


def test_a_range_without_values_was_empty() -> None:
    state = prepared_by_fx().state_dict()
    empty = {
        name: torch.tensor([]) if name.endswith(("min_val", "max_val")) else value
        for name, value in state.items()
    }
    ours, fresh = prepared_here(), prepared_here()
    ours(*X)
    load_fx_state(ours, empty)
    ours(*X)
    load_fx_state(fresh, state)
    fresh(*X)
    assert activation_qparams(tc.convert_to_reference_fx(ours)) == activation_qparams(
        tc.convert_to_reference_fx(fresh)
    )


def prepared_by_fx() -> GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fx.prepare_fx(ConvNet().eval(), X86, X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_reference_states_of_other_precisions(dtype: torch.dtype) -> None:
    state = fx.convert_to_reference_fx(calibrated_by_fx()).state_dict()
    other = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in state.items()
    }
    found = []
    for each in (state, other):
        ours = prepared_here()
        load_fx_state(ours, each)
        found.append(tc.convert_to_reference_fx(ours)(*X))
    assert sqnr(*found) > (100 if dtype is torch.float64 else 25)


def test_a_gamma_of_ones_own_is_no_batch_norm() -> None:
    state = {"scale.gamma": torch.ones(3), "conv.gamma": torch.ones(3), "conv.beta": torch.ones(3)}
    state |= {"conv.running_mean": torch.ones(3), "conv.running_var": torch.ones(3)}
    assert {"scale.gamma", "conv.bn.weight", "conv.bn.bias"} <= FxState(state).entries.keys()


WRAPPED: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "in a checkpoint": (
        lambda s: {"state_dict": s, "epoch": 3},
        r"(?s)under 'state_dict'.*checkpoint\['state",
    ),
    "of DataParallel": (
        lambda s: {f"module.{name}": value for name, value in s.items()},
        r"(?s)begin with 'module\.'.*consume_prefix_in_state_dict_if_present",
    ),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_a_state_inside_of_something_is_named(case: str) -> None:
    wrap, message = WRAPPED[case]
    with pytest.raises(CheckpointError, match=message):
        load_fx_state(prepared_here(), wrap(calibrated_by_fx().state_dict()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_states_of_other_precisions(dtype: torch.dtype) -> None:
    """A double state gives the same bits, a half state nearly the same values."""
    state = calibrated_by_fx().state_dict()
    converted = {name: v.to(dtype) if v.is_floating_point() else v for name, v in state.items()}
    found = []
    for each in (state, converted):
        ours = prepared_here()
        load_fx_state(ours, each)
        assert {tensor.dtype for name, tensor in ours.named_parameters()} == {torch.float32}
        found.append(tc.convert_to_reference_fx(ours)(*X))
    if dtype is torch.float64:
        assert torch.equal(*found)
    assert sqnr(*found) > 40


def without(state: dict[str, Any], part: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if part not in name}


def with_value(state: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    return {**state, name: value}


BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "half a state": (lambda s: without(s, "fc."), "lacks fc"),
    "no observers": (lambda s: without(s, "activation_post_process_1."), "3 observers .* has"),
    "of another model": (lambda s: with_value(s, "more.weight", torch.ones(3)), "no place for more.weight"),
    "other shape": (lambda s: with_value(s, "fc.weight", torch.ones(4, 7)), r"fc.weight is \(4, 7\)"),
    "NaN": (lambda s: with_value(s, "fc.weight", torch.full((4, 6), torch.nan)), "fc.weight holds NaN"),
    "NaN seen": (
        lambda s: with_value(s, "activation_post_process_0.min_val", torch.tensor(torch.nan)),
        "activation_post_process_0.min_val holds NaN",
    ),
    "an object": (lambda s: with_value(s, "_packed_weight_0", object()), "_packed_weight_0 .object.*"),
    "no range": (
        lambda s: with_value(s, "activation_post_process_0.min_val", torch.tensor(1e3)),
        "min_val is larger than activation_post_process_0.max_val",
    ),
    "other bins": (
        lambda s: with_value(s, "activation_post_process_0.histogram", torch.ones(9)),
        "9 bins, and this model 2048",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_states_are_refused_and_nothing_is_loaded(case: str) -> None:
    change, message = BAD[case]
    ours = prepared_here()
    before = tensors_of(ours)
    with pytest.raises(CheckpointError, match=message):
        load_fx_state(ours, change(dict(calibrated_by_fx().state_dict())))
    after = tensors_of(ours)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


BAD_REFERENCE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "infinity": (lambda weight: torch.full_like(weight, torch.inf), "fc.weight holds NaN or infinity"),
    "no values": (lambda weight: weight.to("meta"), "fc.weight is a meta tensor"),
}


@pytest.mark.parametrize("case", BAD_REFERENCE)
def test_bad_reference_states_are_refused(case: str) -> None:
    change, message = BAD_REFERENCE[case]
    state = dict(fx.convert_to_reference_fx(calibrated_by_fx()).state_dict())
    with pytest.raises(CheckpointError, match=message):
        load_fx_state(prepared_here(), with_value(state, "fc.weight", change(state["fc.weight"])))


def test_a_state_of_another_form_of_the_model_is_refused() -> None:
    with pytest.raises(CheckpointError, match="another class of observer"):
        load_fx_state(prepared_here(), calibrated_by_fx(is_qat=True).state_dict())
    with pytest.raises(CheckpointError, match="lacks"):
        load_fx_state(prepared_here(), ConvNet().state_dict())


def test_only_prepared_models_take_one() -> None:
    state = calibrated_by_fx().state_dict()
    converted = tc.convert_to_reference_fx(calibrated_here())
    for model in (ConvNet(), converted):
        with pytest.raises(ArgumentError, match="not one prepared here"):
            load_fx_state(model, state)


@pytest.mark.parametrize("strict", [True, False])
def test_load_state_dict_says_that_there_is_load_fx_state(strict: bool) -> None:
    ours = prepared_here()
    before = tensors_of(ours)
    with pytest.raises(CheckpointError, match="load_fx_state"):
        ours.load_state_dict(calibrated_by_fx().state_dict(), strict=strict)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), tensors_of(ours).values(), strict=True))


def test_our_own_states_are_not_taken_for_those_of_fx() -> None:
    """Without weights, or trained with observers of whole ranges, the states differ only by their names."""
    ranges = torch.ao.quantization.FakeQuantize.with_args(observer=torch.ao.quantization.MinMaxObserver)
    mapping = torch.ao.quantization.QConfigMapping().set_global(torch.ao.quantization.QConfig(ranges, ranges))
    first, second = (tc.prepare_qat_fx(ConvNet().train(), mapping, X) for _ in range(2))
    first(*X)
    second.load_state_dict(first.state_dict())
    assert all(
        torch.equal(a, b)
        for a, b in zip(tensors_of(first).values(), tensors_of(second).values(), strict=True)
    )


def test_own_eps_survives_our_own_state_dict() -> None:
    observer = torch.ao.quantization.MinMaxObserver.with_args(eps=0.0625)
    weight = torch.ao.quantization.default_weight_observer
    mapping = torch.ao.quantization.QConfigMapping().set_global(
        torch.ao.quantization.QConfig(observer, weight)
    )
    first, second = (tc.prepare_fx(ConvNet().eval(), mapping, X) for _ in range(2))
    first(*X)
    second.load_state_dict(first.state_dict())
    eps = [value for name, value in second.state_dict().items() if name.endswith("_0.eps")]
    assert eps == [torch.tensor([0.0625])]


def test_compare_loads_it_on_both_sides() -> None:
    torch.manual_seed(3)
    state = calibrated_by_fx().state_dict()
    compared = tc.compare(ConvNet().eval(), X86, X, [X], fx_state=state, fx=True)
    assert compared.verdict.status == "same"
    with pytest.raises(CheckpointError, match="lacks"):
        tc.compare(ConvNet().eval(), X86, X, [X], fx_state=without(dict(state), "fc."))


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized(seed: int, *, is_qat: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
    return model.train(is_qat)


def states_of_parametrized(*, is_qat: bool) -> tuple[GraphModule, dict[str, dict[str, Any]]]:
    """Return FX's reference, and the states of its forms."""
    mapping = get_default_qat_qconfig_mapping("x86") if is_qat else X86
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepare = fx.prepare_qat_fx if is_qat else fx.prepare_fx
        prepared = prepare(parametrized(1, is_qat=is_qat), mapping, (torch.randn(6, 8),))
        for _ in range(3):
            prepared(torch.randn(6, 8))
        reference = fx.convert_to_reference_fx(copy.deepcopy(prepared).eval())
        lowered = fx.convert_fx(copy.deepcopy(prepared).eval())
    forms = {"prepared": prepared, "reference": reference, "lowered": lowered}
    return reference, {form: model.state_dict() for form, model in forms.items()}


def test_a_computed_weight_takes_the_place_of_what_it_is_computed_of() -> None:
    """Calibrated, FX keeps the parametrization, and the weight is computed here."""
    reference, states = states_of_parametrized(is_qat=False)
    given = torch.randn(6, 8)
    for state in states.values():
        other = parametrized(2, is_qat=False)
        prepared = tc.prepare_fx(other, X86, (given,))
        before = {name: value.clone() for name, value in prepared.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"(?s)a tensor of 0, on one side.*model\.a\.weight"):
            load_fx_state(prepared, state)
        assert all(torch.equal(value, before[name]) for name, value in prepared.state_dict().items())
        # What the hint says.
        name = next(name for name in state if "parametrizations" in name)
        other.load_state_dict({name: state[name]}, strict=False)
        own = {key: value for key, value in state.items() if key != name}
        load_fx_state(prepared, {**own, "0.weight": other[0].weight.detach()})
        # FX leaves the weight float.
        assert sqnr(reference(given), tc.convert_to_reference_fx(prepared)(given)) > 22


def test_a_converted_weight_is_no_parameter_of_a_parametrization() -> None:
    """FX's converted state of QAT has the weight; loaded as what it is computed of, it would be doubled."""
    reference, states = states_of_parametrized(is_qat=True)
    given, mapping = 0.3 * torch.randn(6, 8), get_default_qat_qconfig_mapping("x86")
    plain = parametrized(2, is_qat=True)
    torch.nn.utils.parametrize.remove_parametrizations(plain[0], "weight")
    for form in ("reference", "lowered"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            prepared = tc.prepare_qat_fx(parametrized(2, is_qat=True), mapping, (given,))
        with pytest.raises(CheckpointError, match="computes a tensor of 0, on one side alone"):
            load_fx_state(prepared, states[form])
        removed = tc.prepare_qat_fx(plain, mapping, (given,))
        load_fx_state(removed, states[form])
        assert sqnr(reference(given), tc.convert_to_reference_fx(removed.eval())(given)) > 25


def test_fixed_qparams_of_a_gate_behind_it() -> None:
    """Of a number times a gate, FX's lowered integers; of a join that begins with one, FX's numbers."""

    class Gated(nn.Module):
        def __init__(self, joins: bool) -> None:
            super().__init__()
            self.first, self.second, self.joins = nn.Linear(6, 8), nn.Linear(8, 4), joins

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            gate = torch.sigmoid(x)
            return self.second(torch.cat([gate, x], 1)[:, 4:12] if self.joins else gate * 8)

    for joins in (False, True):
        torch.manual_seed(0)
        batches = [(torch.randn(16, 6),) for _ in range(3)]
        state = saved_from(Gated(joins), lambda: get_default_qconfig_mapping("fbgemm"), batches)
        assert state.lowered is not None
        for form in ("prepared", "lowered"):
            prepared = state.prepared()
            load_fx_state(prepared, state.states[form])
            ours = tc.convert_fx(prepared)(*batches[0])
            assert sqnr(with_exact_sums(state.lowered)(*batches[0]), ours) > 30
