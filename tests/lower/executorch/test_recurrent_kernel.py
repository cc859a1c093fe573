"""Recurrent modules as one kernel of ExecuTorch's runtime, which also runs plain torch.export programs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qconfig_mapping

import torchq_compat as tc
from tests.helpers.executorch_models import Tagger
from tests.helpers.oracle import calibrate, leaves, sqnr
from torchq_compat import to_executorch
from torchq_compat.errors import ExportError
from torchq_compat.lower.executorch import recurrent_kernel
from torchq_compat.recurrent.kernel import build

ROOT = Path(__file__).parents[3]


def converted(recurrent: nn.Module, features: int, inputs: int = 6) -> Any:
    torch.manual_seed(0)
    x = torch.randn(5, 2, inputs)
    config = tc.get_default_prepare_custom_config()
    model = Tagger(recurrent, features).eval()
    prepared = tc.prepare_fx(model, get_default_qconfig_mapping("x86"), (x,), config)
    calibrate(prepared, [(torch.randn(20, 4, inputs),)])
    return tc.convert_fx(prepared)


MODELS: dict[str, Callable[[], tuple[nn.Module, int]]] = {
    "lstm": lambda: (nn.LSTM(6, 8, 2, bidirectional=True), 16),
    "projected": lambda: (nn.LSTM(6, 8, proj_size=5, batch_first=True), 5),
    "gru": lambda: (nn.GRU(6, 7), 7),
}


@pytest.mark.parametrize(
    "name", ["projected", *(pytest.param(n, marks=pytest.mark.slow) for n in ("lstm", "gru"))]
)
def test_the_kernel_runs_any_length_and_batch_up_to_the_example(name: str) -> None:
    model = converted(*MODELS[name]())
    program = to_executorch(model, (torch.randn(9, 4, 6),), recurrent="opaque")
    exported = tc.export(model, (torch.randn(9, 4, 6),), recurrent="opaque").module(check_guards=False)
    for sizes in ((9, 4), (3, 2), (1, 1), (9, 1), (1, 4)):
        x = torch.randn(*sizes, 6)
        triples = zip(leaves(model.reference(x)), leaves(exported(x)), leaves(program(x)), strict=True)
        for reference, expected, found in triples:
            assert torch.equal(expected, found), sizes
            assert sqnr(reference, found) > 40


@pytest.mark.slow
def test_two_programs_at_once_keep_their_weights() -> None:
    torch.manual_seed(0)
    models = [converted(nn.GRU(6, 7), 7) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(0.5)
    programs = [to_executorch(model, (torch.randn(9, 4, 6),), recurrent="opaque") for model in models]
    x = torch.randn(9, 4, 6)
    results = [program(x)["tags"] for program in programs]
    assert not torch.equal(*results)
    assert all(torch.equal(p(x)["tags"], result) for p, result in zip(programs, results, strict=True))


def test_clones_share_the_compiled_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    monkeypatch.setattr(build, "load_or_make", lambda name, *_: names.append(name))
    for line in ("", "", "// another kernel"):
        recurrent_kernel._load_or_make(Path("executorch"))
        for module, name in ((recurrent_kernel, "KERNEL"), (build, "SOURCE")):
            copied = tmp_path / vars(module)[name].name
            copied.write_text(vars(module)[name].read_text() + line)
            monkeypatch.setattr(module, name, copied)
    recurrent_kernel._load_or_make(Path("executorch"))
    assert names[0] == names[1] == names[2] != names[3]


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ExportError, match="recurrent='folded' is not known"):
        to_executorch(nn.Linear(2, 2), (torch.randn(9, 2),), recurrent="folded")


def best(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


@pytest.mark.slow
def test_the_kernel_is_about_as_fast_as_a_lowered_model() -> None:
    model, x = converted(nn.LSTM(64, 128, 2), 128, inputs=64), torch.randn(64, 1, 64)
    program = to_executorch(model, (x,), recurrent="opaque")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            pairs = [(best(lambda: program(x)), best(lambda: model(x))) for _ in range(6)]
    finally:
        torch.set_num_threads(before)
    assert min(pair[0] for pair in pairs) <= 1.5 * min(pair[1] for pair in pairs)


PLAIN = """
import sys
import torch
from tests.helpers import executorch_models as plain
from tests.lower.executorch.test_recurrent_kernel import MODELS, converted, leaves
from torchq_compat.lower.executorch.passes import executorch_module, runtime

exir = executorch_module("exir")
if sys.argv[1] == "lstm":
    model, x = converted(*MODELS["lstm"]()), torch.randn(5, 2, 6)
else:
    words = lambda: torch.randint(0, 100, (6, 4))
    embedding = torch.ao.quantization.float_qparams_weight_only_qconfig
    mapping = plain.PER_CHANNEL.set_object_type(torch.nn.Embedding, embedding)
    model, x = plain.converted(plain.Words(), mapping, words), words()
captured = model if sys.argv[2] == "lowered" else model.reference
with torch.no_grad():
    program = torch.export.export(captured, (x,))
    config = exir.EdgeCompileConfig(_check_ir_validity=False)
    pte = exir.to_edge_transform_and_lower(program, compile_config=config).to_executorch().buffer
found = runtime().load_program(pte).load_method("forward").execute([x])
assert all(map(torch.equal, found, leaves(model.reference(x)))), "other bits"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "captured"), [("lstm", "reference"), ("embedding", "reference"), ("embedding", "lowered")]
)
def test_what_torch_export_makes_does_not_stop_the_process(model: str, captured: str) -> None:
    """The quantize of two directions is per channel, and its kernel requires float64 scales; the dequantize
    of a table has float zero points, which its kernel does not accept. A lowered LSTM is our operator, which
    ExecuTorch by itself has no kernel for: ``to_executorch`` brings one."""
    subprocess.run([sys.executable, "-c", PLAIN, model, captured], check=True, cwd=ROOT)
