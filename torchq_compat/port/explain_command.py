"""The command ``torchq-compat explain CODE...``: the guide's text on a finding, without network or torch.

examples:
  torchq-compat explain TQ105
  torchq-compat explain --list
  torchq-compat explain --passes

exit code: 0, or 2 for an unknown code
"""

import argparse
import re
import shutil
import sys
import textwrap

from torchq_compat.codes import CODES, DIFFERENCES, RANGES, Code
from torchq_compat.errors import ScriptError
from torchq_compat.port.constructs import CONSTRUCTS, GUIDE_PAGES, RETIRED, Construct
from torchq_compat.port.process import Subparsers, add_command
from torchq_compat.quantize.passes import PASSES

#: The maximum width of the text.
WIDEST = 100


def add_parser(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        explain_command,
        __doc__,
        help="show the guide's text on a code",
        description="Show what the guide says of a code that 'scan' prints, or a warning ends with.",
    )
    parser.add_argument("codes", metavar="CODE", nargs="*", help="TQ101, for example; case does not matter")
    parser.add_argument("--list", action="store_true", help="list the codes with their titles")
    parser.add_argument(
        "--passes", action="store_true", help="list what prepare, convert and lower do, in order"
    )


def explain_command(args: argparse.Namespace) -> int:
    """Print the texts, or the list of codes if none is given, and return the exit code.

    Raises:
        ScriptError: there is no such code.
    """
    if args.passes:
        for stage, passes in PASSES.items():
            for item in passes:
                print(f"{stage:8} {item.name}: {item.guarantees}")
        return 0
    if args.list or not args.codes:
        titles = {code: entry.title for code, entry in (CONSTRUCTS | CODES).items()}
        titles |= {code: f"FX: {difference.fx}".replace("`", "") for code, difference in DIFFERENCES.items()}
        for first, what in RANGES.items():
            print(f"TQ{first}xx {what}")
            for code, title in sorted(titles.items()):
                if code[2] == first:
                    print(f"  {code}  {title}")
        return 0
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns) if sys.stdout.isatty() else WIDEST
    print("\n\n".join(explained(code, width) for code in args.codes))
    return 0


def explained(code: str, width: int) -> str:
    """Return the text about ``code`` in lines of at most ``width`` columns; code blocks are not wrapped.

    Raises:
        ScriptError: there is no such code.
    """
    if code.upper() in CODES:
        return _registered(CODES[code.upper()], width)
    if code.upper() in DIFFERENCES:
        difference = DIFFERENCES[code.upper()]
        texts = (
            f"{difference.code} FX: {difference.fx}.",
            f"Here: {difference.here}.",
            f"tests/{difference.test}",
        )
        return "\n\n".join("\n".join(_wrapped(text.replace("`", ""), width)) for text in texts)
    construct = CONSTRUCTS.get(code.upper()) or RETIRED.get(code.upper())
    if construct is None:
        raise ScriptError.of("TQ982", code=code)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", construct.guide.replace("`", ""))
    lines = [f"{construct.code} {construct.title}", "", *_wrapped(_becomes(construct), width), ""]
    return "\n".join([*lines, *_wrapped(" ".join(text.split()), width)])


def _registered(entry: Code, width: int) -> str:
    """Return what the register says of a code at run time, with an example of how to filter it."""
    what = f"{RANGES[entry.code[2]]}, {entry.severity}."
    if entry.severity == "error":
        example = f'try: ...\n    except TorchQCompatError as error: assert error.code == "{entry.code}"'
    else:
        example = f'warnings.filterwarnings("ignore", message=r".*{entry.code}")'
    lines = [
        f"{entry.code} {entry.title}",
        "",
        *_wrapped(f"{what[0].upper()}{what[1:]} {entry.advice}", width),
    ]
    for text, hint in (map(_plain, both) for both in entry.texts):
        lines += ["", *_wrapped(f"It says: {text}", width)]
        if hint != entry.hint:
            lines += textwrap.wrap(f"Hint: {hint}", width, initial_indent="    ", subsequent_indent="    ")
    page = f"{GUIDE_PAGES}/{entry.page}#{entry.anchor}"
    return "\n".join([*lines, "", f"    {example}", "", f"{page}, tests/{entry.test}"])


def _plain(text: str) -> str:
    """Return ``text`` with the names of its places alone in braces."""
    return re.sub(r"(?<!\{)\{(\w+)[^{}]*\}(?!\})", r"{\1}", text)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _becomes(construct: Construct) -> str:
    if construct.code in RETIRED:
        return f"Becomes {construct.becomes}. scan does not list it any more."
    who = "rewrite" if construct.code < "TQ2" else "Manual review"
    return f"Becomes {construct.becomes}. {who} settles it."
