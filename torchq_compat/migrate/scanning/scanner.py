"""Scan a whole tree: find the files that use FX, and the sites in them.

Every file is read once and searched as text. It is parsed in full only if it contains a legacy name, or a
name under which a file of the tree re-exports one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import libcst as cst

from torchq_compat.migrate.legacy_api.construct import Construct
from torchq_compat.migrate.legacy_api.legacy_names import DICT_GETTERS, ENGINE_INTERNALS, KEYWORDS, MOVED
from torchq_compat.migrate.manual_review import MANUAL_REVIEWS
from torchq_compat.migrate.rewrites import REWRITES
from torchq_compat.migrate.scanning.constructs import CONSTRUCTS
from torchq_compat.migrate.scanning.rewriter import Origin, find_sites
from torchq_compat.migrate.source.documents import Document, Place, read_document
from torchq_compat.migrate.source.sites import Site
from torchq_compat.migrate.source.source_files import Problem, UnreadableError, find_files
from torchq_compat.migrate.source.source_tree import ReExport, Tree

__all__ = ["Finding", "Progress", "Scan", "scan_paths"]

#: Constructs whose rewriting depends on which other files use a name of the file.
RENAMING = ("TQ102", "TQ105", "TQ106", "TQ109")
TOO_DEEP = (RecursionError, MemoryError)


def _words() -> Iterator[str]:
    for moved in MOVED:
        yield from (*moved.names, *moved.names.values())
    yield from (name.rpartition(".")[2] for name in DICT_GETTERS)
    yield from KEYWORDS
    yield from ("quantize_fx", "lstm_utils", "_numeric_suite", "_numeric_suite_fx", "quantize_dynamic")
    yield "quantize_pt2e"
    for rewrite in REWRITES:
        yield from rewrite.words
    for review in MANUAL_REVIEWS:
        yield from review.words


FX_MODULES = "|".join(re.escape(name.rpartition(".")[2]) for name in ENGINE_INTERNALS if ".fx." in name)


def _legacy_word() -> re.Pattern[bytes]:
    return re.compile(
        rf"\b(?:{'|'.join(sorted(set(_words())))})\b"
        rf"|torch\.(?:ao\.)?quantization\.fx(?:\.(?:{FX_MODULES})\b| import\b)|torch\.ao\.ns\b"
        r"|torch\.ao\.quantization(?:\.| import )(?:quantizer|pt2e)\b".encode()
    )


LEGACY_WORD = _legacy_word()

ItemT = TypeVar("ItemT")


class Progress(Protocol):
    """Wraps items to show the progress while they are processed."""

    def __call__(self, description: str, items: Sequence[ItemT], /) -> Iterable[ItemT]: ...


def no_progress(description: str, items: Sequence[ItemT]) -> Iterable[ItemT]:
    del description
    return items


@dataclass(frozen=True)
class Finding:
    """A site in a file."""

    path: Path
    place: Place
    site: Site

    @property
    def construct(self) -> Construct:
        return CONSTRUCTS[self.site.code]

    @property
    def by(self) -> str:
        """Who handles the site: ``rewrite`` or ``manual review``."""
        return "manual review" if self.site.refusal else "rewrite"

    @property
    def remark(self) -> str:
        if self.site.refusal:
            return self.site.refusal
        return "" if self.site.edits else "settled where it is imported"

    @property
    def line(self) -> str:
        """The finding as one line: place, code, the replacement, and the reason for manual review."""
        construct = self.construct
        told = f"{self.path}:{self.place}: {construct.code} {self.site.what} -> {construct.becomes}"
        if self.site.refusal:
            return f"{told} [by hand: {self.site.refusal}]"
        return f"{told} [{self.remark}]" if self.remark else told


@dataclass
class Scan:
    """The result of scanning a tree.

    Attributes:
        files: the number of files read.
        documents: the files that may use FX, with facts from other files.
        findings: in the order of files and lines.
        problems: files and folders that could not be read.
    """

    files: int = 0
    documents: list[tuple[Document, Origin]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def scan_paths(paths: Iterable[Path], progress: Progress = no_progress) -> Scan:
    """Scan all Python files and notebooks under ``paths``.

    Args:
        paths: files and folders.
        progress: wraps files and documents while they are processed.

    Raises:
        PathError: one of ``paths`` does not exist.
    """
    scan = Scan()
    files: list[Path] = []
    for found in find_files(paths):
        if isinstance(found, Problem):
            scan.problems.append(found)
        else:
            files.append(found)
    scan.files = len(files)
    tree = Tree(files)
    documents = list(_candidates(files, tree, scan.problems, progress))
    # Find all sites first: which names of a file others use is known once the names in those are resolved.
    sites = {
        document.path: _sites(document, _origin(tree, document.path), scan.problems)
        for document in progress("Parsing", documents)
    }
    for document in documents:
        origin = _origin(tree, document.path)
        if origin.taken_by_others and any(f.site.code in RENAMING for f in sites[document.path]):
            sites[document.path] = _sites(document, origin, [])
        scan.documents.append((document, origin))
        scan.findings += sites[document.path]
    scan.findings.sort(key=lambda finding: (str(finding.path), finding.site.offset))
    scan.problems.sort(key=lambda problem: str(problem.path))
    return scan


def _origin(tree: Tree, path: Path) -> Origin:
    return Origin(partial(tree.follow, path), tree.taken_from(path))


def _candidates(
    files: list[Path], tree: Tree, problems: list[Problem], progress: Progress
) -> Iterator[Document]:
    """Yield the documents that contain a legacy word, then those that contain a name these re-export, and so
    on."""
    is_candidate: Callable[[bytes], object] = LEGACY_WORD.search
    known: set[ReExport] = set()
    remaining, first_round = files, True
    while remaining:
        silent, re_exported = [], set[ReExport]()
        for path in progress("Reading", remaining) if first_round else remaining:
            try:
                document = read_document(path)
            except UnreadableError as error:
                problems.append(Problem(path, str(error)))
                continue
            if first_round:
                problems += [Problem(path, problem) for problem in document.problems]
            if not is_candidate(document.source.raw):
                silent.append(path)
                continue
            try:
                re_exported |= tree.add(path, document.syntax)
            except TOO_DEEP:
                problems.append(Problem(path, "is nested too deeply"))
                continue
            yield document
        if re_exported <= known:
            break
        is_candidate = partial(_uses, re_exported - known)
        known |= re_exported
        remaining, first_round = silent, False


def _uses(re_exported: set[ReExport], raw: bytes) -> bool:
    return any(name.encode() in raw and module.encode() in raw for name, module in re_exported)


def _sites(document: Document, origin: Origin, problems: list[Problem]) -> list[Finding]:
    try:
        source = origin.parse(document.text)
        sites = find_sites(source)
    except cst.ParserSyntaxError as error:
        problems.append(Problem(document.path, f"line {error.raw_line}: {error.message}"))
        return []
    except TOO_DEEP:
        problems.append(Problem(document.path, "is nested too deeply"))
        return []
    return [
        Finding(document.path, document.place(source.line(site.offset), source.column(site.offset)), site)
        for site in sites
    ]
