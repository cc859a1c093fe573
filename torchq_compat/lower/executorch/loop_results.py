"""Give the results of loops the sizes of the call: a repair of programs that ExecuTorch emits.

ExecuTorch allocates a tensor at its upper bound, and its kernels resize the tensors they write. Two of the
instructions that a ``scan`` becomes (pytorch/executorch#16028) do not: ``aten::copy_``, which writes the
states, requires the size of its target; ``executorch_prim::et_copy_index``, which stacks the outputs, leaves
a target unchanged that is longer than the loop. Below the bounds a program would stop, or return the rest of
a buffer as further steps. Here, states are written by ``aten::copy.out``, which resizes, and a stack is
resized to (steps, *output) before a step is written into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchq_compat.lower.executorch.runtime import executorch_module

__all__ = ["size_loop_results"]

COPY_INTO = ("aten::copy_", "")
STACK = ("executorch_prim::et_copy_index", "tensor")
IS_LAST_STEP = ("executorch_prim::eq", "Scalar")


def size_loop_results(pte: bytes) -> bytes:
    """Return ``pte`` with the results of its loops sized by the call; unchanged if it has no loops."""
    _serialize = executorch_module("exir._serialize")
    file = _serialize._deserialize_pte_binary(pte)
    names = {(each.name, each.overload) for plan in file.program.execution_plan for each in plan.operators}
    if not names & {COPY_INTO, STACK}:
        return pte
    for plan in file.program.execution_plan:
        editor = _PlanEditor(plan)
        for chain in plan.chains:
            chain.instructions = editor.with_sized_results(chain.instructions)
    return bytes(_serialize._serialize_pte_binary(file, extract_delegate_segments=True))


class _PlanEditor:
    """Adds operators, values and instructions to an ``executorch.exir.schema.ExecutionPlan``."""

    def __init__(self, plan: Any) -> None:
        self.schema = executorch_module("exir.schema")
        self.plan = plan
        self.none = self._value(self.schema.Null())

    def with_sized_results(self, instructions: list[Any]) -> list[Any]:
        steps = {args[0]: args[1] for name, args in map(self._call, instructions) if name == IS_LAST_STEP}
        edited: list[Any] = []
        place_of: list[int] = []
        for instruction in instructions:
            place_of.append(len(edited))
            edited.extend(self._replacement(instruction, steps))
        for instruction in edited:
            if isinstance(instruction.instr_args, self.schema.JumpFalseCall):
                target = instruction.instr_args.destination_instruction
                instruction.instr_args.destination_instruction = place_of[target]
        return edited

    def _replacement(self, instruction: Any, steps: dict[int, int]) -> Iterator[Any]:
        name, args = self._call(instruction)
        if name == COPY_INTO:
            target, source, blocking, _ = args
            yield self._kernel("aten::copy", "out", source, source, blocking, target, target)
            return
        if name == STACK:
            stack, output, step = args
            yield from self._resize(stack, steps[step], output)
        yield instruction

    def _resize(self, stack: int, steps: int, output: int) -> Iterator[Any]:
        sizes = [steps]
        for dimension in range(len(self.plan.values[output].val.sizes)):
            sizes.append(self._value(self.schema.Int(0)))
            yield self._kernel(
                "aten::sym_size", "int", output, self._value(self.schema.Int(dimension)), sizes[-1]
            )
        size = self._value(self.schema.IntList(sizes))
        yield self._kernel("aten::empty", "out", size, self.none, stack, stack)

    def _call(self, instruction: Any) -> tuple[tuple[str, str] | None, list[int]]:
        call = instruction.instr_args
        if not isinstance(call, self.schema.KernelCall):
            return None, []
        operator = self.plan.operators[call.op_index]
        return (operator.name, operator.overload), call.args

    def _kernel(self, name: str, overload: str, *args: int) -> Any:
        operator = self.schema.Operator(name, overload)
        if operator not in self.plan.operators:
            self.plan.operators.append(operator)
        return self.schema.Instruction(
            self.schema.KernelCall(self.plan.operators.index(operator), list(args))
        )

    def _value(self, value: Any) -> int:
        self.plan.values.append(self.schema.EValue(value))
        return len(self.plan.values) - 1
