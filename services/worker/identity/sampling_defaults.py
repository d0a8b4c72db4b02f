"""Determines the sampling defaults of a worker: the operator's values, else the model's, else the API's.

The model's values are in generation_config.json. `do_sample: false` means temperature 0, even if the file has a temperature.
`max_new_tokens` is ignored, because each API has its own default of the output length.
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
        from_model: whether generation_config.json is used.
        preferred: the operator's values as a JSON object; empty: no values.

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
        ValueError: the text is not JSON, or a name or a value is invalid.
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
            raise ValueError(f"preferred_sampling_params has {name!r}; it may only have {', '.join(DEFAULT_NAMES)}")
        if wrong := default_fault(name, value):
            raise ValueError(f"preferred_sampling_params: {name} {wrong}")
    return values


def _of_model(path: Path) -> Mapping[str, Any]:
    """Returns the values of generation_config.json. Logs and omits invalid values; the API's defaults replace them."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")
    given = {name: values[name] for name in DEFAULT_NAMES if values.get(name) is not None}
    wrong = {name: text for name, value in given.items() if (text := default_fault(name, value))}
    samples = values.get(DO_SAMPLE)
    if samples is False:
        given["temperature"] = 0.0
        wrong.pop("temperature", None)
    elif samples is not None and samples is not True:
        wrong[DO_SAMPLE] = "must be true or false"
    for name, text in wrong.items():
        logger.warning("an invalid sampling default of the model is ignored", extra=fields(file=str(path), name=name, fault=text))
    return {name: value for name, value in given.items() if name not in wrong}
