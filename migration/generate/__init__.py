"""The generated pages of ``migration/``, and the command that generates them.

python -m migration.generate [--check] [CHECKOUT]
"""
