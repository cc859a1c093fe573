"""The register of codes: every code that is carried is in it, and every entry is carried."""

from __future__ import annotations

import ast
import copy
import re
import string
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import (
    QConfig,
    default_weight_observer,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
    get_observer_state_dict,
)
from torch.fx import GraphModule
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

import torchq_compat as tc
from tests.helpers.package_trees import PACKAGE, package_nodes, spelled
from torchq_compat import errors
from torchq_compat.capture.opaque_stub import OPAQUE_OP
from torchq_compat.codes import CODES, DIFFERENCES, RANGES, TEXTS
from torchq_compat.port.constructs import CONSTRUCTS, RETIRED
from torchq_compat.profiles import whole_range_dynamic
from torchq_compat.read.qconfig_mappings import MISTAKEN_FOR_MAPPINGS
from torchq_compat.recurrent.kernel import build
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.user_warnings import warn_user

X = torch.randn(8, 4)


def literals() -> Iterator[str]:
    """Return the codes that are written in the package's code, without docstrings."""
    for nodes in package_nodes().values():
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from re.findall(r"^(TQ[3-9]\d\d)(?:\.\w+)?$", node.value)


def test_what_is_written_is_registered_and_the_other_way_round() -> None:
    assert {*literals()} - set(DIFFERENCES) == set(CODES)


def test_places_of_texts_are_filled_where_they_are_said() -> None:
    """Every ``warn_user``, ``said`` and ``of`` of a text gives its places, no more and no less."""
    told: set[str] = {"TQ801", "TQ805"}  # whose code is in a variable
    for path, nodes in package_nodes().items():
        told |= {text for node in nodes if (text := written(node)) in TEXTS}
        for node in nodes:
            function = spelled(node.func) if isinstance(node, ast.Call) else ""
            if function in ("warn_user", "said") or function.endswith((".of", "error.of")):
                assert isinstance(node, ast.Call)
                key = written(node.args[0]) if node.args else ""
                given = {keyword.arg for keyword in node.keywords}
                assert key not in TEXTS or given == places(key), f"{path}:{node.lineno}: {key}"
    told |= {f"TQ910.{mistake}_for_mapping" for mistake in MISTAKEN_FOR_MAPPINGS.values()}
    of_decisions = {code for code, (text, _) in TEXTS.items() if text in ("", "{reason}")}
    assert told | of_decisions == set(TEXTS)


def written(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def places(key: str) -> set[str]:
    text, hint = TEXTS[key]
    # The hint of a warning has no places: what stands in braces there is code.
    texts = f"{text} {hint}" if CODES[key.partition(".")[0]].severity == "error" else text
    names = {name for _, name, _, _ in string.Formatter().parse(texts) if name is not None}
    return {re.split(r"[.\[]", name)[0] for name in names}


def test_every_class_of_errors_has_a_code_of_its_own() -> None:
    classes = [
        getattr(errors, name) for name in errors.__all__ if "Warning" not in name and "Note" not in name
    ]
    assert len({cls.code for cls in classes}) == len(classes) > 10
    for cls in classes:
        assert CODES[cls.code].severity == "error"
        assert str(cls("what and where.", hint="do this.")) == f"what and where.\nHint: do this. [{cls.code}]"


def test_every_text_of_an_error_is_in_the_register_with_a_hint() -> None:
    """An error is made of a text of the register; two hand on another error, with its words."""
    classes = {name for name in errors.__all__ if "Warning" not in name and "Note" not in name}
    made = [
        f"{path.name}:{ast.unparse(node)}"
        for path, nodes in package_nodes().items()
        for node in nodes
        if isinstance(node, ast.Call) and spelled(node.func).removeprefix("errors.") in classes
    ]
    assert len(made) == 2
    assert all("message, hint=" in call for call in made), made
    assert all(len(hint) > 5 for _, hint in TEXTS.values())


def test_a_code_is_used_once_and_says_what_to_do() -> None:
    everywhere = [*CODES, *DIFFERENCES, *CONSTRUCTS, *RETIRED]
    assert len(set(everywhere)) == len(everywhere)
    assert {code[2] for code in everywhere} == set(RANGES)
    for entry in CODES.values():
        assert entry.title
        assert entry.hint.endswith(".")
        assert entry.severity in ("note", "warning", "error")
        file, _, test = entry.test.partition("::")
        name = test.partition("[")[0]
        source = (PACKAGE.parent / "tests" / file).read_text()
        # That it raises the code is asserted whenever it runs: around_tests.py.
        assert f"def {name}(" in source, entry


def of_ours(caught: Iterable[Any]) -> list[Any]:
    """Return our warnings: torch has some that it raises once in a process."""
    return [item for item in caught if isinstance(item.message, errors.QuantizationWarning)]


def test_warnings_can_be_filtered_by_code_and_by_severity() -> None:
    prepared = tc.prepare_fx(nn.Sequential(nn.Linear(4, 2)).eval(), get_default_qconfig_mapping("x86"), (X,))
    with pytest.warns(errors.QuantizationWarning) as caught:
        tc.convert_fx(prepared)
    (warning,) = of_ours(caught)
    assert (warning.message.code, str(warning.message)[-8:]) == ("TQ405", " [TQ405]")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*TQ405")
        tc.convert_fx(prepared)
    with pytest.warns(errors.QuantizationNote, match=r"\[TQ304\]$"):
        warn_user("TQ304", argument="an argument", why="it is of FX")


def test_a_decision_that_matters_has_a_code() -> None:
    for action in Action:
        assert CODES[Decision("a", "Linear", action, "because", warn=True).code].severity != "error"
        is_told = action in (Action.FLOAT, Action.DROPPED, Action.REFERENCE)
        assert bool(Decision("a", "Linear", action, "because").code) is is_told
        assert not Decision("a", "Linear", action, "its qconfig is None (global)").code


class OtherInFx(nn.Module):
    """Is cut in FX five times, has a layer that FX leaves float, and sums that grow with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.behind = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates = [self.fc(torch.sigmoid(x[i : i + 1])) for i in range(5)]
        return torch.cat([*gates, self.behind(x.reshape(-1, 4)), x.erf()[:, :2]])


def test_several_reasons_are_one_note_and_the_same_words_everywhere() -> None:
    with pytest.warns(errors.QuantizationNote) as caught:
        prepared = tc.prepare_fx(OtherInFx().eval(), get_default_qconfig_mapping("x86"), (X,))
    (warning,) = of_ours(caught)
    assert warning.message.code == "TQ599"
    text = str(warning.message)
    assert re.match(
        r"FX gives other numbers at 6 places .*\[TQ599\]\nsigmoid.* and 2 more: FX .* \[TQ504\]\n", text
    )
    assert text.count("[TQ506]") == 1
    assert re.match(".*TQ506", text)  # as a filter of warnings looks for it, which stops at the end of a line
    assert "explain(model)" in text
    report = tc.explain(prepared)
    for row in (row for row in report.rows if row.code):
        assert f"{row.reason} [{row.code}]" == row.note
    assert report.to_text(400).count("[TQ504]") == 5
    assert report.to_text(400).count("[TQ506]") == 1
    (erf,) = report.find("erf")
    assert (erf.action, erf.code) == (Action.FLOAT, "TQ401")


class CutInFx(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.sigmoid(x))


def test_other_numbers_than_fx_are_told_once_with_the_import_alone() -> None:
    with pytest.warns(errors.QuantizationNote, match=r"FX quantizes its input .*\[TQ504\]$") as caught:
        prepared = tc.prepare_fx(CutInFx().eval(), get_default_qconfig_mapping("x86"), (X,))
    assert len(of_ours(caught)) == 1
    (row,) = (each for each in tc.explain(prepared) if each.unlike_fx)
    assert row.code == "TQ504"


@pytest.mark.parametrize("kind", ["plain", "lstm"])
def test_what_users_of_fx_see_as_no_problem_is_not_told(kind: str) -> None:
    model: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    x, custom = torch.randn(2, 3, 8, 8), None
    if kind == "lstm":
        model, x = nn.LSTM(4, 4).eval(), torch.randn(5, 2, 4)
        custom = tc.get_default_prepare_custom_config()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,), custom)
        prepared(x)
        tc.convert_fx(prepared)
    assert not of_ours(caught)


class Annotates(Quantizer):
    """Annotates the input of every call of a custom module, which does not take it."""

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            if node.target is OPAQUE_OP:
                spec = QuantizationSpec(torch.int8, MinMaxObserver)
                node.meta["quantization_annotation"] = QuantizationAnnotation(
                    input_qspec_map={node.all_input_nodes[0]: spec}, _annotated=True
                )
        return model

    def validate(self, model: GraphModule) -> None:
        pass


def custom_module_under_a_quantizer() -> None:
    model = nn.Sequential(nn.LSTM(4, 4)).eval()
    tc.prepare_fx(model, Annotates(), (torch.randn(3, 2, 4),), tc.get_default_prepare_custom_config())


def bag_with_whole_range() -> None:
    qconfig = QConfig(whole_range_dynamic().activation, default_weight_observer)
    mapping = {nn.Conv2d: torch.ao.nn.quantized.dynamic.Conv2d}
    tc.quantize_dynamic(nn.Sequential(nn.Conv2d(1, 1, 1)), {nn.Conv2d: qconfig}, mapping=mapping)


def states_over_what_was_seen() -> None:
    prepared = tc.prepare_fx(nn.Sequential(nn.Linear(4, 2)).eval(), get_default_qconfig_mapping("x86"), (X,))
    prepared(X)
    state = copy.deepcopy(get_observer_state_dict(prepared))
    prepared(10 * X)
    tc.merge_observers(prepared, states=[state])


def layer_behind_a_reshape() -> None:
    model = nn.Sequential(Reshaped(), nn.Linear(4, 2)).eval()
    tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (X,))


class Reshaped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, 4)


def library_that_does_not_load() -> None:
    with pytest.MonkeyPatch.context() as patch:
        path, load = Path("no such library"), build._load_operators

        def refusing(library: str) -> None:
            if library == str(path):
                raise OSError("no such file")
            load(library)

        patch.setattr(build, "carried_library", lambda: path)
        patch.setattr(build, "_load_operators", refusing)
        build.build_kernel()


@pytest.mark.parametrize(
    ("code", "raised_by"),
    [
        ("TQ315", custom_module_under_a_quantizer),
        ("TQ320", bag_with_whole_range),
        ("TQ411", lambda: tc.quantize_dynamic(nn.Sequential(nn.ReLU()), mapping={})),
        ("TQ422", states_over_what_was_seen),
        ("TQ506", layer_behind_a_reshape),
        ("TQ802", library_that_does_not_load),
    ],
)
def test_raised(code: str, raised_by: Callable[[], object]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        raised_by()
    assert code in {getattr(warning.message, "code", "") for warning in caught}


def test_a_range_that_is_an_accident_is_told_with_its_place() -> None:
    prepared = tc.prepare_fx(nn.Sequential(nn.Linear(4, 2)).eval(), get_default_qconfig_mapping("x86"), (X,))
    prepared(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.QuantizationWarning)
        tc.convert_fx(prepared)
    prepared(X * 1e27)
    with pytest.warns(
        errors.QuantizationWarning, match=r"beyond 1e12.*activation_post_process_0.*\[TQ419\]$"
    ):
        tc.convert_fx(prepared)


def test_what_fx_converts_otherwise_is_told() -> None:
    mapping = get_default_qat_qconfig_mapping("x86")
    prepared = tc.prepare_qat_fx(nn.Sequential(nn.Linear(4, 2)).train(), mapping, (X,))
    prepared(X)
    with pytest.warns(
        errors.QuantizationNote, match=r"convert to what was trained; FX .*\[TQ511\]$"
    ) as caught:
        tc.convert_fx(prepared.eval())
    assert len([each for each in caught if each.message.code == "TQ511"]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.QuantizationWarning)
        tc.convert_fx(prepared, observer_qparams=True)
