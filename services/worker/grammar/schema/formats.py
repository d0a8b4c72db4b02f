"""String formats of JSON Schema as patterns.

A pattern matches only valid texts of its format, but not all of them. The pattern of host names is an exception: it also matches
invalid labels with more than 63 characters, because a limit would cost one automaton state per character.
"""

from __future__ import annotations

from collections.abc import Mapping

_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_DATE = rf"(?:[12]\d{{3}}-{_DAY}|(?:[12]\d(?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)-02-29)"
_ANY_DATE = rf"(?!0000)(?:\d{{4}}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d"
_OFFSET = r"(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_LABEL = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_DOMAIN = rf"(?:{_LABEL}\.)+[A-Za-z]{{2,}}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_ANY_NAME = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_ANY_PART = rf"(?:{_ANY_NAME}|[/?])*"
# The last label of a host begins with a letter, because URL parsers read a host that ends with a number as an IPv4 address.
_URI_HOST = rf"(?:(?:{_LABEL}\.)*[A-Za-z][A-Za-z0-9]*(?:-[A-Za-z0-9]+)*|{_IPV4})(?::[1-9]\d{{0,3}})?"
_URI = rf"^[a-z][a-z0-9+-]{{0,15}}://{_URI_HOST}(?:/{_ANY_NAME}*)*(?:\?{_ANY_PART})?(?:#{_ANY_PART})?$"


def _ipv6(group: str) -> str:
    return "|".join(
        [rf"(?:{group}:){{7}}{group}", "::", rf"::{group}(?::{group}){{0,5}}"]
        + [rf"{group}(?::{group}){{{n - 1}}}::(?:{group}(?::{group}){{0,{5 - n}}})?" for n in range(1, 6)]
        + [rf"{group}(?::{group}){{5}}::"]
    )


def _uuid(version: str, variant: str = "[89ab]") -> str:
    return f"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-{variant}[0-9a-f]{{3}}-[0-9a-f]{{12}}"


_IPV6 = _ipv6("[0-9a-f]{1,4}")
_IPV4_NETWORKS = rf"(?:{_IPV4}/32|{_BYTE}\.{_BYTE}\.{_BYTE}\.0/24|{_BYTE}\.{_BYTE}\.0\.0/16|{_BYTE}\.0\.0\.0/8)"
_IPV6_NETWORKS = rf"(?:(?:{_IPV6})/128|[0-9a-f]{{1,4}}(?::[0-9a-f]{{1,4}}){{0,3}}::/64)"
_LENGTH_4, _LENGTH_6 = r"/(?:3[0-2]|[12]?\d)", r"/(?:12[0-8]|1[01]\d|[1-9]?\d)"
_BASE64 = r"(?:[0-9a-zA-Z+/]{4})*(?:[0-9a-zA-Z+/][AQgw]==|[0-9a-zA-Z+/]{2}[AEIMQUYcgkosw048]=)?"
_BASE64_URL = r"(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]==|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048]=)?"
_TIMES = r"(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"

PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": rf"^{_CLOCK}(?:\.\d{{1,6}})?{_OFFSET}$",
    "date-time": rf"^{_DATE}T{_CLOCK}(?:\.\d{{1,6}})?{_OFFSET}$",
    "duration": r"^P(?:\d{1,4}W|(?:\d{1,4}D)(?:T\d{1,4}H(?:\d{1,4}M(?:\d{1,4}S)?)?)?|T\d{1,4}[HMS])$",
    "email": rf"^[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_DOMAIN}$",
    "hostname": f"^{_HOST}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "uri": _URI,
    # Formats of pydantic and zod, which are not in JSON Schema.
    **{f"uuid{version}": f"^{_uuid(str(version))}$" for version in (1, 3, 4, 5, 6, 7, 8)},
    "ipvanyaddress": f"^(?:{_IPV4}|{_IPV6})$",
    "ipv4interface": f"^{_IPV4}(?:{_LENGTH_4})?$",
    "ipv6interface": f"^(?:{_IPV6})(?:{_LENGTH_6})?$",
    "ipvanyinterface": f"^(?:{_IPV4}(?:{_LENGTH_4})?|(?:{_IPV6})(?:{_LENGTH_6})?)$",
    "ipv4network": f"^{_IPV4_NETWORKS}$",
    "ipv6network": f"^{_IPV6_NETWORKS}$",
    "ipvanynetwork": f"^(?:{_IPV4_NETWORKS}|{_IPV6_NETWORKS})$",
    "base64": f"^{_BASE64}$",
    "base64url": f"^{_BASE64_URL}$",
    "jwt": r"^eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*$",
    "fraction": r"^-?\d{1,15}/[1-9]\d{0,14}$",
    "multi-host-uri": _URI,
    **dict.fromkeys(("path", "file-path", "directory-path"), r"^[^\x00-\x1f\x7f]+$"),
}
# Less strict patterns of JSON Schema's formats, for schemas that also have a `pattern`. A strict pattern of the format could
# exclude all texts that satisfy the schema's own pattern.
LENIENT_PATTERNS: Mapping[str, str] = {
    "date": f"^{_ANY_DATE}$",
    "time": rf"^{_CLOCK}(?:\.\d+)?{_OFFSET}$",
    "date-time": rf"^{_ANY_DATE}T{_CLOCK}(?:\.\d+)?{_OFFSET}$",
    "duration": rf"^P(?:\d+W|(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)(?:T{_TIMES})?|T{_TIMES})$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_DOMAIN}$",
    "hostname": rf"^(?=.{{1,48}}$){_HOST}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_ipv6('[0-9a-fA-F]{1,4}')})$",
    "uuid": r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "uri": _URI,
}
# Formats that allow every text: raw bytes, and passwords.
ANY_TEXT = frozenset({"binary", "password"})
