"""Measures the tokens per step and per round of a server with draft tokens, by task, and prints a Markdown table.

The questions are held out from training. They are sent one at a time, with greedy decoding.

make run RUN_FLAGS="--worker-flags='--speculative-algorithm eagle3 --speculative-draft-model-path models/demo-eagle3 \
--speculative-num-steps 3 --no-speculative-adaptive'"
python demo/acceptance.py --questions 20

A step is any step that computes output tokens, including the step of the prompt and steps without draft tokens. A round is a step
that verifies draft tokens. The column "at most" has the tokens per round of the same outputs if all draft tokens were accepted.
"""

import argparse
import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tasks import TASKS, sample_held_out
from transformers import AutoTokenizer

MODEL = Path(__file__).resolve().parents[1] / "models/demo"


def ask(url: str, text: str) -> dict:
    body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 320}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["meta_info"]


@dataclass
class Counts:
    """Sums over all outputs of one task."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    best: int = 0  # rounds if all draft tokens were right

    def add(self, meta: dict, guesses: int) -> None:
        rounds, accepted = meta.get("spec_verify_ct", 0), meta.get("spec_accept_token_num", 0)
        self.tokens += meta["completion_tokens"]
        self.drafted += meta.get("spec_draft_token_num", 0)
        self.accepted += accepted
        self.rounds += rounds
        self.best += -(-(rounds + accepted) // (guesses + 1))

    def cells(self) -> str:
        """Returns the task's cells of the Markdown table. A round commits its accepted draft tokens and one sampled token."""
        step = f"{self.tokens / (self.tokens - self.accepted):.2f}"
        if not self.rounds:
            return f"{step} | none | none | none"
        of_rounds = self.rounds + self.accepted
        return f"{step} | {of_rounds / self.rounds:.2f} | {of_rounds / self.best:.2f} | {self.accepted / self.drafted:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--guesses", type=int, default=3, help="the server's --speculative-num-steps")
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    print("| task | tokens a step | tokens a round | at most | accepted draft tokens |\n| --- | ---: | ---: | ---: | ---: |")
    for task in TASKS:
        rng, counts = Random(arguments.seed), Counts()
        for _ in range(arguments.questions):
            chat = [{"role": "user", "content": sample_held_out(task, rng)[0]}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            counts.add(ask(arguments.url, text), arguments.guesses)
        print(f"| {task} | {counts.cells()} |", flush=True)


if __name__ == "__main__":
    main()
