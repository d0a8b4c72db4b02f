"""The sampling defaults of a worker: the operator's values, else the model's, else the API's.

The model's values are in generation_config.json. `do_sample: false` means temperature 0, whatever the file's temperature is.
`max_new_tokens` is not used, because each API has a separate default for it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rootstock_llm.services.shared.observe.log_fields import fields
from rootstock_llm.services.shared.sampling_parameters import API_DEFAULTS, DEFAULT_NAMES, SamplingDefaults, default_fault

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
DO_SAMPLE = "do_sample"


def sampling_defaults(folder: str | Path, from_model: bool, preferred: str) -> SamplingDefaults:
    """Returns the values for parameters that a request leaves out.

    Args:
        folder: the model folder.
        from_model: whether the folder's file is used.
        preferred: the operator's values, see parse_preferences().

    Raises:
        ValueError: the operator's values are invalid, or the file is not a JSON object.
    """
    of_model = _of_model(Path(folder) / FILE) if from_model else {}
    defaults = API_DEFAULTS.over(of_model).over(parse_preferences(preferred))
    logger.info("sampling defaults", extra=fields(**defaults.as_dict()))
    return defaults


def parse_preferences(text: str) -> Mapping[str, Any]:
    """Returns the operator's values from JSON text; empty text means no values.

    Raises:
        ValueError: with a sentence for the operator.
    """
    if not text:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("preferred_sampling_params is not valid JSON") from None
    if not isinstance(values, dict):
        raise ValueError("preferred_sampling_params must be a JSON object")
    for name, value in values.items():
        if name not in DEFAULT_NAMES:
            raise ValueError(f"preferred_sampling_params may hold {', '.join(DEFAULT_NAMES)} only")
        if wrong := default_fault(name, value):
            raise ValueError(f"preferred_sampling_params: {name} {wrong}")
    return values


def _of_model(path: Path) -> Mapping[str, Any]:
    """Returns the model's values. A value out of range is logged and left out, because the model can be served without it."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    given = {name: values[name] for name in DEFAULT_NAMES if values.get(name) is not None}
    wrong = {name: text for name, value in given.items() if (text := default_fault(name, value))}
    samples = values.get(DO_SAMPLE)
    if samples is False:
        given["temperature"] = 0.0
        wrong.pop("temperature", None)
    elif samples is not None and samples is not True:
        wrong[DO_SAMPLE] = "must be true or false"
    for name, text in wrong.items():
        logger.warning("the model's sampling default is left out", extra=fields(file=str(path), name=name, fault=text))
    return {name: value for name, value in given.items() if name not in wrong}
