"""Values that several tests install over cpu-demo-values.yaml and little-values.yaml."""

from __future__ import annotations

from tests.cluster.kubernetes import Object

TWO: Object = {name: {"replicas": 2} for name in ("gateway", "tokenizer", "detokenizer", "worker")}
SERVICES = (("gateway", ""), ("tokenizer", "demo"), ("detokenizer", "demo"), ("worker", "demo"))
# For tests that do not depend on the model: the worker starts without torch and computes nothing.
FAKE: Object = {"executor": "fake", "fake_step_s": 0.02, "max_total_tokens": 16384}
MONITORED: Object = {"podMonitor": {"enabled": True, "interval": "5s"}, "rules": {"enabled": True}}
