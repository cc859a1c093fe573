"""Exported recurrent operators, ``aten.lstm.input`` and related, decomposed for any torchao Quantizer."""
