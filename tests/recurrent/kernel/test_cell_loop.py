"""The cell loop: converted cells over time, on integers, in one call. The oracle is the q-dq graph."""

from __future__ import annotations

import copy
import ctypes
import itertools
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.ao.quantization import (
    MinMaxObserver,
    QConfig,
    QConfigMapping,
    default_dynamic_qconfig,
    default_observer,
    get_default_qconfig,
    per_channel_dynamic_qconfig,
)
from torch.fx import GraphModule
from torch.nn.utils.rnn import pack_padded_sequence

import torchq_compat as tc
from tests.helpers.cell_loop_shared import X_QPARAMS, attribute, inputs_of, native, on
from tests.helpers.converted_cells import KINDS, cells_of, converted
from tests.helpers.lstm_flow import uniform
from tests.helpers.once import made_once
from tests.helpers.oracle import leaves, sqnr
from tests.helpers.warm_python import warm_python
from torchq_compat.modules.registry import handler_of
from torchq_compat.nn import quantized
from torchq_compat.read.qparams import PerChannelQParams, PerTensorQParams
from torchq_compat.recurrent.cell_graph import ConvertedCellGraphModule
from torchq_compat.recurrent.kernel import build, op
from torchq_compat.recurrent.kernel.direct_calls import LinearWeight, linear_call
from torchq_compat.recurrent.kernel.interpreter import run_interpreted
from torchq_compat.recurrent.kernel.program import (
    DynamicQParams,
    Op,
    as_numbers,
    column_qparams,
    floats_around,
)
from torchq_compat.recurrent.over_time import RecurrentDirection
from torchq_compat.recurrent_parts import get_individually_observed_parts

SIGNED = PerTensorQParams(2 / 127, 0, -128, 127, torch.int8)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def steps_between(cell: ConvertedCellGraphModule, found: Any, expected: Any) -> tuple[float, float]:
    """Return the largest difference in quantization steps, and the share of values that differ."""
    all_qparams = cell.state_qparams()
    worst, different, count = 0.0, 0, 0
    for a, b, qparams in zip(leaves(found), leaves(expected), (all_qparams[0], *all_qparams), strict=True):
        assert qparams is not None
        off = (a - b).abs() / qparams.scale
        worst, different, count = (
            max(worst, float(off.max())),
            different + int((off > 0.5).sum()),
            count + a.numel(),
        )
    return worst, different / count


@torch.no_grad()
@pytest.mark.parametrize("name", KINDS)
def test_weights_packed_for_one_call_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = converted(name)
    bound, columns = module.bound(), ((8, X_QPARAMS),)
    widths = [item.shape[-1] for item in module(uniform(2.0, 2, 1, 8))[1]] if "lstm" in name else [12]
    for steps, batch, sizes in ((90, 3, ()), (1, 1, ()), (3, 4, (4, 2, 2))):
        x = on(X_QPARAMS, uniform(2.0, *((sum(sizes),) if sizes else (steps, batch)), 8))
        states = [uniform(0.9, len(bound.bound), batch, width) for width in widths]
        expected = bound.run(x, states, columns, sizes)
        kept = torch.ops.torchq_compat_native.kept()
        with monkeypatch.context() as patched:
            patched.setattr(op, "are_large_read_one_by_one", lambda weights: True)
            found = bound.run(x, states, columns, sizes)
        assert all(map(torch.equal, found, expected))
        assert torch.ops.torchq_compat_native.kept() == kept


@pytest.mark.parametrize("name", KINDS)
def test_one_step_is_within_a_step_of_the_graph(name: str) -> None:
    for cell, batch in itertools.product(cells_of(converted.itself(name)), (1, 3, 8, 19)):
        x, states = inputs_of(cell, 1, batch)
        columns = column_qparams(X_QPARAMS, x.shape[-1], 3)
        expected = RecurrentDirection(cell)(x, states)
        worst, share = steps_between(cell, native(cell, x, states, columns=columns), expected)
        assert worst <= 1.01, batch
        assert share <= 0.01, batch


@pytest.mark.parametrize("name", KINDS)
def test_a_long_sequence_follows_the_graph(name: str) -> None:
    """A value on the edge between two steps may fall to the other side; later steps then differ as well."""
    for cell, backward in itertools.product(cells_of(converted.itself(name)), (False, True)):
        x, states = inputs_of(cell, 60, 5)
        output, last = RecurrentDirection(cell)(x, states, backward=backward)
        found, found_last = native(cell, x, states, backward=backward)
        assert sqnr(output, found) > 45
        for expected, got in zip(last, found_last, strict=True):
            assert sqnr(expected, got) > 35
        assert float(output.std()) > 0.02


@pytest.mark.parametrize("name", KINDS)
def test_the_kernel_and_torchs_operators_agree(name: str) -> None:
    """The fallback without a compiler computes the same program."""
    for cell in cells_of(converted.itself(name)):
        x, states = inputs_of(cell, 9, 4)
        program = cell.program()
        assert program is not None
        weights = [None if n is None else attribute(cell, n) for names in program.weights for n in names]
        interpreted = run_interpreted(x, states, weights, program.table, program.constants, backward=True)
        worst, share = steps_between(cell, interpreted, native(cell, x, states, backward=True))
        assert worst <= 2.01
        assert share <= 0.01


def test_an_initial_state_with_other_qparams_is_computed_in_floats() -> None:
    cell = cells_of(converted.itself("split lstm"))[0]
    x, states = inputs_of(cell, 1, 16)
    elsewhere = tuple(state * 0.7371 for state in states)
    expected = RecurrentDirection(cell)(x, elsewhere)
    assert steps_between(cell, native(cell, x, elsewhere), expected)[0] <= 2.01
    # The same state quantized with the qparams that the cell uses from step to step is another state.
    rounded = tuple(map(on, cell.state_qparams(), elsewhere))
    assert steps_between(cell, native(cell, x, rounded), expected)[1] > 0.05


def test_an_input_without_qparams_is_computed_in_floats() -> None:
    cell = cells_of(converted.itself("gru"))[0]
    x, states = inputs_of(cell, 12, 3)
    x = x * 0.7371
    expected = RecurrentDirection(cell)(x, states)
    assert steps_between(cell, native(cell, x, states, columns=((8, None),)), expected)[0] <= 2.01
    assert steps_between(cell, native(cell, x, states), expected)[1] > 0.05


def test_signed_integers_come_in_as_well() -> None:
    cell = cells_of(converted.itself("lstm"))[0]
    x, states = inputs_of(cell, 12, 3, qparams=SIGNED)
    expected = RecurrentDirection(cell)(x, states)
    assert steps_between(cell, native(cell, x, states, columns=((8, SIGNED),)), expected)[0] <= 1.01


def test_columns_with_qparams_of_their_own() -> None:
    """Input columns as a bidirectional layer passes them to the next layer."""
    cell = cells_of(converted.itself("gru"))[0]
    x, states = inputs_of(cell, 12, 3)
    other = PerTensorQParams(0.05, 20, 0, 255, torch.uint8)
    x = torch.cat([x[..., :5], on(other, 3 * x[..., 5:])], -1)
    qparams = PerChannelQParams(((5, X_QPARAMS), (3, other)), 2)
    expected = RecurrentDirection(cell)(x, states)
    assert (
        steps_between(cell, native(cell, x, states, columns=column_qparams(qparams, 8, 3)), expected)[0]
        <= 1.01
    )
    assert column_qparams(qparams, 8, 2) == ((8, None),)


def test_columns_of_which_one_has_no_qparams_are_floats() -> None:
    assert as_numbers(((5, X_QPARAMS), (3, None))) == [8.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("channels", [False, True])
def test_weights_that_are_not_symmetric(channels: bool) -> None:
    torch.manual_seed(0)
    module: Any = nn.LSTM(8, 12).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.2
    observer: Any = torch.ao.quantization.PerChannelMinMaxObserver if channels else MinMaxObserver
    scheme = torch.per_channel_affine if channels else torch.per_tensor_affine
    module.qconfig = QConfig(default_observer, observer.with_args(dtype=torch.qint8, qscheme=scheme))
    observed = get_individually_observed_parts(module)
    with torch.no_grad():
        observed(uniform(1.0, 9, 16, 8))
    (cell,) = cells_of(quantized.LSTM.from_observed(observed))
    x, states = inputs_of(cell, 12, 9)
    expected = RecurrentDirection(cell)(x, states)
    assert steps_between(cell, native(cell, x, states), expected)[0] <= 1.01


@made_once
def cell_of_width(width: int, hidden: int) -> ConvertedCellGraphModule:
    torch.manual_seed(0)
    module: Any = nn.LSTM(width, hidden).eval()
    module.qconfig = get_default_qconfig("x86")
    observed = get_individually_observed_parts(module)
    with torch.no_grad():
        observed(uniform(1.0, 9, 16, width))
    return cells_of(quantized.LSTM.from_observed(observed))[0]


@pytest.mark.parametrize("hidden", [5, 16, 33, 100])
def test_threads_share_the_units_without_changing_a_bit(hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of_width.itself(70, hidden)
    x, states = inputs_of(cell, 70, 3)
    columns = column_qparams(X_QPARAMS, 70, 3)
    alone = leaves(native(cell, x, states, columns=columns))
    monkeypatch.setattr(op, "WORK_PER_THREAD", 1)
    torch.set_num_threads(3)
    for backward in (False, True):
        monkeypatch.setattr(op, "WORK_PER_THREAD", 1 << 60)
        alone = leaves(native(cell, x, states, columns=columns, backward=backward))
        monkeypatch.setattr(op, "WORK_PER_THREAD", 1)
        together = leaves(native(cell, x, states, columns=columns, backward=backward))
        assert all(map(torch.equal, alone, together))


def test_blocks_of_steps_join_without_a_seam() -> None:
    """The input is projected in blocks of steps; the results do not depend on the size of the blocks."""
    cell = cell_of_width.itself(70, 33)
    x, states = inputs_of(cell, 200, 1)
    columns = column_qparams(X_QPARAMS, 70, 3)
    whole, last = native(cell, x, states, columns=columns)
    pieces, state = [], states
    for part in torch.split(x, [1, 63, 64, 65, 7]):
        output, state = native(cell, part, state, columns=columns)
        pieces.append(output)
    assert torch.equal(whole, torch.cat(pieces))
    assert all(map(torch.equal, last, state))


def test_the_projection_is_computed_once_and_the_rest_in_every_step() -> None:
    (cell,) = cells_of(converted.itself("split lstm"))
    program = cell.program()
    assert program is not None
    once = [(i.op, i.width) for i in program.instructions if i.once]
    assert once == [(Op.LINEAR, 12)] * 4
    assert sum(i.op is Op.LINEAR for i in program.instructions) == 8
    assert all(i.output is not None for i in program.instructions)


def test_packed_sequences_run_in_runs_of_equal_batch_size() -> None:
    module: Any = converted.itself("lstm")
    lowered = module.lowered()
    x = on(X_QPARAMS, uniform(2.0, 11, 4, 8))
    packed = pack_padded_sequence(x, torch.tensor([3, 11, 3, 7]), enforce_sorted=False)
    expected, found = leaves(module(packed)), leaves(lowered(packed))
    for a, b in zip(expected, found, strict=True):
        if a.is_floating_point():
            assert sqnr(a, b) > 45
        else:
            assert torch.equal(a, b)


def test_a_graph_the_loop_has_no_instruction_for_runs_as_before() -> None:
    module: Any = converted("rnn")
    (cell,) = cells_of(module)
    tanh = next(node for node in cell.graph.nodes if node.target is torch.ops.aten.tanh.default)
    tanh.target = torch.ops.aten.sin.default
    cell.recompile()
    assert cell.program() is None
    handler = handler_of(module)
    assert handler is not None
    assert handler.lower(module) == "there is no instruction for aten.sin.default"


def test_new_qparams_are_in_the_program() -> None:
    (cell,) = cells_of(converted("rnn"))
    (other,) = cells_of(converted.itself("rnn", seed=5, gain=3.0))
    cell.load_state_dict(other.state_dict())
    x, states = inputs_of(other, 9, 2)
    assert all(map(torch.equal, leaves(native(cell, x, states)), leaves(native(other, x, states))))


WITHOUT_A_COMPILER = """
import importlib, os, sys, traceback, warnings, torch
os.environ.update(TORCHQ_COMPAT_CACHE_DIR=sys.argv[3], CXX=sys.argv[4])
from tests.helpers.cell_loop_shared import native
from tests.helpers.converted_cells import cells_of, converted
from torchq_compat.recurrent.kernel import op
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    given = torch.load(sys.argv[1])
    (cell,) = cells_of(converted("split lstm"))
    found = [native(cell, *given["of_cell"]) for _ in range(2)]
    found.append(converted("lstm").lowered()(given["x"]))
told = [str(each.message) for each in caught if "kernel" in str(each.message)]
has = torch._C._dispatch_has_kernel_for_dispatch_key("torchq_compat_native::recurrent", "CPU")
problem = ""
try:
    del sys.modules[op.__name__]
    importlib.import_module(op.__name__)
except Exception:
    problem = traceback.format_exc()
torch.save({"found": found, "told": told, "has": has, "problem of the second import": problem}, sys.argv[2])
"""


@pytest.fixture(scope="module")
def without_a_compiler(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a process was given and found; it is another one, because a loaded library stays loaded.

    It is a fork of one that has loaded none.
    """
    path = tmp_path_factory.mktemp("without_a_compiler")
    (cell,) = cells_of(converted.itself("split lstm"))
    given = {"x": on(X_QPARAMS, uniform(2.0, 11, 4, 8)), "of_cell": inputs_of(cell, 6, 2)}
    torch.save(given, path / "given")
    files = (path / name for name in ("given", "found", "cache", "no-such-compiler"))
    ran = warm_python("-c", WITHOUT_A_COMPILER, *files)
    assert not ran.returncode, ran.stderr
    return given, torch.load(path / "found")


def test_without_a_compiler_it_says_so_once_and_computes_the_same(without_a_compiler: Any) -> None:
    given, made = without_a_compiler
    assert not made["has"]
    assert len(made["told"]) == 1
    assert re.search(r"no-such-compiler.*Hint: Install g\+\+", made["told"][0])
    first, second, whole = made["found"]
    assert leaves(first)[0].equal(leaves(second)[0])
    (cell,) = cells_of(converted.itself("split lstm"))
    assert steps_between(cell, first, RecurrentDirection(cell)(*given["of_cell"]))[0] <= 2.01
    for a, b in zip(leaves(converted.itself("lstm")(given["x"])), leaves(whole), strict=True):
        assert sqnr(a, b) > 40


def test_the_operator_is_registered_again_after_an_import_that_failed(without_a_compiler: Any) -> None:
    assert without_a_compiler[1]["problem of the second import"] == ""


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TORCHQ_COMPAT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "c++ --no-such-option")
    made = build.build_kernel()
    assert made.library is None
    assert "no-such-option" in made.problem
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_built_kernel_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("TORCHQ_COMPAT_CACHE_DIR", str(tmp_path))
    assert build.build_kernel().library is not None
    (built,) = tmp_path.iterdir()
    before = built.stat().st_mtime_ns
    assert build.build_kernel().library is not None
    assert built.stat().st_mtime_ns == before


def results_of_many() -> list[Tensor]:
    modules = (converted.itself(name) for name in ("lstm", "gru"))
    cells = [cell_of_width.itself(70, 33), *itertools.chain.from_iterable(map(cells_of, modules))]
    found: list[Tensor] = []
    for cell, batch in itertools.product(cells, (1, 2, 3, 7, 19)):
        torch.manual_seed(batch)
        x, states = inputs_of(cell, 5, batch)
        # All integers at the ends of the range, or a few: other products than inside the calibrated range.
        x *= {3: torch.tensor(99.0), 7: torch.where(torch.arange(x.shape[-1]) % 24 == 0, 99.0, 1.0)}.get(
            batch, 1
        )
        found += leaves(native(cell, x, states, columns=split_columns(x.shape[-1])))
    return found


def test_every_instruction_set_gives_the_same_bits() -> None:
    library = ctypes.CDLL(str(build.kernel_build().library))
    library.torchq_compat_instruction_set.restype = ctypes.c_char_p
    library.torchq_compat_instruction_set.argtypes = [ctypes.c_int64]
    names: list[bytes] = []
    while name := library.torchq_compat_instruction_set(len(names)):
        names.append(name)
    print("instruction sets of this CPU:", names)
    assert names[-1] in (b"sse2", b"plain")
    assert library.torchq_compat_use_instruction_set(b"abacus") == 1
    expected = results_of_many()
    assert len(expected) > 40
    try:
        for name in names[1:]:
            assert library.torchq_compat_use_instruction_set(name) == 0
            assert all(map(torch.equal, results_of_many(), expected)), name
    finally:
        library.torchq_compat_use_instruction_set(None)


def dynamic_linear_results() -> list[Tensor]:
    """Return results for inputs whose largest integer is 128, one beyond the range of 127 steps, as both ends
    round up. All weights are the largest or the smallest, so that sums of two products are as large as
    possible."""
    chosen = DynamicQParams(1e-7, 127, 0, 255, torch.uint8)
    x = torch.full((4, 64), 63.5)
    x[0, 0] = -63.5
    found = []
    for value in (127, -128):
        weight = LinearWeight(torch.full((16, 64), value, dtype=torch.int8), None, None, None)
        call = linear_call(weight, ((64, None),), dynamic=chosen)
        found += op.OPS.recurrent.default(x, *call)
    return found


def products_of_integers(x: Tensor, weight: Tensor) -> Tensor:
    qparams = PerTensorQParams(1.0, 0, 0, 255, torch.uint8)
    call = linear_call(LinearWeight(weight, None, None, None), ((x.shape[1], qparams),))
    (result,) = op.OPS.recurrent.default(x, *call)
    return result


def test_integers_of_the_whole_range_are_multiplied_exactly() -> None:
    library = ctypes.CDLL(str(build.kernel_build().library))
    torch.manual_seed(0)
    weight = torch.tensor([-128, 127], dtype=torch.int8)[torch.randint(2, (18, 133))]
    for high in (None, [132], [0, 1, 2, 3, 64], range(0, 133, 5), range(133)):
        x = torch.randint(129, (19, 133)).float()
        for row in range(0, 19, 2):  # Row 18 is in the second tile.
            x[row, list(high or [])] = float(255 - row)
        expected = (x.double() @ weight.double().T).float()
        try:
            for name in ("avx512_vnni", "avx_vnni", "avx2", "sse2", "neon_i8mm", "neon_dotprod", "plain"):
                if library.torchq_compat_use_instruction_set(name.encode()) == 0:
                    assert products_of_integers(x, weight).equal(expected), (name, high)
                    assert products_of_integers(x[18:], weight).equal(expected[18:]), (name, high)
        finally:
            library.torchq_compat_use_instruction_set(None)


def test_dynamic_integers_beyond_their_range_do_not_saturate() -> None:
    library = ctypes.CDLL(str(build.kernel_build().library))
    names = ("avx512_vnni", "avx_vnni", "avx2", "sse2", "neon_i8mm", "neon_dotprod", "plain")
    expected = [torch.full((4, 16), 64.0 * 64 * value) for value in (127, -128)]
    for row in expected:
        row[0] -= row[1] / 32  # -63.5 became -64
    try:
        here = [name for name in names if library.torchq_compat_use_instruction_set(name.encode()) == 0]
        assert {"sse2", "plain"} & set(here)
        for name in here:
            assert library.torchq_compat_use_instruction_set(name.encode()) == 0
            assert all(map(torch.equal, dynamic_linear_results(), expected)), name
    finally:
        library.torchq_compat_use_instruction_set(None)


def split_columns(width: int) -> Any:
    """A first column with qparams of its own, so that the other columns begin at an odd address."""
    return ((1, X_QPARAMS), (width - 1, X_QPARAMS))


def test_the_operator_is_one_that_torch_can_trace() -> None:
    module: Any = converted.itself("gru")
    bound = module.lowered().bound()
    x = on(X_QPARAMS, uniform(2.0, 5, 2, 8))
    states = [torch.zeros(bound.directions * len(module.layers), 2, 12)]
    boundary = floats_around(as_numbers(((8, X_QPARAMS),)), 1)
    arguments = (x, states, bound.weights(), bound.program, boundary, (), bound.directions, False)
    torch.library.opcheck(torch.ops.torchq_compat_native.recurrent.default, arguments)


def test_every_part_of_every_kind_has_an_instruction() -> None:
    names = {name: cells_of(converted.itself(name)) for name in KINDS}
    for name, cell in itertools.chain.from_iterable([(n, c) for c in cells] for n, cells in names.items()):
        assert cell.program_problem() is None, name


DYNAMIC = {"per tensor": default_dynamic_qconfig, "per channel": per_channel_dynamic_qconfig}


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 20, 2, bidirectional=True)
        self.gru = nn.GRU(40, 12)
        self.cell = nn.RNNCell(12, 9)

    def forward(self, x: Tensor) -> Any:
        output, state = self.lstm(x)
        output, _ = self.gru(output)
        return output, state, self.cell(output[-1])


@made_once
def dynamic(scheme: str) -> tuple[nn.Module, GraphModule, GraphModule, GraphModule]:
    """Return (float, prepared, reference, lowered)."""
    model, x = Dynamic().eval(), uniform(2.0, 9, 4, 8)
    prepared = tc.prepare_fx(model, QConfigMapping().set_global(DYNAMIC[scheme]), (x,))
    lowered = tc.convert_fx(prepared)
    return model, prepared, lowered.reference, lowered


def assert_same_qparams(reference: nn.Module, *runs: Callable[[Tensor], Any]) -> None:
    """Assert that each run gives, for most inputs, the same results but for the order of sums of floats.

    A sum near the middle of two integers may round to the other one, and change the qparams of what follows.
    """
    inputs = [uniform(3.0, 17, 5, 8) for _ in range(5)]
    with torch.no_grad():
        expected = [leaves(reference(x)) for x in inputs]
        for run in runs:
            ratios = [list(map(sqnr, of_x, leaves(run(x)))) for of_x, x in zip(expected, inputs, strict=True)]
            assert all(statistics.median(column) > 55 for column in zip(*ratios, strict=True)), ratios


@pytest.mark.parametrize("scheme", DYNAMIC)
def test_dynamic_qparams_are_chosen_as_in_the_graph(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _, reference, lowered = dynamic.itself(scheme)
    monkeypatch.setattr(op, "WORK_PER_THREAD", 1)

    def on_threads(threads: int) -> Callable[[Tensor], Any]:
        def run(x: Tensor) -> Any:
            torch.set_num_threads(threads)
            return lowered(x)

        return run

    runs = [on_threads(1), on_threads(3)]
    assert_same_qparams(reference, *runs)
    x = uniform(3.0, 31, 5, 8)
    with torch.no_grad():
        for run in runs:
            for a, b in zip(leaves(plain(x)), leaves(run(x)), strict=True):
                assert 20 < sqnr(a, b) < 60


def test_a_loaded_state_reaches_the_dynamic_loop() -> None:
    _, prepared, before, lowered = dynamic.itself("per tensor")
    prepared, lowered = copy.deepcopy((prepared, lowered))
    for parameter in prepared.parameters():
        parameter.data = uniform(0.4, *parameter.shape)
    converted = tc.convert_fx(prepared)
    lowered.load_state_dict(converted.state_dict())
    assert_same_qparams(converted.reference, lowered)
    x = uniform(3.0, 31, 5, 8)
    assert all(sqnr(*pair) < 20 for pair in zip(leaves(before(x)), leaves(lowered(x)), strict=True))


def test_dynamic_modules_compile_to_calls_of_the_loop() -> None:
    torch._dynamo.reset()
    _, _, reference, lowered = dynamic.itself("per tensor")
    compiled = torch.compile(copy.deepcopy(lowered), backend="eager", fullgraph=True)
    assert_same_qparams(reference, compiled)
