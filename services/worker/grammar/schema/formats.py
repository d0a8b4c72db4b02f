"""String formats that are enforced, as patterns. Each matches a part of what the format allows, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

_MONTH_DAY = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_DATE = rf"[1-2]\d{{3}}-{_MONTH_DAY}"  # the 29th of February is left out: it needs the year
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_GROUP = r"[0-9a-f]{1,4}"
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_IPV6 = "|".join(
    [rf"(?:{_GROUP}:){{7}}{_GROUP}", "::", rf"::{_GROUP}(?::{_GROUP}){{0,5}}"]
    + [rf"{_GROUP}(?::{_GROUP}){{{n - 1}}}::(?:{_GROUP}(?::{_GROUP}){{0,{5 - n}}})?" for n in range(1, 6)]
)
_PATH = r"(?:/[A-Za-z0-9._~-]*){0,16}"

PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": r"^P(?:\d{1,4}W|(?:\d{1,4}D)(?:T\d{1,4}H(?:\d{1,4}M(?:\d{1,4}S)?)?)?|T\d{1,4}[HMS])$",
    "email": rf"^[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,16}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,3}}$",
    "hostname": f"^{_HOST}$",
    "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "uri": rf"^[a-z][a-z0-9+-]{{0,15}}://{_HOST}(?::[1-9]\d{{0,3}})?{_PATH}(?:\?[A-Za-z0-9._~=&-]*)?(?:#[A-Za-z0-9._~-]*)?$",
}
