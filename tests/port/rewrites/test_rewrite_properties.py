"""For any code: rewriting keeps it valid, is idempotent, and changes nothing without FX names.

Programs are composed of statements of the standard library, whose functions and classes nobody wrote for
these tests; in programs with FX, legacy statements are put between them.
"""

from __future__ import annotations

import ast
import functools
import io
import itertools
import sysconfig
import tokenize
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchq_compat.port.scanner import LEGACY_WORD, find_sites, rewrite_text
from torchq_compat.port.source.parsed import ParsedSource

MAX_STATEMENT = 1500
LEGACY = (
    "from torch.ao.quantization.quantize_fx import prepare_fx, convert_fx",
    "from torch.ao.quantization.quantize_fx import PrepareCustomConfig, prepare_fx as prep, Scope",
    "import torch.ao.quantization.quantize_fx as qfx",
    "import torch.ao.quantization.quantize_fx",
    "import torch, torch.quantization.quantize_fx as old",
    "from torch.ao.quantization import quantize_fx, default_qconfig",
    "from torch.quantization import quantize_fx, default_qconfig, default_eval_fn",
    "from torch import quantization, nn",
    "from torch.nn import intrinsic as nni, Linear",
    "prepared = quantization.quantize_fx.prepare_fx(m, {'': quantization.default_qconfig}, x)",
    "from torch.ao.quantization.quantize_fx import *",
    "from torch.ao.quantization.fx.lstm_utils import _get_lstm_with_individually_observed_parts",
    "qconfig_dict = {'': q, 'object_type': [(a, b)]}  # all",
    "prepared = prepare_fx(model, qconfig_dict, (x,), {'preserved_attributes': []})",
    "prepared = qfx.prepare_qat_fx(model, qconfig_dict={'': None}, example_inputs=(x,))",
    "prepared = quantize_fx.prepare_fx(m, {\n    'object_type': [\n        (a, b),  # one\n    ],\n}, x)",
    "quantized = convert_fx(prepared, is_reference=True)",
    "quantized = torch.ao.quantization.quantize_fx.convert_fx(prepared)",
    "torch.jit.save(torch.jit.script(quantized), path)",
    "lstm = _get_lstm_with_individually_observed_parts(lstm, tanh_obs_ctr=torch.quantization.QConfig)",
    "x = torch.randn(2)",
    "quantized = convert_fx(\n    prepared,  # all\n    is_reference=(True),\n)",
    "prepared = prepare_fx((m), ({'': (q)}), (x,), {  # no\n    'preserved_attributes': (['a']),  # b\n})",
    "scripted = torch.jit.script(quantized)  # one\nscripted.save(path)  # two",
    "def f(prepare_fx, x):\n    return prepare_fx(x, {'': 1}, x)",
    "for prepared in prepared:\n    quantized = convert_fx(prepared)\n "
    "   torch.jit.script(quantized).save('q')",
    "class C:\n\tqfx = 1\n\tdef prepare_fx(self):\n\t\treturn prepare_fx(self, {'': q}, ())",
)


@functools.cache
def library_statements() -> tuple[str, ...]:
    """Return top-level statements of the standard library, as written."""
    statements = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))[::4]:
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")
        for node in ast.parse(text).body:
            is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
            code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if len(code) < MAX_STATEMENT and not is_future:
                statements.append(code)
    return tuple(statements)


def programs(*more: str) -> st.SearchStrategy[str]:
    ordinary = st.deferred(lambda: st.sampled_from(library_statements()))
    statement = st.one_of(st.sampled_from(more), ordinary) if more else ordinary
    newline = st.sampled_from(["\n", "\r\n"])
    lines = st.tuples(st.lists(statement, min_size=1, max_size=8), newline, st.booleans())
    return lines.map(lambda parts: _join(*parts))


def _join(statements: list[str], newline: str, ends: bool) -> str:
    text = "\n".join(statements) + ("\n" if ends else "")
    return text.replace("\n", newline)


def comments(program: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(program, newline="").readline)
    return sorted(token.string for token in tokens if token.type == tokenize.COMMENT)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs())
def test_without_fx_names_nothing_changes(program: str) -> None:
    assert not LEGACY_WORD.search(program.encode())
    assert rewrite_text(program) == program
    assert find_sites(ParsedSource(program)) == []


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs(*LEGACY))
def test_the_result_parses_and_is_what_scan_announces_and_rewriting_it_changes_nothing(program: str) -> None:
    announced = any(site.edits for site in find_sites(ParsedSource(program)))
    once = rewrite_text(program)
    assert (once != program) == announced
    ast.parse(once)
    assert rewrite_text(once) == once
    assert not any(site.edits for site in find_sites(ParsedSource(once)))
    # Comments are kept, and so are line endings.
    assert comments(once) == comments(program)
    assert ("\r\n" in once) == ("\r\n" in program) or "\n" not in program


#: Names of one module that move to torchq_compat, to torch.ao or nowhere.
NAMES_OF_ONE_MODULE = {
    "torch.quantization": (
        "quantize_fx",
        "quantize_fx as qfx",
        "default_qconfig",
        "default_eval_fn",
        "fx",
        "QConfig as Q",
        "quantize_dynamic",
        "get_default_qconfig_dict",
    ),
    "torch.ao.quantization": ("quantize_fx", "QConfigMapping", "quantize_dynamic", "MinMaxObserver as M"),
    "torch.ao.quantization.quantize_fx": ("prepare_fx", "PrepareCustomConfig", "_convert_fx", "fuse_fx as f"),
    "torch": ("quantization", "nn", "quantization as tq", "ao"),
    "torch.nn": ("intrinsic", "quantized as nnq", "Linear", "qat"),
}
PAIRS = [
    (module, *pair)
    for module, names in NAMES_OF_ONE_MODULE.items()
    for pair in itertools.combinations(names, 2)
]


def test_one_statement_that_imports_names_of_two_fates_is_settled_at_once() -> None:
    """By brute force: every pair, each name with a use that keeps its import."""
    split = 0
    for module, first, second in PAIRS:
        local = [name.rpartition(" as ")[2] for name in (first, second)]
        statement = f"from {module} import {first}, {second}"
        uses = f"{local[0]}(m)\n{local[1]}.quantize_fx.prepare_fx(m, q)\n"
        program = f"{statement}\nfrom torch.quantization.quantize_fx import prepare_fx as p\n{uses}"
        once = rewrite_text(program)
        ast.parse(once)
        assert rewrite_text(once) == once, program
        left = Counter((site.code, site.what) for site in find_sites(ParsedSource(once)) if not site.edits)
        before = find_sites(ParsedSource(program))
        # The sites announced for manual review are those that remain for it.
        assert not Counter((site.code, site.what) for site in before if not site.edits) - left, program
        split += statement not in once
    assert split > len(PAIRS) // 2
