"""What can go wrong on the way to ExecuTorch, in words."""

from __future__ import annotations

from collections.abc import Iterable

from torchq_compat.errors import TorchQCompatError

__all__ = ["ExecutorchError"]


class ExecutorchError(TorchQCompatError):
    """A model that cannot become an ExecuTorch program, or a program that cannot be run."""

    @classmethod
    def not_installed(cls, cause: BaseException) -> ExecutorchError:
        return cls(
            f"ExecuTorch cannot be imported: {cause}.",
            hint="install the extra: pip install torchq-compat[executorch].",
        )

    @classmethod
    def unknown_backend(cls, backend: object, known: Iterable[str]) -> ExecutorchError:
        return cls(
            f"backend {backend!r} is not known.",
            hint=f"choose one of {', '.join(map(repr, known))}; for another one take the program of "
            "torch.export.export to the partitioner of that backend.",
        )

    @classmethod
    def no_upper_bound(cls, argument: str, dimension: int) -> ExecutorchError:
        return cls(
            f"dimension {dimension} of input {argument!r} has no upper bound; ExecuTorch plans its memory "
            "before it runs.",
            hint="give its Dim a max=, or leave dynamic_shapes out: then the sizes of example_inputs are "
            "the largest.",
        )

    @classmethod
    def cannot_lower(cls, stage: str, cause: BaseException) -> ExecutorchError:
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        return cls(
            f"ExecuTorch cannot take the model ({stage}): {type(cause).__name__}: {' '.join(lines[:2])}",
            hint="its operators have to be in ExecuTorch's portable library; leave what needs the one named "
            "here outside the model.",
        )

    @classmethod
    def no_kernel(cls, operators: Iterable[str]) -> ExecutorchError:
        return cls(
            f"ExecuTorch's runtime has no kernel for {', '.join(operators)}.",
            hint="leave the part of the model that computes this outside, or write it with other operators.",
        )

    @classmethod
    def unreadable(cls, name: str, cause: BaseException) -> ExecutorchError:
        return cls(
            f"{name} is no ExecuTorch program this runtime can load: {cause}",
            hint="write it with to_executorch(..., path=...) and the same version of executorch.",
        )

    @classmethod
    def other_inputs(cls, problem: str, expected: Iterable[str]) -> ExecutorchError:
        return cls(
            f"the program cannot be called like this: {problem}.",
            hint=f"its inputs, flat, are ({', '.join(expected)}).",
        )

    @classmethod
    def beyond_bound(cls, index: int, dimension: int, size: int, bound: int) -> ExecutorchError:
        return cls(
            f"input {index} has size {size} in dimension {dimension}, and the program was made for at most "
            f"{bound}.",
            hint="call to_executorch with example_inputs as large as the largest input, or with "
            "dynamic_shapes= whose Dims have a larger max.",
        )

    @classmethod
    def run_failed(cls, cause: BaseException) -> ExecutorchError:
        return cls(
            f"ExecuTorch's runtime stopped: {cause}",
            hint="the lines it printed before name the instruction; sizes that the model fixes must be those "
            "of example_inputs.",
        )
