"""An LSTM whose cell works in 16 bits: every part observed on its own, as torch.ao documents it.

Gate sums, gates and cell state have fixed qparams in 32-bit storage; input, weights and hidden state 8 bits.

    python lstm_16bit_parts.py
"""

import torch
from torch import nn
from torch.ao.quantization import FixedQParamsObserver, QConfigMapping, default_qconfig
from torch.ao.quantization.backend_config import DTypeConfig, get_qnnpack_backend_config
from torchq_compat.custom_config import ConvertCustomConfig, PrepareCustomConfig
from torchq_compat.lstm_utils import (
    get_lstm_with_individually_observed_parts,
    get_reference_quantized_lstm_module,
)
from torchq_compat.quantize_fx import convert_to_reference_fx, prepare_fx

INPUTS, HIDDEN, BATCH = 8, 16, 4


def fixed(scale, zero_point, dtype=torch.qint32):
    return FixedQParamsObserver.with_args(scale=scale, zero_point=zero_point, dtype=dtype)


def backend_with_32_bits():
    backend_config = get_qnnpack_backend_config()
    for config in backend_config.configs:
        if config.pattern in (nn.Sigmoid, nn.Tanh, torch.add, torch.mul):
            config.add_dtype_config(DTypeConfig(input_dtype=torch.qint32, output_dtype=torch.qint32))
    return backend_config


BACKEND = backend_with_32_bits()


class UserObservedLSTM(torch.ao.nn.quantizable.LSTM):
    @classmethod
    def from_float(cls, float_lstm):
        state = (torch.zeros(1, BATCH, HIDDEN), torch.zeros(1, BATCH, HIDDEN))
        return get_lstm_with_individually_observed_parts(
            float_lstm=float_lstm,
            example_inputs=(torch.zeros(5, BATCH, INPUTS), state),
            backend_config=BACKEND,
            linear_output_obs_ctr=fixed(2**-11, 2**15),
            sigmoid_obs_ctr=fixed(2**-16, 0),
            tanh_obs_ctr=fixed(2**-15, 2**15),
            cell_state_obs_ctr=fixed(2**-11, 0),
            hidden_state_obs_ctr=fixed(2**-7, 2**7, torch.quint8),
        )


class UserQuantizedLSTM(torch.ao.nn.quantized.LSTM):
    @classmethod
    def from_observed(cls, observed_lstm):
        return get_reference_quantized_lstm_module(observed_lstm=observed_lstm, backend_config=BACKEND)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(INPUTS, HIDDEN)

    def forward(self, x, h, c):
        output, _ = self.lstm(x, (h, c))
        return output


def quantize(model, batches):
    prepare_config = PrepareCustomConfig().set_float_to_observed_mapping(nn.LSTM, UserObservedLSTM)
    # FX finds the quantized class by the class that was observed, not by the user's.
    convert_config = ConvertCustomConfig().set_observed_to_quantized_mapping(
        torch.ao.nn.quantizable.LSTM, UserQuantizedLSTM
    )
    mapping = QConfigMapping().set_global(default_qconfig)
    prepared = prepare_fx(model, mapping, batches[0], prepare_config, backend_config=BACKEND)
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    return convert_to_reference_fx(prepared, convert_config, backend_config=BACKEND)


def report(name, output):
    print(name, *(f"{value:.6f}" for value in output.flatten().tolist()))


def main():
    torch.manual_seed(0)
    model = Encoder().eval()
    state = torch.zeros(1, BATCH, HIDDEN)
    batches = [(torch.randn(12, BATCH, INPUTS), state, state) for _ in range(8)]
    quantized = quantize(model, batches)
    with torch.no_grad():
        report("float", model(*batches[-1]))
        report("quantized", quantized(*batches[-1]))


if __name__ == "__main__":
    main()
