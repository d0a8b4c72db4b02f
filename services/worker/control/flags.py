"""The arguments of `rootstock control`. Imports only the standard library, because the client always adds them to its parser."""

from __future__ import annotations

import argparse

OPERATIONS = """\
operations:
  FlushCache [device] [host] [storage] [cache_salt=SALT] [older_than_s=SECONDS]
  GetInternalState                      SetInternalState NAME=VALUE ...
  Pause [abort|retract|in_place]        Continue
  ReleaseMemory [kv_cache] [weights]    ResumeMemory [kv_cache] [weights]
  StartProfile [NAME]                   StopProfile
  SetLogLevel [LEVEL]                   TraceRequest REQUEST_ID
  SlowDown [SECONDS]                    FreezeGc"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments to a parser.

    A flag without a value stays None, so that the ROOTSTOCK_ variables of the environment and then the settings' defaults apply.
    """
    parser.add_argument("operation", metavar="OPERATION", help="operation of the worker's control service")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="arguments of the operation, as listed below")
    parser.add_argument("--address", metavar="HOST:PORT", help="the worker's control address; default 127.0.0.1:9203")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="seconds that the operation may take; default 60")
    parser.add_argument("--control-token-file", metavar="FILE", help="file that holds the worker's token")
    parser.add_argument("--mtls-cert-file", metavar="FILE", help="PEM file of an operator's certificate")
    parser.add_argument("--mtls-key-file", metavar="FILE", help="PEM file of the certificate's key")
    parser.add_argument("--mtls-ca-file", metavar="FILE", help="PEM file of the authorities that sign the services' certificates")
    parser.add_argument("--mtls-token-file", metavar="FILE", help="file with the token that all services share")
