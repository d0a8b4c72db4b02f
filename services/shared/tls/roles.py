"""The roles of processes in TLS between services.

A role is a DNS name in a certificate. It names the kind of a service and not a host, because services have the addresses of their
pods, which a certificate cannot list. A client checks that the server's certificate names the role that it wants to reach. A
server checks that the client's certificate names a role that may call it. A certificate that several services share has all their
roles.
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    GATEWAY = "rootstock-gateway"
    TOKENIZER = "rootstock-tokenizer"
    DETOKENIZER = "rootstock-detokenizer"
    WORKER = "rootstock-worker"
    OPERATOR = "rootstock-operator"  # a person or a program that calls control services
