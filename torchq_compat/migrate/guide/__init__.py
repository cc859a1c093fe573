"""The generated pages of ``migration/``, and the command that generates them.

python -m torchq_compat.migrate.guide [--check] [CHECKOUT]
"""
