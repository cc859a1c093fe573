"""Transformers of Hugging Face with tiny configurations: one tensor out, as with a script's wrapper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entry import Entry, Inputs

__all__ = ["transformer_models"]

VOCABULARY = 100


class FirstResult(nn.Module):
    """A model that returns the first result of ``model`` for the named arguments."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        given = dict(zip(self.names, (first, second), strict=False))
        return self.model(**given, return_dict=False)[0]


def tokens(batch: int, length: int) -> Inputs:
    return (torch.randint(0, VOCABULARY, (batch, length)),)


def tokens_and_mask(batch: int, length: int) -> Inputs:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return (*tokens(batch, length), mask)


def waveform(batch: int, samples: int) -> Inputs:
    return (torch.randn(batch, samples),)


def transformer_models() -> Iterator[Entry]:
    text = {"batch": 2, "length": 12}
    others = ({"batch": 1}, {"batch": 3, "length": 7}, {"length": 1})
    yield Entry("bert_tiny", "transformers.BertModel", _bert, tokens_and_mask, text, others)
    yield Entry("gpt2_tiny", "transformers.GPT2LMHeadModel", _gpt2, tokens, text, others)
    yield Entry(
        "wav2vec2_tiny",
        "transformers.Wav2Vec2Model",
        _wav2vec2,
        waveform,
        {"batch": 2, "samples": 2000},
        ({"batch": 1}, {"samples": 3000}),
    )


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(**_common(), intermediate_size=64, max_position_embeddings=64)
    return FirstResult(BertModel(config, add_pooling_layer=False), "input_ids", "attention_mask")


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, use_cache=False
    )
    return FirstResult(GPT2LMHeadModel(config), "input_ids")


def _wav2vec2() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        **_common(),
        intermediate_size=64,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
    )
    return FirstResult(Wav2Vec2Model(config), "input_values")


def _common() -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
