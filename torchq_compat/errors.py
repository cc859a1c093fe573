"""Every error this package raises on purpose: what went wrong, where, and a ``Hint:`` what to do.

The wording lives here, in classmethods, so that one place decides how the package speaks.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "CalibrationError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "ConvertError",
    "CustomModuleError",
    "ExportError",
    "InputError",
    "ScriptError",
    "TorchQCompatError",
]


class TorchQCompatError(Exception):
    """Base of all errors of torchq_compat.

    Args:
        message: what is wrong and where (module path, setting).
        hint: what the user can do about it.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}\nHint: {hint}" if hint else message)


class InputError(TorchQCompatError, ValueError):
    """Example inputs or call arguments that do not fit the model."""

    @classmethod
    def not_a_tuple(cls, found: object) -> InputError:
        return cls(
            f"example_inputs must be a tuple of positional arguments, got {type(found).__name__}.",
            hint="write example_inputs=(x,) with a trailing comma for a model of one argument.",
        )

    @classmethod
    def missing(cls) -> InputError:
        return cls(
            "example_inputs is missing: torch.export captures the model by running it once.",
            hint="pass a tuple with one example of every argument, e.g. prepare_fx(model, mapping, (x,)).",
        )

    @classmethod
    def does_not_fit(cls, model: str, cause: BaseException) -> InputError:
        reason = cause.message if isinstance(cause, TorchQCompatError) else f"{type(cause).__name__}: {cause}"
        return cls(
            f"{model}.forward does not run on the example_inputs: {reason}",
            hint="check the number, shapes and dtypes of example_inputs by calling model(*example_inputs).",
        )

    @classmethod
    def packed(cls) -> InputError:
        return cls(
            "example_inputs hold a PackedSequence, which torch.export cannot carry.",
            hint="capture the model with padded sequences; a prepared or converted recurrent module itself, "
            "say prepared.encoder, can be called with a PackedSequence.",
        )

    @classmethod
    def call_does_not_match(cls, reason: str, names: Iterable[str]) -> InputError:
        return cls(
            f"the captured model cannot be called like this: {reason}.",
            hint=f"it takes the arguments of the example it was prepared with: ({', '.join(names)}).",
        )

    @classmethod
    def fixed_size(cls, name: str, dimension: int, expected: int, found: int) -> InputError:
        return cls(
            f"argument {name!r} has size {found} in dimension {dimension}, "
            f"but the captured model is fixed to {expected} there.",
            hint="the model's own code depends on that size; capture it with the size you need, "
            "or pass dynamic_shapes= to prepare_fx.",
        )

    @classmethod
    def not_integers(cls, index: int, expected: str, found: str) -> InputError:
        return cls(
            f"input {index} is one of input_quantized_indexes: it is taken as {expected}, got {found}.",
            hint=f"pass a quantized tensor, or converted.input_grids()[{index}].quantize(x).",
        )


class ConfigError(TorchQCompatError, ValueError):
    """A setting that cannot be read or that contradicts another one."""

    @classmethod
    def standalone_without_inputs(cls, path: str) -> ConfigError:
        return cls(
            f"the standalone module {path!r} has no example_inputs.",
            hint="give the arguments the module itself is called with, as FX wants them, to "
            "set_standalone_module_name or set_standalone_module_class.",
        )

    @classmethod
    def no_such_index(cls, setting: str, index: object, count: int) -> ConfigError:
        return cls(
            f"{setting} has {index!r}, and the model has {count}.",
            hint=f"indexes are integers from 0 to {count - 1}.",
        )

    @classmethod
    def wrong_type(cls, setting: str, expected: str, found: object) -> ConfigError:
        return cls(
            f"{setting} must be {expected}, got {type(found).__name__}.",
            hint=f"build it with the torch.ao class, or use the documented dict form of {setting}.",
        )

    @classmethod
    def unknown_key(cls, setting: str, key: object, known: Iterable[str]) -> ConfigError:
        return cls(
            f"{setting} has the unknown key {key!r}.",
            hint="the keys FX knows are: " + ", ".join(repr(k) for k in known) + ".",
        )

    @classmethod
    def malformed(cls, setting: str, cause: BaseException) -> ConfigError:
        return cls(
            f"{setting} could not be read: {type(cause).__name__}: {cause}",
            hint=f"compare it with the dict form that the torch.ao documentation of {setting} shows.",
        )

    @classmethod
    def bad_regex(cls, pattern: str, cause: BaseException) -> ConfigError:
        return cls(
            f"module_name_regex {pattern!r} does not compile: {cause}",
            hint="it is matched with re.match against the module path, e.g. r'encoder\\.layers\\.\\d+'.",
        )

    @classmethod
    def not_a_constructor(cls, setting: str, found: object) -> ConfigError:
        return cls(
            f"{setting} is not an observer or fake-quantize constructor: {found!r}.",
            hint="pass a class or Class.with_args(...), not an instance or its result.",
        )

    @classmethod
    def observer_cannot_be_made(cls, setting: str, cause: BaseException) -> ConfigError:
        first_line = str(cause).strip().split("\n", 1)[0]
        return cls(
            f"{setting} cannot make its observer: {type(cause).__name__}: {first_line}",
            hint="call it once on its own, as in qconfig.activation(), and see which argument it refuses.",
        )

    @classmethod
    def unsupported_dtype(cls, dtype: object) -> ConfigError:
        return cls(
            f"qconfig: the dtype {dtype} is not supported: PT2E graphs do not quantize to it.",
            hint="use quint8, qint8 or qint32 (or uint8, int8, int16, int32), or float16.",
        )

    @classmethod
    def index_out_of_range(cls, module: str, object_type: str, index: int, calls: int) -> ConfigError:
        return cls(
            f"module_name_object_type_order: ({module!r}, {object_type}, {index}) is out of range: "
            f"the module calls {object_type} {calls} times.",
            hint="the index counts from 0 the calls made in the code of that very module.",
        )

    @classmethod
    def conflict_in_fused_pattern(cls, path: str, types: list[str], other: str) -> ConfigError:
        return cls(
            f"qconfig_mapping: object_type: {path!r} starts the fused pattern {' + '.join(types)}, but the "
            f"qconfig of {other} is not that of {types[0]}.",
            hint="set the same qconfig for all of these object types, or none for any of them; "
            "module_name switches a single place off.",
        )

    @classmethod
    def other_mapping_at_convert(cls, difference: str) -> ConfigError:
        return cls(
            f"convert_fx: qconfig_mapping is not the one given to prepare_fx: {difference}.",
            hint="copy the mapping given to prepare_fx and set qconfigs in the copy to None; "
            "convert can switch quantization off, and nothing else.",
        )

    @classmethod
    def custom_module_switched_off(cls, path: str, rule: str) -> ConfigError:
        return cls.not_supported(
            f"convert_fx: qconfig_mapping: None for the custom module at {path!r} ({rule})",
            "an observed custom module has no float form to go back to",
            "set its qconfig to None in the mapping given to prepare_fx.",
        )

    @classmethod
    def mapping_after_quantizer(cls) -> ConfigError:
        return cls.not_supported(
            "convert_fx: qconfig_mapping",
            "the model was prepared with a torchao Quantizer, which has no QConfigs to compare it with",
            "leave out of the Quantizer what shall stay float.",
        )

    @classmethod
    def unknown_engine(cls, engine: str, known: Iterable[str]) -> ConfigError:
        return cls(
            f"torch.backends.quantized.engine is {engine!r}, an engine convert_fx does not know.",
            hint=f"set it to one of {', '.join(known)}; or call convert_to_reference_fx, which needs none.",
        )

    @classmethod
    def backend_beside_quantizer(cls) -> ConfigError:
        return cls.not_supported(
            "backend_config beside a torchao Quantizer",
            "the Quantizer says what the backend takes",
            "leave backend_config out, or give a QConfigMapping.",
        )

    @classmethod
    def other_qconfig_at_convert(cls, path: str, rule: str) -> ConfigError:
        return cls(
            f"convert_fx: qconfig_mapping gives {path!r} another qconfig than prepare_fx did ({rule}).",
            hint="its observers were made for the one of prepare_fx; convert can only switch them off.",
        )

    @classmethod
    def not_supported(cls, setting: str, why: str, hint: str) -> ConfigError:
        return cls(f"{setting} is not supported: {why}.", hint=hint)


class CaptureError(TorchQCompatError):
    """torch.export could not capture the model."""

    @classmethod
    def from_export(cls, model: str, location: str | None, cause: BaseException) -> CaptureError:
        where = f" at {location}" if location else ""
        first_line = str(cause).strip().split("\n", 1)[0]
        hint = (
            "control flow on tensor values has to become torch.where or torch.cond; "
            "see the torch.export programming model."
        )
        if "register a pytree" in first_line or "Unsupported input type" in first_line:
            hint = (
                "register what the model takes or returns: torch.export.register_dataclass for a dataclass, "
                "torch.utils._pytree.register_pytree_node for another container."
            )
        return cls(
            f"torch.export cannot capture {model}{where}: {type(cause).__name__}: {first_line}",
            hint=f"{hint} The model was not changed.",
        )


class ExportError(TorchQCompatError, ValueError):
    """A converted model cannot be exported as asked."""

    @classmethod
    def not_converted(cls, found: object) -> ExportError:
        return cls(
            f"{type(found).__name__} is no model that convert_fx or convert_to_reference_fx returned.",
            hint="prepare_fx, calibrate, convert_fx, then export what convert_fx returns.",
        )

    @classmethod
    def unknown_shape(cls, found: object, known: Iterable[str]) -> ExportError:
        return cls(
            f"export: recurrent={found!r} is not known.",
            hint="the shapes of a loop over time are " + ", ".join(repr(shape) for shape in known) + ".",
        )

    @classmethod
    def in_training(cls) -> ExportError:
        return cls("export: the model is in training mode.", hint="call model.eval() first.")

    @classmethod
    def failed(cls, shape: str, dynamic_shapes: object, cause: BaseException) -> ExportError:
        first_line = str(cause).strip().split("\n", 1)[0]
        hint = "this is a defect of torchq_compat: report it with the model's code."
        if dynamic_shapes is not None:
            hint = "leave dynamic_shapes out: then every size is free that the model leaves free; "
            hint += (
                "recurrent='unrolled' fixes the number of steps."
                if shape == "unrolled"
                else ("or give bounds that the example_inputs lie in, and free no size that the model fixes.")
            )
        return cls(
            f"torch.export refuses the converted model with recurrent={str(shape)!r} and "
            f"dynamic_shapes={dynamic_shapes}: {type(cause).__name__}: {first_line}",
            hint=hint,
        )


class CustomModuleError(TorchQCompatError):
    """A custom module whose classes do not do what the mapping promises."""

    @classmethod
    def missing_method(cls, mapping: str, found: type, method: str, path: str = "") -> CustomModuleError:
        where = f" for module {path!r}" if path else ""
        return cls(
            f"{found.__module__}.{found.__qualname__} in {mapping} has no classmethod {method!r}{where}.",
            hint=f"give it a classmethod {method}(cls, module) that returns the module to use instead.",
        )

    @classmethod
    def call_failed(cls, path: str, problem: str) -> CustomModuleError:
        return cls(
            f"the call of module {path!r} is not valid: {problem}.",
            hint="the module takes the same arguments as the float module it replaces.",
        )

    @classmethod
    def no_qconfig(cls, kind: str) -> CustomModuleError:
        return cls(
            f"the float {kind} has no qconfig.",
            hint="prepare_fx sets it before it calls from_float; on your own, set its qconfig first.",
        )

    @classmethod
    def not_observed_here(cls, found: str) -> CustomModuleError:
        return cls(
            f"{found} is not a custom module this package made.",
            hint="let from_float and from_observed return what the class they inherit them from returns.",
        )

    @classmethod
    def unknown_container(cls, path: str, found: object) -> CustomModuleError:
        name = f"{type(found).__module__}.{type(found).__qualname__}"
        return cls(
            f"the module at {path!r} is given, or returns, a {name}, which holds tensors "
            "but is no tuple, list, dict or dataclass.",
            hint=f"make {type(found).__name__} a dataclass, or register it with torch.utils._pytree.",
        )

    @classmethod
    def returns_size(cls, path: str) -> CustomModuleError:
        return cls(
            f"the module at {path!r} returns an integer computed from the sizes of its inputs.",
            hint="take the size from a tensor outside the module: x.shape[0].",
        )


class ConvertError(TorchQCompatError):
    """convert_fx was given something it cannot convert."""

    @classmethod
    def not_prepared(cls, found: object) -> ConvertError:
        return cls(
            f"{type(found).__name__} was not made by torchq_compat.prepare_fx or prepare_qat_fx.",
            hint="call prepared = prepare_fx(model, qconfig_mapping, example_inputs) first "
            "and convert what it returns.",
        )

    @classmethod
    def no_qparams(cls, places: str) -> ConvertError:
        return cls(
            f"these observers compute no scale and zero point: {places}.",
            hint="a RecordingObserver, NoopObserver or PlaceholderObserver cannot quantize to integers; give "
            "the qconfig an observer with a range, like MinMaxObserver.",
        )

    @classmethod
    def not_finite(cls, places: str) -> ConvertError:
        return cls(
            f"these observers have seen NaN or infinity, so they have no range: {places}.",
            hint="find the batch with torch.isfinite, prepare again, or load the state saved before it, "
            "and calibrate without it.",
        )


class CheckpointError(TorchQCompatError):
    """A checkpoint that cannot be read, or that does not belong to the model; the model is unchanged."""

    @classmethod
    def unreadable(cls, path: str, cause: BaseException) -> CheckpointError:
        first_line = str(cause).strip().split("\n", 1)[0]
        return cls(
            f"the checkpoint {path} cannot be read: {type(cause).__name__}: {first_line}",
            hint="it may have been cut off while it was written; save_checkpoint replaces a file only when "
            "the new one is whole, so an older copy of it would be.",
        )

    @classmethod
    def other_model(cls, problem: str) -> CheckpointError:
        return cls(
            f"the state does not belong to this model: {problem}",
            hint="prepare the same float model with the same configuration before loading; "
            "a checkpoint of the float model is loaded into the float model, before prepare.",
        )

    @classmethod
    def no_pickle(cls, kind: str) -> CheckpointError:
        return cls(
            f"a {kind} model cannot be pickled: its graph would lose what it knows of the float model.",
            hint="save model.state_dict() and load it into a model prepared (and converted) the same way; "
            "to ship a converted model use torch.export.export and torch.export.save.",
        )


class CalibrationError(TorchQCompatError):
    """An observer that could not take a batch."""

    @classmethod
    def failed(cls, place: str, cause: BaseException) -> CalibrationError:
        first_line = str(cause).strip().split("\n", 1)[0]
        return cls(
            f"the observer at {place} failed on this batch: {type(cause).__name__}: {first_line}",
            hint="look for NaN or infinity in the batch with torch.isfinite; earlier batches are kept.",
        )


class ScriptError(TorchQCompatError):
    """A script the command line was asked for cannot be run."""
