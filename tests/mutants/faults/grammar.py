"""Of constraints."""

from __future__ import annotations

from tests.mutants.fault import of

GRAMMAR = (
    *of(
        "grammar",
        "services/worker/grammar/schema/schema_support.py",
        ('if key not in _KNOWN and not key.startswith("x-"):', 'if key not in _KNOWN and "$" in key:'),
        only="test_schema_keywords",
    ),
    *of(
        "grammar",
        "services/worker/grammar/schema/regex_syntax.py",
        ("        if char.isalnum():\n            raise", "        if char.isupper():\n            raise"),
        ('raise self._refuse("octal escapes are not supported")', "return 0"),
    ),
)
