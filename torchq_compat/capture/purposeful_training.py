"""Ops whose training flag, on purpose, does not follow ``train()`` and ``eval()`` in the float model.

Examples: ``F.dropout(x, training=True)``, a batch norm without running statistics, a dropout that a script
put into training mode in a model in evaluation (Monte Carlo dropout), a batch norm that the model's own
``train()`` keeps in evaluation. torch.export writes the flag of each call into the graph as a literal, and
the graph does not show which literals follow the mode.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode

from torchq_compat.capture.torch_export import copied_inputs
from torchq_compat.capture.training_modes import fix_mode, training_flag
from torchq_compat.support.decisions import Action, Decision
from torchq_compat.support.graph_nodes import module_path_of
from torchq_compat.support.model_copies import copied_model

__all__ = ["EvaluationRun", "decide_evaluation", "fix_modes", "run_in_evaluation"]


#: Python function -> (aten operator, and the name, position and default of the function's training flag).
FUNCTIONS: dict[str, tuple[str, str, int, bool]] = {
    "dropout": ("dropout", "training", 2, True),
    "dropout1d": ("feature_dropout", "training", 2, True),
    "dropout2d": ("feature_dropout", "training", 2, True),
    "dropout3d": ("feature_dropout", "training", 2, True),
    "alpha_dropout": ("alpha_dropout", "training", 2, False),
    "feature_alpha_dropout": ("feature_alpha_dropout", "training", 2, False),
    "rrelu": ("rrelu", "training", 3, False),
    "batch_norm": ("batch_norm", "training", 5, False),
    "instance_norm": ("instance_norm", "use_input_stats", 5, True),
}
TORCH_FUNCTIONS: dict[str, tuple[str, str, int, bool]] = {
    **{
        f"{kind}dropout": (f"{kind}dropout", "train", 2, True)
        for kind in ("", "feature_", "alpha_", "feature_alpha_")
    },
    "rrelu": ("rrelu", "training", 3, False),
    "batch_norm": ("batch_norm", "training", 5, True),
    "instance_norm": ("instance_norm", "use_input_stats", 5, True),
}


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
    model = copied_model(working).eval()
    recorder = _Recorder()
    try:
        with _following(model, recorder), recorder, torch.no_grad(), torch.random.fork_rng(devices=[]):
            model(*copied_inputs(args))
    except Exception as cause:
        return EvaluationRun(error=cause)
    return EvaluationRun(recorder.flags)


def decide_evaluation(working: nn.Module, run: EvaluationRun) -> Iterator[Decision]:
    """Yield a decision about a model that fails in evaluation."""
    if run.error is not None:
        first_line = str(run.error).strip().split("\n", 1)[0]
        yield Decision(
            "",
            f"evaluation mode of {type(working).__name__}",
            Action.DROPPED,
            f"the float model fails in evaluation ({type(run.error).__name__}: {first_line}): what trains "
            "there on purpose is not known, and every dropout and batch norm follows train() and eval()",
            warn=True,
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
    first_path = _first_paths(working)
    position: defaultdict[tuple[str, str], int] = defaultdict(int)
    for node in graph_module.graph.nodes:
        flag = training_flag(node)
        if flag is None:
            continue
        path = _module_path(node)
        call = (first_path.get(path, path), _operator(node))
        flags = in_evaluation.flags.get(call, [])
        trains_in_evaluation = position[call] < len(flags) and flags[position[call]]
        position[call] += 1
        if flag is not is_qat or trains_in_evaluation:
            fix_mode(node)


def _first_paths(model: nn.Module) -> dict[str, str]:
    """Return each path of ``model`` -> the first path of the same module."""
    first: dict[nn.Module, str] = {}
    return {
        path: first.setdefault(module, path) for path, module in model.named_modules(remove_duplicate=False)
    }


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
        name = getattr(func, "__name__", "")
        known = FUNCTIONS if getattr(func, "__module__", "") == "torch.nn.functional" else TORCH_FUNCTIONS
        if name in known:
            operator, keyword, position, default = known[name]
            flag = args[position] if position < len(args) else kwargs.get(keyword, default)
            self.flags[self.path[-1], operator].append(bool(flag))
        return func(*args, **kwargs)


@contextmanager
def _following(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Keep the path of the running module of ``model`` in ``recorder``."""

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: recorder.path.append(path)

    def leave(*_: Any) -> None:
        recorder.path.pop()

    hooks = []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # It takes no hooks.
        hooks.append(module.register_forward_pre_hook(enter(path)))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _module_path(node: Node) -> str:
    return module_path_of(node).partition("@")[0]


def _operator(node: Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2].removesuffix("_")
