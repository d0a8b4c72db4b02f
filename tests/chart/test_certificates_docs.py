"""Runs the certificate commands of docs/how-to/kubernetes/security.md, with a kubectl that copies the files to a folder.

It also checks the Kubernetes objects on the page.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.chart.kube_schemas import faults
from tests.chart.release import REPO, refusal, render

PAGE = REPO / "docs" / "how-to" / "kubernetes" / "security.md"
KUBECTL = "#!/bin/sh\nmkdir $6 && cp tls.crt tls.key ca.crt $6\n"


@pytest.mark.needs("openssl")
def test_service_certificates_cannot_sign_other_certificates(tmp_path: Path) -> None:
    """Checks that a service's certificate is valid for servers and clients, and that a certificate it has signed is invalid."""
    (commands,) = re.findall(r"```bash\n(openssl .*?)```", PAGE.read_text(), re.S)
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
        return "" if done.returncode == 0 else done.stdout + done.stderr

    assert run("bash", "-ec", commands) == ""
    for role in ("gateway", "redis"):
        for purpose in ("sslserver", "sslclient"):
            own = f"llm-{role}-tls/tls.crt"
            assert run("openssl", "verify", "-CAfile", "ca.crt", "-purpose", purpose, own) == ""
    worker = ("-CA", "llm-worker-tls/tls.crt", "-CAkey", "llm-worker-tls/tls.key")
    forged = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=rootstock-gateway")
    assert run("openssl", "req", "-x509", *forged, *worker, "-keyout", "forged.key", "-out", "forged.crt") == ""
    chain = ("-CAfile", "ca.crt", "-untrusted", "llm-worker-tls/tls.crt", "forged.crt")
    assert "invalid CA certificate" in run("openssl", "verify", *chain)


def test_admission_policy_on_the_page_is_valid_and_names_the_service_account() -> None:
    """Checks the page's objects and values. The policy must name the ServiceAccount of the workers of release `rootstock`."""
    documents = [
        each for block in re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S) for each in yaml.safe_load_all(block)
    ]
    admission = [each for each in documents if each.get("apiVersion", "").startswith("admissionregistration")]
    assert [each["kind"] for each in admission] == ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
    assert [found for each in admission if (found := faults(each))] == []
    policy, binding = admission
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    role = render({"worker": {"deletionCost": True}}, name="rootstock").get("RoleBinding", "rootstock-worker")
    (account,) = [each["name"] for each in role["subjects"]]
    assert f'"system:serviceaccount:llm:{account}"' in policy["spec"]["matchConditions"][0]["expression"]
    values = [each for each in documents if "kind" not in each]
    assert values and [why for each in values if (why := refusal(each))] == []
