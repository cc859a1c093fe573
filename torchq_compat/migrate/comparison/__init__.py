"""What ``torchq-compat compare`` and ``torchq_compat.compare`` do, in stages.

``cases`` says what is compared; ``our_side`` and ``fx_engine`` quantize it; ``collect`` runs float, ours and
FX on the same batches and measures; ``verdict`` judges; ``terminal_report``, ``json_report`` and
``html_report`` show. What passes between measuring and showing are the frozen values of ``results``, which
need no torch.
"""
