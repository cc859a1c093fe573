"""The stages of ``torchq-compat compare`` and ``torchq_compat.compare``.

``cases`` defines what is compared; ``our_side`` and ``fx_side`` quantize it; ``collect`` runs the float
model, this package and FX on the same batches and measures; ``causes`` judges; ``text`` and
``page`` show the result. The values passed from measuring to showing are the
frozen values of ``results``, which do not need torch.
"""
