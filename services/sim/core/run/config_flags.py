"""A command-line flag for every field of the scheduler's configuration, made from the fields themselves."""

from __future__ import annotations

import argparse
import enum
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields, replace
from typing import Any, Literal

from services.sim.core.trace.script import EOS_ID, VOCAB_SIZE
from services.worker.core.contracts.config import SchedulerConfig
from services.worker.core.contracts.graph_limits import GraphLimits

# What has no default in the configuration: the KV of an 8B model on one large accelerator, about 800,000 tokens.
SIM_DEFAULTS: dict[str, Any] = {"num_pages": 50_000, "page_size": 16, "context_len": 131_072}
SET_BY_SIM: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS_ID,)}


def add_config_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """without: fields that the caller gives to config_of itself."""
    group = parser.add_argument_group("the scheduler's configuration (see services/worker/core/contracts/config.py)")
    hints = typing.get_type_hints(SchedulerConfig)
    for field in fields(SchedulerConfig):
        if field.name in SET_BY_SIM or field.name in without:
            continue
        default = SIM_DEFAULTS.get(field.name, field.default)
        if default is MISSING:
            raise TypeError(f"SchedulerConfig.{field.name} has no default: the simulator needs one")
        options = _options(field.name, hints[field.name])
        group.add_argument(f"--{field.name.replace('_', '-')}", dest=field.name, default=default, help=_shown(default), **options)


def config_of(args: argparse.Namespace, **given: Any) -> SchedulerConfig:
    """Raises ValueError for values that the scheduler does not take."""
    given |= SET_BY_SIM
    flags = {field.name: getattr(args, field.name) for field in fields(SchedulerConfig) if field.name not in given}
    return SchedulerConfig(**flags, **given)


def with_graphs(config: SchedulerConfig, graphs: GraphLimits) -> SchedulerConfig:
    """As an executor with such graphs has it."""
    return replace(config, graph_rows=graphs.rows, graph_rereads=graphs.rereads, eager_step_cost=graphs.eager_cost)


def _shown(default: object) -> str:
    return f"default {default}".replace("%", "%%")


def _options(name: str, hint: Any) -> dict[str, Any]:
    """What argparse needs for a field of this type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if hint in (int, float, str):
        return {"type": hint, "metavar": hint.__name__.upper()}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return {"type": _tuple_of(typing.get_args(hint)[0]), "metavar": "A,B,…"}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"type": _member_of(hint), "metavar": "|".join(_word(member) for member in hint)}
    raise TypeError(f"SchedulerConfig.{name} is of a type that has no flag: {hint}")


def _tuple_of(element: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(element(part) for part in text.split(",") if part)


def _word(member: enum.Enum) -> str:
    return member.value if isinstance(member.value, str) else member.name.lower()


def _member_of(kind: type[enum.Enum]) -> Callable[[str], enum.Enum]:
    def parse(text: str) -> enum.Enum:
        for member in kind:
            if _word(member) == text:
                return member
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(map(_word, kind))}")

    return parse
