"""Who a process is to the others: a DNS name in its certificate that says what it is, and nothing of where it runs.

A certificate may have several; of a set of processes that share one it has all. Addresses are those of pods, which no certificate
can name: so a client asks for the name of the role that it means to reach, and a server for that of those who may call it.
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    GATEWAY = "rootstock-gateway"
    TOKENIZER = "rootstock-tokenizer"
    DETOKENIZER = "rootstock-detokenizer"
    WORKER = "rootstock-worker"
    OPERATOR = "rootstock-operator"  # of a person, or a program, that calls control services
