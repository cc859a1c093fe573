"""What can be wrong with a user's custom module, in words."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchq_compat.errors import CustomModuleError

__all__ = ["UserModuleError"]


class UserModuleError(CustomModuleError):
    """Classes of a user's custom module that do not do what the mapping promises."""

    @classmethod
    def mutates_input(cls, path: str, argument: str) -> UserModuleError:
        return cls(
            f"the module at {path!r} changes its input {argument} in place; behind a quantized boundary "
            "nobody would see the change.",
            hint="write the result to a new tensor and return it.",
        )

    @classmethod
    def shapes_unknown(cls, path: str, found: type, cause: BaseException) -> UserModuleError:
        first_line = str(cause).strip().split("\n", 1)[0]
        return cls(
            f"the shapes of the results of {found.__name__} at {path!r} cannot be computed without data: "
            f"{type(cause).__name__}: {first_line}",
            hint="register a torchq_compat.custom_modules.UserModuleHandler whose fake_call computes them.",
        )

    @classmethod
    def shapes_depend_on_data(cls, path: str, found: type) -> UserModuleError:
        return cls(
            f"the shapes of the results of {found.__name__} at {path!r} are no sizes of its inputs.",
            hint="register a torchq_compat.custom_modules.UserModuleHandler whose fake_call computes them.",
        )

    @classmethod
    def not_a_module(cls, path: str, owner: type, method: str, found: object) -> UserModuleError:
        return cls(
            f"{owner.__qualname__}.{method} for the module at {path!r} returned {type(found).__name__}.",
            hint=f"{method} has to return the nn.Module to use instead.",
        )

    @classmethod
    def other_results(cls, path: str, owner: type, expected: str, found: str) -> UserModuleError:
        return cls(
            f"{owner.__qualname__} at {path!r} returns {found}, where the float module returns {expected}.",
            hint="its forward has to take the arguments and return the structure of the float module's.",
        )

    @classmethod
    def call_raised(cls, path: str, owner: type, cause: BaseException) -> UserModuleError:
        first_line = str(cause).strip().split("\n", 1)[0]
        return cls(
            f"{owner.__qualname__} at {path!r} cannot be called as the float module is: "
            f"{type(cause).__name__}: {first_line}",
            hint="its forward has to take the arguments of the float module's.",
        )

    @classmethod
    def unknown_boundary(
        cls, path: str, setting: str, key: object, known: Iterable[object]
    ) -> UserModuleError:
        return cls(
            f"{setting} of the module at {path!r} names {key!r}, which its calls do not have.",
            hint="they have " + (", ".join(repr(k) for k in known) or "none") + ".",
        )

    @classmethod
    def no_boundary(cls, path: str, setting: str, found: object) -> UserModuleError:
        return cls(
            f"{setting} of the module at {path!r} must be a dict, got {type(found).__name__}.",
            hint=f'write {setting} = {{"name": choice}}; a choice is None (floats), an integer dtype, or an '
            "observer constructor.",
        )

    @classmethod
    def no_integers(cls, named: str, dtype: torch.dtype) -> UserModuleError:
        return cls(
            f"{named} is {str(dtype).removeprefix('torch.')}, which is no integer dtype.",
            hint="None leaves a tensor in floats.",
        )

    @classmethod
    def method_raised(cls, path: str, owner: type, method: str, cause: BaseException) -> UserModuleError:
        first_line = str(cause).strip().split("\n", 1)[0]
        return cls(
            f"{owner.__qualname__}.{method} failed for the module at {path!r}: "
            f"{type(cause).__name__}: {first_line}",
            hint=f"{method} gets the module to replace and has to return the nn.Module to use instead.",
        )

    @classmethod
    def no_legacy_dtype(cls, path: str, owner: type, dtype: torch.dtype) -> UserModuleError:
        return cls(
            f"an input of {owner.__qualname__} at {path!r} is {str(dtype).removeprefix('torch.')}, "
            "which torch.ao's quantized tensors cannot hold.",
            hint="set takes_floats = True on the quantized class: it then gets floats on that grid.",
        )
