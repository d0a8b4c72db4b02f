"""The sampling parameters of requests that do not set them: the operator's, else the model's, else the API's.

The model's are those of generation_config.json in its folder. `do_sample: false` means temperature 0, whatever temperature the
file has. `max_new_tokens` is not used: each API has a length of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.shared.observe.log_fields import fields
from services.shared.sampling_defaults import API_DEFAULTS, NAMES, SamplingDefaults, fault

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
DO_SAMPLE = "do_sample"


def sampling_defaults(folder: str | Path, from_model: bool, preferred: str) -> SamplingDefaults:
    """from_model: the folder's file counts. preferred: see parse_preferences. Raises ValueError, also for a file that is no JSON
    object."""
    of_model = _of_model(Path(folder) / FILE) if from_model else {}
    defaults = API_DEFAULTS.over(of_model).over(parse_preferences(preferred))
    logger.info("sampling defaults", extra=fields(**defaults.as_dict()))
    return defaults


def parse_preferences(text: str) -> Mapping[str, Any]:
    """The operator's values, as JSON text; "" for none. Raises ValueError with a sentence."""
    if not text:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("preferred_sampling_params is not valid JSON") from None
    if not isinstance(values, dict):
        raise ValueError("preferred_sampling_params must be a JSON object")
    for name, value in values.items():
        if name not in NAMES:
            raise ValueError(f"preferred_sampling_params may hold {', '.join(NAMES)} only")
        if wrong := fault(name, value):
            raise ValueError(f"preferred_sampling_params: {name} {wrong}")
    return values


def _of_model(path: Path) -> Mapping[str, Any]:
    """What is out of range is a mistake of the file's and not a reason to serve nothing: it is logged and left out."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    given = {name: values[name] for name in NAMES if values.get(name) is not None}
    wrong = {name: text for name, value in given.items() if (text := fault(name, value))}
    samples = values.get(DO_SAMPLE)
    if samples is False:
        given["temperature"] = 0.0
        wrong.pop("temperature", None)
    elif samples is not None and samples is not True:
        wrong[DO_SAMPLE] = "must be true or false"
    for name, text in wrong.items():
        logger.warning("the model's sampling default is left out", extra=fields(file=str(path), name=name, fault=text))
    return {name: value for name, value in given.items() if name not in wrong}
