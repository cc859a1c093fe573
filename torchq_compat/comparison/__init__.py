"""The stages of ``torchq-compat compare`` and ``torchq_compat.compare``.

``cases`` defines what is compared; ``our_side`` and ``fx_engine`` quantize it; ``collect`` runs the float
model, this package and FX on the same batches and measures; ``verdict`` judges; ``terminal_report``,
``json_report`` and ``html_report`` show the result. The values passed from measuring to showing are the
frozen values of ``results``, which do not need torch.
"""
