"""``torchq-compat run --explain FILE``: the decisions about every model a script quantized, in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torchq_compat.migrate.running.recorder import RecordedModel
from torchq_compat.support.atomic_files import write_whole

__all__ = ["write_explanation"]

#: Of a file, which no terminal wraps: each row is one line.
WIDTH = 400


def write_explanation(models: Iterable[RecordedModel], path: Path) -> None:
    """Write ``path`` in one step: JSON if its name ends so, else the tables that ``explain`` prints.

    Raises:
        OSError: it cannot be written; a file that was there is left.
    """
    content = _as_json(models) if path.suffix == ".json" else _as_text(models)
    write_whole(path, content)


def _as_text(models: Iterable[RecordedModel]) -> str:
    return "".join(f"{model.title}\n\n{model.report.to_text(WIDTH)}\n\n" for model in models)


def _as_json(models: Iterable[RecordedModel]) -> str:
    data = [
        {"model": list(model.names), "stage": model.stage, "decisions": model.report.as_dicts()}
        for model in models
    ]
    return json.dumps(data, indent=2, default=str) + "\n"
