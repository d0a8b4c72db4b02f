"""Seeded faults in the checks of grammars and JSON schemas. The tests of a fault's area (areas.py) must detect the fault."""

from __future__ import annotations

from tests.mutants.fault import of

GRAMMAR = (
    *of(
        "grammar",
        "services/worker/grammar/schema/schema_support.py",
        ("if key not in _KNOWN and not is_annotation(key):", 'if key not in _KNOWN and "$" in key:'),
        only="test_schema_keywords",
    ),
    *of(
        "grammar",
        "services/worker/grammar/schema/regex_syntax.py",
        ("        if char.isalnum():\n            raise", "        if char.isupper():\n            raise"),
        ('raise self._refuse("octal escapes are not supported")', "return 0"),
    ),
    *of(
        "grammar",
        "services/worker/grammar/schema/schema_containers.py",
        ("[:high]\n", "\n"),
        ("        if index >= low:\n", "        if index > low:\n"),
        ("return None if num_prefix and low <= num_prefix else VALUE", "return None if num_prefix else VALUE"),
        ("Repeat(more, max(low - 1, 0), None", "Repeat(more, low, None"),
        ("pairs.append((builder.define(pair) if shared else pair, name in required))", "pairs.append((pair, True))"),
        (
            "        if name not in properties:\n            pairs.append((_pair(_key(name",
            "        if False:\n            pairs.append((_pair(_key(name",
        ),
        only="test_schema_keywords",
    ),
    *of(
        "grammar",
        "services/worker/grammar/schema/number_ranges.py",
        ("return value, value == strict", "return value, value == plain"),
        ("value = tighter(plain, strict)", "value = plain"),
        only="test_schema_keywords",
    ),
)
