"""Google Cloud Storage: https://cloud.google.com/storage/docs/json_api."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

from services.shared.fetch.files import File, is_wanted, unequal
from services.shared.fetch.http_client import Headers, answer_json, encoded


class Gcs:
    mark = ".source"

    def __init__(self, source: str) -> None:
        self.wanted = source
        self._bucket, _, prefix = source.removeprefix("gs://").partition("/")
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._endpoint = (os.environ.get("GCS_ENDPOINT") or "https://storage.googleapis.com").rstrip("/")
        self._key = json.loads(os.environ["GCS_KEY"]) if os.environ.get("GCS_KEY") else None
        self._lent = (0.0, "")
        self._lock = threading.Lock()

    def files(self) -> list[File]:
        found: list[File] = []
        query = {"prefix": self._prefix, "fields": "nextPageToken,items(name,size,md5Hash,generation)"}
        while True:
            page = answer_json(f"{self._endpoint}/storage/v1/b/{self._bucket}/o?{encoded(query)}", self._headers())
            found += [self._file(each) for each in page.get("items", ()) if is_wanted(each["name"].removeprefix(self._prefix))]
            if not page.get("nextPageToken"):
                return found
            query["pageToken"] = page["nextPageToken"]

    def _file(self, about: dict[str, str]) -> File:
        query = encoded({"alt": "media", "generation": about["generation"]})
        url = f"{self._endpoint}/storage/v1/b/{self._bucket}/o/{urllib.parse.quote(about['name'], safe='')}?{query}"
        wrong = unequal("md5", base64.b64decode(about["md5Hash"]).hex()) if "md5Hash" in about else self._without_a_sum
        name = about["name"].removeprefix(self._prefix)
        return File(name, int(about["size"]), about["generation"], url, self._headers, wrong)

    def _without_a_sum(self, path: Path) -> str:
        print(f"{path.name}: of its size; the store has no MD5 of what was put together of parts", flush=True)
        return ""

    def _headers(self) -> Headers:
        with self._lock:
            if time.time() > self._lent[0] - 300:
                about = self._token_by_key(self._key) if self._key else self._token_of_the_node()
                self._lent = (time.time() + float(about["expires_in"]), about["access_token"])
            return {"Authorization": f"Bearer {self._lent[1]}"}

    def _token_of_the_node(self) -> dict[str, Any]:
        host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
        url = f"http://{host}/computeMetadata/v1/instance/service-accounts/default/token"
        return dict(answer_json(url, {"Metadata-Flavor": "Google"}))

    def _token_by_key(self, key: dict[str, str]) -> dict[str, Any]:
        """RFC 7523, signed by RFC 8017's RSASSA-PKCS1-v1_5."""
        now = int(time.time())
        scope = "https://www.googleapis.com/auth/devstorage.read_only"
        claims = {"iss": key["client_email"], "scope": scope, "aud": key["token_uri"], "iat": now, "exp": now + 3600}
        text = b".".join(url_safe(json.dumps(part).encode()) for part in ({"alg": "RS256", "typ": "JWT"}, claims))
        assertion = b".".join((text, url_safe(rsa_signature(text, key["private_key"])))).decode()
        grant = {"grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer", "assertion": assertion}
        return dict(answer_json(key["token_uri"], {}, encoded(grant).encode()))


def url_safe(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def rsa_signature(text: bytes, pem: str) -> bytes:
    """pem: an unencrypted PKCS #8 private key."""
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
    """Contents of the values that lie one behind the other (X.690)."""
    found, at = [], 0
    while at < len(data):
        length, at = data[at + 1], at + 2
        if length & 0x80:
            many = length & 0x7F
            length, at = int.from_bytes(data[at : at + many], "big"), at + many
        found.append(data[at : at + length])
        at += length
    return found
