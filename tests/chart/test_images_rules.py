"""Tests that Dockerfiles follow the rules, that the rules find violations, and that the pins satisfy pyproject.toml."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from rootstock_llm.services.gateway.config.settings import GatewaySettings
from rootstock_llm.services.local.reference import SERVICES
from rootstock_llm.services.worker.exec.attention.flashinfer_limits import HEAD_DIMS
from rootstock_llm.services.worker.exec.attention.flashinfer_prebuild import DTYPES_BY_NAME, build_parser
from tests.chart.dockerfile import Stage, context_files, read
from tests.chart.dockerfile_rules import complaints

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker/Dockerfile"
IMAGES = ["gateway", "tokenizer", "detokenizer", "worker", "worker-cuda"]
# Compiler packages that an image may contain. Triton compiles its launcher, a C file, in the pod.
COMPILING = {"worker-cuda": frozenset({"gcc", "libc6-dev"})}
REQUIREMENTS = ROOT / "docker/requirements"
SITE_PACKAGES = "lib/python3.11/site-packages"
LAYERED = ("COPY", "RUN", "WORKDIR")


@pytest.mark.parametrize("kernels", ["compiled", "wheels"])
def test_dockerfile_follows_all_rules(kernels: str) -> None:
    dockerfile = read(DOCKERFILE, {"FLASHINFER_KERNELS": kernels})
    assert dockerfile.stage("cuda-kernels").base == f"kernels-{kernels}"
    assert complaints(dockerfile, ROOT, [*IMAGES, "dev"], COMPILING) == []


@pytest.mark.parametrize("service", ["gateway", "worker"])
def test_build_argument_selects_the_image(service: str) -> None:
    dockerfile = read(DOCKERFILE, {"SERVICE": service})
    assert dockerfile.stages[-1].base == service
    assert dockerfile.stage("dev").base == service


def test_worker_images_contain_the_default_model() -> None:
    values = yaml.safe_load((ROOT / "charts/rootstock/values.yaml").read_text())
    (path,) = [each["path"] for each in values["models"]]
    for image in ("worker", "worker-cuda"):
        copied = [each.words for each in read(DOCKERFILE).stage(image).all("COPY") if "from" not in each.flags]
        assert [f"/app/{words[-1]}" for words in copied] == [path]


def layers(lineage: list[Stage]) -> list[str]:
    """Returns the instructions that create the layers of an image, in order."""
    return [f"{each.name} {each.flags} {each.text}" for stage in lineage for each in stage.instructions if each.name in LAYERED]


def shared(images: list[list[str]]) -> list[str]:
    """Returns the longest common prefix of these lists."""
    return [each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*images, strict=False))]


def test_images_share_their_first_layers() -> None:
    """Images share the layers of base, account and packages, so that a node stores these layers once.

    No build argument changes the shared layers.
    """
    dockerfile = read(DOCKERFILE)
    assert len(set(dockerfile.images())) == 1
    made = [layers(dockerfile.lineage(name)) for name in IMAGES]
    assert shared(made) == layers([dockerfile.stage("runtime")])
    assert shared(made[:3]) == layers(dockerfile.lineage("front")), (
        "gateway, tokenizer and detokenizer must share all layers except those of their service"
    )
    assert not dockerfile.stage("runtime").all("ARG") and not dockerfile.stage("front").all("ARG")
    assert "/opt/venv /opt/venv" in shared(made)[-1] and "worker" not in str(shared(made))


def test_worker_libraries_exclude_service_packages() -> None:
    """The worker's libraries are a layer above the services' packages.

    The worker's list pins the services' packages in the same versions, so pip skips them when it installs the libraries.
    """
    services = pins("service.txt").items()
    assert services <= pins("worker-cpu.txt").items() and services <= pins("worker-cuda.txt").items()
    dockerfile = read(DOCKERFILE)
    for image, libraries in (("worker", "cpu-libraries"), ("worker-cuda", "cuda-libraries")):
        assert dockerfile.lineage(libraries)[0] is dockerfile.stage("libraries")
        (step,) = [each.text for each in dockerfile.stage(libraries).all("RUN") if "--requirement" in each.text]
        assert "--prefix /opt/worker" in step
        copied = [each.text for each in dockerfile.stage(image).all("COPY") if each.flags.get("from") == libraries]
        assert copied[0] == "/opt/worker /opt/venv"


GOOD = """
ARG BASE=python:3.11.14-slim
FROM ${BASE} AS app
LABEL org.opencontainers.image.title="t" org.opencontainers.image.description="d" org.opencontainers.image.licenses="l" \\
      org.opencontainers.image.vendor="v" org.opencontainers.image.version="1" org.opencontainers.image.revision="r"
WORKDIR /app
COPY LICENSE LICENSE
USER 10001:10001
EXPOSE 1
HEALTHCHECK CMD ["true"]
ENTRYPOINT ["true"]
"""
WRONG = {
    "python 3": ("pinned", "BASE=python:3.11.14-slim", "BASE=python:3-slim"),
    "no user": ("last USER", "USER 10001:10001", ""),
    "root as the last user": ("last USER", "EXPOSE 1", "USER 0:0\nEXPOSE 1"),
    "a named user": ("last USER", "10001:10001", "app"),
    "a shell entry point": ("one ENTRYPOINT in exec form", 'ENTRYPOINT ["true"]', "ENTRYPOINT true"),
    "a CMD": ("no CMD", "EXPOSE 1", 'EXPOSE 1\nCMD ["x"]'),
    "no health check": ("HEALTHCHECK", 'HEALTHCHECK CMD ["true"]', ""),
    "no ports": ("no EXPOSE", "EXPOSE 1", ""),
    "no licence": ("licenses", 'org.opencontainers.image.licenses="l"', ""),
    "sudo": ("sudo", "USER", "RUN sudo true\nUSER"),
    "a downloaded script": ("piped", "USER", "RUN curl -s http://x | sh\nUSER"),
    "cd": ("use WORKDIR instead", "USER", "RUN cd /x && true\nUSER"),
    "recommended packages": (
        "--no-install-recommends",
        "USER",
        "RUN apt-get update && apt-get install --yes x && rm -rf /var/lib/apt/lists/*\nUSER",
    ),
    "package lists that stay": (
        "rm -rf",
        "USER",
        "RUN apt-get update && apt-get install --yes --no-install-recommends x\nUSER",
    ),
    "a compiler": (
        "installs a compiler",
        "USER",
        "RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*\nUSER",
    ),
    "nvcc": (
        "installs a compiler",
        "USER",
        "RUN apt-get update && apt-get install --yes --no-install-recommends cuda-nvcc-13-0 && rm -rf /var/lib/apt/lists/*\nUSER",
    ),
    "unpinned packages": ("--no-deps", "USER", "RUN pip install numpy\nUSER"),
    "a package that the list does not pin": (
        "pins no numpy",
        "USER",
        "RUN pip install --no-deps --constraint docker/requirements/build.txt grpcio numpy\nUSER",
    ),
    "a missing source": ("does not exist", "COPY LICENSE LICENSE", "COPY nothing nothing"),
    "an ignored source": ("excludes docs", "COPY LICENSE LICENSE", "COPY docs docs"),
    "the whole context": ("name its sources", "COPY LICENSE LICENSE", "COPY . ."),
    "a later stage": ("no earlier stage", "COPY LICENSE", "COPY --from=later LICENSE"),
    "a secret": ("would stay", "USER", "ENV HF_TOKEN=x\nUSER"),
    "a secret argument": ("would stay", "USER", "ARG API_KEY\nUSER"),
    "an argument before its ARG": ("before an ARG", "EXPOSE 1", "EXPOSE ${PORT}"),
    "ADD": ("ADD", "COPY LICENSE", "ADD LICENSE"),
    "a relative folder": ("absolute", "WORKDIR /app", "WORKDIR app"),
    "no name": ("the stage has no name", "COPY LICENSE LICENSE", "COPY LICENSE LICENSE\nFROM app"),
}


def test_good_dockerfile_has_no_complaints(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(GOOD)
    assert complaints(read(tmp_path / "Dockerfile"), ROOT, ["app"]) == []


@pytest.mark.by_day(one_in=3, seed=12)
@pytest.mark.by_day(one_in=1, name="python 3")
@pytest.mark.parametrize("name", WRONG)
def test_complaint_about_a_dockerfile_names_the_broken_rule(name: str, tmp_path: Path) -> None:
    expected, before, after = WRONG[name]
    assert before in GOOD
    (tmp_path / "Dockerfile").write_text(GOOD.replace(before, after))
    found = complaints(read(tmp_path / "Dockerfile"), ROOT, ["app"])
    assert any(expected in each for each in found), found


@pytest.mark.parametrize(("stage", "service"), [*((name, name) for name in IMAGES[:4]), ("worker-cuda", "worker")], ids=IMAGES)
def test_images_expose_and_probe_the_services_ports(stage: str, service: str) -> None:
    lineage = read(DOCKERFILE).lineage(stage)
    fields = SERVICES[service].model_fields
    health = fields["health_port" if SERVICES[service] is GatewaySettings else "port"].default
    exposed = {int(word) for each in lineage for line in each.all("EXPOSE") for word in line.words}
    known = {field.default for name, field in fields.items() if name.endswith("port") and field.default}
    off = {9104} if service == "gateway" else {7004}  # off by default: the separate metrics port, and the control service
    assert known <= exposed <= known | off
    probe = next(line.text for each in lineage for line in each.all("HEALTHCHECK"))
    assert f'"127.0.0.1:{health}"' in probe
    assert next(line.words for each in lineage for line in each.all("ENTRYPOINT")) == [
        "python",
        "-m",
        f"rootstock_llm.services.{service}",
    ]


def pins(name: str) -> dict[str, str]:
    lines = (REQUIREMENTS / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "extras"),
    [("service.txt", []), ("worker-cpu.txt", []), ("worker-cuda.txt", ["gpu"])],
)
def test_pinned_versions_satisfy_pyproject(name: str, extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = runpy.run_path(str(ROOT / "docker/lock.py"))
    left_out = {*lock["NOT_IN_IMAGES"], *(lock["IN_WORKER"] if name == "service.txt" else ())}
    asked = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    pinned = pins(name)
    assert name != "service.txt" or not set(lock["IN_WORKER"]) & set(pinned)
    for requirement in map(Requirement, asked):
        if requirement.name not in left_out:
            assert requirement.specifier.contains(pinned[requirement.name], prereleases=True), (
                f"the pin does not satisfy {requirement}: run docker/lock.py"
            )


@pytest.mark.parametrize("name", ["service.txt", "worker-cpu.txt", "worker-cuda.txt", "build.txt"])
def test_pinned_lists_contain_all_dependencies(name: str) -> None:
    """Each list must have all dependencies of its packages, because pip installs it without dependency resolution."""
    lock = runpy.run_path(str(ROOT / "docker/lock.py"))
    needed = set(lock["closure"](lock["wanted"]()[name]))
    assert needed, f"docker/lock.py finds no requirement for {name}"
    assert needed - set(pins(name)) == ({"triton"} if name == "worker-cpu.txt" else set()), (
        "the list lacks a dependency or has a superfluous one: run docker/lock.py"
    )


def test_cuda_compiler_has_the_cuda_version_of_the_image() -> None:
    compiler, libraries, kernels = pins("cuda-compiler.txt"), pins("worker-cuda.txt"), pins("cuda-kernels.txt")
    cuda = libraries["cuda-toolkit"].split(".")[:2]
    wheels = [version for name, version in compiler.items() if name != "nvidia-curand"]  # curand has its own versions
    assert {tuple(version.split(".")[:2]) for version in wheels} == {tuple(cuda)}
    shared = compiler.keys() & libraries.keys()
    assert {"nvidia-cuda-runtime", "nvidia-curand"} <= shared
    assert all(compiler[name] == libraries[name] for name in shared)
    assert set(kernels.values()) == {libraries["flashinfer-python"]}, "the wheels of compiled kernels have FlashInfer's version"
    index = dict(each.text.split("=", 1) for each in read(DOCKERFILE).stage("kernels-wheels").all("ARG"))["FLASHINFER_INDEX_URL"]
    assert index.endswith(f"/cu{''.join(cuda)}")


def test_images_have_no_cuda_compiler() -> None:
    """Only the stage that compiles FlashInfer's kernels has the compiler, outside of the folder that the image copies."""
    copied = [each for stage in read(DOCKERFILE).lineage("worker-cuda") for each in stage.all("COPY") if "from" in each.flags]
    assert [each.words[0] for each in copied if each.flags["from"] == "cuda-kernels"] == ["/opt/kernels"]
    assert {name for name in pins("worker-cuda.txt") if "nvcc" in name or "nvvm" in name} == set()
    assert "PYTHONPATH" in variables("cuda-libraries") and "PYTHONPATH" not in variables("cuda-compiler"), (
        "the compiler's stage must not set PYTHONPATH: pip would skip packages that are on it, and nvcc does not search it"
    )


def variables(stage: str) -> dict[str, str]:
    lineage = read(DOCKERFILE).lineage(stage)
    return dict(word.split("=", 1) for each in lineage for line in each.all("ENV") for word in line.words)


def test_cuda_worker_has_compiled_kernels_in_the_folder_that_flashinfer_reads() -> None:
    """The kernels are in FlashInfer's folder for precompiled kernels. A missing kernel is an error, because compiling is off."""
    dockerfile = read(DOCKERFILE)
    place = next(each.words[1] for each in dockerfile.stage("worker-cuda").all("COPY") if each.words[0] == "/opt/kernels")
    (command,) = [each.words for each in dockerfile.stage("kernels-compiled").all("RUN") if "flashinfer_prebuild" in each.text]
    options = build_parser().parse_args(command[command.index("--out") :])
    below = options.out.relative_to("/opt/kernels")
    assert place == "/opt/venv" and str(below) == f"{SITE_PACKAGES}/flashinfer/data/aot"
    assert set(options.head_dims.split(",")) <= {str(size) for size in HEAD_DIMS}
    assert set(options.dtypes.split(",")) <= DTYPES_BY_NAME.keys()
    given = variables("worker-cuda")
    assert given["FLASHINFER_DISABLE_JIT"] == "1"
    assert given["FLASHINFER_WORKSPACE_BASE"] == "/tmp" and given["TRITON_CACHE_DIR"].startswith("/tmp/")
    (check,) = [each.words for each in dockerfile.stage("kernels-wheels").all("RUN") if "flashinfer_prebuild" in each.text]
    assert build_parser().parse_args(check[check.index("--check") :]).check
    assert variables("kernels-wheels")["PYTHONPATH"].endswith(f":/opt/kernels/{SITE_PACKAGES}")


def test_cuda_worker_image_requests_driver_libraries() -> None:
    """The image sets the variables of NVIDIA's base images: devices, driver libraries and their folders, and the CUDA version."""
    given = variables("worker-cuda")
    assert given["NVIDIA_VISIBLE_DEVICES"] == "all" and set(given["NVIDIA_DRIVER_CAPABILITIES"].split(",")) == {
        "compute",
        "utility",
    }
    assert given["LD_LIBRARY_PATH"].split(":") == ["/usr/local/nvidia/lib", "/usr/local/nvidia/lib64"]
    assert given["NVIDIA_REQUIRE_CUDA"] == f"cuda>={'.'.join(pins('worker-cuda.txt')['cuda-toolkit'].split('.')[:2])}"
    assert "NVIDIA_VISIBLE_DEVICES" not in variables("worker"), "only the CUDA image requests a GPU"


def test_package_paths_use_the_base_images_python() -> None:
    """The paths of libraries and kernels contain the Python version, which must be that of the base image."""
    text = DOCKERFILE.read_text()
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=python:(\d+\.\d+)\.", text, re.MULTILINE)
    assert set(re.findall(r"python(3\.\d+)", text)) == {base}
    assert f"lib/python{base}/site-packages" == SITE_PACKAGES


def test_cpu_worker_imports_without_triton() -> None:
    """xgrammar requires triton but needs it only on GPUs."""
    modules = "rootstock_llm.services.worker.__main__, rootstock_llm.services.worker.grammar.compile.forking_compiler, xgrammar"
    code = f"import sys; sys.modules['triton'] = None; import {modules}"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 0


def test_service_pins_exclude_torch() -> None:
    assert {"torch", "triton", "transformers", "xgrammar", "grpcio-tools"}.isdisjoint(pins("service.txt"))


def test_protobuf_pins_have_one_version() -> None:
    assert pins("build.txt")["protobuf"] == pins("service.txt")["protobuf"] == pins("worker-cpu.txt")["protobuf"]


@pytest.mark.parametrize(
    "path", ["tests/__init__.py", "docs/reference/api.md", "build/kernels", ".venv/bin/python", "demo/train.py"]
)
def test_build_context_excludes_unneeded_paths(path: str) -> None:
    assert not context_files(ROOT, [path])


def test_build_context_excludes_built_and_cached_files() -> None:
    found = context_files(ROOT, ["services", "kernels", "protos", "models/demo"])
    assert "services/worker/core/scheduler.py" in found and "models/demo/model.safetensors" in found
    assert not [name for name in found if name.endswith((".pyc", ".so")) or "cache" in Path(name).parts]
