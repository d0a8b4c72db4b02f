# Two commands set up everything: `make run` makes an environment that serves, and `make test` adds the packages for tests.
PYTHON ?= python3
VENV   ?= .venv
PORT   ?= 8000
MODEL  ?= models/demo
WORKERS ?= 1
CHAT_TEMPLATE ?=
URL    ?= http://127.0.0.1:$(PORT)
PYTHON_GPU ?= python3
OUT    ?= docs/reference/gpu
DIST   ?= dist
BENCH  ?= --workload random --num-requests 64 --concurrency 8 --input-len 128 --output-len 64

export CLUSTER BASE_IMAGE CLUSTER_TEST_KUBECONFIG CLUSTER_TEST_LOAD

# Index of torch's builds without CUDA, which are a gigabyte smaller. It is used on Linux without nvidia-smi, if it is reachable.
# Empty: it is never used.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

PY     := $(VENV)/bin/python
DEV    := $(VENV)/.ready
ENV    := $(if $(wildcard $(DEV)),$(DEV),$(VENV)/.ready-run)
PROTOS := rootstock_llm/protos/__init__.py

# Two test processes. Each runs one file at a time, in the order of tests/conftest.py.
SPREAD := --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Bytecode is written even if the shell forbids it, because compiling torch at each start takes longer than a test run. After the
# installation, compileall writes it with all cores. It skips files that do not compile, such as templates; they are never imported.
unexport PYTHONDONTWRITEBYTECODE

# The extra `docs` of pyproject.toml has Sphinx and its theme. The first `make docs-site` installs it.
SITE := build/site

.PHONY: help env dev-env run test check docs docs-site clients cluster-test cluster-faults bench bench-front bench-compare bench-peers gpu-check sim mutants nightly release clean

help:            ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 16

env: $(ENV) $(PROTOS)  ## the virtual environment of `make run` and the generated protos
dev-env: $(DEV) $(PROTOS)  ## the environment of `make run` with the packages for tests

# pip waits minutes for an unreachable index, so the index is probed first.
TORCH_FLAGS = $$([ "$$(uname -s)" = Linux ] && [ -n '$(TORCH_INDEX)' ] && ! $(HAS_GPU) \
	  && $(PYTHON) -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=3)' '$(TORCH_INDEX)/torch/' 2>/dev/null \
	  && echo "--extra-index-url $(TORCH_INDEX)")
# Succeeds if the NVIDIA driver's program exists, so that torch can use a GPU of this machine.
HAS_GPU = command -v nvidia-smi >/dev/null
INSTALL = $(PY) -m pip install -q --no-compile --disable-pip-version-check --progress-bar on $(TORCH_FLAGS) -e

$(VENV)/.ready-run: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "Python 3.11 to 3.13 is needed; choose one with PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "First: sudo apt-get install python3-venv"; exit 1; }
	@echo "making $(VENV) and installing what a server needs, once: 1.3 GB, with a GPU 6 GB"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[protos]'
	@$(HAS_GPU) || $(PY) -m pip uninstall -q -y --disable-pip-version-check triton  # a gigabyte that xgrammar needs only for GPUs
	-@$(PY) -m compileall -qq -j 0 -x '/transformers/models/|/tests?/' $(VENV)/lib
	@touch $@

$(DEV): pyproject.toml $(filter-out $(DEV),$(ENV))
	@echo "installing what tests need into $(VENV)"
	$(INSTALL) '.[dev]'
	-@$(PY) -m compileall -qq -j 0 -x '/transformers/models/|/tests?/' $(VENV)/lib
	@touch $@

$(PROTOS): $(ENV) release/package.py $(wildcard protos/rootstock/v1/*.proto)
	$(PY) release/package.py

# `chosen` is not empty if the user has set the variable. A default above is not passed as a flag, because a flag overrides the
# file of --config.
chosen = $(filter-out file undefined,$(origin $(1)))

run: env         ## start the whole system on this machine (MODEL=, PORT=, WORKERS=, CHAT_TEMPLATE=)
	@exec $(PY) -m rootstock_llm.services.cli serve $(if $(call chosen,MODEL),'$(MODEL)') $(if $(call chosen,PORT),--port $(PORT)) \
	  $(if $(call chosen,WORKERS),--workers $(WORKERS)) $(if $(call chosen,CHAT_TEMPLATE),--chat-template '$(CHAT_TEMPLATE)') $(RUN_FLAGS)

check: dev-env       ## lint, types, core tests, contracts: before every commit
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check -q
	$(VENV)/bin/mypy
	$(PY) -m pytest tests/core tests/contracts $(SPREAD)

test: dev-env        ## all tests that need no GPU; all groups run even if one fails
	$(PY) -m tests.groups

nightly: dev-env     ## make test with long tests and a 30-minute soak (ONLY="group" of tests/groups.py), then the cluster tests if a cluster is named
	ROOTSTOCK_TEST_NIGHTLY=1 $(PY) -m tests.groups $(if $(ONLY),--only '$(ONLY)')
	@[ -z "$(CLUSTER)$(CLUSTER_TEST_KUBECONFIG)" ] && echo "skipped: cluster-test and cluster-faults (no CLUSTER= or CLUSTER_TEST_KUBECONFIG=)" \
	  || $(MAKE) cluster-test cluster-faults

cluster-test: dev-env  ## tests on a real Kubernetes (CLUSTER= and BASE_IMAGE=, or CLUSTER_TEST_KUBECONFIG=: python -m tests.cluster --help)
	$(PY) -m tests.cluster

cluster-faults: dev-env  ## the long tests on a real Kubernetes
	ROOTSTOCK_CLUSTER_ROLLOUTS=10 $(PY) -m tests.cluster tests/cluster -k "(rollout or test_long) and not far_pools"
	CLUSTER_TEST_NODES=3 $(PY) -m tests.cluster tests/cluster/test_long_far_pools.py


bench: env       ## load test of any OpenAI-compatible URL (URL=, BENCH="flags"), like `rootstock bench`
	$(PY) -m rootstock_llm.services.cli bench --url $(URL) $(BENCH)

bench-front: dev-env ## attacks on the gateway, and their effect on other clients (FRONT="attacks", FRONT="--minutes 120")
	$(PY) -m tests.benchmarks.front $(FRONT)

clients: dev-env     ## public clients, installed by npm and pip, with the demo model (CLIENTS="node browser frameworks")
	$(PY) -m tests.clients $(CLIENTS)

bench-compare: dev-env  ## speed compared with transformers.generate, for Qwen3-0.6B's shape and equal batches
	$(PY) -m tests.benchmarks.compare_transformers

bench-peers: dev-env  ## speed compared with vLLM, OpenVINO GenAI and llama.cpp on two cores, in 90 minutes (PEERS="--smoke")
	$(PY) -m tests.benchmarks.engines --pip-flags="$(TORCH_FLAGS)" $(PEERS)

# Uses the machine's own interpreter with its torch, and installs nothing from a network.
gpu-check:       ## all GPU tests and benchmarks, with a report (WHEELS=dir, OUT=docs/reference/gpu, PARTS="names", GPU_FLAGS=)
	@$(PYTHON_GPU) release/package.py links
	@$(PYTHON_GPU) -m tests.gpu.check --out '$(OUT)' --parts '$(PARTS)' $(if $(WHEELS),--wheels '$(WHEELS)') $(GPU_FLAGS)

sim: dev-env         ## the scheduler on a trace and a virtual clock (TRACE=file, SIM="flags")
	$(PY) -m rootstock_llm.services.sim.core $(TRACE) $(SIM)

mutants: dev-env     ## check that the tests find small faults in the code, one at a time (AREAS="chart kernels core tiers loads gateway exec grammar worker")
	$(PY) -m tests.mutants $(AREAS)

docs: dev-env        ## files generated from code: settings, metrics, the client and models in docs/, the chart's schema and dashboards, the record of public names
	$(PY) -m rootstock_llm.services.local.reference > docs/reference/configuration.md
	$(PY) -m rootstock_llm.services.local.metrics_reference > docs/reference/metrics.md
	$(PY) -m rootstock_llm.services.cli.reference > docs/reference/cli.md
	$(PY) -m rootstock_llm.services.local.models_reference
	$(PY) -m rootstock_llm.services.local.parameter_tables
	$(PY) -m tests.contracts.picture
	$(PY) charts/rootstock/dashboards/build.py
	$(PY) -m charts.rootstock.alerts_page
	$(PY) -m charts.rootstock.values_schema > charts/rootstock/values.schema.json
	$(PY) -m charts.rootstock.empty_keys > charts/rootstock/files/empty-keys.yaml
	$(PY) -m tests.contracts.public_names

docs-site: env       ## docs/ as a static site in build/site that works without a network; a warning is an error
	@$(PY) -c 'import furo, myst_parser, sphinx' 2>/dev/null || $(INSTALL) '.[docs]'
	$(PY) -m sphinx -W --keep-going -q -b html docs $(SITE)
	@echo "open $(SITE)/index.html"

release: dev-env     ## wheel, chart, checksums and, with buildah or docker, images, in DIST; pushes nothing (DIST=dist, IMAGES="gateway ...")
	$(PY) -m release --out '$(DIST)' $(if $(call chosen,IMAGES),--images '$(IMAGES)') $(RELEASE_FLAGS)

clean:           ## remove build results, but not the environment
	rm -rf build dist rootstock_llm/protos
