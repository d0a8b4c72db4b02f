"""Greedy exact-match accuracy per task on seeded questions that training withheld; prints a Markdown table.

python demo/evaluate.py --questions 200
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
from tasks import TASKS, conversation, is_correct, sample_held_out
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

Messages = list[dict[str, str]]
Answer = Callable[[list[Messages]], list[str]]

MODEL = Path(__file__).resolve().parents[1] / "models/demo"
BATCH = 50
CHAT_TURNS = (2, 3, 8)
MAX_NEW_TOKENS = 320


def answerer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> Answer:
    """A function from chats that end in a user turn to the greedy answers."""

    def answer(chats: list[Messages]) -> list[str]:
        prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        outputs = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        return tokenizer.batch_decode(outputs[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)

    return answer


def batches(items: list) -> Iterator[list]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))


def task_accuracy(answer: Answer, task: str, questions: int, rng: Random) -> tuple[float, str]:
    """Share of right answers, and one wrong answer if there is any."""
    right, wrong = 0, ""
    for batch in batches([sample_held_out(task, rng) for _ in range(questions)]):
        for (question, _), given in zip(batch, answer([user_turn(question) for question, _ in batch]), strict=True):
            if is_correct(task, question, given):
                right += 1
            else:
                wrong = f"{question!r} -> {given!r}"
    return right / questions, wrong


def user_turn(question: str) -> Messages:
    return [{"role": "user", "content": question}]


def chat_accuracy(answer: Answer, turns: int, questions: int, rng: Random) -> tuple[float, str]:
    """Share of conversations whose last answer is right, the earlier answers being given."""
    right, wrong = 0, ""
    for batch in batches([conversation(rng, turns, sample_held_out) for _ in range(questions)]):
        for messages, given in zip(batch, answer([messages[:-1] for messages in batch]), strict=True):
            if given.strip() == messages[-1]["content"]:
                right += 1
            else:
                wrong = f"{messages[-2]['content']!r} -> {given!r}"
    return right / questions, wrong


def rows(answer: Answer, tasks: list[str], questions: int, seed: int) -> Iterator[tuple[str, float, str]]:
    for task in tasks:
        yield task, *task_accuracy(answer, task, questions, Random(f"{seed} {task}"))
    for turns in CHAT_TURNS if tasks == list(TASKS) else ():
        yield f"chat, turn {turns}", *chat_accuracy(answer, turns, questions, Random(f"{seed} chat {turns}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument(
        "--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK", help="default: all, and chats"
    )
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show-wrong", action="store_true", help="also print one wrong answer per task")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    answer = answerer(model, AutoTokenizer.from_pretrained(arguments.model))
    print(f"| task | exact match, {arguments.questions} questions, {arguments.dtype} |\n|---|---|")
    for name, accuracy, wrong in rows(answer, arguments.tasks, arguments.questions, arguments.seed):
        print(f"| {name} | {accuracy:.1%} |" + (f" {wrong}" if arguments.show_wrong else ""), flush=True)


if __name__ == "__main__":
    main()
