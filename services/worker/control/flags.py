"""The arguments of `rootstock control`.

This file imports only the standard library, because every `rootstock` command loads it and must start fast.
"""

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
  StartExpertDistributionRecord         StopExpertDistributionRecord
  DumpExpertDistributionRecord          FreezeGc
  SlowDown [SECONDS]"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rootstock control` to a parser."""
    parser.add_argument("operation", metavar="OPERATION", help="operation of the worker's control service")
    parser.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="arguments of the operation, as listed below")
    parser.add_argument("--address", metavar="HOST:PORT", help="the worker's control address; default 127.0.0.1:9203")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="seconds that the operation may take; default 60")
    parser.add_argument("--control-token-file", metavar="FILE", help="file with the worker's token")
    parser.add_argument("--mtls-cert-file", metavar="FILE", help="PEM file with an operator's certificate")
    parser.add_argument("--mtls-key-file", metavar="FILE", help="PEM file with the private key of --mtls-cert-file")
    parser.add_argument("--mtls-ca-file", metavar="FILE", help="PEM file with the authorities of the services' certificates")
    parser.add_argument("--mtls-token-file", metavar="FILE", help="file with tokens, one per line; the first token is sent")
