"""What is said of devices, tried on one: ``python -m tests.cuda [DEVICE] [WORD]`` prints a table.

``DEVICE`` is ``cuda`` if there is one; every case runs on the CPU too, which finds what is no matter of CUDA.
"""
