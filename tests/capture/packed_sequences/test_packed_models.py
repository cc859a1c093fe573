"""Packing in the ways people write it, lengths as data, and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    QConfigMapping,
    default_dynamic_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from torch.fx import GraphModule
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import torchq_compat as tc
from tests.helpers.histograms import coarse_qconfig_mapping
from tests.helpers.once import made_once
from tests.helpers.oracle import calibrate, leaves, sqnr
from tests.helpers.packed_models import map_all
from tests.helpers.plain_loops import check_against_plain_loops, with_plain_loops
from torchq_compat.errors import CaptureError, InputError

MAPPING = coarse_qconfig_mapping("x86")
Forward = Callable[..., Any]


class Tagger(nn.Module):
    """Parts for the models below."""

    def __init__(self, forward: Forward, *, bidirectional: bool = True) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True, bidirectional=bidirectional)
        self.second = nn.GRU(6, 8, batch_first=True)
        self.attention = nn.Linear(16 if bidirectional else 8, 1)
        self.norm = nn.BatchNorm1d(6)
        self.given = forward

    def forward(self, x: Tensor, lengths: Any) -> Any:
        return self.given(self, x, lengths)


def unpacked(output: PackedSequence, **kwargs: Any) -> Tensor:
    padded, _ = pad_packed_sequence(output, batch_first=True, **kwargs)
    return padded


def old_sorting(model: Any, x: Tensor, lengths: Tensor) -> Any:
    by_length, order = torch.sort(lengths, 0, descending=True)
    _, back = torch.sort(order)
    output, (h, _) = model.rnn(pack_padded_sequence(x[order], by_length.cpu(), batch_first=True))
    return unpacked(output)[back], torch.cat((h[-2], h[-1]), -1)[back]


def lengths_as_list(model: Any, x: Tensor, lengths: Tensor) -> Any:
    return unpacked(model.rnn(pack_padded_sequence(x, lengths.tolist(), batch_first=True))[0])


def sorted_lengths_as_list(model: Any, x: Tensor, lengths: Tensor) -> Any:
    by_length, order = lengths.sort(descending=True)
    packed = pack_padded_sequence(x[order], by_length.tolist(), batch_first=True)
    return unpacked(model.rnn(packed)[0])[order.argsort()]


def lengths_as_array(model: Any, x: Tensor, lengths: Tensor) -> Any:
    return unpacked(model.rnn(pack_padded_sequence(x, lengths.cpu().numpy(), batch_first=True))[0])


def masked_attention(model: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    output, found = pad_packed_sequence(model.rnn(packed)[0], batch_first=True)
    mask = torch.arange(output.size(1))[None] < found[:, None]
    scores = model.attention(output).squeeze(-1).masked_fill(~mask, float("-inf"))
    pooled = torch.bmm(torch.softmax(scores, -1).unsqueeze(1), output).squeeze(1)
    return pooled, output[torch.arange(output.size(0)), lengths - 1], output.max(1)[0]


def beside_its_input(model: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return unpacked(model.rnn(packed)[0], total_length=x.size(1)) + x.sum(-1, keepdim=True)


def to_a_fixed_length(model: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return unpacked(model.rnn(packed)[0], total_length=20)


def several_readers(model: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return model.rnn(packed)[1][0], unpacked(model.second(packed)[0])


def ops_on_rows(model: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    rows = packed.data
    rows = torch.relu(model.norm(rows)) + rows.view(-1, 2, 3).flip(-1).reshape(rows.size(0), 6)
    output, _ = model.rnn(packed._replace(data=rows))
    return unpacked(output), model.attention(output.data)


def cut_to_the_longest(model: Any, x: Tensor, lengths: Tensor) -> Any:
    longest = lengths.max()
    mask = torch.arange(longest)[None] < lengths[:, None]
    output, _ = model.rnn(x[:, :longest])
    return model.attention(output).squeeze(-1).masked_fill(~mask, 0.0)


def last_steps(model: Any, x: Tensor, lengths: Tensor) -> Any:
    output, _ = model.rnn(x)
    rows = (lengths - 1).view(-1, 1, 1).expand(-1, 1, 16)
    return output[torch.arange(x.size(0)), lengths - 1], output.gather(1, rows).squeeze(1)


def packs_returned(model: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    output, (h, _) = model.rnn(packed)
    return {
        "all": output,
        "last": [h, output.data * 2, output.batch_sizes],
        "scores": model.attention(output.data),
    }


class Together(Tagger):
    """Several forwards of the same modules. Those of one model give the recurrent module the same sequences:
    its ranges are those of each forward alone."""

    def __init__(self, *forwards: Forward, bidirectional: bool) -> None:
        super().__init__(
            lambda model, *given: [forward(model, *given) for forward in forwards],
            bidirectional=bidirectional,
        )


#: Forwards that one model has together, by what they read.
MODELS: dict[str, tuple[Forward, ...]] = {
    "ways to pack": (
        old_sorting,
        lengths_as_list,
        sorted_lengths_as_list,
        lengths_as_array,
        beside_its_input,
        several_readers,
    ),
    "results": (masked_attention, to_a_fixed_length, packs_returned),
    "rows": (ops_on_rows,),
    "steps": (cut_to_the_longest, last_steps),
}


def sequences(batch: int, steps: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(1, steps + 1, (batch,)).sort(descending=True).values
    return torch.randn(batch, steps, 6), lengths


@made_once
def converted(name: str) -> tuple[Together, GraphModule, GraphModule]:
    """Return the float model, the reference and the lowered one. Where also a program is made of it, it has
    one direction."""
    torch.manual_seed(0)
    model = Together(*MODELS[name], bidirectional=name != "results").eval()
    prepared = tc.prepare_fx(model, MAPPING, sequences(4, 7), map_all())
    calibrate(prepared, [sequences(5, 9) for _ in range(4)])
    return model, tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, subtests: pytest.Subtests) -> None:
    torch.manual_seed(0)
    model, reference, lowered = converted.itself(name)
    forms = model, reference, lowered, with_plain_loops(reference, model)
    for batch, steps in ((3, 11), (6, 5)):
        given = sequences(batch, steps)
        results = zip(MODELS[name], *(form(*given) for form in forms), strict=True)
        for forward, *of_forms in results:
            with subtests.test(forward=forward.__name__, batch=batch):
                exact, found, fast, looped = (leaves(each) for each in of_forms)
                check_against_plain_loops(exact, found, looped)
                assert all(sqnr(b, c) > 40 for b, c in zip(found, fast, strict=True))


def test_a_returned_pack_is_one_in_every_form() -> None:
    torch.manual_seed(0)
    model = Tagger(packs_returned)
    prepared = tc.prepare_qat_fx(
        model.train(), get_default_qat_qconfig_mapping("x86"), sequences(4, 7), map_all()
    )
    for _ in range(2):
        prepared(*sequences(5, 9))["all"].data.square().mean().backward()
    assert all(weight.grad is not None for weight in prepared.get_submodule("rnn").parameters())
    given = sequences(3, 11)
    for form in (prepared.eval(), tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)):
        exact, found = model.eval()(*given), form(*given)
        assert isinstance(found["all"], PackedSequence)
        assert [t.shape for t in leaves(exact)] == [t.shape for t in leaves(found)]
        assert torch.equal(found["all"].unsorted_indices, exact["all"].unsorted_indices)


def test_a_pack_is_no_argument() -> None:
    packed = pack_padded_sequence(torch.randn(7, 4, 6), torch.tensor([7, 5, 5, 1]))
    with pytest.raises(InputError, match=r"PackedSequence(.|\n)*forward\(self, x, lengths\)"):
        tc.prepare_fx(nn.Sequential(nn.LSTM(6, 8)).eval(), MAPPING, (packed,), map_all())


def whole_steps(model: Any, x: Tensor, lengths: Tensor) -> Any:
    """Compare the number of steps with the input's, as code with a mask of the input's size does."""
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    output = unpacked(model.rnn(packed)[0])
    assert output.size(1) == x.size(1)
    return output * 2


def test_a_model_that_asks_for_the_number_of_steps() -> None:
    torch.manual_seed(0)
    model = Tagger(whole_steps).eval()
    x, lengths = torch.randn(3, 7, 6), torch.tensor([7, 3, 1])
    prepared = tc.prepare_fx(model, MAPPING, (x, lengths), map_all())
    calibrate(prepared, [(torch.randn(4, 9, 6), torch.tensor([9, 3, 7, 1])) for _ in range(4)])
    converted = tc.convert_to_reference_fx(prepared)
    given = torch.randn(4, 9, 6), torch.tensor([2, 9, 9, 5])
    looped = with_plain_loops(converted, model)(*given)
    check_against_plain_loops(model(*given), converted(*given), looped)
    with pytest.raises(
        InputError, match=r"longest of the packed sequences has 5 steps.*9.*\n?.*total_length"
    ):
        converted(torch.randn(2, 9, 6), torch.tensor([5, 2]))


def decides_by_the_steps(model: Any, x: Tensor, lengths: Tensor) -> Any:
    output = unpacked(model.rnn(pack_padded_sequence(x, lengths, batch_first=True))[0])
    return output * 2 if output.size(1) > 8 else output


def cuts_and_decides(model: Any, x: Tensor, lengths: Tensor) -> Any:
    cut = x[:, : lengths.max()]
    return cut * 2 if cut.size(1) > 8 else cut


@pytest.mark.filterwarnings("ignore::torchq_compat.errors.QuantizationWarning")
def test_no_step_count_is_decided_by_the_example() -> None:
    """Of the number of steps torch knows that the example has no more than 7."""
    torch.manual_seed(0)
    example = torch.randn(3, 7, 6), torch.tensor([7, 3, 1])
    model = Tagger(decides_by_the_steps).eval()
    prepared = tc.prepare_fx(model, MAPPING, example, map_all())
    given = torch.randn(3, 5, 6), torch.tensor([5, 3, 1])
    torch.testing.assert_close(prepared(*given), model(*given))
    for steps in (9, 20):
        with pytest.raises(InputError, match="1 to 8"):
            prepared(torch.randn(3, steps, 6), torch.tensor([steps, 3, 1]))
    with pytest.raises(CaptureError):
        tc.prepare_fx(Tagger(cuts_and_decides).eval(), MAPPING, example, map_all())


def test_sizes_are_no_symbols_where_lengths_are_values() -> None:
    torch.manual_seed(0)
    prepared = tc.prepare_fx(Tagger(several_readers).eval(), MAPPING, sequences(4, 7), map_all())
    shapes = [node.meta["val"].shape for node in prepared.graph.find_nodes(op="placeholder")]
    assert shapes == [(4, 7, 6), (4,)]
    assert not any(isinstance(size, torch.SymInt) for shape in shapes for size in shape)


def over_features(model: Any, x: Tensor, lengths: Tensor) -> Any:
    """The number of features depends on the input, as behind a convolution over a spectrum."""
    rows = x.reshape(x.size(0), x.size(1), -1)
    return unpacked(model.rnn(pack_padded_sequence(rows, lengths, batch_first=True))[0])


def test_a_size_that_only_the_kernel_of_torch_takes_is_no_size() -> None:
    """For sequences of equal length torch's kernel does not check the width, and reads beyond its input."""
    torch.manual_seed(0)
    model = Tagger(over_features).eval()
    x, lengths = torch.randn(4, 7, 6, 1), torch.tensor([7, 5, 5, 2])
    prepared = tc.prepare_fx(model, MAPPING, (x, lengths), map_all())
    torch.testing.assert_close(prepared(x, lengths), model(x, lengths))
    for batch in (1, 4):
        with pytest.raises(InputError, match=r"is fixed to 6"):
            prepared(torch.randn(batch, 8, 5, 1), torch.full((batch,), 8))


def tagged(model: Any, x: Tensor, lengths: Tensor) -> Any:
    return unpacked(model.rnn(pack_padded_sequence(x, lengths, batch_first=True))[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_widths_that_torch_fails_to_check_are_not_tried(kind: Any) -> None:
    """With one sequence torch runs at any width, and the model seemed to fix its own."""
    torch.manual_seed(0)
    model = Tagger(tagged)
    model.rnn = kind(6, 8, batch_first=True)
    example = torch.randn(1, 7, 6), torch.tensor([7])
    prepared = tc.prepare_fx(model.eval(), MAPPING, example, map_all())
    given = torch.randn(3, 9, 6), torch.tensor([9, 4, 2])
    torch.testing.assert_close(prepared(*given), model(*given))


def rows_averaged(model: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    return model.rnn(packed)[0].data.mean(0)


def rows_softmaxed(model: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    return torch.softmax(model.rnn(packed)[0].data, 0)


def rows_as_one_sequence(model: Any, x: Tensor, lengths: Tensor) -> Any:
    return model.rnn(pack_padded_sequence(x, lengths, batch_first=True).data)[0]


def rows_cumulated(model: Any, x: Tensor, lengths: Tensor) -> Any:
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    return model.rnn(packed._replace(data=packed.data.cumsum(0)))[0].data


@pytest.mark.parametrize("forward", [rows_averaged, rows_softmaxed, rows_as_one_sequence, rows_cumulated])
def test_ops_that_mix_rows_are_refused(forward: Forward) -> None:
    with pytest.raises(CaptureError, match=r"test_packed_models.py:\d+ \(.*mixes the rows") as caught:
        tc.prepare_fx(Tagger(forward).eval(), MAPPING, sequences(4, 7), map_all())
    assert "Hint:" in str(caught.value)


def loops_over_lengths(model: Any, x: Tensor, lengths: Tensor) -> Any:
    mask = torch.zeros(x.size(0), x.size(1))
    for index, length in enumerate(lengths):
        mask[index, : int(length)] = 1
    return model.attention(model.rnn(x)[0]).squeeze(-1) * mask


def integer_of_lengths(model: Any, x: Tensor, lengths: Tensor) -> Any:
    return model.rnn(x)[0][:, : int(lengths.max())]


@pytest.mark.parametrize("forward", [loops_over_lengths, integer_of_lengths])
def test_lengths_in_python_are_refused_with_a_way(forward: Forward) -> None:
    with pytest.raises(CaptureError, match=r"test_packed_models.py:\d+ \(.*length") as caught:
        tc.prepare_fx(Tagger(forward).eval(), MAPPING, sequences(4, 7), map_all())
    assert re.search(r"Hint: .*lengths\.max\(\)\.item\(\).*lengths\[:, None\]", str(caught.value))


def test_lengths_in_a_list_are_fixed_and_said() -> None:
    model = Tagger(lambda m, x, n: unpacked(m.rnn(pack_padded_sequence(x, n, batch_first=True))[0])).eval()
    x, lengths = torch.randn(3, 7, 6), [7, 4, 2]
    prepared = tc.prepare_fx(model, MAPPING, (x, lengths), map_all())
    prepared(x, lengths)
    converted = tc.convert_to_reference_fx(prepared)
    looped = with_plain_loops(converted, model)(x, lengths)
    check_against_plain_loops(model(x, lengths), converted(x, lengths), looped)
    fixed = {d.path: d.reason for d in tc.explain(converted) if d.path.startswith("input lengths")}
    assert list(fixed) == ["input lengths[0]", "input lengths[1]", "input lengths[2]"]
    assert fixed["input lengths[1]"].startswith("at 4")
    with pytest.raises(InputError, match=r"lengths\[1\].*fixed to 4.*\n?.*tensor"):
        converted(x, [7, 5, 2])


def test_lengths_that_do_not_fit() -> None:
    def sorted_lengths(model: Any, x: Tensor, lengths: Tensor) -> Any:
        return unpacked(model.rnn(pack_padded_sequence(x, lengths, batch_first=True))[0])

    model = Tagger(sorted_lengths).eval()
    prepared = tc.prepare_fx(model, MAPPING, sequences(4, 7), map_all())
    calibrate(prepared, [sequences(4, 7)])
    forms = prepared, tc.convert_to_reference_fx(prepared), tc.convert_fx(prepared)
    for lengths in ([6, 3, 2], [5, 3, 0], [5, 3, -1], [2, 3, 5], [5, 3]):
        given = torch.randn(3, 5, 6), torch.tensor(lengths)
        with pytest.raises(RuntimeError):
            model(*given)
        for made in forms:
            with pytest.raises(InputError, match=r"length|sorted|batch_size"):
                made(*given)


def test_dynamic_and_float_modules_take_packs() -> None:
    torch.manual_seed(0)
    model, given = Tagger(several_readers).eval(), sequences(5, 9)
    exact = leaves(model(*given))
    dynamic = QConfigMapping().set_global(default_dynamic_qconfig)
    converted = tc.convert_fx(tc.prepare_fx(model, dynamic, sequences(4, 7)))
    assert all(25 < sqnr(a, b) < 60 for a, b in zip(exact, leaves(converted(*given)), strict=True))
    left = get_default_qconfig_mapping("x86").set_object_type(nn.LSTM, None).set_object_type(nn.GRU, None)
    prepared = tc.prepare_fx(model, left, sequences(4, 7), map_all())
    converted = tc.convert_fx(prepared)
    assert type(converted.rnn) is nn.LSTM
    assert all(sqnr(a, b) > 100 for a, b in zip(exact, leaves(converted(*given)), strict=True))
