"""Finds the folder of the draft model: speculative_draft_model_path, or a folder next to the model's."""

from __future__ import annotations

import logging
from pathlib import Path

from rootstock_llm.services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

WITH_A_FOLDER = frozenset(("draft", "eagle3", "mtp"))


def draft_folder(settings: WorkerSettings) -> str:
    """Returns the folder of the draft model.

    If speculative_draft_model_path is empty, the algorithm is appended to the model's folder: models/demo-eagle3 for models/demo.

    Returns:
        "" if no folder is set and the one next to the model's does not exist. mtp then uses the layer in the model's checkpoint.
    """
    path, algorithm = settings.speculative_draft_model_path, settings.speculative_algorithm
    if path or algorithm not in WITH_A_FOLDER:
        return path
    model = Path(settings.model).absolute()  # "." has no name
    beside = model.with_name(f"{model.name}-{algorithm}")
    if not beside.is_dir():
        return ""
    logger.info("%s drafts with %s, because --speculative-draft-model-path is not set", algorithm, beside)
    return str(beside)
