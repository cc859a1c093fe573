"""What can be wrong with an exported program whose ``aten.lstm.input`` is to be quantized, in words."""

from __future__ import annotations

import torch
from torch.fx import Node

from torchq_compat.errors import TorchQCompatError

__all__ = ["AtenLSTMError"]


class AtenLSTMError(TorchQCompatError, ValueError):
    """An exported LSTM that cannot be broken up as asked."""

    @classmethod
    def none_found(cls) -> AtenLSTMError:
        return cls(
            "the program has no aten.lstm.input.",
            hint="export the float model with torch.export.export and do not run_decompositions before.",
        )

    @classmethod
    def not_a_program(cls, found: object) -> AtenLSTMError:
        return cls(
            f"an ExportedProgram or a GraphModule is needed, got {type(found).__name__}.",
            hint="call torch.export.export(model, example_inputs) first.",
        )

    @classmethod
    def unknown_shape(cls, found: object, known: str) -> AtenLSTMError:
        return cls(f"shape {found!r} is not known.", hint=f"the shapes are: {known}.")

    @classmethod
    def computed_parameter(cls, node: Node) -> AtenLSTMError:
        return cls(
            f"parameter {node.name!r} of the LSTM is computed in the graph ({node.target}).",
            hint="the pieces own copies of the weights; remove parametrizations before torch.export.",
        )

    @classmethod
    def not_float32(cls, node: Node, dtype: torch.dtype) -> AtenLSTMError:
        return cls(
            f"parameter {node.name!r} of the LSTM is {dtype}.",
            hint="quantize a float32 model: model.float() before torch.export.",
        )

    @classmethod
    def unknown_length(cls, node: Node) -> AtenLSTMError:
        return cls(
            f"the sequence length of {node.name!r} is dynamic, so its steps cannot be written out.",
            hint="use shape='rolled' or shape='opaque', or export with a fixed length.",
        )

    @classmethod
    def not_prepared(cls) -> AtenLSTMError:
        return cls(
            "a cell of the model has no observers.",
            hint="prepare it with prepare_pieces, not with prepare_pt2e, which does not see inside a module.",
        )
