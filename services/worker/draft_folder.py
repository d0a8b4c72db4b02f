"""Which folder has what guesses: the one that is set, or the one that stands beside the model's."""

from __future__ import annotations

import logging
from pathlib import Path

from services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

WITH_A_FOLDER = frozenset(("draft", "eagle3", "mtp"))


def draft_folder(settings: WorkerSettings) -> str:
    """Where none is set, the model's folder with the algorithm behind its name, if there is one: models/demo-eagle3 for
    models/demo. "": neither, which mtp takes for a layer of the model's own."""
    path, algorithm = settings.speculative_draft_model_path, settings.speculative_algorithm
    if path or algorithm not in WITH_A_FOLDER:
        return path
    model = Path(settings.model).absolute()  # "." has no name
    beside = model.with_name(f"{model.name}-{algorithm}")
    if not beside.is_dir():
        return ""
    logger.info("%s guesses by %s, for no --speculative-draft-model-path is set", algorithm, beside)
    return str(beside)
