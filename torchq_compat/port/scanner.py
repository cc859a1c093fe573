"""Scan a whole tree for the constructs of legacy code, and apply their rewrites to a text."""

import ast
import multiprocessing
import os
import re
import signal
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import libcst as cst

from torchq_compat.port.constructs import CONSTRUCTS, Construct, Edit, Site, apply_edits, overlap
from torchq_compat.port.finders import Finder
from torchq_compat.port.names import DICT_GETTERS, ENGINE_INTERNALS, MOVED
from torchq_compat.port.process import progress
from torchq_compat.port.reviews import MANUAL_REVIEWS
from torchq_compat.port.rewrites import REWRITES
from torchq_compat.port.source import files as source_files
from torchq_compat.port.source.fx_calls import fx_calls
from torchq_compat.port.source.imports import import_edits
from torchq_compat.port.source.parsed import ParsedSource
from torchq_compat.port.source.source_tree import ReExport, Tree, imports_of, installed_lacks
from torchq_compat.read.old_forms import KEYWORDS

# Apply the rewrites to one text, in as many rounds as the sites need.


MAX_ROUNDS = 20
#: Codes of rewrites that move a file from FX's engine to this one; the first two name its functions.
MOVING = ("TQ101", "TQ102", "TQ108", "TQ116")
#: What of FX's engine prepares, fuses or converts models, and has no counterpart in ``rewrite``.
MAKES_MODELS = tuple(
    f"torch.{package}quantization.{name}"
    for package in ("", "ao.")
    for name in (
        *(f"quantize_fx._{name}" for name in ("prepare_fx", "convert_fx", "fuse_fx", "swap_ff_with_fxff")),
        "quantize_fx._prepare_standalone_module_fx",
        *(f"fx.{name}." for name in ("convert", "prepare", "fuse", "_equalize", "_model_report")),
        *(f"fx.{name}." for name in ("_lower_to_native_backend", "lower_to_fbgemm", "lower_to_qnnpack")),
    )
)
DECOMPOSED = "_convert_to_reference_decomposed_fx"
MAX_PASSES = 5


class InvalidResultError(Exception):
    """A rewrite would produce a text that is not valid Python; it is reported and never written."""


#: Parses a text, with what other files say of its names.
Parse = Callable[[str], ParsedSource]


def find_sites(source: ParsedSource) -> list[Site]:
    """Return all sites in text order, including those for manual review."""
    sites = [site for rewrite in REWRITES for site in _sites_of(source, rewrite)]
    sites += [site for review in MANUAL_REVIEWS for site in review.find(source)]
    return sorted(dict.fromkeys(sites), key=lambda site: (site.offset, site.code))


def rewrite_text(text: str, rewrites: Iterable[Finder] = REWRITES, parse: Parse = ParsedSource) -> str:
    """Return ``text`` with every site rewritten that a rewrite can handle.

    Raises:
        InvalidResultError: the result does not parse.
        cst.ParserSyntaxError: ``text`` is not valid Python.
    """
    source, rewrites = parse(text), tuple(rewrites)
    for _ in range(MAX_PASSES):
        before = source
        for rewrite in rewrites:
            source = _settle(source, rewrite, parse)
        # The result of one rewrite may be a site of a rewrite that ran before it.
        if source is before:
            break
    return source.text


def _settle(source: ParsedSource, rewrite: Finder, parse: Parse) -> ParsedSource:
    for _ in range(MAX_ROUNDS):
        edits: list[Edit] = []
        sites: list[Site] = []
        for site in _sites_of(source, rewrite):
            # A site whose edits overlap those of an earlier one gets another round.
            if site.edits and not overlap(site.edits, edits):
                edits += site.edits
                sites.append(site)
        if not sites:
            break
        requests = [request for site in sites for request in site.imports]
        text = apply_edits(source.data, [*edits, *import_edits(source, requests)]).decode()
        try:
            source = parse(text)
        except cst.ParserSyntaxError as error:
            raise InvalidResultError(f"rewriting would break it: {error.message}") from error
    return source


def _sites_of(source: ParsedSource, rewrite: Finder) -> Iterator[Site]:
    """Yield the sites of ``rewrite``; those whose imports the installed packages do not have are refused."""
    stays = stays_with_fx(source) if rewrite.code in MOVING else ""
    for site in rewrite.find(source):
        reason = (stays or _missing(source, site)) if site.edits else ""
        yield site.settled(reason, site.edits, site.imports)


@lru_cache(maxsize=2)
def stays_with_fx(source: ParsedSource) -> str:
    """Return why the FX functions of a file stay FX's, all of them: what one engine prepared the other cannot
    convert. Empty if they can move."""
    if engine := next((name for name in source.used_names() if name.startswith(MAKES_MODELS)), ""):
        return f"the file also uses {engine}, which stays with FX; its FX names move all or none"
    refused = (s for rewrite in REWRITES if rewrite.code in MOVING[:2] for s in rewrite.find(source))
    first = next((s for s in refused if s.refusal or _missing(source, s)), None)
    if first is not None:
        return f"{first.what} at line {source.line(first.offset)} stays with FX; FX names move all or none"
    decomposed = (c for c in fx_calls(source) if source.code(c.node.func).endswith(DECOMPOSED))
    if any(sum(arg.keyword is None for arg in call.node.args) > 2 for call in decomposed):
        return f"{DECOMPOSED} has other positional arguments than convert_to_reference_fx: name them"
    return ""


def _missing(source: ParsedSource, site: Site) -> str:
    """Return why an import that the site's edits write fails; empty if none does."""
    requested = {(request.module, request.name) for request in site.imports}
    starts, spans = _import_spans(source)
    for span in {spans[at] for edit in site.edits if (at := bisect_right(starts, edit.start) - 1) >= 0}:
        start, end = span
        if inside := [edit for edit in site.edits if start <= edit.start and edit.end <= end]:
            moved = [edit._replace(start=edit.start - start, end=edit.end - start) for edit in inside]
            before = source.data[start:end]
            requested |= _imports_in(apply_edits(before, moved)) - _imports_in(before)
    return next(filter(None, (installed_lacks(*request) for request in sorted(requested))), "")


@lru_cache(maxsize=2)
def _import_spans(source: ParsedSource) -> tuple[list[int], list[tuple[int, int]]]:
    spans = sorted((source.start(node), source.end(node)) for node in source.imports())
    return [start for start, _ in spans], spans


def _imports_in(statements: bytes) -> set[tuple[str, str]]:
    return imports_of(ast.parse(b"\n".join(line.strip() for line in statements.splitlines())))


# Scan a whole tree: find the files that use FX, and the sites in them.
#
# Every file is read once and searched as text. It is parsed in full only if it contains a legacy name, or a
# name under which a file of the tree re-exports one.


#: Constructs whose rewriting depends on which other files use a name of the file.
RENAMING = ("TQ102", "TQ105", "TQ106", "TQ109")
TOO_DEEP = (RecursionError, MemoryError)
#: The code of what is found in no text, but of a file.
TOO_LONG = "TQ214"


def _words() -> Iterator[str]:
    for moved in MOVED:
        yield from (*moved.names, *moved.names.values())
    yield from (name.rpartition(".")[2] for name in DICT_GETTERS)
    yield from KEYWORDS
    yield from ("quantize_fx", "lstm_utils", "_numeric_suite", "_numeric_suite_fx", "quantize_dynamic")
    yield "quantize_pt2e"
    for finder in (*REWRITES, *MANUAL_REVIEWS):
        yield from finder.words


FX_MODULES = "|".join(re.escape(name.rpartition(".")[2]) for name in ENGINE_INTERNALS if ".fx." in name)


LEGACY_WORD = re.compile(
    rf"\b(?:{'|'.join(sorted(set(_words())))})\b"
    rf"|torch\.(?:ao\.)?quantization\.fx(?:\.(?:{FX_MODULES})\b| import\b)|torch\.ao\.ns\b"
    r"|torch\.ao\.quantization(?:\.| import )(?:quantizer|pt2e)\b".encode()
)


def may_concern(raw: bytes) -> bool:
    """Return whether a file may use what this tool knows."""
    return LEGACY_WORD.search(raw) is not None


ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Finding:
    """A site in a file."""

    path: Path
    place: source_files.Position
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
        described = f"{self.path}:{self.place}: {construct.code} {self.site.what} -> {construct.becomes}"
        if self.site.refusal:
            return f"{described} [by hand: {self.site.refusal}]"
        return f"{described} [{self.remark}]" if self.remark else described


#: Seconds that one file may take.
SECONDS = 60.0
#: How many files are worth starting processes for.
WORTH_PROCESSES = 8


class TooLongError(Exception):
    """A file took longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise a TooLongError in the ``with`` block after ``seconds`` of work, if the system has a signal for
    it; time in which other processes run does not count."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise TooLongError(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


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
    documents: list[tuple[source_files.Document, Parse]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    problems: list[source_files.Problem] = field(default_factory=list)


def scan_paths(paths: Iterable[Path], *, jobs: int = 1, seconds: float = SECONDS) -> Scan:
    """Scan all Python files and notebooks under ``paths``, with a bar on a terminal.

    Args:
        paths: files and folders.
        jobs: the number of processes, for many files.
        seconds: how long one file may take; it is a finding then, TQ214.

    Raises:
        PathError: one of ``paths`` does not exist.
    """
    everything = list(source_files.find_files(paths))
    files = [item for item in everything if isinstance(item, Path)]
    scan = Scan(len(files), problems=[item for item in everything if isinstance(item, source_files.Problem)])
    tree = Tree(files)
    documents = list(_candidates(files, tree, scan.problems))
    # Find all sites first: which names of a file others use is known once the names in those are resolved.
    sites: dict[Path, list[Finding]] = {}
    results = in_processes(partial(_sites_and_taken, tree, seconds), documents, jobs, "Parsing")
    for document, (findings, problems, taken) in zip(documents, results, strict=True):
        sites[document.path] = findings
        scan.problems += problems
        tree.add_taken(taken)
    for document in documents:
        parse = _parser(tree, document.path)
        if tree.taken.get(document.path) and any(f.site.code in RENAMING for f in sites[document.path]):
            sites[document.path], _ = _sites(document, parse, seconds)
        scan.documents.append((document, parse))
        scan.findings += sites[document.path]
    scan.findings.sort(key=lambda finding: (str(finding.path), finding.site.offset))
    scan.problems.sort(key=lambda problem: str(problem.path))
    return scan


def in_processes(
    work: Callable[[source_files.Document], ResultT],
    documents: Sequence[source_files.Document],
    jobs: int,
    description: str,
) -> Iterator[ResultT]:
    """Yield ``work(document)`` for each document, in order; in ``jobs`` processes if there are many."""
    if jobs < 2 or len(documents) < WORTH_PROCESSES:
        yield from map(work, progress(description, documents))
        return
    # The syntax tree is large, and only this process needs it.
    sent = [replace(document, syntax=ast.Module([], [])) for document in documents]
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(work,))
    try:
        results = pool.map(_do, sent, chunksize=max(1, min(8, len(sent) // (4 * jobs))))
        for _ in progress(description, documents):
            yield next(results)
    finally:
        pool.shutdown(cancel_futures=True)


_WORK: list[Callable[[source_files.Document], Any]] = []


def _start(work: Callable[[source_files.Document], Any]) -> None:
    """Keep ``work``, which has the whole tree, for all documents of this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends its processes.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _WORK[:] = [work]


def _end_with_parent() -> None:
    """End this process when its parent is gone: one that is killed leaves it waiting for more work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(document: source_files.Document) -> Any:
    return _WORK[0](document)


def _sites_and_taken(
    tree: Tree, seconds: float, document: source_files.Document
) -> tuple[list[Finding], list[source_files.Problem], dict[Path, set[str]]]:
    return (*_sites(document, _parser(tree, document.path), seconds), tree.taken)


def _parser(tree: Tree, path: Path) -> Parse:
    taken_by_others = frozenset(tree.taken.get(path, ()))
    return partial(ParsedSource, follow=partial(tree.follow, path), taken_by_others=taken_by_others)


def _candidates(
    files: list[Path], tree: Tree, problems: list[source_files.Problem]
) -> Iterator[source_files.Document]:
    """Yield the documents that contain a legacy word, then those that contain a name these re-export, and so
    on."""
    is_candidate: Callable[[bytes], object] = may_concern
    known: set[ReExport] = set()
    remaining, first_round = files, True
    while remaining:
        silent, re_exported = [], set[ReExport]()
        for path in progress("Reading", remaining) if first_round else remaining:
            try:
                raw = source_files.read_raw(path)
                if not is_candidate(raw):
                    if first_round:
                        source_files.check_readable(path, raw)
                    silent.append(path)
                    continue
                document = source_files.read_document(path, raw)
            except source_files.UnreadableError as error:
                problems.append(source_files.Problem(path, str(error)))
                continue
            if first_round:
                problems += [source_files.Problem(path, problem) for problem in document.problems]
            try:
                re_exported |= tree.add(path, document.syntax)
            except TOO_DEEP:
                problems.append(source_files.Problem(path, "is nested too deeply"))
                continue
            yield document
        if re_exported <= known:
            break
        is_candidate = partial(_uses, re_exported - known)
        known |= re_exported
        remaining, first_round = silent, False


def _uses(re_exported: set[ReExport], raw: bytes) -> bool:
    return any(name.encode() in raw and module.encode() in raw for name, module in re_exported)


def _sites(
    document: source_files.Document, parse: Parse, seconds: float
) -> tuple[list[Finding], list[source_files.Problem]]:
    path = document.path
    try:
        with time_limit(seconds):
            source = parse(document.text)
            sites = find_sites(source)
    except TooLongError as error:
        site = Site(TOO_LONG, 0, path.name, refusal=str(error))
        return [Finding(path, source_files.Position(1), site)], []
    except cst.ParserSyntaxError as error:
        return [], [source_files.Problem(path, f"line {error.raw_line}: {error.message}")]
    except TOO_DEEP:
        return [], [source_files.Problem(path, "is nested too deeply")]
    places = (document.place(source.line(site.offset), source.column(site.offset)) for site in sites)
    return [Finding(path, place, site) for place, site in zip(places, sites, strict=True)], []
