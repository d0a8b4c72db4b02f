"""python -m tests.contracts.public_names records the public names of the product in public_names.json.

A public name is a name that users write in their own files and programs: a path, a field, a flag, a metric. The command adds
the code's new names to the record. Recorded names that the code no longer has stay in the record, unless --drop is given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import yaml
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from pydantic_settings import BaseSettings, CliSettingsSource

from charts.rootstock import values_schema
from rootstock_llm.protos import common_pb2, control_pb2, detokenizer_pb2, gateway_pb2, kv_pb2, tokenizer_pb2, worker_pb2
from rootstock_llm.services.cli.commands import build_parser
from rootstock_llm.services.cli.shared.flags import KEY, URL
from rootstock_llm.services.gateway.keys.key_table import FIELDS
from rootstock_llm.services.local import metrics_reference
from rootstock_llm.services.local.reference import SERVICES
from rootstock_llm.services.shared.flag_parser import FlagParser
from rootstock_llm.services.shared.rpc import probe
from rootstock_llm.services.sim.core import fit_command, generate_command, run_command
from rootstock_llm.services.sim.fleet import __main__ as fleet_command
from rootstock_llm.services.worker.control.__main__ import ControlSettings
from rootstock_llm.services.worker.control.command_line import PARSERS
from rootstock_llm.services.worker.core.contracts.config import SchedulePolicy
from rootstock_llm.services.worker.core.control import RANGES
from rootstock_llm.services.worker.exec.attention import flashinfer_prebuild
from tests.contracts import http_names
from tests.contracts.schema_names import names_of

RECORD = Path(__file__).with_name("public_names.json")
RULES = Path(__file__).parents[2] / "charts/rootstock/files/rules.yaml"
PROTO_FILES: tuple[FileDescriptor, ...] = tuple(
    module.DESCRIPTOR for module in (common_pb2, tokenizer_pb2, detokenizer_pb2, worker_pb2, control_pb2, gateway_pb2, kv_pb2)
)
# Argument parsers of the programs that are not services. Charts, images and operators' scripts use their flags.
PROGRAMS: Mapping[str, Callable[[], argparse.ArgumentParser]] = {
    "rootstock": build_parser,
    "rootstock sim run": run_command.build_parser,
    "rootstock sim generate": generate_command.build_parser,
    "rootstock sim fit": fit_command.build_parser,
    "rootstock sim fleet": fleet_command.build_parser,
    "probe": probe.build_parser,
    "flashinfer_prebuild": flashinfer_prebuild.build_parser,
}

Names = Mapping[str, Collection[str]]  # kind → names


@cache
def current() -> Mapping[str, frozenset[str]]:
    """Returns the public names in the code, by kind."""
    return {kind: frozenset(names()) for kind, names in KINDS.items()}


def recorded() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(RECORD.read_text())
    return found


def removed(record: Names, now: Names) -> list[str]:
    """Returns the recorded names that the code lacks, as `KIND: NAME`. A renamed name counts as removed."""
    return [f"{kind}: {name}" for kind, names in record.items() for name in sorted({*names} - {*now.get(kind, ())})]


def merged(record: Names, now: Names) -> dict[str, list[str]]:
    """Returns the names of the record and of the code together, sorted by kind and name."""
    return {kind: sorted({*record.get(kind, ()), *now.get(kind, ())}) for kind in sorted({*record, *now})}


def rendered(names: Names) -> str:
    """Returns the text of the file: one name per line."""
    return json.dumps(names, indent=1) + "\n"


def complaint(gone: Collection[str]) -> str:
    """Returns the message of a failing check, with one removed name per line."""
    names = "".join(f"  {name}\n" for name in gone)
    return (
        f"public names are gone from the code: {len(gone)}\n{names}"
        "Add each name back as an alias for one release. "
        "Or state the removal in CHANGELOG and run `python -m tests.contracts.public_names --drop`."
    )


def flags() -> Iterator[str]:
    """Yields the flags of each service, and the permitted values of flags with an enumeration."""
    for service, settings in SERVICES.items():
        parser = FlagParser(service, allow_abbrev=False)
        CliSettingsSource(settings, cli_prog_name=service, root_parser=parser)
        yield from (f"{service} {flag}" for action in parser._actions for flag in action.option_strings)
        schema = settings.model_json_schema()
        values = (name.partition(" = ") for name in names_of(schema, schema.get("$defs", {})) if " = " in name)
        yield from (f"{service} --{field.replace('_', '-')} = {value}" for field, _, value in values)


def environment_variables() -> Iterator[str]:
    programs: Mapping[str, type[BaseSettings]] = {**SERVICES, "rootstock control": ControlSettings}
    for program, settings in programs.items():
        prefix = settings.model_config.get("env_prefix", "")
        yield from (f"{program} {prefix}{field.upper()}" for field in settings.model_fields)
    yield from (f"rootstock {name}" for name in (URL, KEY))


def commands() -> Iterator[str]:
    """Yields the commands of each program, their flags, and the permitted values of flags and arguments."""
    for program, parser in PROGRAMS.items():
        yield from _commands(program, parser())
    yield from (f"rootstock control {operation}" for operation in PARSERS)


def _commands(command: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield command
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _commands(f"{command} {name}", below)
            continue
        yield from (f"{command} {flag}" for flag in action.option_strings)
        # Users do not write the name of a positional argument, so only its permitted values are public.
        spelled = f"{command} {action.option_strings[-1]} =" if action.option_strings else command
        yield from (f"{spelled} {word}" for word in action.choices or ())


def metrics() -> Iterator[str]:
    """Yields the name of each series in Prometheus, and its labels."""
    for service, rows in metrics_reference.services().items():
        for series, labels in ((series, row.labels) for row in rows for series in row.series):
            yield f"{service} {series}"
            yield from (f"{service} {series}{{{label}}}" for label in labels)


def alerts() -> set[str]:
    """Returns the chart's alerts and recorded series. Users silence alerts and build dashboards by these names."""
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    return {rule.get("alert") or rule["record"] for rule in rules}


def chart_values() -> set[str]:
    """Returns the paths of chart values, and the permitted values of enums.

    Omits the names in extraEnv, because another list has them as environment variables.
    """
    schema = json.loads(values_schema.render())
    return {name for name in names_of(schema, schema["$defs"]) if ".extraEnv[].name = " not in name}


def tunables() -> Iterator[str]:
    yield from RANGES
    yield from (f"schedule_policy = {policy}" for policy in SchedulePolicy)


def protos() -> Iterator[str]:
    """Yields fields with their numbers and types, enum values with their numbers, and methods with their messages."""
    for file in PROTO_FILES:
        for message in file.message_types_by_name.values():
            yield from _message(message)
        for enum in file.enum_types_by_name.values():
            yield from _enum(enum)
        for service in file.services_by_name.values():
            for method in service.methods:
                request = f"{'stream ' if method.client_streaming else ''}{method.input_type.full_name}"
                response = f"{'stream ' if method.server_streaming else ''}{method.output_type.full_name}"
                yield f"{method.full_name}({request}) returns ({response})"


def _message(message: Descriptor) -> Iterator[str]:
    yield message.full_name
    yield from (f"{field.full_name} = {field.number} {_type(field)}" for field in message.fields)
    for below in message.nested_types:
        yield from _message(below)
    for enum in message.enum_types:
        yield from _enum(enum)


def _enum(enum: EnumDescriptor) -> Iterator[str]:
    yield from (f"{enum.full_name}.{value.name} = {value.number}" for value in enum.values)


def _type(field: FieldDescriptor) -> str:
    label = "repeated " if field.is_repeated else "optional " if field.has_presence else ""
    named = field.message_type or field.enum_type
    scalar: str = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    return label + (named.full_name if named else scalar)


KINDS: Mapping[str, Callable[[], Collection[str] | Iterator[str]]] = {
    "API key file fields": lambda: FIELDS,
    "HTTP paths": http_names.paths,
    "alerts": alerts,
    "chart values": chart_values,
    "commands": commands,
    "environment variables": environment_variables,
    "error codes": http_names.error_codes,
    "error fields": http_names.error_fields,
    "flags": flags,
    "headers": http_names.headers,
    "metrics": metrics,
    "protos": protos,
    "request fields": http_names.request_fields,
    "response fields": http_names.response_fields,
    "tunables": tunables,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.contracts.public_names", description="Records new public names.")
    parser.add_argument("--drop", action="store_true", help="remove recorded names that the code does not have")
    record = {} if parser.parse_args().drop else recorded()
    RECORD.write_text(rendered(merged(record, current())))


if __name__ == "__main__":
    main()
