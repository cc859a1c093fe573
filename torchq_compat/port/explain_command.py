"""The command ``torchq-compat explain CODE...``: the guide's text on a finding, without network or torch.

Exit code: 0, or 2 for an unknown code.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap

from torchq_compat.errors import CodeError
from torchq_compat.port.constructs import Construct
from torchq_compat.port.scanner import CONSTRUCTS, RETIRED
from torchq_compat.quantize.passes import PASSES

EXAMPLES = """\
examples:
  torchq-compat explain TQ105
  torchq-compat explain --list
  torchq-compat explain --passes
"""
#: The maximum width of the text.
WIDEST = 100
BLOCK = re.compile(r"(```.*?```)", re.DOTALL)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="show the guide's text on a code that scan prints",
        description="Show what the guide says of a code that 'scan' prints.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("codes", metavar="CODE", nargs="*", help="TQ101, for example; case does not matter")
    parser.add_argument("--list", action="store_true", help="list the codes with their titles")
    parser.add_argument(
        "--passes", action="store_true", help="list what prepare, convert and lower do, in order"
    )
    parser.set_defaults(command=explain_command)


def explain_command(args: argparse.Namespace) -> int:
    """Print the texts, or the list of codes if none is given, and return the exit code.

    Raises:
        CodeError: there is no such code.
    """
    if args.passes:
        for stage, passes in PASSES.items():
            for each in passes:
                print(f"{stage:8} {each.name}: {each.guarantees}")
        return 0
    if args.list or not args.codes:
        for construct in CONSTRUCTS.values():
            print(f"{construct.code}  {construct.title}")
        return 0
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns) if sys.stdout.isatty() else WIDEST
    print("\n\n".join(explained(code, width) for code in args.codes))
    return 0


def explained(code: str, width: int) -> str:
    """Return the text about ``code`` in lines of at most ``width`` columns; code blocks are not wrapped.

    Raises:
        CodeError: there is no such code.
    """
    construct = CONSTRUCTS.get(code.upper()) or RETIRED.get(code.upper())
    if construct is None:
        raise CodeError(f"there is no code {code!r}.", hint=f"there are {', '.join(CONSTRUCTS)}.")
    lines = [f"{construct.code} {construct.title}", "", *_wrapped(_becomes(construct), width)]
    for index, passage in enumerate(BLOCK.split(construct.guide)):
        if index % 2:
            lines += ["", *(f"    {line}".rstrip() for line in passage.splitlines()[1:-1])]
            continue
        for paragraph in filter(None, (each.strip() for each in passage.split("\n\n"))):
            lines += ["", *_wrapped(" ".join(paragraph.replace("`", "").split()), width)]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _becomes(construct: Construct) -> str:
    if construct.code in RETIRED:
        return f"Becomes {construct.becomes}. scan does not list it any more."
    who = "rewrite" if construct.code < "TQ2" else "Manual review"
    return f"Becomes {construct.becomes}. {who} settles it."
