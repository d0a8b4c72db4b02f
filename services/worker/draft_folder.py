"""Finds the folder of the draft model: speculative_draft_model_path, or a folder next to the model's."""

from __future__ import annotations

import logging
from pathlib import Path

from rootstock_llm.services.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

FOLDER_ALGORITHMS = frozenset(("draft", "eagle3", "mtp"))  # algorithms whose draft model can have its own folder


def draft_folder(settings: WorkerSettings) -> str:
    """Returns the folder of the draft model.

    If speculative_draft_model_path is empty, the algorithm is appended to the model's folder: models/demo-eagle3 for models/demo.

    Returns:
        "" if no folder is set, and the algorithm has no draft model or the default folder does not exist. Without a folder, mtp
        uses the MTP layer in the model's checkpoint.
    """
    path, algorithm = settings.speculative_draft_model_path, settings.speculative_algorithm
    if path or algorithm not in FOLDER_ALGORITHMS:
        return path
    model = Path(settings.model).absolute()  # absolute, because the relative path "." has no name
    default_folder = model.with_name(f"{model.name}-{algorithm}")
    if not default_folder.is_dir():
        return ""
    logger.info("%s drafts with %s, because --speculative-draft-model-path is not set", algorithm, default_folder)
    return str(default_folder)
