"""The private names of torch and torchao that this package uses: one test for each, of what is relied on."""

from __future__ import annotations

import ast
import inspect
import linecache
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import FixedQParamsObserver
from torch.overrides import BaseTorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e

from tests.helpers.package_trees import PACKAGE, package_nodes, spelled
from torchq_compat.support import upstream

#: Public and private names of torch.ao have a module of their own.
HOMES = (PACKAGE / "support" / "upstream.py", PACKAGE / "support" / "torch_ao.py")


@torch.fx.wrap
def wrapped(x: torch.Tensor) -> torch.Tensor:
    return x


def test_private_modules_are_imported_in_one_place() -> None:
    found = []
    for path, nodes in package_nodes().items():
        for node in nodes:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            private = [name for name in names if name.startswith("torch") and "._" in name]
            private = [name for name in private if not name.startswith("torchq_compat")]
            found += [(path.relative_to(PACKAGE).as_posix(), name) for name in private if path not in HOMES]
    assert found == []


def test_fixed_qparams_ops() -> None:
    observers = upstream.FIXED_QPARAMS_OP_TO_OBSERVER
    assert {nn.Sigmoid, nn.Tanh, torch.sigmoid, "tanh"} <= observers.keys()
    assert all(isinstance(make(), FixedQParamsObserver) for make in observers.values())


def test_torchaos_prepare_asks_for_the_scopes_of_nodes() -> None:
    """By this call a model of this package recognizes torchao's prepare."""
    code = upstream.get_node_name_to_scope.__code__
    for prepare in (prepare_pt2e, prepare_qat_pt2e):
        assert code.co_name in inspect.unwrap(prepare).__code__.co_names
    assert "graph" in code.co_names


def test_a_lazy_graph_module_runs_what_its_graph_says() -> None:
    traced = torch.fx.symbolic_trace(nn.ReLU())
    lazy = upstream.LazyGraphModule(traced, traced.graph)
    x = torch.tensor([-1.0, 1.0])
    assert torch.equal(lazy(x), torch.relu(x))
    for node in lazy.graph.find_nodes(op="call_function", target=torch.nn.functional.relu):
        node.target = torch.neg
        node.kwargs = {}
    lazy.recompile()
    assert torch.equal(lazy(x), -x)
    assert "neg" in lazy.code


@pytest.mark.parametrize("is_lazy", [False, True])
def test_modules_of_graphs_are_lazy_while_it_is_asked_for(is_lazy: bool) -> None:
    root, graph = nn.Module(), torch.fx.symbolic_trace(nn.ReLU()).graph
    with upstream.lazy_graph_modules(is_lazy):
        made = torch.fx._lazy_graph_module._make_graph_module(root, graph)
    assert isinstance(made, upstream.LazyGraphModule) is is_lazy
    assert torch.equal(made(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))


def test_preserved_attributes_survive_a_copy() -> None:
    graph_module = torch.fx.symbolic_trace(nn.ReLU())
    graph_module.meta[upstream.USER_PRESERVED_ATTRIBUTES_KEY] = {"kept": 3}
    assert torch.fx.GraphModule.__deepcopy__(graph_module, {}).kept == 3


def test_wrapped_functions_are_known_by_name_and_namespace() -> None:
    key = next(key for key in upstream.WRAPPED_FUNCTIONS if key[1] == "wrapped")
    assert upstream.WRAPPED_FUNCTIONS[key] is globals()


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_base_of_batch_norms(kind: type[nn.Module]) -> None:
    assert issubclass(kind, upstream.BatchNormBase)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_base_of_dropouts(kind: type[nn.Module]) -> None:
    assert issubclass(kind, upstream.DropoutBase)
    assert kind(0.25).p == 0.25


def test_fake_tensors() -> None:
    with upstream.FakeTensorMode() as mode:
        fake = torch.empty(2, 3)
        assert isinstance(fake, upstream.FakeTensor)
        assert upstream.detect_fake_mode([fake]) is mode
        with upstream.disable_current_modes():
            assert not isinstance(torch.empty(2), upstream.FakeTensor)


def test_op_overloads() -> None:
    assert isinstance(torch.ops.aten.add.Tensor, upstream.OpOverload)
    assert isinstance(torch.ops.aten.add, upstream.OpOverloadPacket)
    assert torch.ops.aten.add.Tensor.namespace == "aten"


def test_observers_are_recognised() -> None:
    from torchao.quantization.pt2e.observer import MinMaxObserver

    assert upstream.is_activation_post_process(MinMaxObserver())
    assert not upstream.is_activation_post_process(nn.ReLU())


def test_quantized_tensors_from_integers() -> None:
    integers = torch.tensor([[0, 10], [20, 30]], dtype=torch.uint8)
    whole = upstream.make_per_tensor_quantized_tensor(integers, 0.5, 10)
    assert torch.equal(whole.dequantize(), torch.tensor([[-5.0, 0.0], [5.0, 10.0]]))
    scales, zero_points = torch.tensor([0.5, 1.0], dtype=torch.double), torch.tensor([0, 20])
    rows = upstream.make_per_channel_quantized_tensor(integers, scales, zero_points, 0)
    assert torch.equal(rows.dequantize(), torch.tensor([[0.0, 5.0], [0.0, 10.0]]))


def test_pytree_flattens_and_rebuilds() -> None:
    leaves, spec = upstream.pytree.tree_flatten({"a": (1, [2]), "b": 3})
    assert leaves == [1, 2, 3]
    assert upstream.pytree.tree_unflatten(leaves, spec) == {"a": (1, [2]), "b": 3}


def test_sizes_of_one_stay_free() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    with upstream.symbolic_shapes_config.patch(backed_size_oblivious=True):
        free = ({0: torch.export.Dim.DYNAMIC},)
        program = torch.export.export(Twice(), (torch.ones(1, 2),), dynamic_shapes=free)
    assert program.module()(torch.ones(4, 2)).shape == (4, 2)


def test_sizes_of_values_are_free_unless_computed() -> None:
    free: list[tuple[bool, ...]] = []

    class Cut(nn.Module):
        def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            count = n.item()
            several = torch.arange(count), torch.arange(count + 2), x[:count]
            free.append(tuple(upstream.is_free(tensor.shape[0]) for tensor in several))
            return several[0]

    torch.export.export(Cut(), (torch.ones(7), torch.tensor(3)))
    assert free == [(True, False, False)]


def test_modes_are_listed_the_innermost_last() -> None:
    with BaseTorchFunctionMode() as outer, BaseTorchFunctionMode() as inner:
        assert upstream.function_modes()[-2:] == [outer, inner]


def test_caches_of_devices_can_be_cleared() -> None:
    for module, name in upstream.DEVICE_CACHES:
        function = getattr(module, name)
        assert callable(function)
        assert hasattr(function, "cache_clear"), name


def test_tracing_is_paused_and_goes_on() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        with upstream.tracing_paused():
            assert not torch._C._is_tracing()
            torch.full((2,), 3.0).neg()
        return x * 2

    traced = torch.jit.trace(doubled, torch.ones(2))
    assert "aten::mul" in str(traced.graph)
    assert "aten::neg" not in str(traced.graph)


def test_decomposed_operators_are_registered() -> None:
    schema = torch.ops.quantized_decomposed.quantize_per_tensor.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names == ["input", "scale", "zero_point", "quant_min", "quant_max", "dtype"]


def packed_by_hand() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    padded = torch.arange(6.0).reshape(3, 2, 1)
    rows, batch_sizes = upstream.pack_padded_sequence(padded, torch.tensor([3, 1]), False)
    return padded, rows, batch_sizes


def test_packing_is_a_function_of_padded_values_and_lengths() -> None:
    padded, rows, batch_sizes = packed_by_hand()
    packed = nn.utils.rnn.pack_padded_sequence(padded, torch.tensor([3, 1]))
    assert rows.flatten().tolist() == [0, 1, 2, 4] == packed.data.flatten().tolist()
    assert batch_sizes.tolist() == [2, 1, 1] == packed.batch_sizes.tolist()


def test_gradient_of_packing_is_zero_where_padding_stood() -> None:
    padded, rows, batch_sizes = packed_by_hand()
    gradient = upstream.pack_padded_sequence_backward(torch.ones_like(rows), padded.shape, batch_sizes, False)
    assert gradient.flatten().tolist() == [1, 1, 1, 0, 1, 0]


def test_padding_takes_the_value_and_the_number_of_steps() -> None:
    _, rows, batch_sizes = packed_by_hand()
    padded, lengths = upstream.pad_packed(rows, batch_sizes, False, -1.0, 4)
    assert padded.flatten().tolist() == [0, 1, 2, -1, 4, -1, -1, -1]
    assert lengths.tolist() == [3, 1]


def test_what_is_assumed_of_a_size_that_is_data_lets_export_go_on() -> None:
    class Rows(nn.Module):
        def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            rows = count.item()
            upstream.assume(rows >= 2)
            return x.new_ones(rows) if rows > 1 else x

    program = torch.export.export(Rows(), (torch.ones(4), torch.tensor(3)))
    assert program.module()(torch.ones(4), torch.tensor(2)).shape == (2,)
    with pytest.raises(RuntimeError):
        program.module()(torch.ones(4), torch.tensor(1))


def test_names_of_attributes_in_generated_code() -> None:
    assert upstream.format_target("self", "conv.weight") == "self.conv.weight"
    assert upstream.format_target("self", "0.weight") == 'getattr(self, "0").weight'


def test_a_forward_is_made_of_its_source_and_its_lines_are_found() -> None:
    source = "def forward(self, x):\n    doubled = twice(x)\n    return doubled"
    forward = upstream.forward_from_src(source, {"twice": lambda x: 2 * x})
    assert forward(None, 3) == 6
    assert linecache.getline(forward.__code__.co_filename, 2).strip() == "doubled = twice(x)"
    name = forward.__code__.co_filename
    assert "eval_with_key" in name
    assert upstream.graph_sources.eval_cache[name] == source
    assert any(key is name for key in upstream.graph_sources.eval_cache)  # Whose references are counted.


def test_the_front_of_scan_gives_the_last_state_and_what_it_stacked() -> None:
    def step(carried: list[torch.Tensor], parts: list[torch.Tensor]) -> tuple[list[torch.Tensor], ...]:
        total = carried[0] + parts[0]
        return [total], [total * 2]

    x = torch.arange(6.0).reshape(3, 2)
    [last], [stacked] = upstream.scan(step, [torch.zeros(2)], [x])
    assert torch.equal(last, x.sum(0))
    assert torch.equal(stacked, 2 * x.cumsum(0))


def test_default_store(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{tmp_path}/store", 1), rank=0, world_size=1)
    try:
        upstream.default_store().set("a", b"1")
        assert upstream.default_store().get("a") == b"1"
        with pytest.raises(RuntimeError):
            upstream.default_store().wait(["b"], timedelta(seconds=0.1))
    finally:
        dist.destroy_process_group()


def test_what_a_trace_sets_for_all_threads_is_known() -> None:
    """And set back; what ``process_state`` exchanges for the time of a trace is used by it."""
    seen: dict[str, object] = {}
    before = {name: getattr(owner, name) for owner, name in upstream.SET_FOR_ALL_THREADS}

    class Watching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.update((name, getattr(owner, name)) for owner, name in upstream.SET_FOR_ALL_THREADS)
            seen["context"] = upstream.TracingContext.try_get()
            return super().forward(x)

    patchers: list[upstream.Patcher] = []

    class Listed(upstream.Patcher):
        def __init__(self) -> None:
            super().__init__()
            patchers.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*upstream.PATCHER, Listed)
        patched.setattr(*upstream.MODE_STACK, stack := upstream.ModeStack())
        torch.export.export(Watching(2, 2), (torch.randn(1, 2),))
        assert upstream.fx_tracing._is_fx_tracing_flag is False
    changed = {name for name, value in before.items() if seen[name] is not value}
    assert changed >= {"_is_compiling_flag", "_is_exporting_flag", "__call__", "__getattr__", "max", "pow"}
    assert patchers
    assert seen["_mode_stack_state_for_pre_dispatch"] is stack
    assert seen["context"] is not None
    assert upstream.TracingContext.try_get() is None
    assert before == {name: getattr(owner, name) for owner, name in upstream.SET_FOR_ALL_THREADS}


def test_a_lazy_clone_shares_memory_until_one_side_writes() -> None:
    tensor = torch.arange(4.0)
    assert upstream.storage_uses(tensor.untyped_storage()._cdata) == 2
    clone = upstream.lazy_clone(tensor)
    assert upstream.is_shared(tensor)
    assert upstream.is_shared(clone)
    assert upstream.data_address(tensor) == upstream.data_address(clone)
    assert upstream.is_shared(clone)
    tensor.add_(1)
    assert not upstream.is_shared(tensor)
    assert clone.tolist() == [0, 1, 2, 3]
    alias = clone.numpy()
    assert upstream.storage_uses(clone.untyped_storage()._cdata) == 3
    assert upstream.tensor_uses(tensor) == 1
    capsule = torch.utils.dlpack.to_dlpack(tensor)
    assert upstream.tensor_uses(tensor) == 2
    del capsule
    with pytest.raises(RuntimeError):
        upstream.lazy_clone(torch.from_numpy(alias))  # another library's memory


def test_hooks_of_all_modules() -> None:
    assert not upstream.has_global_hooks()
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert upstream.has_global_hooks()
    assert not upstream.has_global_hooks()


def test_every_name_is_tested_here() -> None:
    text = inspect.getsource(inspect.getmodule(test_every_name_is_tested_here))  # type: ignore[arg-type]
    used: set[str] = set()
    for nodes in package_nodes().values():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module == upstream.__name__:
                used.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Attribute) and spelled(node.value) == "upstream":
                used.add(node.attr)
    assert len(used) > 30
    assert [name for name in sorted(used) if f"upstream.{name}" not in text] == []


def test_what_an_overload_calls_computes_the_same() -> None:
    add, x = upstream.overload_caller(torch.ops.aten.add.Tensor), torch.randn(3)
    assert torch.equal(add(x, x, alpha=2), 3 * x)
    traced = torch.fx.Graph()
    assert add(torch.fx.Proxy(traced.placeholder("x")), 1).node.target is torch.ops.aten.add.Tensor


def test_codegen_of_a_captured_model_asks_for_bindings_and_output() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
            return [x + pair[0], pair[1]]

    x = torch.ones(2)
    module = torch.export.export(Pair(), (x, (x, x))).module(check_guards=False)
    codegen = module.graph._codegen
    assert type(codegen) is upstream.PyTreeCodeGen
    assert codegen.gen_var_bindings(["x", "pair"], ["x", "a", "b"], False).count("tree_flatten_spec") == 1
    assert "tree_unflatten" in codegen.generate_output(("a", "b"))


def test_guards_of_a_program_are_those_its_module_checks() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.size(1) != 5
            return x + x

    free = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    program = torch.export.export(Twice(), (torch.ones(4, 2),), dynamic_shapes=free)
    guards = upstream.guards_of(program)
    assert guards == ["L['x'].size()[1] != 5"]
    with pytest.raises(AssertionError, match="Guard failed"):
        program.module()(torch.ones(4, 5))
    guards.clear()
    assert program.module()(torch.ones(4, 5)).shape == (4, 5)


def test_a_symbol_has_the_limits_of_its_dim() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    sizes = ({0: torch.export.Dim("batch", min=3, max=9), 1: torch.export.Dim.AUTO},)
    program = torch.export.export(Twice(), (torch.ones(4, 2),), dynamic_shapes=sizes)
    (x,) = program.graph.find_nodes(op="placeholder")
    assert [upstream.limits_of(size) for size in x.meta["val"].shape] == [(3, 9), (2, None)]


def test_profilers_and_modes_watch_operators() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert not upstream.are_operators_watched()
    for watching in (Seen(), DeviceContext("cpu"), profile(activities=[ProfilerActivity.CPU])):
        with watching:
            assert upstream.are_operators_watched()
    assert not upstream.are_operators_watched()
