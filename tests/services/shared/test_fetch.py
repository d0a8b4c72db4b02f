"""Tests python -m rootstock_llm.services.shared.fetch as a process against download sources on loopback."""

from __future__ import annotations

import base64
import datetime
import importlib.util
import json
import os
import pty
import ssl
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from rootstock_llm.services.local.ports import free_ports
from rootstock_llm.services.shared.fetch.download import fetch as download
from rootstock_llm.services.shared.fetch.files import RemoteFile, Unfetchable
from rootstock_llm.services.shared.fetch.stores import Folder, signed
from rootstock_llm.services.shared.hf_tokenizer import load_tokenizer
from rootstock_llm.services.shared.observe.progress import read
from tests.services.shared.stores import Answer, Bucket, GoogleBucket, Hub, ReceivedRequest, serve
from tests.services.tokenizer.model_folders import sentencepiece_model

LARGE = bytes(range(256)) * 4096  # 1 MiB
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors": LARGE,
    "weights.bin": b"a pickle",
    "consolidated.safetensors": b"again",
}
# The files that a worker or tokenizer reads. The other files are duplicates in other formats, which are not downloaded.
LOADED = {"config.json", "tokenizer.json", "model.safetensors"}
COMMAND = [sys.executable, "-m", "rootstock_llm.services.shared.fetch"]
# The environment without proxies
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def fetch(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**ENVIRONMENT, "FETCH_PATIENCE_S": "2", **environment},
    )


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the contents of all files in the folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def other_files(folder: Path) -> set[str]:
    """Returns the names in the parent folder, without the folder and its lock file."""
    return {path.name for path in folder.parent.iterdir()} - {folder.name, f".{folder.name}.lock"}


class TestHub:
    def test_model_is_downloaded_once_and_the_token_is_sent_to_one_host(self, tmp_path: Path) -> None:
        with serve(lambda request: Answer(body=LARGE)) as cdn:
            hub = Hub({"main": ("c1", FILES), "v2": ("c2", {"config.json": b"2"})}, "secret", cdn.url)
            with serve(hub) as server:
                arguments = (tmp_path / "a", "org/a", tmp_path / "b", "org/a@v2")
                first = fetch(*arguments, HF_ENDPOINT=server.url, HF_TOKEN="secret")
                assert first.returncode == 0, first.stderr
                num_requests = len(server.received)
                again = fetch(*arguments, HF_ENDPOINT=server.url, HF_TOKEN="secret")
                assert again.returncode == 0 and len(server.received) == num_requests and "has org/a" in again.stdout
        assert files_of(tmp_path / "a") == {**{name: FILES[name] for name in LOADED}, ".source": b"org/a"}
        assert files_of(tmp_path / "b") == {"config.json": b"2", ".source": b"org/a@v2"}
        assert [each.headers.get("authorization") for each in cdn.received] == [None]
        assert other_files(tmp_path / "a") == {"b", ".b.lock"}

    def test_fetch_omits_the_weights_when_only_tokenizer_files_are_requested(self, tmp_path: Path) -> None:
        with serve(Hub({"main": ("c1", FILES)})) as server:
            assert fetch(tmp_path / "a", "org/a", HF_ENDPOINT=server.url, MODEL_FILES="tokenizer").returncode == 0
        assert set(files_of(tmp_path / "a")) == {"config.json", "tokenizer.json", ".source"}
        assert not server.got("/org/a/resolve/c1/model.safetensors")

    def test_fetch_resumes_an_interrupted_file(self, tmp_path: Path) -> None:
        path = "/org/a/resolve/c1/model.safetensors"
        with serve(Hub({"main": ("c1", FILES)})) as server:
            server.cut[path] = 300_000
            assert fetch(tmp_path / "a", "org/a", HF_ENDPOINT=server.url).returncode == 0
        assert [each.headers.get("range") for each in server.got(path)] == [None, "bytes=300000-"]
        assert files_of(tmp_path / "a")["model.safetensors"] == LARGE

    def test_fetch_resumes_when_an_earlier_fetch_was_killed(self, tmp_path: Path) -> None:
        path, folder = "/org/a/resolve/c1/model.safetensors", tmp_path / "a"
        with serve(Hub({"main": ("c1", FILES)})) as server:
            server.paused.add(path)
            process = subprocess.Popen([*COMMAND, str(folder), "org/a"], env={**ENVIRONMENT, "HF_ENDPOINT": server.url})
            try:
                half = len(LARGE) // 2
                deadline = time.monotonic() + 60
                while sum(each.stat().st_size for each in tmp_path.glob(".a.*.partial/model.safetensors.part")) < half:
                    assert time.monotonic() < deadline and process.poll() is None
                    time.sleep(0.02)
            finally:
                process.kill()
                process.wait()
            server.paused.clear()
            assert not folder.exists()
            (tmp_path / ".a.0123456789ab.partial").mkdir()  # left by a fetch of an earlier version into `a`
            (tmp_path / ".a.5.0123456789ab.partial").mkdir()  # left by a fetch into the folder `a.5`
            done = fetch(folder, "org/a", HF_ENDPOINT=server.url)
            assert done.returncode == 0, done.stderr
        assert server.got(path)[-1].headers["range"] == f"bytes={half}-"
        assert files_of(folder)["model.safetensors"] == LARGE and other_files(folder) == {".a.5.0123456789ab.partial"}

    def test_old_revision_stays_until_the_new_revision_is_complete(self, tmp_path: Path) -> None:
        folder = tmp_path / "a"
        old = {"config.json": b"1", "model-00001.safetensors": LARGE, "model-00002.safetensors": LARGE}
        with serve(Hub({"v1": ("c1", old), "v2": ("c2", FILES)})) as server:
            assert fetch(folder, "org/a@v1", HF_ENDPOINT=server.url).returncode == 0
            path = "/org/a/resolve/c2/model.safetensors"
            server.paused.add(path)
            environment = {**ENVIRONMENT, "HF_ENDPOINT": server.url, "FETCH_REPORT_S": "0.05"}
            process = subprocess.Popen([*COMMAND, str(folder), "org/a@v2"], env=environment, stdout=subprocess.PIPE, text=True)
            try:
                assert process.stdout is not None
                progress = next(line for line in process.stdout if " %, " in line)
                assert files_of(folder) == {**old, ".source": b"org/a@v1"}
                while "50 %, 0.00 of 0.00 GB" not in progress:
                    parsed = read(progress)
                    assert parsed is not None and int(progress.split()[1]) <= 50, progress
                    progress = next(process.stdout)
                server.resume.set()
                process.stdout.read()
                assert process.wait(60) == 0
            finally:
                process.kill()
                process.wait()
        assert set(files_of(folder)) == {*LOADED, ".source"} and other_files(folder) == set()

    def test_fetch_prints_a_progress_bar_on_a_terminal(self, tmp_path: Path) -> None:
        terminal, program_end = pty.openpty()
        with serve(Hub({"main": ("c1", FILES)})) as server:
            server.paused.add("/org/a/resolve/c1/model.safetensors")
            environment = {**ENVIRONMENT, "HF_ENDPOINT": server.url, "COLUMNS": "100"}
            process = subprocess.Popen([*COMMAND, str(tmp_path / "a"), "org/a"], env=environment, stdout=program_end, text=True)
            os.close(program_end)
            progress = b""
            try:
                while b"\rfetch [##########          ]  50 %  0.00 of 0.00 GB" not in progress:
                    progress += os.read(terminal, 4096)
                server.resume.set()
                while b"is complete" not in progress:
                    progress += os.read(terminal, 4096)
                assert process.wait(60) == 0 and b"\r\x1b[K" in progress and b"fetch: " not in progress
            finally:
                process.kill()
                process.wait()
                os.close(terminal)

    def test_fetch_refuses_a_file_with_a_wrong_checksum(self, tmp_path: Path) -> None:
        hub = Hub({"main": ("c1", FILES)})
        corrupt = lambda request: Answer(body=b"x" * len(LARGE)) if request.path.endswith(".safetensors") else hub(request)  # noqa: E731
        with serve(corrupt) as server:
            result = fetch(tmp_path / "a", "org/a", HF_ENDPOINT=server.url)
            assert result.returncode == 1 and "model.safetensors differs from its source: its sha256 is" in result.stderr
            assert not (tmp_path / "a").exists() and "Traceback" not in result.stderr
            server.answer = hub
            assert fetch(tmp_path / "a", "org/a", HF_ENDPOINT=server.url).returncode == 0
        assert files_of(tmp_path / "a")["model.safetensors"] == LARGE

    def test_fetch_prints_the_refusal_of_the_hub(self, tmp_path: Path) -> None:
        with serve(Hub({"main": ("c1", FILES)}, token="other")) as server:
            result = fetch(tmp_path / "a", "org/a", HF_ENDPOINT=server.url)
            assert (result.returncode, len(server.received)) == (1, 1)
        assert "HTTP Error 401" in result.stderr and "gated: ask for access" in result.stderr and "Traceback" not in result.stderr

    def test_fetch_refuses_a_file_outside_the_folder(self, tmp_path: Path) -> None:
        with serve(Hub({"main": ("c1", {"../../evil.json": b"{}"})})) as server:
            result = fetch(tmp_path / "models" / "a", "org/a", HF_ENDPOINT=server.url)
        assert result.returncode == 1 and "is outside of the model's folder" in result.stderr
        assert not list(tmp_path.rglob("evil.json"))

    @pytest.mark.needs("openssl")
    def test_fetch_trusts_the_certificates_in_ca_file(self, tmp_path: Path) -> None:
        subject = ["-subj", "/CN=hub", "-addext", "subjectAltName=IP:127.0.0.1"]
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "key.pem", "-out", "ca.pem"]
        subprocess.run([*made, *subject], cwd=tmp_path, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "ca.pem", tmp_path / "key.pem")
        with serve(Hub({"main": ("c1", FILES)}), context) as server:
            refused = fetch(tmp_path / "a", "org/a", HF_ENDPOINT=server.url)
            assert refused.returncode == 1 and "CERTIFICATE_VERIFY_FAILED" in refused.stderr
            accepted = fetch(tmp_path / "a", "org/a", HF_ENDPOINT=server.url, CA_FILE=str(tmp_path / "ca.pem"))
        assert accepted.returncode == 0, accepted.stderr

    def test_fetch_uses_a_proxy_for_hosts_outside_no_proxy(self, tmp_path: Path) -> None:
        hub = Hub({"main": ("c1", FILES)})

        def forwarded(request: ReceivedRequest) -> Answer:
            return hub(
                ReceivedRequest(
                    request.method, request.path.removeprefix("//hub.example.com"), request.query, request.headers, request.body
                )
            )

        with serve(forwarded) as proxy:
            environment = {"HF_ENDPOINT": "http://hub.example.com", "HTTP_PROXY": proxy.url, "NO_PROXY": ".svc"}
            assert fetch(tmp_path / "a", "org/a", **environment).returncode == 0
        assert {each.headers["host"] for each in proxy.received} == {"hub.example.com"}


OBJECTS = {f"models/a/{name}": data for name, data in FILES.items()} | {"models/ab/config.json": b"of another model"}


HQQ = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "quantization_config": {"quant_method": "hqq"}}
TWO_MODELS = {"model_type": "clip", "architectures": ["CLIPModel"]}


class TestUnservedModels:
    """Models that no worker serves are refused after config.json is downloaded."""

    @pytest.mark.parametrize("config", [HQQ, TWO_MODELS], ids=["quantized", "several models"])
    @pytest.mark.parametrize("store", ["hub", "S3", "Google", "folder"])
    def test_fetch_refuses_an_unsupported_model_with_the_same_sentence_as_the_worker(
        self, tmp_path: Path, store: str, config: dict[str, object]
    ) -> None:
        files = {**FILES, "config.json": json.dumps(config).encode()}
        objects = {f"models/a/{name}": body for name, body in files.items()}
        answers = {
            "hub": Hub({"main": ("c1", files)}),
            "S3": Bucket(objects, frozenset(), "me"),
            "Google": GoogleBucket(objects, "t"),
        }
        (tmp_path / "there").mkdir()
        for name, body in files.items():
            (tmp_path / "there" / name).write_bytes(body)
        sources = {
            "hub": "org/a-HQQ",
            "S3": "s3://store/models/a",
            "Google": "gs://store/models/a",
            "folder": str(tmp_path / "there"),
        }
        with (
            serve(answers.get(store, lambda _: Answer(404))) as server,
            serve(lambda _: Answer(body=b'{"access_token": "t", "expires_in": 3600}')) as node,
        ):
            urls = dict.fromkeys(("HF_ENDPOINT", "AWS_ENDPOINT_URL", "GCS_ENDPOINT"), server.url)
            host = node.url.removeprefix("http://")
            result = fetch(
                tmp_path / "models" / "a",
                sources[store],
                GCE_METADATA_HOST=host,
                AWS_ACCESS_KEY_ID="me",
                AWS_SECRET_ACCESS_KEY="k",
                **urls,
            )
        subject = f"{sources[store]} is quantized" if config is HQQ else "CLIPModel is made of several models"
        assert result.returncode == 1 and result.stderr.startswith(subject), result.stderr
        assert result.stderr.count("\n") == 1, "the error is one line"
        assert not [each.path for each in server.received if each.path.endswith(".safetensors")]
        assert {path.name for path in (tmp_path / "models").iterdir()} == {".a.lock"}, "only the lock file is left"


class TestConversion:
    def test_fetch_converts_the_tokenizer_when_the_model_has_only_the_file_tokenizer_model(self, tmp_path: Path) -> None:
        made = sentencepiece_model(tmp_path / "tokenizer.model").joinpath("tokenizer.model").read_bytes()
        with serve(Hub({"main": ("c1", {"config.json": b'{"model_type": "llama"}', "tokenizer.model": made})})) as server:
            done = fetch(tmp_path / "a", "org/a", HF_ENDPOINT=server.url, MODEL_FILES="tokenizer")
            assert done.returncode == 0 and "converting the tokenizer" in done.stdout, done.stderr
            assert "has org/a" in fetch(tmp_path / "a", "org/a", HF_ENDPOINT=server.url).stdout
        assert load_tokenizer(tmp_path / "a").vocab_size > 256

    def test_fetch_refuses_the_model_before_the_download_when_the_image_has_no_transformers(self, tmp_path: Path) -> None:
        files = {"config.json": b"{}", "qwen.tiktoken": b"", "model.safetensors": LARGE}
        module = "rootstock_llm.services.shared.fetch.__main__"
        script = f"import sys; sys.modules['transformers'] = None; import {module} as fetch"
        with serve(Hub({"main": ("c1", files)})) as server:
            command = [sys.executable, "-c", f"{script}; fetch.main(sys.argv[1:])", str(tmp_path / "a"), "org/a"]
            environment = {**ENVIRONMENT, "HF_ENDPOINT": server.url}
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
            assert not [each for each in server.received if "/resolve/" in each.path]
        assert done.returncode == 1 and done.stderr.startswith("org/a: the source has qwen.tiktoken but no tokenizer.json, and ")
        assert "modelCache.prefetch.image.repository to rootstock/worker" in done.stderr

    def test_fetch_fails_with_the_reason_when_transformers_cannot_convert_the_tokenizer(self, tmp_path: Path) -> None:
        with serve(Hub({"main": ("c1", {"config.json": b'{"model_type": "llama"}', "tokenizer.model": b"none"})})) as server:
            done = fetch(tmp_path / "a", "org/a", HF_ENDPOINT=server.url)
        assert done.returncode == 1 and done.stderr.startswith("org/a: transformers cannot convert the tokenizer of ")
        assert not (tmp_path / "a").exists()


class TestS3:
    def test_aws_signature_equals_the_published_example(self) -> None:
        """The example is GET Bucket Lifecycle.

        Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
        """
        now = datetime.datetime(2013, 5, 24, tzinfo=datetime.UTC)
        access, secret = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
        headers = signed("GET", "https://examplebucket.s3.amazonaws.com/?lifecycle=", "us-east-1", access, secret, now=now)
        assert headers["Authorization"].endswith("=fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543")

    def test_s3_download_lists_all_pages_and_checks_each_part(self, tmp_path: Path) -> None:
        bucket = Bucket(OBJECTS, frozenset({"models/a/model.safetensors"}), "me")
        key = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}
        with serve(bucket) as server:
            path = "/store/models/a/model.safetensors"
            server.cut[path] = 70_000
            result = fetch(tmp_path / "a", "s3://store/models/a", AWS_ENDPOINT_URL=server.url, **key)
            assert result.returncode == 0, result.stderr
            assert [each.headers.get("range") for each in server.got(path)] == [None, "bytes=70000-"]
            wrong_key = fetch(
                tmp_path / "b", "s3://store/models/a", AWS_ENDPOINT_URL=server.url, **{**key, "AWS_ACCESS_KEY_ID": "x"}
            )
            assert wrong_key.returncode == 1 and "InvalidAccessKeyId" in wrong_key.stderr
            without_key = fetch(tmp_path / "c", "s3://store/models/a", AWS_ENDPOINT_URL=server.url)
            assert without_key.returncode == 0, "the bucket is public"
        assert files_of(tmp_path / "a") == {**{name: FILES[name] for name in LOADED}, ".source": b"s3://store/models/a"}

    @pytest.mark.parametrize(("first", "reports_parts", "compared"), [(1000, True, True), (1 << 16, False, False)])
    def test_fetch_verifies_an_s3_object_of_unequal_parts_when_the_store_lists_the_parts(
        self, tmp_path: Path, first: int, reports_parts: bool, compared: bool
    ) -> None:
        bucket = Bucket(OBJECTS, frozenset({"models/a/model.safetensors"}), first=first, reports_parts=reports_parts)
        with serve(bucket) as server:
            result = fetch(tmp_path / "a", "s3://store/models/a", AWS_ENDPOINT_URL=server.url)
        assert result.returncode == 0, result.stderr
        assert ("the store has no checksum" in result.stdout) != compared
        assert files_of(tmp_path / "a")["model.safetensors"] == LARGE

    @pytest.mark.parametrize("put_in_parts", [False, True])
    def test_fetch_refuses_an_s3_object_with_a_wrong_etag(self, tmp_path: Path, put_in_parts: bool) -> None:
        bucket = Bucket(OBJECTS, frozenset({"models/a/model.safetensors"} if put_in_parts else ()))

        def corrupt(request: ReceivedRequest) -> Answer:
            answer = bucket(request)
            if request.path.endswith(".safetensors") and request.method == "GET":
                answer.body = answer.body[:-1] + b"!"
            return answer

        with serve(corrupt) as server:
            result = fetch(tmp_path / "a", "s3://store/models/a/", AWS_ENDPOINT_URL=server.url)
        assert result.returncode == 1 and "model.safetensors differs from its source: its MD5 is" in result.stderr
        assert not (tmp_path / "a").exists()

    def test_fetch_assumes_the_aws_role_of_the_pod(self, tmp_path: Path) -> None:
        (tmp_path / "token").write_text("of the pod\n")
        credentials = "<AccessKeyId>lent</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
        until = f"<Expiration>{datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1):%Y-%m-%dT%H:%M:%SZ}</Expiration>"
        body = (
            f'<A xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><Credentials>{credentials}{until}</Credentials></A>'.encode()
        )
        with serve(lambda _: Answer(body=body)) as sts, serve(Bucket(OBJECTS, access="lent")) as server:
            role = {"AWS_ROLE_ARN": "arn:aws:iam::1:role/r", "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token")}
            where = {"AWS_ENDPOINT_URL": server.url, "AWS_ENDPOINT_URL_STS": sts.url}
            result = fetch(tmp_path / "a", "s3://store/models/a", **role, **where)
        assert result.returncode == 0, result.stderr
        assert len(sts.received) == 1 and sts.received[0].body.endswith(b"&WebIdentityToken=of%20the%20pod")
        assert {each.headers["x-amz-security-token"] for each in server.received} == {"t"}

    def test_fetch_reads_an_s3_bucket_of_the_moto_server(self, tmp_path: Path) -> None:
        """Compares with moto, which has its own listing, ranges and ETags of parts."""
        if importlib.util.find_spec("moto") is None or importlib.util.find_spec("boto3") is None:
            pytest.skip("moto is not installed")
        with moto() as url:
            import boto3  # type: ignore[import-not-found, unused-ignore]

            keys = {"aws_access_key_id": "me", "aws_secret_access_key": "mine", "region_name": "us-east-1"}
            client = boto3.client("s3", endpoint_url=url, **keys)
            client.create_bucket(Bucket="store")
            for name, data in OBJECTS.items():
                client.put_object(Bucket="store", Key=name, Body=data)
            part = bytes(5 << 20)
            upload = client.create_multipart_upload(Bucket="store", Key="models/a/large 1+1.safetensors")["UploadId"]
            about = {"Bucket": "store", "Key": "models/a/large 1+1.safetensors", "UploadId": upload}
            tags = [client.upload_part(**about, PartNumber=n, Body=body)["ETag"] for n, body in ((1, part), (2, b"the end"))]
            parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
            client.complete_multipart_upload(**about, MultipartUpload={"Parts": parts})
            key = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "mine"}
            result = fetch(tmp_path / "a", "s3://store/models/a", AWS_ENDPOINT_URL=url, **key)
            assert result.returncode == 0, result.stderr
        assert set(files_of(tmp_path / "a")) == {*LOADED, "large 1+1.safetensors", ".source"}
        assert files_of(tmp_path / "a")["large 1+1.safetensors"] == part + b"the end"


def moto() -> AbstractContextManager[str]:
    return third_party_server("/moto-api/", "moto.server", "-p")


@contextmanager
def third_party_server(path: str, *module: str) -> Iterator[str]:
    """Runs a server module with a port as its last argument. Yields the server's URL when the server responds at `path`."""
    (port,) = free_ports(1)
    words, nowhere = [sys.executable, "-m", *module, str(port)], subprocess.DEVNULL
    with subprocess.Popen(words, stdout=nowhere, stderr=nowhere) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60).close()
                    break
                except OSError:
                    assert time.monotonic() < deadline and process.poll() is None
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


class TestGoogle:
    @pytest.mark.needs("openssl")
    def test_google_bucket_is_read_with_a_service_account_key(self, tmp_path: Path) -> None:
        subprocess.run(
            ["openssl", "genpkey", "-algorithm", "RSA", "-out", "key.pem"], cwd=tmp_path, check=True, capture_output=True
        )
        subprocess.run(["openssl", "pkey", "-in", "key.pem", "-pubout", "-out", "public.pem"], cwd=tmp_path, check=True)
        with (
            serve(lambda _: Answer(body=b'{"access_token": "t", "expires_in": 3600}')) as tokens,
            serve(GoogleBucket(OBJECTS, "t")) as server,
        ):
            key = {"client_email": "me@example.com", "private_key": (tmp_path / "key.pem").read_text(), "token_uri": tokens.url}
            result = fetch(tmp_path / "a", "gs://store/models/a", GCS_ENDPOINT=server.url, GCS_KEY=json.dumps(key))
        assert result.returncode == 0, result.stderr
        assert files_of(tmp_path / "a") == {**{name: FILES[name] for name in LOADED}, ".source": b"gs://store/models/a"}
        (token_request,) = tokens.received
        text, _, signature = token_request.body.decode().rpartition("assertion=")[2].partition("&")[0].rpartition(".")
        (tmp_path / "text").write_text(text)
        (tmp_path / "signature").write_bytes(base64.urlsafe_b64decode(signature + "=="))
        verify = ["openssl", "dgst", "-sha256", "-verify", "public.pem", "-signature", "signature", "text"]
        assert subprocess.run(verify, cwd=tmp_path, capture_output=True, text=True).stdout == "Verified OK\n"

    def test_google_bucket_is_read_with_the_token_of_the_node(self, tmp_path: Path) -> None:
        with (
            serve(lambda _: Answer(body=b'{"access_token": "t", "expires_in": 3600}')) as node,
            serve(GoogleBucket(OBJECTS, "t")) as server,
        ):
            host = node.url.removeprefix("http://")
            assert fetch(tmp_path / "a", "gs://store/models/a", GCS_ENDPOINT=server.url, GCE_METADATA_HOST=host).returncode == 0
        assert [each.headers["metadata-flavor"] for each in node.received] == ["Google"]

    def test_fetch_reads_a_bucket_of_the_gcp_storage_emulator(self, tmp_path: Path) -> None:
        """Compares with gcp-storage-emulator, which has its own listing, checksums and generations."""
        if importlib.util.find_spec("gcp_storage_emulator") is None:
            pytest.skip("gcp-storage-emulator is not installed")
        words = ("gcp_storage_emulator", "start", "--in-memory", "--default-bucket", "store", "--port")
        with (
            third_party_server("/", *words) as url,
            serve(lambda _: Answer(body=b'{"access_token": "t", "expires_in": 60}')) as node,
        ):
            for name, data in OBJECTS.items():
                query = urllib.parse.urlencode({"uploadType": "media", "name": name})
                request = urllib.request.Request(f"{url}/upload/storage/v1/b/store/o?{query}", data, method="POST")
                request.add_header("Content-Type", "application/octet-stream")
                urllib.request.urlopen(request, timeout=60).close()
            host = node.url.removeprefix("http://")
            result = fetch(tmp_path / "a", "gs://store/models/a", GCS_ENDPOINT=url, GCE_METADATA_HOST=host)
        assert result.returncode == 0, result.stderr
        assert files_of(tmp_path / "a") == {**{name: FILES[name] for name in LOADED}, ".source": b"gs://store/models/a"}


class TestFolder:
    def test_folder_is_copied_once_and_again_after_a_change(self, tmp_path: Path) -> None:
        source, target = tmp_path / ".cache" / "huggingface" / "a", tmp_path / "cache" / "a"
        (source / ".cache").mkdir(parents=True)
        (source / ".cache" / "lock").write_text("")
        (source / "model.safetensors").write_text("one")
        (source / "other.json").write_text("{}")
        assert "is complete" in fetch(target, source).stdout
        assert set(files_of(target)) == {"model.safetensors", "other.json", ".copied"}
        assert f"has {source}" in fetch(target, source).stdout
        (source / "model.safetensors").write_text("three")
        (source / "other.json").unlink()
        assert "is complete" in fetch(target, source).stdout
        assert set(files_of(target)) == {"model.safetensors", ".copied"} and files_of(target)["model.safetensors"] == b"three"

    def test_copy_fails_when_the_folder_changes_and_the_next_copy_succeeds(self, tmp_path: Path) -> None:
        source, target = tmp_path / "models" / "a", tmp_path / "cache" / "a"
        source.mkdir(parents=True)
        (source / "model.safetensors").write_text("one")

        class Replaced(Folder):
            def files(self) -> list[RemoteFile]:
                found = super().files()
                (source / "config.json").write_text("{}")
                return found

        with pytest.raises(Unfetchable, match="changed during the download"):
            download(target, str(source), Replaced(str(source)))
        assert not target.exists()
        download(target, str(source), Folder(str(source)))
        assert set(files_of(target)) == {"model.safetensors", "config.json", ".copied"} and other_files(target) == set()

    def test_pods_of_one_node_copy_a_folder_once(self, tmp_path: Path) -> None:
        source, target = tmp_path / "models" / "a", tmp_path / "cache" / "a"
        source.mkdir(parents=True)
        (source / "model.safetensors").write_bytes(LARGE * 32)
        processes = [subprocess.Popen([*COMMAND, target, source], stdout=subprocess.PIPE, text=True) for _ in range(3)]
        progress = [process.communicate(timeout=60)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0]
        assert sorted("is complete" in each for each in progress) == [False, False, True]
        assert files_of(target)["model.safetensors"] == LARGE * 32
