"""Custom modules: float module -> observed module -> quantized module, each one leaf call of the outer graph.

A kind of custom module is a handler in ``registry``; the stages loop over the handlers and name no class.
"""
