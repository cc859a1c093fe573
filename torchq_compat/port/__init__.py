"""The command line tool ``torchq-compat``, for users with a legacy FX script.

``cli`` and the command modules it lists do not import torch, so that help and errors appear at once.
"""
