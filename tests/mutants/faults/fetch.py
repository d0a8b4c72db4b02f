"""Seeded faults in the download of models. The tests of a fault's area (areas.py) must detect the fault."""

from __future__ import annotations

from tests.mutants.fault import of

FOLDER = "services/shared/fetch"
FETCH = (
    *of(
        "fetch",
        f"{FOLDER}/download.py",
        ('{"Range": f"bytes={present}-"} if present else {}', "{}"),
        ("if size != file.size else file.find_fault(part)", 'if size != file.size else ""'),
        ("fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
        ("fullmatch(other.name) and other != partial:", "fullmatch(other.name) and other == folder:"),
        ("        if mark.is_file() and mark.read_text() == wanted:", "        if mark.is_file():"),
        ("if store.wanted != wanted:", "if False:"),
        ("        refuse_by_config(partial, source, files)\n", ""),
        ("if not (partial / file.name).resolve().is_relative_to(partial.resolve()):", "if False:"),
    ),
    *of(
        "fetch",
        f"{FOLDER}/http_client.py",
        ("if redirected is not None and", "if redirected is not None or"),
        ("not in (408, 429, 500, 502, 503, 504)", "in (1,)"),
    ),
    *of("fetch", f"{FOLDER}/files.py", ('return "" if found == wanted else', 'return "" if found else')),
    *of(
        "fetch",
        f"{FOLDER}/stores.py",
        ('query["continuation-token"] =', 'query["token"] ='),
        (
            '"s3://").partition("/")\n        self._prefix = prefix.strip("/") + "/" if',
            '"s3://").partition("/")\n        self._prefix = prefix.strip("/") if',
        ),
        ("range(int(parts))", "range(1)"),
        ('query["pageToken"] =', 'query["page"] ='),
        ('b"\\0\\1" +', 'b"\\0\\2" +'),
    ),
)
