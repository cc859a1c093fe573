"""Threads that prepare, calibrate, convert, export and call at once get what one thread gets."""

from __future__ import annotations

import asyncio
import copy
import math
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    HistogramObserver,
    QConfig,
    QConfigMapping,
    default_weight_observer,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.utils.data import DataLoader, Dataset

import torchq_compat as tc
from tests.helpers.once import made_once
from tests.helpers.processes import in_fork
from torchq_compat.errors import QuantizationWarning
from torchq_compat.support.process_state import Lock, is_compiling, is_exporting, once
from torchq_compat.support.user_warnings import silenced, warn_user

MAPPING = get_default_qconfig_mapping("x86")


class Net(nn.Module):
    """A module that is called twice: a trace hands it out as a stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.last(self.first(x))))


def inputs(count: int = 1) -> list[Tensor]:
    draws = torch.Generator().manual_seed(count)
    return [torch.randn(4, 9, generator=draws) * (1 + index) for index in range(count)]


@made_once
def floats() -> Net:
    return Net().eval()


def carried_through(model: nn.Module) -> tuple[Any, Tensor, Tensor]:
    """Return the calibrated state, and what the converted and the exported model compute."""
    (x,) = inputs()
    prepared = tc.prepare_fx(model, MAPPING, (x,))
    for batch in inputs(3):
        prepared(batch)
    converted = tc.convert_fx(prepared)
    return prepared.state_dict(), converted(x), tc.export(converted, (x,)).module()(x)


@made_once
def by_one_thread() -> tuple[Any, Tensor, Tensor]:
    return carried_through(floats.itself())


def check_carried(results: tuple[Any, Tensor, Tensor]) -> None:
    """Check what ``carried_through`` returned."""
    state, converts, exports = by_one_thread.itself()
    assert results[0].keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in results[0].items())
    assert torch.equal(results[1], converts)
    assert torch.equal(results[2], exports)


@made_once
def prepared() -> Any:
    return tc.prepare_fx(floats(), MAPPING, (inputs()[0],))


@made_once
def converted() -> Any:
    model = prepared()
    model(inputs()[0])
    return tc.convert_fx(model)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def until(stop: threading.Event, call: Callable[[], None]) -> int:
    calls = 0
    while not stop.is_set() or not calls:
        call()
        calls += 1
        time.sleep(0.001)
    return calls


def test_all_stages_at_once_beside_calls() -> None:
    (x,), model = inputs(), floats()
    serving, watching = converted(), prepared()
    served, bystander = serving(x), model(x)
    methods = nn.Module.__call__, nn.Module.__getattr__, max, math.pow, list(warnings.filters)
    stop, working = threading.Event(), [2]

    def work() -> Any:
        try:
            return carried_through(model)
        finally:
            working[0] -= 1
            if not working[0]:
                stop.set()

    def call() -> None:
        assert torch.equal(serving(x), served)
        # torch.export switches oneDNN off for all threads, which rounds otherwise.
        torch.testing.assert_close(model(x), bystander, rtol=1e-5, atol=1e-6)
        str(x)  # It takes the modes of traces off for a moment.

    results = at_once(work, work, lambda: until(stop, call), lambda: until(stop, lambda: watching(x)))
    for carried in results[:2]:
        check_carried(carried)
    assert methods == (nn.Module.__call__, nn.Module.__getattr__, max, math.pow, list(warnings.filters))
    assert not torch.compiler.is_exporting()


def test_after_two_exports_at_once_left_the_flags_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        for flag in ("_is_exporting_flag", "_is_compiling_flag"):
            patched.setattr(torch.compiler, flag, True)
        assert not is_exporting()
        assert not is_compiling()
        check_carried(carried_through(floats()))


class Dies(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            raise SystemExit
        return x + 1


def test_an_export_that_is_ended_leaves_nothing_set() -> None:
    methods = nn.Module.__call__, nn.Module.__getattr__, max
    with pytest.raises(SystemExit):
        tc.prepare_fx(Dies(), MAPPING, (torch.randn(2),))
    assert methods == (nn.Module.__call__, nn.Module.__getattr__, max)
    assert at_once(lambda: prepared()(inputs()[0]))[0].shape == (4, 4)


def test_observers_are_not_torn() -> None:
    mapping = QConfigMapping().set_global(QConfig(HistogramObserver, default_weight_observer))
    batches = inputs(24)
    together = tc.prepare_fx(floats(), mapping, (batches[0],))
    at_once(*(lambda part=batches[i::4]: [together(batch) for batch in part] for i in range(4)))
    # Histograms whose range grows move counts by rounded shares.
    counts = {round(count) for count in counted(together).values()}
    assert counts == {x.numel() * len(batches) for x in (batches[0], torch.ones(4, 4))}


def test_trained_models_are_not_torn() -> None:
    (x,), batches = inputs(), inputs(24)
    model = tc.prepare_qat_fx(floats().train(), get_default_qat_qconfig_mapping("x86"), (x,)).eval()
    at_once(*(lambda part=batches[i::4]: [model(batch) for batch in part] for i in range(4)))
    lows = [value for name, value in model.state_dict().items() if name.endswith("min_val")]
    highs = [value for name, value in model.state_dict().items() if name.endswith("max_val")]
    assert lows
    assert all(bool((low <= high).all()) for low, high in zip(lows, highs, strict=True))


def counted(model: nn.Module) -> dict[str, float]:
    return {name: float(v.sum()) for name, v in model.state_dict().items() if name.endswith("histogram")}


def test_a_copy_is_not_of_the_middle_of_a_batch() -> None:
    """While another thread calibrates the model, all observers of a copy have seen a batch or none.

    The tensors of ``state_dict()`` are the model's own, as in torch.
    """
    mapping = QConfigMapping().set_global(QConfig(HistogramObserver, default_weight_observer))
    (x,), stop = inputs(), threading.Event()
    model = tc.prepare_fx(floats(), mapping, (x,))
    model(x)
    one = counted(model)

    def read() -> list[dict[str, float]]:
        try:
            return [counted(copy.deepcopy(model)) for _ in range(20)]
        finally:
            stop.set()

    _, states = at_once(lambda: until(stop, lambda: model(x)), read)
    assert len(one) > 3
    for state in states:
        assert len({state[name] / count for name, count in one.items()}) == 1
    assert states[-1] != states[0]


def test_first_calls_of_a_model_that_waits_for_one() -> None:
    with pytest.warns(QuantizationWarning, match="TQ316"):
        waiting = tc.prepare_fx(floats(), MAPPING, None)
    results = at_once(*(lambda batch=batch: waiting(batch) for batch in inputs(4)))
    calibrated = prepared()
    for batch, result in zip(inputs(4), results, strict=True):
        torch.testing.assert_close(calibrated(batch), result)
    assert counted(waiting) == counted(calibrated) != {}


def test_what_another_thread_warns_of_is_not_lost() -> None:
    inside, warned = threading.Event(), threading.Event()

    def keep_silent() -> None:
        with silenced():
            warnings.warn("not heard", stacklevel=1)
            inside.set()
            assert warned.wait(20)

    def warn() -> None:
        assert inside.wait(20)
        warn_user("TQ804", torch="heard", torchao="too", tested="not")
        warned.set()

    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        at_once(keep_silent, warn)
    assert [str(each.message)[:11] for each in caught] == ["torch heard"]
    assert list(warnings.filters) == filters


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.gru = nn.Embedding(9, 8), nn.LSTM(8, 8), nn.GRU(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(self.table(x.abs().long() % 9))[0])[0]


@made_once
def recurrent() -> Any:
    (x,) = inputs()
    model = tc.prepare_fx(Recurrent().eval(), MAPPING, (x,), tc.get_default_prepare_custom_config())
    model(x)
    return tc.convert_fx(model)


def test_two_models_from_four_threads() -> None:
    """Their packed weights are made, used and dropped at once: loaded anew, and of copies that end."""
    (x,), models = inputs(), [recurrent(), converted()]
    expected = [model(x) for model in models]
    states = [model.state_dict() for model in models]

    def call(index: int) -> None:
        for step in range(6):
            model = models[index % 2] if step % 3 else copy.deepcopy(models[index % 2])
            assert torch.equal(model(x), expected[index % 2])

    for model, state in zip(models, states, strict=True):
        model.load_state_dict(state)
    at_once(*(lambda index=index: call(index) for index in range(4)))


# Forks.


class Waits(nn.Module):
    """Its export waits in the middle."""

    inside, go_on = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if is_exporting():
            self.inside.set()
            assert self.go_on.wait(60)
        return x * 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_fork_beside_an_export() -> None:
    by_one_thread.itself()
    methods = nn.Module.__getattr__, max, math.pow
    thread = threading.Thread(target=tc.prepare_fx, args=(Waits(), MAPPING, (torch.randn(2),)))
    thread.start()
    assert Waits.inside.wait(60)

    def in_child() -> bool:
        assert methods == (nn.Module.__getattr__, max, math.pow)
        assert torch.backends.mkldnn.enabled
        check_carried(carried_through(floats.itself()))
        return not torch.compiler.is_exporting()

    try:
        assert methods != (nn.Module.__getattr__, max, math.pow)
        assert not in_fork(in_child)
    finally:
        Waits.go_on.set()
        thread.join()
    assert methods == (nn.Module.__getattr__, max, math.pow)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")
def test_a_lock_is_free_in_the_child_unless_its_thread_holds_it() -> None:
    held, inside, let_go, parent = Lock(), threading.Event(), threading.Event(), os.getpid()

    @once
    def found() -> int:
        with held:
            inside.set()
            assert os.getpid() != parent or let_go.wait(60)
            return os.getpid()

    thread = threading.Thread(target=found)
    thread.start()
    assert inside.wait(60)
    assert not held.acquire(0)
    assert not in_fork(lambda: held.acquire(5) and found() == os.getpid())
    let_go.set()
    thread.join()
    with held:
        assert not in_fork(lambda: held.is_mine)
    assert found() == parent


def carried_in_a_process(_: int) -> Any:
    return carried_through(floats.itself())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_of_their_own(method: str) -> None:
    with multiprocessing.get_context(method).Pool(2) as pool:
        for results in pool.map(carried_in_a_process, range(2)):
            check_carried(results)


# How servers and loaders call models.


def test_tasks_of_asyncio_with_an_executor() -> None:
    (x,), model = inputs(), floats()

    async def serve() -> list[Any]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(3) as pool:
            calls = [loop.run_in_executor(pool, converted.itself(), x) for _ in range(8)]
            carried = asyncio.to_thread(carried_through, model)
            return await asyncio.gather(carried, *calls)

    carried, *served = asyncio.run(serve())
    check_carried(carried)
    assert all(torch.equal(each, converted.itself()(x)) for each in served)


class Predicted(Dataset[Tensor]):
    """Items that a converted model computes, in the processes of a loader."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        result: Tensor = converted.itself()(inputs()[0] + index)
        return result


def test_workers_of_a_loader() -> None:
    expected = torch.cat([converted.itself()(inputs()[0] + index) for index in range(6)])
    loader = DataLoader(Predicted(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    calibrating, found = prepared(), []
    for batch in loader:
        found.append(batch)
        calibrating(inputs()[0])
    assert torch.equal(torch.cat(found), expected)


def test_a_server_with_a_thread_for_each_request() -> None:
    model = converted.itself()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            scale = float(self.path.strip("/"))
            body = repr(model(inputs()[0] * scale).tolist()).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    def ask(scale: int) -> bytes:
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.request("GET", f"/{scale}")
        return connection.getresponse().read()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answers = at_once(*(lambda scale=scale: ask(scale) for scale in range(6)))
        server.shutdown()
    assert answers == [repr(model(inputs()[0] * scale).tolist()).encode() for scale in range(6)]
