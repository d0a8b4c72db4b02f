"""The download sources of models: a folder, the Hugging Face hub, Google Cloud Storage, and S3 or a compatible store.

Sources: https://huggingface.co/docs/hub/api, https://cloud.google.com/storage/docs/json_api and, for S3's signature version 4,
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import json
import os
import re
import threading
import time
import urllib.parse
import xml.etree.ElementTree as ElementTree
from email.message import Message
from pathlib import Path
from typing import Any

from rootstock_llm.services.shared.fetch.files import RemoteFile, checksum_check, digest, is_wanted
from rootstock_llm.services.shared.fetch.http_client import Headers, encoded, fetch_json, open_url, retry


class Folder:
    """A folder on a mounted volume. All files outside of .cache folders are copied; no checksums are checked.

    `wanted` lists the names, sizes and modification times of the files.
    """

    mark = ".copied"

    def __init__(self, source: str) -> None:
        self._root = Path(source)

    @property
    def wanted(self) -> str:
        return "".join(
            f"{path.relative_to(self._root)} {stat.st_size} {stat.st_mtime_ns}\n" for path, stat in self._stat_files().items()
        )

    def files(self) -> list[RemoteFile]:
        return [
            RemoteFile(str(path.relative_to(self._root)), stat.st_size, str(stat.st_mtime_ns), path.as_uri(), dict, lambda _: "")
            for path, stat in self._stat_files().items()
        ]

    def _stat_files(self) -> dict[Path, os.stat_result]:
        files = (path for path in self._root.rglob("*") if ".cache" not in path.relative_to(self._root).parts)
        return {path: path.stat() for path in sorted(files) if path.is_file()}


class Hub:
    """A repository on the Hugging Face hub or a mirror of it.

    All files come from one commit. The hub reports the SHA-256 of large files and git's SHA-1 of other files.
    """

    mark = ".source"

    def __init__(self, source: str) -> None:
        self.wanted = source
        self._name, _, revision = source.partition("@")
        self._revision = revision or "main"
        self._endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")

    def _headers(self) -> Headers:
        token = os.environ.get("HF_TOKEN")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def files(self) -> list[RemoteFile]:
        revision = urllib.parse.quote(self._revision, safe="")
        metadata = fetch_json(f"{self._endpoint}/api/models/{self._name}/revision/{revision}?blobs=true", self._headers())
        return [self._file(metadata["sha"], each) for each in metadata["siblings"] if is_wanted(each["rfilename"])]

    def _file(self, commit: str, about: dict[str, Any]) -> RemoteFile:
        large, name = about.get("lfs") or {}, about["rfilename"]
        size = int(large.get("size") or about["size"])
        find_fault = checksum_check("sha1", about["blobId"], lambda path: f"blob {path.stat().st_size}\0".encode())
        if large:
            find_fault = checksum_check("sha256", large["sha256"])
        url = f"{self._endpoint}/{self._name}/resolve/{commit}/{urllib.parse.quote(name)}"
        return RemoteFile(name, size, commit, url, self._headers, find_fault)


class Gcs:
    """A prefix in a bucket of Google Cloud Storage."""

    mark = ".source"

    def __init__(self, source: str) -> None:
        self.wanted = source
        self._bucket, _, prefix = source.removeprefix("gs://").partition("/")
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._endpoint = (os.environ.get("GCS_ENDPOINT") or "https://storage.googleapis.com").rstrip("/")
        self._key = json.loads(os.environ["GCS_KEY"]) if os.environ.get("GCS_KEY") else None
        self._token = (0.0, "")  # (expiry in Unix time, access token)
        self._lock = threading.Lock()

    def files(self) -> list[RemoteFile]:
        found: list[RemoteFile] = []
        query = {"prefix": self._prefix, "fields": "nextPageToken,items(name,size,md5Hash,generation)"}
        while True:
            page = fetch_json(f"{self._endpoint}/storage/v1/b/{self._bucket}/o?{encoded(query)}", self._headers())
            found += [self._file(each) for each in page.get("items", ()) if is_wanted(each["name"].removeprefix(self._prefix))]
            if not page.get("nextPageToken"):
                return found
            query["pageToken"] = page["nextPageToken"]

    def _file(self, about: dict[str, str]) -> RemoteFile:
        query = encoded({"alt": "media", "generation": about["generation"]})
        url = f"{self._endpoint}/storage/v1/b/{self._bucket}/o/{urllib.parse.quote(about['name'], safe='')}?{query}"
        find_fault = (
            checksum_check("md5", base64.b64decode(about["md5Hash"]).hex()) if "md5Hash" in about else self._accept_unchecked
        )
        name = about["name"].removeprefix(self._prefix)
        return RemoteFile(name, int(about["size"]), about["generation"], url, self._headers, find_fault)

    def _accept_unchecked(self, path: Path) -> str:
        print(f"{path.name}: only the size was checked, because the store has no MD5 of composed objects", flush=True)
        return ""

    def _headers(self) -> Headers:
        with self._lock:
            if time.time() > self._token[0] - 300:
                grant = self._service_account_token(self._key) if self._key else self._node_token()
                self._token = (time.time() + float(grant["expires_in"]), grant["access_token"])
            return {"Authorization": f"Bearer {self._token[1]}"}

    def _node_token(self) -> dict[str, Any]:
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
        return dict(fetch_json(url, {"Metadata-Flavor": "Google"}))

    def _service_account_token(self, key: dict[str, str]) -> dict[str, Any]:
        """Exchanges a signed assertion for an access token (RFC 7523; signature RSASSA-PKCS1-v1_5 of RFC 8017)."""
        now = int(time.time())
        scope = "https://www.googleapis.com/auth/devstorage.read_only"
        claims = {"iss": key["client_email"], "scope": scope, "aud": key["token_uri"], "iat": now, "exp": now + 3600}
        text = b".".join(url_safe(json.dumps(part).encode()) for part in ({"alg": "RS256", "typ": "JWT"}, claims))
        assertion = b".".join((text, url_safe(rsa_signature(text, key["private_key"])))).decode()
        grant = {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": assertion}
        return dict(fetch_json(key["token_uri"], {}, encoded(grant).encode()))


def url_safe(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def rsa_signature(text: bytes, pem: str) -> bytes:
    """Returns the signature of a text: RSASSA-PKCS1-v1_5 with SHA-256.

    Args:
        pem: an unencrypted PKCS #8 private key.
    """
    der = base64.b64decode("".join(line for line in pem.strip().splitlines() if not line.startswith("-----")))
    (whole,) = der_parts(der)
    (inner,) = der_parts(der_parts(whole)[2])
    numbers = [int.from_bytes(part, "big") for part in der_parts(inner)]
    modulus, exponent = numbers[1], numbers[3]
    length = (modulus.bit_length() + 7) // 8
    sha256_info = bytes.fromhex("3031300d060960864801650304020105000420") + hashlib.sha256(text).digest()
    padded = b"\0\1" + b"\xff" * (length - len(sha256_info) - 3) + b"\0" + sha256_info
    return pow(int.from_bytes(padded, "big"), exponent, modulus).to_bytes(length, "big")


def der_parts(data: bytes) -> list[bytes]:
    """Returns the contents of consecutive DER values (X.690), without their tags and lengths."""
    found, at = [], 0
    while at < len(data):
        length, at = data[at + 1], at + 2
        if length & 0x80:
            length_size = length & 0x7F
            length, at = int.from_bytes(data[at : at + length_size], "big"), at + length_size
        found.append(data[at : at + length])
        at += length
    return found


class S3:
    """A prefix in a bucket of S3 or of a compatible store."""

    mark = ".source"

    def __init__(self, source: str) -> None:
        self.wanted = source
        self._bucket, _, prefix = source.removeprefix("s3://").partition("/")
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._region = os.environ.get("AWS_REGION") or "us-east-1"
        self._endpoint = (os.environ.get("AWS_ENDPOINT_URL") or f"https://s3.{self._region}.amazonaws.com").rstrip("/")
        # Expiry in Unix time and credentials of an assumed role. None before the first use.
        self._role_credentials: tuple[float, tuple[str, str, str]] | None = None
        self._lock = threading.Lock()

    def files(self) -> list[RemoteFile]:
        found: list[RemoteFile] = []
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
            with open_url(url, self._signed("GET", url)) as response:
                return bytes(response.read())

        return ElementTree.fromstring(re.sub(rb' xmlns="[^"]*"', b"", retry(once), count=1))

    def _file(self, key: str, name: str, size: int, tag: str) -> RemoteFile:
        url = f"{self._endpoint}/{self._bucket}/{urllib.parse.quote(key)}"
        return RemoteFile(
            name,
            size,
            tag,
            url,
            lambda: {**self._signed("GET", url), "If-Match": f'"{tag}"'},
            lambda path: self._find_fault(path, url, tag),
        )

    def _find_fault(self, path: Path, url: str, tag: str) -> str:
        """Compares a file with its ETag. Returns the fault, or "" if they match or the ETag is no checksum.

        | upload | ETag |
        | --- | --- |
        | as one object | MD5 of the content |
        | in N parts | MD5 of the concatenated MD5s of the parts, then -N |
        | encrypted with a KMS key | no checksum |
        """
        sums, _, parts = tag.partition("-")
        first = self._headers_of(f"{url}?partNumber=1" if parts else url)
        # A store that does not support partNumber returns the headers of the whole object, without a part count.
        has_part_count = first.get("x-amz-mp-parts-count", "") == parts
        encrypted = first.get("x-amz-server-side-encryption", "").startswith("aws:kms")
        if encrypted or not has_part_count or not re.fullmatch("[0-9a-f]{32}(-[0-9]+)?", tag):
            return _accept_unchecked(path)
        lengths = [int(first["Content-Length"])] * int(parts or 1)
        found = _sum(path, lengths, bool(parts))
        if found != sums and parts:  # the length of the first part may differ from the others
            lengths = [int(self._headers_of(f"{url}?partNumber={number + 1}")["Content-Length"]) for number in range(int(parts))]
            if sum(lengths) != path.stat().st_size:
                return _accept_unchecked(path)
            found = _sum(path, lengths, True)
        return "" if found == sums else f"its MD5 is {found}, not {sums}"

    def _headers_of(self, url: str) -> Message:
        with retry(lambda: open_url(url, self._signed("HEAD", url), method="HEAD")) as response:
            headers: Message = response.headers
            return headers

    def _signed(self, method: str, url: str) -> Headers:
        access, secret, token = self._credentials()
        return signed(method, url, self._region, access, secret, token) if access else {}

    def _credentials(self) -> tuple[str, str, str]:
        """Returns access key, secret key and session token. Credentials of a role are renewed 300 s before they expire."""
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        if os.environ.get("AWS_ACCESS_KEY_ID") or not os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
            access, secret, token = (os.environ.get(name, "") for name in names)
            return access, secret, token
        with self._lock:
            if self._role_credentials is None or time.time() > self._role_credentials[0] - 300:
                self._role_credentials = self._assume_role()
            return self._role_credentials[1]

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
            with open_url(endpoint, {}, encoded(query).encode()) as response:
                return bytes(response.read())

        found = {each.tag.rpartition("}")[2]: each.text or "" for each in ElementTree.fromstring(retry(once)).iter()}
        until = datetime.datetime.fromisoformat(found["Expiration"].replace("Z", "+00:00")).timestamp()
        return until, (found["AccessKeyId"], found["SecretAccessKey"], found["SessionToken"])


def _accept_unchecked(path: Path) -> str:
    print(f"{path.name}: only the size was checked, because the store has no checksum of it", flush=True)
    return ""


def _sum(path: Path, lengths: list[int], put_in_parts: bool) -> str:
    """Returns the hexadecimal MD5 of the content, or of the concatenated MD5s of its parts if it was uploaded in parts."""
    with path.open("rb") as file:
        each = [digest(file, "md5", length=length) for length in lengths]
    return hashlib.md5(b"".join(each), usedforsecurity=False).hexdigest() if put_in_parts else each[0].hex()


def signed(
    method: str, url: str, region: str, access: str, secret: str, token: str = "", now: datetime.datetime | None = None
) -> dict[str, str]:
    """Returns the headers of a request without a body, signed with AWS signature version 4."""
    parts = urllib.parse.urlsplit(url)
    when = (now or datetime.datetime.now(datetime.UTC)).strftime("%Y%m%dT%H%M%SZ")
    empty_sha256 = hashlib.sha256(b"").hexdigest()
    headers = {"host": parts.netloc, "x-amz-content-sha256": empty_sha256, "x-amz-date": when}
    if token:
        headers["x-amz-security-token"] = token
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join((method, parts.path or "/", parts.query, lines, names, empty_sha256))
    scope = f"{when[:8]}/{region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", when, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{secret}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    authorization = f"AWS4-HMAC-SHA256 Credential={access}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**{name: value for name, value in headers.items() if name != "host"}, "Authorization": authorization}
