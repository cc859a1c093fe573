"""Training and evaluation: of a captured graph, and of ops that do not follow the mode."""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from torchq_compat.capture.opaque_stub import StubRegistry
from torchq_compat.capture.trial_runs import Runs, trial_copy
from torchq_compat.codes import error_line, said
from torchq_compat.ops import facts, those
from torchq_compat.support import metadata
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.graph_nodes import module_path_of

# Training and evaluation mode of a captured graph.
#
# torch.export writes the mode as a literal argument of dropout and batch norm. torchao switches the mode by
# matching patterns, which resets the eps of a batch norm to the default, 1e-5 (see its export_utils.py);
# here the literal itself is changed. An op whose literal does not follow the mode in the float model, such
# as ``F.dropout(x, training=True)``, keeps its literal.


ATEN = torch.ops.aten
#: Attribute of a model whose code is to be generated anew before its next call.
STALE = "_torchq_compat_stale"
COUNT_BATCHES = ATEN.add_.Tensor


def training_flag(node: Node) -> bool | None:
    """Return whether ``node`` is in training; None for an op that has no such flag."""
    position = facts(node.target).training
    if position is None:
        return None
    return bool(node.args[position]) if position < len(node.args) else False


def has_fixed_mode(node: Node) -> bool:
    return bool(metadata.FIXED_MODE.of(node))


def set_training(graph_module: GraphModule, training: bool, path: str | None = None) -> None:
    """Switch dropouts, batch norms and batch counters: all, or those of the module at ``path`` until all are
    switched. Frozen batch norms stay in evaluation."""
    if path is None:
        metadata.TRAINING.write(graph_module, training)
    _switch(graph_module, training, path)


def freeze_batch_norm(graph_module: GraphModule, frozen: bool, path: str | None = None) -> None:
    """Keep batch norms in evaluation while the rest trains, or let them follow the mode again: all, or those
    of the module at ``path``."""
    of_all = {module_of(n) for n in graph_module.graph.nodes if n.target in those("normalization")}
    switched = of_all if path is None else {path}
    before = frozen_modules(graph_module)
    metadata.FROZEN.write(graph_module, before | switched if frozen else before - switched)
    written = metadata.TRAINING.of(graph_module)
    _switch(graph_module, graph_module.training if written is None else written, path)


def batch_counters(graph_module: GraphModule) -> list[Node]:
    """Return the nodes that count training batches."""
    return [
        node
        for node in graph_module.graph.nodes
        if node.target is COUNT_BATCHES
        and isinstance(node.args[0], Node)
        and str(node.args[0].target).endswith("num_batches_tracked")
    ]


def drop_batch_counters(graph_module: GraphModule) -> None:
    """Remove the counting of training batches from a graph that will not be trained any more."""
    for node in batch_counters(graph_module):
        graph_module.graph.erase_node(node)


def frozen_modules(graph_module: GraphModule) -> frozenset[str]:
    """Return the paths of the modules whose batch norms are frozen."""
    return metadata.FROZEN.of(graph_module) or frozenset()


def _switch(graph_module: GraphModule, training: bool, path: str | None) -> None:
    frozen = frozen_modules(graph_module)
    counters = set(batch_counters(graph_module))
    changed = False
    for node in graph_module.graph.nodes:
        position = 1 if node in counters else facts(node.target).training
        module = module_of(node) if position is not None else ""
        if position is None or has_fixed_mode(node) or path not in (None, module):
            continue
        mode = training and ("dropout" in facts(node.target).tags or module not in frozen)
        changed |= set_argument(node, position, int(mode) if node in counters else mode)
    if changed and path is None:
        graph_module.recompile()
    elif changed:
        # Loops over modules switch one after the other.
        vars(graph_module)[STALE] = True


@torch.compiler.disable  # type: ignore[untyped-decorator]
def settle(graph_module: GraphModule) -> None:
    """Generate the code that switches of single modules have changed."""
    if vars(graph_module).pop(STALE, False):
        graph_module.recompile()


def module_of(node: Node) -> str:
    """Return the path of the module whose op ``node`` is, without the number of its call."""
    return module_path_of(node).partition("@")[0]


def set_argument(node: Node, position: int | None, value: bool | int) -> bool:
    if position is None or position >= len(node.args) or node.args[position] == value:
        return False
    node.update_arg(position, value)
    return True


# Ops whose training flag, on purpose, does not follow ``train()`` and ``eval()`` in the float model.
#
# Examples: ``F.dropout(x, training=True)``, a batch norm without running statistics, a dropout that a script
# put into training mode in a model in evaluation (Monte Carlo dropout), a batch norm that the model's own
# ``train()`` keeps in evaluation. torch.export writes the flag of each call into the graph as a literal, and
# the graph does not show which literals follow the mode.


#: Functions of torch.nn.functional -> the aten operator that they call, where it has another name.
OPERATORS = dict.fromkeys(("dropout1d", "dropout2d", "dropout3d"), "feature_dropout")
#: The names that functions of torch.nn.functional have for the training flag.
FLAGS = ("training", "use_input_stats")


@functools.cache
def _training_argument(name: str, *, is_functional: bool) -> tuple[str, str, int, Any] | None:
    """Return the aten operator that a function of torch calls, and the name, position and default of its
    training flag; None if it has none."""
    operator = OPERATORS.get(name, name)
    overload = getattr(getattr(ATEN, operator, None), "default", None)
    position = facts(overload).training
    if overload is None or position is None:
        return None
    if not is_functional:
        return operator.removesuffix("_"), overload._schema.arguments[position].name, position, True
    parameters = list(inspect.signature(getattr(F, name)).parameters.values())
    position = next(index for index, item in enumerate(parameters) if item.name in FLAGS)
    return operator, parameters[position].name, position, parameters[position].default


@dataclass(frozen=True)
class EvaluationRun:
    """The training flags of a model's ops, recorded in a run in evaluation.

    Attributes:
        flags: (module path, op) -> the training flag of each call, in order.
        error: why the model does not run in evaluation, in which case ``flags`` is empty.
    """

    flags: Mapping[tuple[str, str], list[bool]] = field(default_factory=dict)
    error: Exception | None = None


def run_in_evaluation(working: nn.Module, args: tuple[Any, ...]) -> EvaluationRun:
    """Run a copy of ``working`` in evaluation, and return its training flags."""
    recorder = _Recorder()
    runs = Runs(trial_copy(working).eval(), StubRegistry(), {}, example=args)
    run = runs.of_float_model(args, watching=recorder.following)
    return EvaluationRun(recorder.flags if run.error is None else {}, run.error)


def decide_evaluation(working: nn.Module, run: EvaluationRun) -> Iterator[Decision]:
    """Yield a decision about a model that fails in evaluation."""
    if run.error is not None:
        yield Decision(
            "",
            f"evaluation mode of {type(working).__name__}",
            Action.DROPPED,
            said("TQ312", error=error_line(run.error)),
            warn=True,
            code="TQ312",
        )


def fix_modes(
    graph_module: GraphModule, working: nn.Module, in_evaluation: EvaluationRun, *, is_qat: bool
) -> None:
    """Fix the mode of every op whose training flag the float model's mode does not switch.

    Args:
        graph_module: the graph, captured in training mode for QAT, else in evaluation.
        working: the captured model.
        in_evaluation: the run of ``working`` in evaluation; needed for QAT only.
    """
    first: dict[nn.Module, str] = {}
    modules = working.named_modules(remove_duplicate=False)
    first_path = {path: first.setdefault(module, path) for path, module in modules}
    position: defaultdict[tuple[str, str], int] = defaultdict(int)
    for node in graph_module.graph.nodes:
        flag = training_flag(node)
        if flag is None:
            continue
        path = module_of(node)
        operator = str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]
        call = (first_path.get(path, path), operator.removesuffix("_"))
        flags = in_evaluation.flags.get(call, [])
        trains_in_evaluation = position[call] < len(flags) and flags[position[call]]
        position[call] += 1
        if flag is not is_qat or trains_in_evaluation:
            metadata.FIXED_MODE.write(node, True)


class _Recorder(TorchFunctionMode):
    """Records the training flags of calls, by the path of the module whose code makes the call."""

    def __init__(self) -> None:
        super().__init__()
        self.path = [""]
        self.flags: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_functional = getattr(func, "__module__", "") == F.__name__
        known = _training_argument(getattr(func, "__name__", ""), is_functional=is_functional)
        if known is not None:
            operator, keyword, position, default = known
            flag = args[position] if position < len(args) else kwargs.get(keyword, default)
            self.flags[self.path[-1], operator].append(bool(flag))
        return func(*args, **kwargs)

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Record the calls of ``model`` while the context is active."""

        def enter(path: str) -> Callable[..., None]:
            return lambda *_: self.path.append(path)

        def leave(*_: Any) -> None:
            self.path.pop()

        with ExitStack() as entered:
            for path, module in model.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):  # It takes no hooks.
                    entered.enter_context(module.register_forward_pre_hook(enter(path)))
                    entered.enter_context(module.register_forward_hook(leave))
            entered.enter_context(self)
            yield
