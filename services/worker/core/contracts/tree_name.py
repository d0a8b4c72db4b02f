"""The name of a tree of cached prefixes: the revision of the weights that computed its KV, and the requests' namespace.

With the revision in it no request ever finds a page of other weights, whatever becomes of the tree when weights are replaced.
"""

from __future__ import annotations

_END = "\n"  # of the revision, which has none


def tree_name(revision: str, namespace: str) -> str:
    """revision: "" where weights have no name; a tree is then named by its namespace alone."""
    assert _END not in revision, "a digest has one line"
    return f"{revision}{_END}{namespace}" if revision else namespace


def parts_of(name: str) -> tuple[str, str]:
    """(revision, namespace) of a name with a revision."""
    revision, _, namespace = name.partition(_END)
    return revision, namespace
