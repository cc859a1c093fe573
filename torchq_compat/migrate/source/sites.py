"""A site: one place in the source that needs attention, and the edits that rewrite it, if there are any."""

from __future__ import annotations

from dataclasses import dataclass

from torchq_compat.migrate.source.text_edits import Edit

__all__ = ["ImportRequest", "Site"]


@dataclass(frozen=True, order=True)
class ImportRequest:
    """An import that is needed at a byte offset: ``import module``, or ``from module import name``."""

    module: str
    name: str = ""
    offset: int = 0

    @property
    def statement(self) -> str:
        return f"from {self.module} import {self.name}" if self.name else f"import {self.module}"


@dataclass(frozen=True)
class Site:
    """One place that needs attention.

    Attributes:
        code: the code of the construct.
        offset: the offset of its first byte.
        what: the name or expression found.
        edits: the edits that ``rewrite`` would make; all are applied or none.
        imports: the imports that the edited code needs.
        refusal: why it is left for manual review; empty if ``rewrite`` handles it.
    """

    code: str
    offset: int
    what: str
    edits: tuple[Edit, ...] = ()
    imports: tuple[ImportRequest, ...] = ()
    refusal: str = ""
