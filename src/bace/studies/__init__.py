"""Studies measure what the paper reports besides accuracy. They do not influence a run: docs/studies.md."""

from bace.core.study import Observation, Skipped, Study
from bace.studies import bias, gallery, probing, tracking

STUDIES: dict[str, Study] = {  # config.StudyName lists the same names
    "probing": probing.STUDY,
    "tracking": tracking.STUDY,
    "gallery": gallery.STUDY,
    "bias": bias.STUDY,
}

__all__ = ["STUDIES", "Observation", "Skipped", "Study"]
