"""The name of a tree of cached prefixes: the revision of the weights that computed its KV, and the requests' namespace.

With the revision in it no request ever finds a page of other weights, whatever becomes of the tree when weights are replaced.
A tree whose salt was deleted is retired: it goes on under a name of its own for the requests that were here before, and nothing
of it is kept in other tiers.
"""

from __future__ import annotations

from services.shared.index.cache_namespace import salt_of

_END = "\n"  # of the revision, which has none
_LENGTH = ":"  # behind the length that a namespace begins with; a revision has none
_RETIRED = "retired-"  # no digest begins so


def tree_name(revision: str, namespace: str) -> str:
    """revision: "" where weights have no name; a tree is then named by its namespace alone."""
    assert _END not in revision, "a digest has one line"
    return f"{revision}{_END}{namespace}" if revision else namespace


def parts_of(name: str) -> tuple[str, str]:
    """(revision, namespace) of a name with a revision."""
    revision, _, namespace = name.partition(_END)
    return revision, namespace


def salt_of_tree(name: str) -> str:
    """The cache salt of its requests, "" for none; also of a tree that is retired."""
    return salt_of(_namespace_of(name))


def retired_name(name: str, number: int) -> str:
    """number: of the deletion, so that no other tree is called the same."""
    assert not is_retired(name), "a tree is retired once"
    return f"{_RETIRED}{number}{_END}{_namespace_of(name)}"


def is_retired(name: str) -> bool:
    return name.startswith(_RETIRED)


def _namespace_of(name: str) -> str:
    revision, end, namespace = name.partition(_END)
    return namespace if end and _LENGTH not in revision else name
