"""Finds the folder of the draft model: the one in the settings, or a folder next to the model's."""

from __future__ import annotations

import logging
from pathlib import Path

from rootstock_llm.services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

WITH_A_FOLDER = frozenset(("draft", "eagle3", "mtp"))


def draft_folder(settings: WorkerSettings) -> str:
    """Returns the folder of the draft model.

    If none is set, it is the model's folder with the algorithm after its name, such as models/demo-eagle3 for models/demo.

    Returns:
        "" if this folder does not exist either. mtp then uses the model's own layer.
    """
    path, algorithm = settings.speculative_draft_model_path, settings.speculative_algorithm
    if path or algorithm not in WITH_A_FOLDER:
        return path
    model = Path(settings.model).absolute()  # "." has no name
    beside = model.with_name(f"{model.name}-{algorithm}")
    if not beside.is_dir():
        return ""
    logger.info("%s guesses by %s, for no --speculative-draft-model-path is set", algorithm, beside)
    return str(beside)
