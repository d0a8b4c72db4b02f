"""Tokens a step by task, of a server that guesses them; prints a Markdown table. Held-out questions, greedy, one at a time.

make run RUN_FLAGS="--worker-flags='--speculative-algorithm eagle3 --speculative-draft-model-path models/demo-eagle3'"
python demo/acceptance.py --questions 20
"""

import argparse
import json
import urllib.request
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    print("| task | tokens a step | guesses that were right |\n| --- | ---: | ---: |")
    for task in TASKS:
        rng, tokens, drafted, accepted = Random(arguments.seed), 0, 0, 0
        for _ in range(arguments.questions):
            chat = [{"role": "user", "content": sample_held_out(task, rng)[0]}]
            meta = ask(arguments.url, tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
            tokens += meta["completion_tokens"]
            drafted += meta.get("spec_draft_token_num", 0)
            accepted += meta.get("spec_accept_token_num", 0)
        right = f"{accepted / drafted:.0%}" if drafted else "none"
        print(f"| {task} | {tokens / (tokens - accepted):.2f} | {right} |", flush=True)


if __name__ == "__main__":
    main()
