"""Pictures, texts and named entities. A program adds its own modality to MODALITIES, under its name."""

from bace.data.modalities.image import IMAGE
from bace.data.modalities.text import TEXT
from bace.data.modalities.token import TOKEN
from bace.data.modality import Modality
from bace.errors import ConfigError, closest_name

MODALITIES: dict[str, Modality] = {  # in the order in which they are tried if the user names none
    modality.name: modality for modality in (IMAGE, TOKEN, TEXT)
}


def find_modality(name: str) -> Modality:
    if name not in MODALITIES:
        raise ConfigError(f"modality '{name}' is unknown.{closest_name(name, MODALITIES)}")
    return MODALITIES[name]
