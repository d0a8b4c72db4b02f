"""Names the owner of stored records."""

from __future__ import annotations

from hashlib import blake2b


def owner_of(key: str) -> str:
    """Returns the owner of an API key's records, as 32 hexadecimal digits.

    Different API keys have different owners, so that no API key can name the records of another API key.

    Args:
        key: Name of the API key; "" if the gateway has no API keys.
    """
    return blake2b(key.encode(), digest_size=16, person=b"rootstock-state").hexdigest()
