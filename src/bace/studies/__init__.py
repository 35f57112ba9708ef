"""Studies measure what the paper reports beside accuracy. They do not influence a run: docs/studies.md."""

from bace.core.study import Observation, Skipped, Study
from bace.studies import bias, gallery, probing, tracking

STUDIES: dict[str, Study] = {  # the names are those of config.StudyName
    "probing": probing.STUDY,
    "tracking": tracking.STUDY,
    "gallery": gallery.STUDY,
    "bias": bias.STUDY,
}

__all__ = ["STUDIES", "Observation", "Skipped", "Study"]
