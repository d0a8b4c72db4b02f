"""Requests whose grammars need much time or memory to compile, or might crash the server."""

from __future__ import annotations

import json
from typing import Any

DEPTH = 10_000  # nesting depth, far above the recursion limits of parsers
BIG_BYTES = 10 << 20  # size of the largest grammars, above the server's limit for a grammar


def hostile_bodies(nonce: int) -> list[tuple[str, bytes]]:
    """Returns (name, body) of each request. Each grammar contains the nonce, so that no earlier round has cached it."""
    return [*_patterns(nonce), *_grammars(nonce), *_schemas(nonce), *_bodies(nonce)]


def _body(**fields: Any) -> bytes:
    base = {"model": "demo", "prompt": "Give the JSON for name Ada, age 36.", "max_tokens": 48, "temperature": 1, "seed": 1}
    return json.dumps({**base, **fields}).encode()


def _patterns(nonce: int) -> list[tuple[str, bytes]]:
    patterns = {
        "nested quantifiers": f"((a+)+)+b{nonce}",
        "overlapping alternatives": f"(a|aa|aaa|a?)*b{nonce}",
        "chain of wildcards": ".*" * 40 + f"={nonce}",
        "nested counts": f"((a{{1,100}}){{1,100}}){{1,100}}{nonce}",
        "one huge count": f"[a-z]{{100000}}{nonce}",
        "pattern of depth 10,000": "(" * DEPTH + f"a{nonce}" + ")" * DEPTH,
        "unicode classes": f"([^\\u4e00-\\u9fff]|[\\u0000-\\uffff]|[α-ωа-я一-龥]|.){{1,3000}}{nonce}",
        "2,000 ambiguous branches": "|".join(f"[a-z]{{1,{index % 90 + 5}}}q{index}" for index in range(2000)) + f"|{nonce}",
    }
    return [(name, _body(regex=pattern)) for name, pattern in patterns.items()]


def _grammars(nonce: int) -> list[tuple[str, bytes]]:
    rules = "\n".join(f"r{i} ::= r{i + 1} r{i + 1} | r{i + 1}" for i in range(40))
    chain = "\n".join(f'c{i} ::= c{i + 1} | "x{i}"' for i in range(1000))
    grammars = {
        "left recursion, ambiguous": f'root ::= root root | "a" | "" | "{nonce}"',
        "palindromes with holes": f'root ::= "a" root | root "a" | "a" root "a" | [a-z]* | "{nonce}"',
        "doubling rules": f'root ::= r0 "{nonce}"\n{rules}\nr40 ::= "a"?',
        "nested empty repeats": f'root ::= (((("a"?){{1,60}}){{1,60}})*)* "{nonce}"',
        "chain of 1,000 rules": f'root ::= c0 "{nonce}"\n{chain}\nc1000 ::= "end"',
    }
    return [(name, _body(ebnf=grammar)) for name, grammar in grammars.items()]


def _schemas(nonce: int) -> list[tuple[str, bytes]]:
    doubling = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2} for i in range(40)}
    doubling["d40"] = {"const": nonce}
    branch = {"type": "string", "maxLength": 40}
    tags = [{"type": "tag", "begin": f"<{nonce}t{i}>", "content": {"type": "any_text"}, "end": f"</t{i}>"} for i in range(400)]
    schemas: dict[str, Any] = {
        "enum of 50,000": {"enum": [f"v{nonce}-{index * 7919 % 100_003}" for index in range(50_000)]},
        "exponential references": {"$ref": "#/$defs/d0", "$defs": doubling},
        "circle of references": {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}, "x-n": nonce},
        },
        "3,000 optional properties": {"type": "object", "properties": {f"p{i}_{nonce}": {"type": "string"} for i in range(3000)}},
        "branches alike": {
            "anyOf": [{"type": "object", "properties": {f"k{nonce}": branch, f"z{i}": branch}} for i in range(400)]
        },
        "a string of a million": {"type": "string", "minLength": 1, "maxLength": 1_000_000 + nonce},
        "catastrophic pattern": {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": f"(x+x+)+y|(.*a){{30}}{nonce}"}},
        },
    }
    out = [(name, _body(guided_json=schema)) for name, schema in schemas.items()]
    tag = {"type": "triggered_tags", "triggers": ["<"], "tags": tags}
    return [*out, ("400 tags", _body(structural_tag={"type": "structural_tag", "format": tag}))]


def _bodies(nonce: int) -> list[tuple[str, bytes]]:
    deep = '{"items":' * DEPTH + f'{{"const":{nonce}}}' + "}" * DEPTH
    inside = _body(guided_json={"HERE": 0}).replace(b'{"HERE": 0}', deep.encode())
    words = [f"{nonce}-{index}-" + "x" * 1000 for index in range(BIG_BYTES // 1016)]
    return [
        ("JSON of depth 10,000", inside),
        ("JSON of depth 10,000 as text", _body(guided_json=deep)),
        ("10 MB schema", _body(guided_json={"enum": words})),
        ("10 MB pattern", _body(regex="a?" * (BIG_BYTES // 2) + str(nonce))),
        ("just below the size limit", _body(regex="(a|b)?" * 170_000 + str(nonce))),
    ]
