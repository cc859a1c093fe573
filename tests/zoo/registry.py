"""All models of the zoo, by name."""

from __future__ import annotations

from tests.zoo.audio import audio_models
from tests.zoo.entry import Entry
from tests.zoo.images import image_models
from tests.zoo.language import transformer_models
from tests.zoo.more_models import more_models
from tests.zoo.recurrent import recurrent_models

__all__ = ["ZOO"]

ZOO: dict[str, Entry] = {
    entry.name: entry
    for group in (image_models, transformer_models, recurrent_models, audio_models, more_models)
    for entry in group()
}
