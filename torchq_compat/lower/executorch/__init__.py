"""Write a converted model as an ExecuTorch ``.pte`` file, which runs on phones and microcontrollers.

Legacy: ``convert_fx`` and PyTorch Mobile, whose runtime had the integer kernels -> ``to_executorch``.
ExecuTorch itself is the optional extra ``executorch``, imported only when needed.
"""
