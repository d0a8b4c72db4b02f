"""Measures the greedy exact-match accuracy per task on seeded, held-out questions, and prints a Markdown table.

python demo/evaluate.py --questions 200
python demo/evaluate.py --questions 100 --model models/demo-hybrid --url http://127.0.0.1:8000

transformers computes the answers; with --url, a running server computes them.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random

import httpx
import torch
from tasks import TASKS, conversation, is_correct, sample_held_out
from tool_tasks import Message, Scene, as_tool_call, long_message, scene
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from window_masks import add_window_masks

Messages = list[Message]
Answer = Callable[..., list[str]]

MODEL = Path(__file__).resolve().parents[1] / "models/demo"
BATCH = 50
CHAT_TURNS = (2, 3, 8)
TOOL_KINDS = {"one": 41, "chain": 34, "plain": 25}
LONG_SENTENCES = (70, 180)  # smallest and largest number of sentences before a question; one has about 16 tokens
MAX_NEW_TOKENS = 320
AT_ONCE = 8  # requests to a server at once


def answerer(tokenizer: PreTrainedTokenizerFast, complete: Callable[[list[str]], list[str]]) -> Answer:
    """Returns a function that takes chats with their tools, and returns the next answer of each chat.

    Args:
        complete: takes prompts in the form of the model's chat template, and returns their greedy completions.
    """

    def answer(chats: list[Messages], tools: list[list[Message]] | None = None) -> list[str]:
        return complete(
            [
                tokenizer.apply_chat_template(chat, tools=known or None, add_generation_prompt=True, tokenize=False)
                for chat, known in zip(chats, tools or [[] for _ in chats], strict=True)
            ]
        )

    return answer


def complete_by_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[str]:
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    outputs = model.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    return tokenizer.batch_decode(outputs[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def complete_by_server(client: httpx.Client, prompts: list[str]) -> list[str]:
    """Returns a server's completions of the prompts, requested AT_ONCE at a time.

    Raises httpx.HTTPStatusError if a response has an error status.
    """

    def complete(prompt: str) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": MAX_NEW_TOKENS, "temperature": 0}
        return client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]

    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(complete, prompts))


def batches(items: list) -> Iterator[list]:
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))


def task_accuracy(answer: Answer, task: str, questions: int, rng: Random) -> tuple[float, str]:
    """Returns the share of right answers, and the last wrong answer with its question; "" if all are right."""
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
    """Returns the share of conversations with a right last answer, and the last wrong answer.

    The model does not generate the earlier answers of a conversation; it gets the right ones.
    """
    right, wrong = 0, ""
    for batch in batches([conversation(rng, turns, sample_held_out) for _ in range(questions)]):
        for messages, given in zip(batch, answer([messages[:-1] for messages in batch]), strict=True):
            if given.strip() == messages[-1]["content"]:
                right += 1
            else:
                wrong = f"{messages[-2]['content']!r} -> {given!r}"
    return right / questions, wrong


def calls_of(text: str) -> list[Message] | None:
    """Returns the calls at the end of an answer, in order, or None if a call is not JSON."""
    try:
        return [json.loads(call) for call in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text)]
    except ValueError:
        return None


def follow(answer: Answer, scenes: list[Scene]) -> list[str]:
    """Asks the only question of each scene, and sends the results of right calls back to the model.

    Returns:
        The first fault of each scene; "" for a scene without a fault.
    """
    chats: list[Messages] = [drawn.messages()[: 2 if drawn.system else 1] for drawn in scenes]
    wrong = [""] * len(scenes)
    for number in range(max(len(drawn.questions[0].turns) for drawn in scenes) + 1):
        going = [at for at, drawn in enumerate(scenes) if not wrong[at] and number <= len(drawn.questions[0].turns)]
        if not going:
            break
        given = answer([chats[at] for at in going], [[tool.schema() for tool in scenes[at].tools] for at in going])
        for at, text in zip(going, given, strict=True):
            question = scenes[at].questions[0]
            if number == len(question.turns):
                wrong[at] = "" if text.strip() == question.answer else f"{question.text!r}: {text!r}, not {question.answer!r}"
                continue
            calls = [as_tool_call(call) for call in question.turns[number].calls]
            if calls_of(text) != [call["function"] for call in calls]:
                wrong[at] = f"{question.text!r}: {text!r}, not {calls}"
            chats[at] += [{"role": "assistant", "content": text.partition("<tool_call>")[0].rstrip(), "tool_calls": calls}]
            chats[at] += [{"role": "tool", "content": call.result} for call in question.turns[number].calls]
    return wrong


def tool_accuracy(answer: Answer, kind: str, questions: int, rng: Random) -> tuple[float, str]:
    """Returns the share of questions with the right calls in order and the right answer, and the fault of a wrong one.

    Training never shows the words of these tools.
    """
    wrong = [
        said for batch in batches([scene(rng, True, kind) for _ in range(questions)]) for said in follow(answer, batch) if said
    ]
    return 1 - len(wrong) / questions, wrong[-1] if wrong else ""


def long_accuracy(answer: Answer, role: str, questions: int, rng: Random) -> tuple[float, str]:
    """Returns the share of right answers, and the last wrong answer with its question; "" if all are right.

    LONG_SENTENCES sentences of other text precede each question, in a system message or in the question's message (`role`).
    """
    right, wrong = 0, ""
    for batch in batches([(name, *sample_held_out(name, rng)) for name in rng.choices(list(TASKS), k=questions)]):
        texts = [long_message(rng, rng.randint(*LONG_SENTENCES)) for _ in batch]
        chats = [
            [{"role": "system", "content": text}, *user_turn(question)]
            if role == "system"
            else user_turn(f"{text}\n\n{question}")
            for text, (_, question, _) in zip(texts, batch, strict=True)
        ]
        for (name, question, _), given in zip(batch, answer(chats), strict=True):
            if is_correct(name, question, given):
                right += 1
            else:
                wrong = f"{question!r} -> {given!r}"
    return right / questions, wrong


def rows(answer: Answer, tasks: list[str], questions: int, seed: int) -> Iterator[tuple[str, float, str]]:
    for task in tasks:
        yield task, *task_accuracy(answer, task, questions, Random(f"{seed} {task}"))
    for turns in CHAT_TURNS if tasks == list(TASKS) else ():
        yield f"chat, turn {turns}", *chat_accuracy(answer, turns, questions, Random(f"{seed} chat {turns}"))
    for role in ("system", "user") if tasks == list(TASKS) else ():
        yield f"after a long {role} message", *long_accuracy(answer, role, questions // 4, Random(f"{seed} long {role}"))
    for kind, share in TOOL_KINDS.items():
        yield f"tools, {kind}", *tool_accuracy(answer, kind, questions * share // 100, Random(f"{seed} tools {kind}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument(
        "--tasks",
        nargs="*",
        choices=list(TASKS),
        default=list(TASKS),
        metavar="TASK",
        help="tasks to measure; default: all tasks, and also chats and long messages",
    )
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--url", help="address of a server that serves the model; --dtype and --threads then have no effect")
    parser.add_argument("--show-wrong", action="store_true", help="print one wrong answer per task, too")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if arguments.url:
        complete = partial(complete_by_server, httpx.Client(base_url=arguments.url, timeout=300))
    else:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
        add_window_masks(model)
        complete = partial(complete_by_model, model, tokenizer)
    computed_by = "by a server" if arguments.url else arguments.dtype
    print(f"| task | exact match, {arguments.questions} questions, {computed_by} |\n|---|---|")
    accuracies = []
    for name, accuracy, wrong in rows(answerer(tokenizer, complete), arguments.tasks, arguments.questions, arguments.seed):
        accuracies.append(accuracy)
        print(f"| {name} | {accuracy:.1%} |" + (f" {wrong}" if arguments.show_wrong else ""), flush=True)
    print(f"| mean | {sum(accuracies) / len(accuracies):.1%} |")


if __name__ == "__main__":
    main()
