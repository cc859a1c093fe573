"""The pages of ``migration/`` that are made from code and data, and the command that makes them.

python -m torchq_compat.migrate.guide [--check] [CHECKOUT]
"""
