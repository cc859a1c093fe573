"""The table of this package's keys in ``meta`` of nodes and graph modules: who writes them, who reads them.

State between stages is kept there because torchao's prepare and convert, and copies of graph modules, keep
``meta`` and drop other attributes. The keys of torch and torchao (``val``, ``nn_module_stack``,
``quantization_annotation``) are not in the table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.fx import GraphModule, Node

T = TypeVar("T")
#: The key of a node's metadata whose value torch.export keeps.
CUSTOM = "custom"


@dataclass(frozen=True)
class MetaKey(Generic[T]):
    """One key of ``meta``, with a value of type ``T``.

    Attributes:
        name: the key itself.
        on: the owner of the ``meta``: "node" or "graph".
        written_by: the module of this package that writes the value.
        read_by: the modules that read the value; by default the same one.
    """

    name: str
    on: str
    written_by: str
    read_by: str = ""

    def of(self, owner: Node | GraphModule) -> T | None:
        """Return the value on ``owner``, or None."""
        value: T | None = owner.meta.get(self.name)
        return value

    def required(self, owner: Node | GraphModule) -> T:
        """Return the value on ``owner``.

        Raises:
            KeyError: ``owner`` has none.
        """
        value: T = owner.meta[self.name]
        return value

    def is_on(self, owner: Node | GraphModule) -> bool:
        return self.name in owner.meta

    def write(self, owner: Node | GraphModule, value: T) -> None:
        owner.meta[self.name] = value

    def drop(self, owner: Node | GraphModule) -> None:
        owner.meta.pop(self.name, None)


#: Facts about a model that this package made.
RECORD: MetaKey[Any] = MetaKey("torchq_compat", "graph", "model.graph_module", "everything")
#: Whether the graph is in training mode.
TRAINING: MetaKey[bool] = MetaKey("torchq_compat_training", "graph", "capture.training")
#: The paths of the modules whose batch norms keep their statistics in training.
FROZEN: MetaKey[frozenset[str]] = MetaKey("torchq_compat_batch_norm_frozen", "graph", "capture.training")
#: The parameters of a model prepared for training, each with its first values then.
UNTRAINED: MetaKey[tuple[Any, ...]] = MetaKey(
    "torchq_compat_untrained", "graph", "capture.training", "quantize.convert"
)
#: Whether an op keeps its training flag, whatever the mode of the graph.
FIXED_MODE: MetaKey[bool] = MetaKey("torchq_compat_fixed_mode", "node", "capture.training")
#: The properties of an op that a QConfigMapping selects by.
OP: MetaKey[Any] = MetaKey("torchq_compat_op", "node", "annotate.annotation", "quantize.convert")
#: The qparams of the integers in a result of an opaque call, from convert on; None for floats.
INTEGERS: MetaKey[Any] = MetaKey("torchq_compat_integers", "node", "model.quantized_boundary", "lower, model")
#: Whether the node has values on the example inputs that mean infinity.
INFINITE: MetaKey[bool] = MetaKey("torchq_compat_infinite", "node", "capture.checked", "annotate.decide")
#: The labels of the ops that FX converts to other qparams or ranges than they trained with; from convert on.
FX_CONVERTS_OTHERWISE: MetaKey[tuple[str, ...]] = MetaKey(
    "torchq_compat_fx_converts_otherwise", "graph", "annotate.observed_graph", "quantize.convert"
)
#: The part of a cell that a node computes.
PART: MetaKey[Any] = MetaKey("torchq_compat_part", "node", "modules.parts", "modules.parts, comparison")
#: Part -> the share of its calibration values outside its observer's range, from convert on.
SATURATION: MetaKey[dict[str, float]] = MetaKey("torchq_compat_saturation", "graph", "modules.parts")
#: Part -> dB of a typical value over rounding, if its observer has a histogram; from convert on.
OBSERVED_SQNR: MetaKey[dict[str, float]] = MetaKey("torchq_compat_observed_sqnr", "graph", "modules.parts")
#: Index of a state -> (scale, zero point) of its initial zeros.
INITIAL_STATES: MetaKey[dict[int, tuple[float, int]]] = MetaKey(
    "torchq_compat_initial_state_qparams", "graph", "recurrent.cell_graph", "recurrent"
)
#: The layouts of the calls of a standalone module.
LAYOUTS: MetaKey[Any] = MetaKey(
    "torchq_compat_opaque_layouts", "graph", "capture.opaque_calls", "modules.standalone"
)
#: The qparams of the inputs of a converted model that takes integers: torch.compile cannot look at its graph.
INPUT_QPARAMS: MetaKey[Any] = MetaKey("torchq_compat_input_qparams", "graph", "model.graph_module")
#: Path -> cell, for the cells whose steps are written out in the graph.
UNROLLED_CELLS: MetaKey[dict[str, GraphModule]] = MetaKey(
    "torchq_compat_unrolled_cells", "graph", "recurrent.exported_lstm.shapes"
)
#: The path of the cell, and its node by name, that a node is the copy of, if steps are written out.
COPY: MetaKey[tuple[str, str]] = MetaKey("torchq_compat_copy", "node", "recurrent.exported_lstm.shapes")
#: Whether a node only moves values between steps, layers and directions: no arithmetic to quantize.
GLUE: MetaKey[bool] = MetaKey(
    "torchq_compat_glue", "node", "recurrent.exported_lstm.aten_recurrent", "recurrent.exported_lstm.shapes"
)
#: The name of the node of the reference graph that a lowered node was written for.
REFERENCE_NODE: MetaKey[str] = MetaKey(
    "torchq_compat_reference", "node", "lower.integers.rewrite", "lower.torchscript.scripted"
)
#: The recording that ``torchq-compat compare`` made of a model that FX prepared.
RECORDING: MetaKey[Any] = MetaKey("torchq_compat_recording", "graph", "comparison.cases")
#: The number of a node whose sizes the model returns; inside torch.export's own key "custom".
SIZES_ASKED: MetaKey[int] = MetaKey("torchq_compat_sizes_asked", "node", "capture.sizes.size_reads")
#: The lines that ask for values of tensors, with the value; None for an ``assert``, which is left out.
VALUES_DECIDED: MetaKey[tuple[tuple[str, Any], ...]] = MetaKey(
    "torchq_compat_values_decided", "graph", "capture.sizes.size_reads", "capture.checked, capture.loops.roll"
)
#: Whether the model ran a node without gradients; inside torch.export's own key "custom".
WITHOUT_GRADIENT: MetaKey[bool] = MetaKey("torchq_compat_without_gradient", "node", "capture.inlined_blocks")
#: (function, index of the call) of a function under torch.fx.wrap; inside torch.export's own key "custom".
WRAPPED_CALL: MetaKey[tuple[str, int]] = MetaKey(
    "torchq_compat_wrapped_call", "node", "capture.unseen_python", "capture.origins"
)

#: The prepared model that a converted model was made from, under ``torchq-compat run``.
PREPARED: MetaKey[Any] = MetaKey("torchq_compat_prepared", "graph", "port.running.fx_draws")
#: A function that converts that prepared model again.
CONVERTED_FROM: MetaKey[Callable[[], GraphModule]] = MetaKey(
    "torchq_compat_convert", "graph", "port.running.fx_draws"
)

#: What FX prepared beside a prepared model, under ``torchq-compat run`` and ``compare``.
FX_MODEL: MetaKey[Any] = MetaKey("torchq_compat_fx_model", "graph", "port.running.fx_draws")

#: All keys.
KEYS: tuple[MetaKey[object], ...] = tuple(value for value in globals().values() if isinstance(value, MetaKey))
