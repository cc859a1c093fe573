"""The command line tool: what a person with a legacy FX script types.

``cli`` and the commands it lists never import torch, so that help and errors come at once.
"""
