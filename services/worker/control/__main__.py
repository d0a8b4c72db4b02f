"""`rootstock control`, or python -m rootstock_llm.services.worker.control: calls an operation of one worker."""

from __future__ import annotations

import argparse
import asyncio
import sys

import grpc
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from rootstock_llm.services.shared.rpc.control_token import read_token
from rootstock_llm.services.shared.rpc.dialer import Dialer
from rootstock_llm.services.shared.settings import ENV_PREFIX, TlsSettings, load_given
from rootstock_llm.services.shared.tls.mutual_tls import mutual_tls
from rootstock_llm.services.shared.tls.roles import Role
from rootstock_llm.services.worker.control.command_line import PARSERS, InvalidArguments, call, failure
from rootstock_llm.services.worker.control.flags import OPERATIONS, add_flags

PROG = "rootstock control"  # begins each line on stderr


class ControlSettings(TlsSettings):
    """The settings of one call to a worker's control service."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    operation: str = Field(description=f"Operation: {', '.join(PARSERS)}.")
    arguments: list[str] = Field(default=[], description="Arguments of the operation; see docs/reference/control.md.")
    address: str = Field("127.0.0.1:9203", description="The worker's control address.")
    timeout_s: float = Field(60.0, gt=0, description="Seconds that the operation may take, including its wait for requests.")
    control_token: str = Field("", repr=False, description="The worker's token. Other users can read it on the command line.")
    control_token_file: str = Field("", description="File with the worker's token.")


def run(args: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status: 0, 1 if the worker refuses or is unreachable, 2 if the command line is wrong."""
    given = {name: value for name, value in vars(args).items() if name in ControlSettings.model_fields and value is not None}
    settings = load_given(ControlSettings, PROG, given)
    parse = PARSERS.get(settings.operation)
    if parse is None:
        print(f"{PROG}: no operation {settings.operation}\n\n{OPERATIONS}", file=sys.stderr)
        return 2
    try:
        request = parse(settings.arguments)
        token = read_token(settings.control_token, settings.control_token_file)
        dialer = Dialer(mutual_tls(settings, Role.OPERATOR))
    except InvalidArguments as error:
        print(f"{PROG}: {settings.operation} {error}\n\n{OPERATIONS}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    try:
        response = asyncio.run(call(dialer, settings.address, token, settings.operation, request, settings.timeout_s))
    except grpc.aio.AioRpcError as error:
        print(f"{PROG}: {failure(error)}", file=sys.stderr)
        return 1
    print(response.decode())
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rootstock_llm.services.worker.control",
        description="Calls one operation of one worker's control service.",
        epilog=OPERATIONS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
