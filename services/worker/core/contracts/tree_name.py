"""The name of a tree of cached prefixes: the revision of the weights that computed its KV, and the requests' cache namespace.

The revision separates requests from pages of other weights, even if the tree outlives a replacement of the weights. The tree of a
deleted salt is retired: requests that were present continue to use it under a unique name, and no other tier stores its pages.
"""

from __future__ import annotations

from services.shared.index.prefix_index import salt_of

_END = "\n"  # end of the revision, which never contains it
_LENGTH = ":"  # follows the length at the beginning of a namespace; a revision never contains it
_RETIRED = "retired-"  # beginning of a retired tree's revision; no digest begins like this


def tree_name(revision: str, namespace: str) -> str:
    """Returns the name of a tree. Without a revision, the name is the namespace."""
    assert _END not in revision, "a digest has one line"
    return f"{revision}{_END}{namespace}" if revision else namespace


def parts_of(name: str) -> tuple[str, str]:
    """Returns (revision, namespace) of a name with a revision."""
    revision, _, namespace = name.partition(_END)
    return revision, namespace


def salt_of_tree(name: str) -> str:
    """Returns the cache salt of a tree, which may be retired; empty for none."""
    return salt_of(_namespace_of(name))


def retired_name(name: str, number: int) -> str:
    """Returns the unique name of a retired tree. `number` is the number of the deletion."""
    assert not is_retired(name), "a tree is retired once"
    return f"{_RETIRED}{number}{_END}{_namespace_of(name)}"


def is_retired(name: str) -> bool:
    return name.startswith(_RETIRED)


def _namespace_of(name: str) -> str:
    revision, end, namespace = name.partition(_END)
    return namespace if end and _LENGTH not in revision else name
