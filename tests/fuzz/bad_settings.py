"""Wrong values inside settings: in config dicts and objects, states, qparams, observers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import (
    MinMaxObserver,
    PerChannelMinMaxObserver,
    QConfig,
    QConfigMapping,
    default_observer,
    default_weight_observer,
)
from torch.ao.quantization.backend_config import BackendConfig, BackendPatternConfig
from torch.ao.quantization.fx.custom_config import ConvertCustomConfig, FuseCustomConfig, PrepareCustomConfig

import torchq_compat as tc
from tests.fuzz.bad_arguments import KINDS, MAPPING, Model, converted, inputs, lstm, prepared, temporary
from tests.fuzz.outcomes import Case
from torchq_compat.checkpoints import load_checkpoint, save_checkpoint
from torchq_compat.lstm_utils import get_lstm_with_individually_observed_parts
from torchq_compat.read.custom_configs import CONVERT_KEYS, FUSE_KEYS, PREPARE_KEYS
from torchq_compat.read.qconfig_mappings import DICT_KEYS

__all__ = ["cases"]

Make = Callable[[], Any]
#: Further values that a person might write, and that are nearly right.
NEARLY: tuple[tuple[str, Make], ...] = (
    ("set", lambda: {1, 2}),
    ("bool", lambda: True),
    ("list of ints", lambda: [1, 2]),
    ("list of None", lambda: [None]),
    ("list of str", lambda: ["a", "b"]),
    ("pairs of wrong things", lambda: [(1, 2), ("a", object())]),
    ("short tuples", lambda: [("a",), ()]),
    ("static: int", lambda: {"static": 5}),
    ("static: str to str", lambda: {"static": {"a": "b"}}),
    ("static: class to instance", lambda: {"static": {nn.Linear: nn.Linear(1, 1)}}),
    ("static: instance to class", lambda: {"static": {nn.Linear(1, 1): nn.Linear}}),
    ("static: class to None", lambda: {"static": {nn.Linear: None}}),
    ("static: class to int", lambda: {"static": {nn.Linear: 5}}),
    ("unknown quant type", lambda: {"statisch": {nn.Linear: nn.Linear}}),
    ("nan in a list", lambda: [float("nan")]),
)
VALUES: tuple[tuple[str, Make], ...] = (*((kind.name, kind.make) for kind in KINDS), *NEARLY)
EMPTY = "says nothing, as no key would"
#: (key, value) of a dict that may succeed -> why.
ACCEPTED: dict[tuple[str, str], str] = {
    ("", "None"): "None: nothing by default",
    (
        "non_traceable_module_name",
        "list of str",
    ): "names of modules; one that is not there is nothing to keep",
    (
        "preserved_attributes",
        "list of str",
    ): "names; an attribute that is not there is not preserved, as in FX",
    ("name", "str"): "any name will do",
}


def prepare(**settings: Any) -> Any:
    return tc.prepare_fx(Model(), **{"qconfig_mapping": MAPPING, "example_inputs": inputs(), **settings})


def cases() -> Iterator[Case]:
    yield from _dicts("prepare_custom_config", PREPARE_KEYS, lambda v: prepare(prepare_custom_config=v))
    yield from _dicts(
        "convert_custom_config", CONVERT_KEYS, lambda v: tc.convert_to_reference_fx(prepared(), v)
    )
    yield from _dicts("fuse_custom_config", FUSE_KEYS, lambda v: tc.fuse_fx(Model().eval(), v))
    yield from _dicts("qconfig_mapping", DICT_KEYS, lambda v: prepare(qconfig_mapping=v))
    yield from _dicts("backend_config", ("name", "configs"), lambda v: prepare(backend_config=v))
    yield from _objects()
    yield from _observers()
    yield from _states()
    yield from _files()


def _dicts(setting: str, keys: tuple[str, ...], call: Callable[[Any], Any]) -> Iterator[Case]:
    for key in keys:
        for name, make in VALUES:
            reason = EMPTY if name.startswith("empty") else ACCEPTED.get((key, name), "")
            yield Case(f"{setting}[{key!r}]={name}", lambda k=key, m=make: call({k: m()}), accepted=reason)


def _objects() -> Iterator[Case]:
    """Yield cases with wrong attributes of config objects, which torch.ao's own setters do not check."""
    custom: tuple[tuple[type, Callable[[Any], Any]], ...] = (
        (PrepareCustomConfig, lambda c: prepare(prepare_custom_config=c)),
        (ConvertCustomConfig, lambda c: tc.convert_to_reference_fx(prepared(), c)),
        (FuseCustomConfig, lambda c: tc.fuse_fx(Model().eval(), c)),
        (QConfigMapping, lambda c: prepare(qconfig_mapping=c)),
        (BackendConfig, lambda c: prepare(backend_config=c)),
    )
    for config_class, call in custom:
        for attribute in vars(config_class()):
            for name, make in VALUES:

                def wrong(
                    config_class: type = config_class,
                    attribute: str = attribute,
                    make: Make = make,
                    call: Callable[[Any], Any] = call,
                ) -> Any:
                    config = config_class()
                    setattr(config, attribute, make())
                    return call(config)

                reason = EMPTY if name.startswith("empty") else OBJECTS_ACCEPTED.get((attribute, name), "")
                yield Case(f"{config_class.__name__}.{attribute}={name}", wrong, accepted=reason)
    for name, make in VALUES:

        def pattern(make: Make = make) -> Any:
            config = BackendConfig("x").set_backend_pattern_config(BackendPatternConfig(nn.Linear))
            next(iter(config.configs)).dtype_configs = make()
            return prepare(backend_config=config)

        reason = EMPTY if name.startswith("empty") else ""
        yield Case(f"BackendPatternConfig.dtype_configs={name}", pattern, accepted=reason)


OBJECTS_ACCEPTED: dict[tuple[str, str], str] = {
    ("non_traceable_module_names", "list of str"): "names of modules; one that is not there keeps nothing",
    (
        "preserved_attributes",
        "list of str",
    ): "names; an attribute that is not there is not preserved, as in FX",
    ("global_qconfig", "None"): "nothing by default",
    ("name", "str"): "any name will do",
}


def _observers() -> Iterator[Case]:
    for axis in (-7, 2, 5, 2**40, "0", None, 0.5, float("nan")):
        qconfig = QConfig(
            default_observer,
            PerChannelMinMaxObserver.with_args(
                ch_axis=axis, dtype=torch.qint8, qscheme=torch.per_channel_symmetric
            ),
        )
        yield Case(f"weight ch_axis={axis!r}", lambda q=qconfig: _to_the_end({"": q}))
        yield Case(f"weight_obs_ctr ch_axis={axis!r}", lambda q=qconfig: _parts_to_the_end(q.weight))
    for name, make in VALUES:
        for place in ("activation", "weight"):
            given = {"activation": default_observer, "weight": default_weight_observer}

            def call(make: Make = make, place: str = place, given: dict[str, Any] = given) -> Any:
                return _to_the_end({"": QConfig(**{**given, place: make()})})

            yield Case(f"QConfig.{place}={name}", call)
    for dtype in (torch.complex64, torch.bool, torch.float64, "quint8", 5):
        yield Case(
            f"observer dtype={dtype}",
            lambda d=dtype: _to_the_end(
                {"": QConfig(MinMaxObserver.with_args(dtype=d), default_weight_observer)}
            ),
        )


def _to_the_end(mapping: Any) -> Any:
    model = prepare(qconfig_mapping=mapping)
    model(*inputs())
    return tc.convert_to_reference_fx(model)(*inputs())


def _parts_to_the_end(weight: Any) -> Any:
    from torchq_compat.nn.quantized import LSTM

    observed = get_lstm_with_individually_observed_parts(lstm(), weight_obs_ctr=weight)
    observed(torch.ones(3, 2, 4))
    return LSTM.from_observed(observed)


def _states() -> Iterator[Case]:
    stages = {"prepared": prepared, "converted": converted, "lowered": lambda: tc.convert_fx(prepared())}
    for stage, make_model in stages.items():
        for kind in KINDS:
            yield Case(
                f"{stage}.load_state_dict({kind.name})",
                lambda m=make_model, k=kind: copy.deepcopy(m()).load_state_dict(k.make()),
            )
        for kind in (*KINDS, *(_Made(name, value) for name, value in TENSORS.items())):

            def one_wrong(make_model: Make = make_model, kind: Any = kind) -> Any:
                model = copy.deepcopy(make_model())
                state = dict(model.state_dict())
                state["linear.weight"] = kind.make()
                return model.load_state_dict(state)

            is_float = stage == "prepared" and kind.name == "tensor of nan"
            reason = "a float weight may hold anything, as in torch" if is_float else ""
            yield Case(f"{stage}.load_state_dict(one value={kind.name})", one_wrong, accepted=reason)
    for key, value in (("scale", float("nan")), ("scale", -1.0), ("scale", 0.0), ("scale", float("inf"))):
        for stage in ("converted", "lowered"):
            yield Case(
                f"{stage}: {key}={value}", lambda s=stage, v=value, m=stages[stage]: _load_scale(m(), v)
            )
    for value in (float("nan"), float("inf")):
        yield Case(f"prepared: min_val={value}", lambda v=value: _load_range(v))


class _Made:
    def __init__(self, name: str, make: Make) -> None:
        self.name, self.make = name, make


TENSORS: dict[str, Make] = {
    "tensor of another shape": lambda: torch.ones(3),
    "tensor of complex numbers": lambda: torch.ones(4, 4, dtype=torch.complex64),
    "tensor of nan": lambda: torch.full((4, 4), float("nan")),
    "meta tensor": lambda: torch.ones(4, 4, device="meta"),
}


def _load_scale(model: Any, value: float) -> Any:
    model = copy.deepcopy(model)
    state = dict(model.state_dict())
    names = [name for name in state if "extra_state" in name or "scale" in name]
    assert names
    for name in names:
        state[name] = torch.full_like(state[name], value)
    return model.load_state_dict(state)


def _load_range(value: float) -> Any:
    model = copy.deepcopy(prepared())
    state = dict(model.state_dict())
    names = [name for name in state if name.endswith("min_val")]
    assert names
    for name in names:
        state[name] = torch.full_like(state[name], value)
    model.load_state_dict(state)
    return tc.convert_to_reference_fx(model)


def _files() -> Iterator[Case]:
    contents = {
        "empty": b"",
        "text": b"junk",
        "pickle of an object": b"cbuiltins\nobject\n.",
        "cut off": None,
        "zip of nothing": b"PK\x05\x06" + bytes(18),
    }
    for name, content in contents.items():

        def load(content: bytes | None = content) -> Any:
            path = temporary("state.pt")
            save_checkpoint(prepared(), path)
            path.write_bytes(path.read_bytes()[:-100] if content is None else content)
            return load_checkpoint(path)

        yield Case(f"load_checkpoint of a file that is {name}", load)
    for name, value in (("a tensor", torch.ones(2)), ("a list", [1]), ("a number", 5), ("None", None)):

        def load_value(value: Any = value) -> Any:
            path = temporary("state.pt")
            torch.save(value, path)
            return load_checkpoint(path, copy.deepcopy(prepared()))

        yield Case(f"load_checkpoint of {name}", load_value)
    yield Case("load_checkpoint of a folder", lambda: load_checkpoint(Path(tempfile.mkdtemp())))
    yield Case(
        "save_checkpoint of what cannot be pickled", lambda: save_checkpoint({"a": lambda: 1}, temporary("x"))
    )
