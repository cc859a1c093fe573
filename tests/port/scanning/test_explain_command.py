"""``torchq-compat explain`` and ``--version``: the guide's text, offline, and without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from torchq_compat.cli import main
from torchq_compat.codes import CODES, DIFFERENCES
from torchq_compat.port.constructs import CONSTRUCTS, RETIRED
from torchq_compat.port.explain_command import explained

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("code", [*CONSTRUCTS, *RETIRED])
def test_every_code_has_its_text(code: str, width: int) -> None:
    text = explained(code.lower(), width)
    construct = CONSTRUCTS.get(code) or RETIRED[code]
    assert text.startswith(f"{code} {construct.title}\n\nBecomes ")
    words = re.sub(r"\[([^]]*)\]\(.*?\)", r"\1", construct.guide).replace("`", "").split()
    assert len(words) >= 3
    assert " ".join(words) in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width


def test_several_codes_and_the_list(capsys: Capture) -> None:
    assert main(["explain", "TQ101", "TQ110"]) == 0
    out = capsys.readouterr().out
    assert out.index("TQ101 quantize_fx functions") < out.index("TQ110 TorchScript")
    assert "scan does not list it any more" in out
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert listed == sorted([*CONSTRUCTS, *CODES, *DIFFERENCES])
    assert [line for line in lines if not line.startswith("  ")][4] == "TQ5xx other numbers than FX"


def test_a_code_at_run_time_and_a_known_difference(capsys: Capture) -> None:
    assert main(["explain", "tq405", "TQ520", "TQ903"]) == 0
    out = capsys.readouterr().out
    assert "TQ405 observers that have seen no data" in out
    assert "It says: {count} observers have seen no data" in " ".join(out.split())
    assert 'warnings.filterwarnings("ignore", message=r".*TQ405")' in out
    assert f"TQ520 FX: {DIFFERENCES['TQ520'].fx[:20]}" in out
    assert 'error.code == "TQ903"' in out


def test_a_code_that_there_is_not(capsys: Capture) -> None:
    assert main(["explain", "TQ299"]) == 2
    assert re.match(
        r"torchq-compat: error: there is no code 'TQ299'. Hint: .*--list", capsys.readouterr().err
    )


def test_without_torch() -> None:
    code = (
        "import sys\nfrom torchq_compat.cli import main\nmain(['explain', 'TQ105'])\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "TQ105 qconfig_dict" in done.stdout


def test_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"torchq-compat {version('torchq-compat')}\n"
