"""Scan a whole tree for the constructs of legacy code, and apply their rewrites to a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import libcst as cst

from torchq_compat.port.constructs import Construct, Edit, Site, apply_edits, overlap
from torchq_compat.port.legacy_api.names import DICT_GETTERS, ENGINE_INTERNALS
from torchq_compat.port.reviews import MANUAL_REVIEWS
from torchq_compat.port.rewrites import REWRITES
from torchq_compat.port.rewrites.declaration import Rewrite
from torchq_compat.port.source.files import (
    Document,
    Place,
    Problem,
    UnreadableError,
    find_files,
    read_document,
)
from torchq_compat.port.source.imports import import_edits
from torchq_compat.port.source.moved_tables import MOVED
from torchq_compat.port.source.parsed import Follow, ParsedSource
from torchq_compat.port.source.source_tree import ReExport, Tree
from torchq_compat.read.old_forms import KEYWORDS

# Apply the rewrites to one text, in as many rounds as the sites need.


MAX_ROUNDS = 20
MAX_PASSES = 5


class InvalidResultError(Exception):
    """A rewrite would produce a text that is not valid Python; it is reported and never written."""


@dataclass(frozen=True)
class Origin:
    """Facts about a text that come from other files.

    Attributes:
        follow: resolves names from other files.
        taken_by_others: top-level names of the text that other files use.
    """

    follow: Follow | None = None
    taken_by_others: frozenset[str] = frozenset()

    def parse(self, text: str) -> ParsedSource:
        return ParsedSource(text, self.follow, self.taken_by_others)


def find_sites(source: ParsedSource, rewrites: Iterable[Rewrite] = REWRITES) -> list[Site]:
    """Return all sites in text order, including those for manual review."""
    sites = [site for rewrite in rewrites for site in rewrite.find(source)]
    sites += [site for review in MANUAL_REVIEWS for site in review.find(source)]
    return sorted(dict.fromkeys(sites), key=lambda site: (site.offset, site.code))


def rewrite_text(text: str, rewrites: Iterable[Rewrite] = REWRITES, origin: Origin | None = None) -> str:
    """Return ``text`` with every site rewritten that a rewrite can handle.

    Raises:
        InvalidResultError: the result does not parse.
        cst.ParserSyntaxError: ``text`` is not valid Python.
    """
    origin, rewrites = origin or Origin(), tuple(rewrites)
    source = origin.parse(text)
    for _ in range(MAX_PASSES):
        before = source
        for rewrite in rewrites:
            source = _settle(source, rewrite, origin)
        # The result of one rewrite may be a site of a rewrite that ran before it.
        if source is before:
            break
    return source.text


def _settle(source: ParsedSource, rewrite: Rewrite, origin: Origin) -> ParsedSource:
    for _ in range(MAX_ROUNDS):
        sites = list(_compatible(site for site in rewrite.find(source) if site.edits))
        if not sites:
            break
        source = _apply(source, sites, origin)
    return source


def _compatible(sites: Iterable[Site]) -> Iterator[Site]:
    """Yield the sites whose edits do not overlap those of an earlier site; the rest gets another round."""
    taken: list[Edit] = []
    for site in sites:
        if not overlap(site.edits, taken):
            taken += site.edits
            yield site


def _apply(source: ParsedSource, sites: list[Site], origin: Origin) -> ParsedSource:
    edits = [edit for site in sites for edit in site.edits]
    edits += import_edits(source, [request for site in sites for request in site.imports])
    text = apply_edits(source.data, edits).decode()
    try:
        return origin.parse(text)
    except cst.ParserSyntaxError as error:
        raise InvalidResultError(f"rewriting would break it: {error.message}") from error


# All constructs that ``scan`` finds, by code: those of the rewrites, then those for manual review.


def _by_code(constructs: Iterable[Construct]) -> dict[str, Construct]:
    codes: dict[str, Construct] = {}
    for construct in sorted(constructs):
        if construct.code in codes:
            raise ValueError(f"two declarations have the code {construct.code}")
        codes[construct.code] = construct
    return codes


CONSTRUCTS = _by_code(
    [*(rewrite.construct for rewrite in REWRITES), *(review.construct for review in MANUAL_REVIEWS)]
)

#: Codes that findings no longer have, but that occur in old logs.
RETIRED = _by_code(
    [
        Construct(
            "TQ110",
            "TorchScript",
            "nothing: it stays as it is",
            "`torch.jit.script` and `torch.jit.trace` take what `convert_fx` returns, and `torch.jit.save` "
            "writes it;\n`torch.export` is the way that PyTorch goes on with.",
        )
    ]
)


# Scan a whole tree: find the files that use FX, and the sites in them.
#
# Every file is read once and searched as text. It is parsed in full only if it contains a legacy name, or a
# name under which a file of the tree re-exports one.


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
