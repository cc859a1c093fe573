"""All public names: adding or removing one is a decision, and a line of the changelog."""

from __future__ import annotations

import importlib
import inspect

import pytest

from torchq_compat import ArgumentError

ERRORS = """
    AnnotationError ArgumentError CallError CaptureError CheckpointError ConfigError ConvertError
    CustomModuleError ExportError InputError ModuleAttributeError PathError QuantizationNote
    QuantizationWarning ScriptError TorchQCompatError
"""
QUANTIZE_FX = """
    convert_fx convert_to_reference_fx fuse_fx get_default_convert_custom_config
    get_default_prepare_custom_config prepare_fx prepare_qat_fx
"""
PUBLIC = {
    "torchq_compat": f"""{ERRORS} {QUANTIZE_FX}
        ConvertedModel Output QuantizationGraphModule annotate_outputs calibrate check_annotations
        check_sharing compare explain export merge_observers quantize_dynamic quantizer_from reroute_tuples
        streaming suggest to_executorch to_onnx
    """,
    "torchq_compat.errors": ERRORS,
    "torchq_compat.pt2e": """
        Output annotate_outputs check_annotations check_sharing convert_decomposed_lstm convert_pt2e
        decompose_lstm decompose_recurrent prepare_decomposed_lstm prepare_pt2e prepare_qat_pt2e
        quantizer_from reroute_tuples whole_op_lstm_quantizer whole_op_recurrent_quantizer
    """,
    "torchq_compat.quantize_eager": """
        DeQuantStub FloatFunctional QConfig QuantStub QuantWrapper add_quant_dequant convert default_qconfig
        fuse_modules fuse_modules_qat get_default_qat_qconfig get_default_qconfig lower prepare prepare_qat
        propagate_qconfig_ quantize quantize_qat swap_module
    """,
    "torchq_compat.quantize_fx": QUANTIZE_FX,
    "torchq_compat.custom_modules": "CustomModuleHandler UserModuleHandler register",
    "torchq_compat.checkpoints": "load_checkpoint load_fx_state save_checkpoint",
    "torchq_compat.custom_config": """
        ConvertCustomConfig FuseCustomConfig PrepareCustomConfig StandaloneModuleConfigEntry
    """,
    "torchq_compat.lstm_utils": """
        get_lstm_with_individually_observed_parts get_reference_quantized_lstm_module
    """,
    "torchq_compat.nn.intrinsic.qat": "freeze_bn_stats update_bn_stats",
    "torchq_compat.nn.quantizable": "GRU GRUCell LSTM LSTMCell MultiheadAttention RNN RNNCell",
    "torchq_compat.nn.quantized": "GRU GRUCell LSTM LSTMCell MultiheadAttention RNN RNNCell",
    "torchq_compat.operators": "native_library",
    "torchq_compat.profiles": """
        int16_parts int8_parts int8_products int8_with_int16_cell whole_range_dynamic
    """,
    "torchq_compat.recurrent_parts": "get_individually_observed_parts",
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module: str) -> None:
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(PUBLIC[module].split())
    for name in found.__all__:
        assert getattr(found, name).__doc__, f"{module}.{name} has no docstring"


def test_every_public_module_is_reached_from_the_top() -> None:
    """Without an import of its own; ``dir`` lists what is imported at the first use."""
    import torchq_compat

    assert {module.split(".")[1] for module in PUBLIC if "." in module} <= set(dir(torchq_compat))


def test_a_misspelled_argument_is_refused_with_a_hint() -> None:
    for module in ("torchq_compat", "torchq_compat.pt2e"):
        found = importlib.import_module(module)
        doors = [getattr(found, name) for name in found.__all__ if inspect.isfunction(getattr(found, name))]
        assert len(doors) > 10
        for door in doors:
            with pytest.raises(ArgumentError, match="cannot be called like this") as refused:
                door(misspelled=1)
            assert "Hint:" in str(refused.value)


def test_every_error_is_one_of_ours_and_reached_from_the_top() -> None:
    import torchq_compat
    from torchq_compat import errors

    for name in errors.__all__:
        found = getattr(torchq_compat, name)
        assert found is getattr(errors, name)
        assert issubclass(found, (errors.TorchQCompatError, errors.QuantizationWarning))


def test_errors_are_declared_in_one_file() -> None:
    from pathlib import Path

    import torchq_compat

    package = Path(torchq_compat.__file__).parent
    elsewhere = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path.name != "errors.py" and "(TorchQCompatError" in path.read_text().replace("isinstance(", "")
    ]
    assert elsewhere == []
