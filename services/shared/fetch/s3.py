"""S3 and what speaks like it. Signature version 4:
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import re
import threading
import time
import urllib.parse
import xml.etree.ElementTree as ElementTree
from email.message import Message
from pathlib import Path

from services.shared.fetch.files import File, digest, is_wanted
from services.shared.fetch.http_client import Headers, ask, encoded, patiently


class S3:
    mark = ".source"

    def __init__(self, source: str) -> None:
        self.wanted = source
        self._bucket, _, prefix = source.removeprefix("s3://").partition("/")
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._region = os.environ.get("AWS_REGION") or "us-east-1"
        self._endpoint = (os.environ.get("AWS_ENDPOINT_URL") or f"https://s3.{self._region}.amazonaws.com").rstrip("/")
        self._lent: tuple[float, tuple[str, str, str]] | None = None
        self._lock = threading.Lock()

    def files(self) -> list[File]:
        found: list[File] = []
        query = {"list-type": "2", "prefix": self._prefix}
        while True:
            page = self._page(query)
            for each in (each for each in page if each.tag == "Contents"):
                key = each.findtext("Key", "")
                name = key.removeprefix(self._prefix)
                if is_wanted(name) and not name.startswith("/"):
                    found.append(self._file(key, name, int(each.findtext("Size", "0")), each.findtext("ETag", "").strip('"')))
            if page.findtext("IsTruncated") != "true":
                return found
            query["continuation-token"] = page.findtext("NextContinuationToken", "")

    def _page(self, query: dict[str, str]) -> ElementTree.Element:
        url = f"{self._endpoint}/{self._bucket}?{encoded(query)}"

        def once() -> bytes:
            with ask(url, self._signed("GET", url)) as answer:
                return bytes(answer.read())

        return ElementTree.fromstring(re.sub(rb' xmlns="[^"]*"', b"", patiently(once), count=1))

    def _file(self, key: str, name: str, size: int, tag: str) -> File:
        url = f"{self._endpoint}/{self._bucket}/{urllib.parse.quote(key)}"
        return File(
            name,
            size,
            tag,
            url,
            lambda: {**self._signed("GET", url), "If-Match": f'"{tag}"'},
            lambda path: self._wrong(path, url, tag),
        )

    def _wrong(self, path: Path, url: str, tag: str) -> str:
        """An ETag is the MD5 of the bytes, or of its parts' MD5s, and their number; under a key of KMS it is neither."""
        sums, _, parts = tag.partition("-")
        first = self._about(f"{url}?partNumber=1" if parts else url)
        counted = first.get("x-amz-mp-parts-count", "") == parts  # a store that knows no parts says what the whole object has
        encrypted = first.get("x-amz-server-side-encryption", "").startswith("aws:kms")
        if encrypted or not counted or not re.fullmatch("[0-9a-f]{32}(-[0-9]+)?", tag):
            return _uncompared(path)
        lengths = [int(first["Content-Length"])] * int(parts or 1)
        found = _sum(path, lengths, bool(parts))
        if found != sums and parts:  # of different lengths, perhaps
            lengths = [int(self._about(f"{url}?partNumber={number + 1}")["Content-Length"]) for number in range(int(parts))]
            if sum(lengths) != path.stat().st_size:
                return _uncompared(path)
            found = _sum(path, lengths, True)
        return "" if found == sums else f"its MD5 is {found}, not {sums}"

    def _about(self, url: str) -> Message:
        with patiently(lambda: ask(url, self._signed("HEAD", url), method="HEAD")) as answer:
            headers: Message = answer.headers
            return headers

    def _signed(self, method: str, url: str) -> Headers:
        access, secret, token = self._credentials()
        return signed(method, url, self._region, access, secret, token) if access else {}

    def _credentials(self) -> tuple[str, str, str]:
        """Access key, secret key and session token; those that a role lends are asked for again before they end."""
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        if os.environ.get("AWS_ACCESS_KEY_ID") or not os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
            access, secret, token = (os.environ.get(name, "") for name in names)
            return access, secret, token
        with self._lock:
            if self._lent is None or time.time() > self._lent[0] - 300:
                self._lent = self._assume_role()
            return self._lent[1]

    def _assume_role(self) -> tuple[float, tuple[str, str, str]]:
        query = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": os.environ["AWS_ROLE_ARN"],
            "RoleSessionName": "rootstock-fetch",
            "WebIdentityToken": Path(os.environ["AWS_WEB_IDENTITY_TOKEN_FILE"]).read_text().strip(),
        }
        endpoint = os.environ.get("AWS_ENDPOINT_URL_STS") or f"https://sts.{self._region}.amazonaws.com"

        def once() -> bytes:
            with ask(endpoint, {}, encoded(query).encode()) as answer:
                return bytes(answer.read())

        found = {each.tag.rpartition("}")[2]: each.text or "" for each in ElementTree.fromstring(patiently(once)).iter()}
        until = datetime.datetime.fromisoformat(found["Expiration"].replace("Z", "+00:00")).timestamp()
        return until, (found["AccessKeyId"], found["SecretAccessKey"], found["SessionToken"])


def _uncompared(path: Path) -> str:
    print(f"{path.name}: of its size; the store has no sum of its bytes to compare", flush=True)
    return ""


def _sum(path: Path, lengths: list[int], put_in_parts: bool) -> str:
    """MD5 in hex, of the bytes or of the MD5s of parts that are so long."""
    with path.open("rb") as file:
        each = [digest(file, "md5", length=length) for length in lengths]
    return hashlib.md5(b"".join(each), usedforsecurity=False).hexdigest() if put_in_parts else each[0].hex()


def signed(
    method: str, url: str, region: str, access: str, secret: str, token: str = "", now: datetime.datetime | None = None
) -> dict[str, str]:
    """Headers of a request to S3 without a body."""
    at = urllib.parse.urlsplit(url)
    when = (now or datetime.datetime.now(datetime.UTC)).strftime("%Y%m%dT%H%M%SZ")
    nothing = hashlib.sha256(b"").hexdigest()
    headers = {"host": at.netloc, "x-amz-content-sha256": nothing, "x-amz-date": when}
    if token:
        headers["x-amz-security-token"] = token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join((method, at.path or "/", at.query, lines, names, nothing))
    scope = f"{when[:8]}/{region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", when, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{secret}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    authorization = f"AWS4-HMAC-SHA256 Credential={access}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**{name: value for name, value in headers.items() if name != "host"}, "Authorization": authorization}
