"""KL divergence of the demo model with quantized weights: python -m tests.benchmarks.quantization_kl [--questions 200]

The texts are held-out questions of demo/tasks.py with their right answers, in the model's chat template. At each token of an
answer, the executor gives the log probabilities of the whole vocabulary. For each form of the weights, the output has the mean
and the 99th percentile of KL(bf16 ‖ form) in nats per token, and the share of positions with the same most likely token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from rootstock_llm.services.worker.core.contracts.plan import SamplingParams
from rootstock_llm.services.worker.exec.build import DeviceOptions, build_device_executor
from tests.benchmarks.server_process import ROOT
from tests.exec.driver import Driver, Sequence

sys.path.insert(0, str(ROOT / "demo"))
from tasks import TASKS, sample_held_out

FORMS = ("int8", "int8+head", "int4", "int4+head")
PAGE_SIZE = 16
Text = tuple[list[int], int]  # token ids, and the number of tokens before the answer


def texts(model: Path, questions: int) -> list[Text]:
    tokenizer, rng, found = AutoTokenizer.from_pretrained(model), Random("kl"), []
    for number in range(questions):
        question, answer = sample_held_out(list(TASKS)[number % len(TASKS)], rng)
        chat = [{"role": "user", "content": question}]
        before = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in (before, before + answer)]
        found.append((ids[1], len(ids[0])))
    return found


def logprobs(model: Path, form: str, drawn: list[Text], threads: int) -> NDArray[np.float64]:
    """Returns the log probabilities at each token of all answers, [tokens, vocabulary]."""
    scheme, _, head = form.partition("+")
    options = DeviceOptions(device="cpu", num_threads=threads, quantization=scheme, quantize_head=head == "head")
    pages = max(len(ids) for ids, _ in drawn) // PAGE_SIZE + 2
    executor, info = build_device_executor(str(model), "bfloat16", PAGE_SIZE, 2, pages, 0.5, None, options, lambda _: None)
    driver, found = Driver(executor, PAGE_SIZE), []
    for ids, start in drawn:
        driver.next_page = 0
        everything = tuple(range(info.vocab_size))
        params = SamplingParams(
            max_new_tokens=1, temperature=0.0, prompt_logprobs_from=start, top_logprobs=0, logprob_token_ids=everything
        )
        sequence = Sequence(ids, 0, params)
        driver.prefill([sequence])
        found += [part.chosen.astype(np.float64) for part in sequence.prompt_logprobs]
    executor.close()
    return np.concatenate(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--quantization", nargs="+", default=FORMS, help="forms of the weights: int8, int4, int8+head, ...")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    drawn = texts(options.model, options.questions)
    exact = logprobs(options.model, "auto", drawn, options.threads)
    print(f"{len(exact)} tokens of {len(drawn)} answers")
    for form in options.quantization:
        found = logprobs(options.model, form, drawn, options.threads)
        divergence = (np.exp(exact) * (exact - found)).sum(axis=1)
        same = (exact.argmax(axis=1) == found.argmax(axis=1)).mean()
        most = np.percentile(divergence, 99)
        print(f"{form:>10}: mean {divergence.mean():.5f}, p99 {most:.5f}, same most likely token {same:.2%}", flush=True)


if __name__ == "__main__":
    main()
