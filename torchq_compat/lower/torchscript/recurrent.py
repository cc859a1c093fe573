"""A recurrent module of an eager model in TorchScript: torch.nn's signature around one compiled function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq_compat.capture.torch_export import capture_freely
from torchq_compat.lower.torchscript.scripted import compile_text, script_source, source_of_graph
from torchq_compat.recurrent.contracts import RecurrentContract, SequenceContract
from torchq_compat.recurrent.over_time import LoopShape, exporting_loops_as

STEPS, BATCH = 3, 2


class _Flat(nn.Module):
    """The module, called with its states as separate arguments."""

    def __init__(self, module: nn.Module, state_count: int) -> None:
        super().__init__()
        self.module = module
        self.state_count = state_count

    def forward(self, x: Tensor, *states: Tensor) -> Any:
        return self.module(x, states if self.state_count > 1 else states[0])


def scripted_recurrent(module: nn.Module, contract: RecurrentContract) -> nn.Module:
    """Return a plain module that torch.jit.script compiles, called like ``module`` with batched tensors."""
    settings = contract.attributes()
    count = len(contract.kind.states)
    sizes, x = _state_sizes(settings, count), _example(contract, settings)
    batch = x.dim() - 2 if not settings.get("batch_first", False) else 0
    states = tuple(torch.zeros(*(BATCH if size < 0 else size for size in item)) for item in sizes)
    with exporting_loops_as(LoopShape.ROLLED), torch.no_grad():
        source = source_of_graph(capture_freely(_Flat(module, count).eval(), (x, *states)))
    function = script_source(source, f"{contract.kind.name}_call")
    text = _forward_text(contract, sizes, batch, x.dim(), list(source.constants))
    forward = compile_text(text, "forward", {"graph_function": function, "Tensor": Tensor})
    result: nn.Module = type(f"Scripted{contract.kind.name}", (nn.Module,), {"forward": forward})()
    for name, value in source.constants.items():
        if isinstance(value, Tensor):
            result.register_buffer(name, value)
        else:
            setattr(result, name, value)
    return result.eval()


def _example(contract: RecurrentContract, settings: dict[str, Any]) -> Tensor:
    if not isinstance(contract, SequenceContract):
        return torch.zeros(BATCH, settings["input_size"])
    leading = (BATCH, STEPS) if settings["batch_first"] else (STEPS, BATCH)
    return torch.zeros(*leading, settings["input_size"])


def _state_sizes(settings: dict[str, Any], count: int) -> list[tuple[int, ...]]:
    """Return the sizes of each state; -1 is the batch size."""
    width = settings["hidden_size"]
    hidden = settings.get("proj_size") or width
    if "num_layers" not in settings:
        return [(-1, width)] * count
    rows = settings["num_layers"] * (2 if settings["bidirectional"] else 1)
    both: list[tuple[int, ...]] = [(rows, -1, hidden), (rows, -1, width)]
    return both[:count]


def _forward_text(
    contract: RecurrentContract, sizes: list[tuple[int, ...]], batch: int, rank: int, constants: list[str]
) -> str:
    zeros = [
        f"input.new_zeros([{', '.join('batch' if size < 0 else str(size) for size in item)}])"
        for item in sizes
    ]
    kind = "Tensor" if len(sizes) == 1 else f"Tuple[{', '.join(['Tensor'] * len(sizes))}]"
    states = ["hx"] if len(sizes) == 1 else [f"hx[{index}]" for index in range(len(sizes))]
    given = ", ".join(["input", *states, *(f"self.{name}" for name in constants)])
    lines = [
        f"assert input.dim() == {rank}, 'the input has to have {rank} dimensions in TorchScript'",
        f"batch = input.size({batch})",
        "if hx is None:",
        f"    hx = {zeros[0] if len(zeros) == 1 else '(' + ', '.join(zeros) + ')'}",
        f"results = graph_function({given})",
        f"return {_returned(contract, len(sizes))}",
    ]
    head = f"def forward(self, input: Tensor, hx: Optional[{kind}] = None):\n"
    return head + "".join(f"    {line}\n" for line in lines)


def _returned(contract: RecurrentContract, count: int) -> str:
    if not isinstance(contract, SequenceContract):
        return "results" if count == 1 else "(results[0], results[1])"
    last = "results[1]" if count == 1 else "(results[1], results[2])"
    return f"(results[0], {last})"
