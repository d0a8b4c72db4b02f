"""python -m rootstock_llm.services.local.models_reference updates docs/reference/models.md and served_architectures.json.

The page lists the architectures that Rootstock's own decoder implements. The JSON file says for each architecture of transformers
whether the worker serves it, so that a download in an image without transformers can refuse an unsupported model.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from rootstock_llm.services.shared.served_config import LAYER_TYPES, TABLE, TYPE_LISTS, unknown_layers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
WRITTEN = re.compile(r"(?<=<!-- make docs: architectures -->\n)(.*?)(?=^ *<!-- end -->)", re.M | re.S)


def render(page: str) -> str:
    """Returns the page with the current list of architectures."""
    from rootstock_llm.services.worker.exec.models.decoder_config import CAUSAL
    from rootstock_llm.services.worker.exec.models.registry import FAMILIES

    names = ", ".join(f"{family}{CAUSAL}" for family in sorted(FAMILIES))
    written, count = WRITTEN.subn(f"   {names}\n", page)
    assert count == 1, "the page has one marked block for the list"
    return written


def table() -> str:
    """Returns the content of served_architectures.json. Takes 20 s: each architecture is tried with its default config."""
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto import modeling_auto
    from transformers.utils import logging

    from rootstock_llm.services.worker.exec.models.registry import ARCHITECTURES, FAMILIES, WRAPPER

    logging.set_verbosity_error()  # default configs of a model and its submodels do not match, which transformers logs
    verdicts: dict[str, dict[str, Any]] = defaultdict(dict)  # by architecture, then by model type
    for name, names in vars(modeling_auto).items():
        if name.startswith("MODEL") and name.endswith("_MAPPING_NAMES"):
            for model_type, classes in names.items():
                for architecture in [classes] if isinstance(classes, str) else classes:
                    verdicts[architecture].setdefault(model_type, _verdict(CONFIG_MAPPING, model_type, architecture))
    found: dict[str, Any] = {
        "transformers": __version__,
        "families": sorted(FAMILIES),
        "wrappers": sorted(name for name in ARCHITECTURES if name.endswith(WRAPPER)),
        "own_layer_types": {
            name: sorted(own) for name, family in ARCHITECTURES.items() if (own := family.layer_types - LAYER_TYPES)
        },
        "model_types": sorted(CONFIG_MAPPING),
        "served": [],
        "fixed_attention": [],
        "encoder_with_decoder": [],
        "several_models": {},
        "layers": {},
    }
    for architecture, by_type in sorted(verdicts.items()):
        kinds = {kind for kind, _ in by_type.values()}
        kind, detail = next(iter(by_type.values()))
        if len(kinds) > 1 or kind == "served":  # if the results differ between model types, the worker decides
            found["served"].append(architecture)
        elif isinstance(found.get(kind), dict):
            found[kind][architecture] = detail
        elif kind != "unsupported":
            found[kind].append(architecture)
    return json.dumps(found, indent=0) + "\n"


def _verdict(configs: Any, model_type: str, architecture: str) -> tuple[str, list[str]]:
    """Returns a key of table(), or "unsupported", and the names of layer types or submodels for the worker's message."""
    from rootstock_llm.services.worker.exec.models.encoder import is_encoder
    from rootstock_llm.services.worker.exec.models.registry import NotCovered, config_of
    from rootstock_llm.services.worker.exec.models.transformers_model import auto_class_of
    from rootstock_llm.services.worker.exec.weights import transformers_checkpoint
    from rootstock_llm.services.worker.exec.weights.checkpoint import UnsupportedModel

    try:
        config = configs[model_type]()
    except Exception:  # the class has no default config, so the worker decides
        return "served", []
    config.architectures = [architecture]
    try:
        config_of(config)
        return "served", []
    except NotCovered:
        pass
    if is_encoder(config):
        return "served", []
    if not (transformers_checkpoint.is_causal_head(config) or transformers_checkpoint.is_base(config)):
        return "unsupported", []
    if types := unknown_layers(getattr(config, each, None) for each in TYPE_LISTS):
        return "layers", sorted(types)
    try:
        if not transformers_checkpoint.class_of(auto_class_of(config), config)._can_set_attn_implementation():
            return "fixed_attention", []
    except (UnsupportedModel, ValueError, AttributeError):  # several classes for a config, or none in this version
        return "served", []
    if config.is_encoder_decoder:
        return "encoder_with_decoder", []
    return ("several_models", sorted(config.sub_configs)) if config.sub_configs else ("served", [])


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
    TABLE.write_text(table())
