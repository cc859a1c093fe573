"""Custom modules: float module -> observed module -> quantized module, each one opaque call of the outer
graph.

Each kind of custom module has a handler in ``modules/registry.py``; the stages loop over the handlers and
name no class. Scripts add a kind with ``register``.
"""

# Each registers its kinds when it is imported; the kinds of scripts come later, and take precedence.
import torchq_compat.modules.attention
import torchq_compat.modules.standalone
import torchq_compat.recurrent.handler
import torchq_compat.recurrent.python_loops  # noqa: F401
from torchq_compat.modules.registry import CustomModuleHandler, register
from torchq_compat.modules.registry import handler_of as handler_of
from torchq_compat.modules.user_modules import UserModuleHandler

__all__ = ["CustomModuleHandler", "UserModuleHandler", "register"]
