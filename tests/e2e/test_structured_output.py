"""Structured output through the whole system with OpenAI's client: outputs satisfy their grammars.

Neither a bad grammar nor a killed grammar compiler affects other requests.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import jsonschema
import openai
import psutil
import pytest
from pydantic import BaseModel, Field

from tests.e2e.system import System, wait_until

ADA: Any = [{"role": "user", "content": "Give the JSON for name Ada, age 36."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
}
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</f>"}
CHOICES = ["yes", "no", 'say "maybe"\n']


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


Kind = tuple[dict[str, Any], Callable[[str], object]]  # fields of a request, and a function that checks the output
KINDS: dict[str, Kind] = {
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}}, is_person),
    "json_object": ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    "guided_json": ({"extra_body": {"guided_json": json.dumps(PERSON)}}, is_person),
    "regex": ({"extra_body": {"regex": r"\d{4}-[a-f]{2,5}(, é)?"}}, re.compile(r"\d{4}-[a-f]{2,5}(, é)?").fullmatch),
    "ebnf": ({"extra_body": {"ebnf": 'root ::= ("ab" | "cd") [0-9]{2} "."'}}, re.compile(r"(ab|cd)\d\d\.").fullmatch),
    "choice": ({"extra_body": {"guided_choice": CHOICES}}, lambda text: text in CHOICES),
    "structural_tag": (
        {"response_format": {"type": "structural_tag", "format": TAG}},
        lambda text: text.startswith("<f>") and text.endswith("</f>") and is_person(text[3:-4]),
    ),
}


@pytest.fixture(scope="module")
def system(exact_system: System) -> System:
    return exact_system


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(client: openai.OpenAI, **options: Any) -> list[Any]:
    """Sends a request without streaming and returns the choices."""
    values = {"model": "demo", "messages": ADA, "max_tokens": 400, **options}
    return list(client.chat.completions.create(**values).choices)


def streamed(client: openai.OpenAI, **options: Any) -> str:
    values = {"model": "demo", "messages": ADA, "max_tokens": 400, "stream": True, **options}
    return "".join(choice.delta.content or "" for chunk in client.chat.completions.create(**values) for choice in chunk.choices)


class TestEveryKind:
    """Tests of each kind of constraint. Half of the kinds run with sampled choices, the other half with batches of prompts."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_constraint_holds_for_whole_and_streamed_output(self, client: openai.OpenAI, kind: str) -> None:
        options, satisfies = KINDS[kind]
        (choice,) = chat(client, temperature=0, **options)
        assert choice.finish_reason == "stop"
        assert satisfies(choice.message.content), choice.message.content
        assert streamed(client, temperature=0, **options) == choice.message.content

    @pytest.mark.by_day(one_in=2, seed=5)
    @pytest.mark.parametrize("kind", list(KINDS)[::2])
    def test_constraint_holds_for_each_sampled_choice(self, client: openai.OpenAI, kind: str) -> None:
        options, satisfies = KINDS[kind]
        ended = [
            c for seed in (1, 2) for c in chat(client, n=2, seed=seed, temperature=0.7, **options) if c.finish_reason == "stop"
        ]
        assert len(ended) == 4 or kind == "json_object", "only json_object, which has no schema, may reach the token limit"
        assert all(satisfies(choice.message.content) for choice in ended)

    @pytest.mark.by_day(one_in=2, seed=4)
    @pytest.mark.parametrize("kind", list(KINDS)[1::2])
    def test_constraint_holds_for_each_prompt_of_a_batch(self, client: openai.OpenAI, kind: str) -> None:
        options, satisfies = KINDS[kind]
        extra = options.get("extra_body") or {"response_format": options["response_format"]}
        prompts = ["Give the JSON for name Ada, age 36.", "Count", "<f>"]
        answer = client.completions.create(
            model="demo", prompt=prompts, max_tokens=400, temperature=0, extra_body={**extra, "ignore_eos": False}
        )
        ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
        assert len(ended) == 3 or kind == "json_object"
        assert all(satisfies(choice.text) for choice in ended)


@pytest.mark.parametrize("stop_ids", [[], [0, 7]], ids=["no-stop-ids", "stop-ids"])
def test_response_reports_no_stop_token_when_the_grammar_ends_the_output(system: System, stop_ids: list[int]) -> None:
    """The end of the grammar ends the output, so no API may report a stop token."""
    more = {"temperature": 0, "stop_token_ids": stop_ids} if stop_ids else {"temperature": 0}
    grammar = {**more, "regex": "ab{2}"}
    _, generated = system.post("/generate", {"text": "Hi", "sampling_params": {**grammar, "max_new_tokens": 9}})
    assert (generated["text"], generated["meta_info"]["finish_reason"]) == ("abb", {"type": "stop", "matched": None})
    for path, asked in (("/v1/chat/completions", {"messages": ADA}), ("/v1/completions", {"prompt": "Hi"})):
        _, answer = system.post(path, {"model": "demo", "max_tokens": 9, **asked, **grammar})
        assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", None)
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    asked = {
        "model": "demo",
        "messages": ADA,
        "max_tokens": 90,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    _, message = system.post("/v1/messages", asked)
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


class Address(BaseModel):
    street: Annotated[str, Field(max_length=12)]
    number: Annotated[int, Field(ge=1, le=999)] | None


class Customer(BaseModel):
    """A typical pydantic model of a user: nested, with optional values, literals and bounded lists."""

    name: Annotated[str, Field(max_length=10, description="Family name last.")]
    kind: Literal["person", "company"]
    addresses: Annotated[list[Address], Field(min_length=1, max_length=2)]
    vip: bool


class TestPydantic:
    def test_parse_method_of_the_client_returns_the_pydantic_model(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.parse(model="demo", messages=ADA, response_format=Customer, temperature=0)
        parsed = answer.choices[0].message.parsed
        assert isinstance(parsed, Customer) and 1 <= len(parsed.addresses) <= 2

    def test_stream_helper_of_the_client_returns_the_pydantic_model(self, client: openai.OpenAI) -> None:
        with client.chat.completions.stream(
            model="demo", messages=ADA, response_format=Customer, temperature=1, seed=4
        ) as stream:
            final = stream.get_final_completion()
        assert isinstance(final.choices[0].message.parsed, Customer)

    def test_parse_method_of_the_client_returns_the_values_in_the_prompt(self, client: openai.OpenAI) -> None:
        class Person(BaseModel):
            name: str
            age: int

        answer = client.chat.completions.parse(model="demo", messages=ADA, response_format=Person, temperature=0)
        assert answer.choices[0].message.parsed == Person(name="Ada", age=36)


ROUTES = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


def ask_for_call(system: System, route: str, parameters: Any, strict: bool, **more: Any) -> tuple[int, dict[str, Any]]:
    """Requests a forced call of the function `f`. If `parameters` is `...`, the function has no such field."""
    given = {} if parameters is ... else {"input_schema" if route == "/v1/messages" else "parameters": parameters}
    function = {"name": "f", "strict": strict, **given}
    body: dict[str, Any] = {"model": "demo", "temperature": 1, **more}
    if route == "/v1/chat/completions":
        tool = {"type": "function", "function": function}
        return system.post(route, {**body, "messages": ADA, "tools": [tool], "tool_choice": "required", "max_tokens": 200})
    if route == "/v1/messages":
        return system.post(
            route, {**body, "messages": ADA, "tools": [function], "tool_choice": {"type": "any"}, "max_tokens": 200}
        )
    tool = {"type": "function", **function}
    return system.post(route, {**body, "input": ADA, "tools": [tool], "tool_choice": "required", "max_output_tokens": 200})


def arguments_of(route: str, answer: dict[str, Any]) -> Any:
    """Returns the arguments of the first call in a response."""
    if route == "/v1/chat/completions":
        return json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])
    if route == "/v1/messages":
        return next(block["input"] for block in answer["content"] if block["type"] == "tool_use")
    return json.loads(next(item["arguments"] for item in answer["output"] if item["type"] == "function_call"))


def objects(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


class TestForcedCalls:
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("strict", [False, True], ids=["loose", "strict"])
    def test_tool_call_has_no_arguments_when_the_function_has_no_parameters(
        self, system: System, route: str, strict: bool
    ) -> None:
        for parameters in (..., None, {}, {"type": "object", "properties": {}}):
            status, answer = ask_for_call(system, route, parameters, strict)
            assert status == 200, answer
            assert arguments_of(route, answer) == {}, parameters

    @pytest.mark.parametrize("route", ROUTES)
    def test_call_of_a_function_that_is_not_strict_is_served_despite_unsupported_keywords(
        self, system: System, route: str
    ) -> None:
        small = {"type": "integer", "minimum": 0, "maximum": 9}
        keywords = {"uniqueItems": True, "nullable": True, "contains": {}}
        parameters = objects(a={"type": "array", "items": small, "maxItems": 2, **keywords}, b=small)
        status, answer = ask_for_call(system, route, parameters, strict=False)
        assert status == 200, answer
        jsonschema.validate(arguments_of(route, answer), objects(a={"type": "array", "items": small, "maxItems": 2}, b=small))

    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize("keyword", ["uniqueItems", "nullable"])
    def test_refusal_of_a_strict_function_has_the_field_name_of_the_client(
        self, system: System, route: str, keyword: str
    ) -> None:
        parameters = objects(a={"type": "array", "items": {"type": "string"}, keyword: True})
        status, answer = ask_for_call(system, route, parameters, strict=True)
        field = {"/v1/chat/completions": ".function.parameters", "/v1/messages": ".input_schema"}.get(route, ".parameters")
        assert status == 400
        assert answer["error"]["message"] == f"tools[0]{field}: #/properties/a/{keyword}: this keyword is not supported"
        assert answer["error"].get("param", f"tools[0]{field}") == f"tools[0]{field}"

    @pytest.mark.parametrize("route", ROUTES)
    def test_strict_function_enforces_a_lookahead_in_a_pattern(self, system: System, route: str) -> None:
        parameters = objects(a={"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{2,4}$"})
        status, answer = ask_for_call(system, route, parameters, strict=True)
        assert status == 200, answer
        jsonschema.validate(arguments_of(route, answer), parameters)


def schema(**properties: Any) -> dict[str, Any]:
    return {"guided_json": {"type": "object", "properties": properties}}


# Case → fields of a request, and part of the refusal. There is one case per component that refuses; tests/grammar has all
# reasons.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not": (schema(a={"not": {"type": "null"}}), "json_schema: #/properties/a/not: this keyword is not supported"),
    "unknown keyword": (schema(**{"a/b": {"maxLenght": 3}}), "#/properties/a~1b/maxLenght: this keyword is not supported"),
    "two schemas at once": (schema(a={"allOf": [{}, {}]}), "#/properties/a/allOf: supported with a single schema only"),
    "unsatisfiable schema": ({"guided_json": {"$ref": "#"}}, "json_schema: #"),
    "regex": ({"regex": "(a"}, "position 2: a group is not closed"),
    "look-ahead": ({"regex": "(?=a)b"}, "pattern: no text satisfies the pattern"),
    "ebnf": ({"ebnf": 'root ::= "a'}, "ebnf"),
    "ebnf without root": ({"ebnf": 'start ::= "a"'}, "ebnf"),
    "structural tag": ({"structural_tag": {"type": "structural_tag", "format": {"type": "sing"}}}, "structural_tag"),
    "schema in a tag": (
        {"structural_tag": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"not": {}}}}},
        "not: this keyword is not supported",
    ),
    "empty choice": ({"guided_choice": []}, "guided_choice"),
    "two constraints": ({"regex": "a", "ebnf": 'root ::= "a"'}, "both constrain"),
}


IN_A_STREAM = ["not", "regex", "ebnf", "structural tag", "empty choice", "two constraints"]


class TestRefusals:
    @pytest.mark.by_day(one_in=2, seed=4)
    @pytest.mark.parametrize("case", [case for case in REFUSED if case not in IN_A_STREAM])
    def test_bad_grammar_gets_400_with_fault_and_position(self, client: openai.OpenAI, case: str) -> None:
        extra, message = REFUSED[case]
        with pytest.raises(openai.BadRequestError) as refusal:
            client.chat.completions.create(model="demo", messages=ADA, extra_body=extra)
        assert message in refusal.value.message
        assert refusal.value.type == "invalid_request_error"

    @pytest.mark.by_day(one_in=2, seed=8)
    @pytest.mark.parametrize("case", IN_A_STREAM)
    def test_bad_grammar_gets_400_before_the_stream_begins(self, client: openai.OpenAI, case: str) -> None:
        """The gateway refuses some of these grammars, and the worker refuses others. Each kind of grammar is tested."""
        extra, message = REFUSED[case]
        with pytest.raises(openai.BadRequestError, match=re.escape(message)) as refusal:
            client.chat.completions.create(model="demo", messages=ADA, stream=True, extra_body=extra)
        assert refusal.value.type == "invalid_request_error"

    def test_worker_is_idle_after_refused_requests(self, system: System, client: openai.OpenAI) -> None:
        for extra, _ in REFUSED.values():
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="demo", prompt="hi", n=3, extra_body=extra)
        wait_until(lambda: work_of_worker(system) == 0, 60, "the worker to be idle")


def work_of_worker(system: System) -> float:
    """Returns the worker's used KV tokens plus its running and queued requests; 0 if the worker is idle."""
    names = ("sglang:num_used_tokens", "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs")
    return sum(system.metric("worker-0", name) for name in names)


class TestTogether:
    def test_concurrent_requests_share_a_new_schema(self, system: System) -> None:
        fresh = {"type": "object", "properties": {"fresh": {"enum": ["a", "bb", 3]}, "more": PERSON}, "required": ["more"]}
        texts = asyncio.run(all_at_once(system, [{"extra_body": {"json_schema": fresh}, "temperature": 0}] * 16))
        jsonschema.validate(json.loads(texts[0]), fresh)
        assert set(texts) == {texts[0]}

    def test_plain_outputs_do_not_change_among_structured_requests(self, system: System) -> None:
        plain = [
            {"messages": [{"role": "user", "content": content}], "temperature": 0}
            for content in (
                "Count from 3 to 9.",
                "Spell the word lantern.",
                "What is 17 + 25?",
                "Repeat: naïve 日本語",
                "x",
                "y z",
            )
        ]
        alone = [asyncio.run(all_at_once(system, [request]))[0] for request in plain]
        structured = [
            {**options, "temperature": 1, "seed": seed} for seed in range(2) for _, (options, _) in sorted(KINDS.items())
        ]
        # These grammars are new, so that they compile while the plain requests run.
        structured += [{"extra_body": {"regex": f"[a-z]{{3,{n}}}\\d"}, "temperature": 1} for n in range(10, 16)]
        together = [request for pair in zip(structured, plain * 4, strict=False) for request in pair]
        texts = asyncio.run(all_at_once(system, together))
        assert texts[1::2] == (alone * 4)[: len(structured)]


async def all_at_once(system: System, requests: list[dict[str, Any]]) -> list[str]:
    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        async def one(request: dict[str, Any]) -> str:
            values = {"model": "demo", "messages": ADA, "max_tokens": 200, **request}
            answer = await client.chat.completions.create(**values)
            return str(answer.choices[0].message.content)

        return await asyncio.gather(*(one(request) for request in requests))


def compilers(system: System) -> list[psutil.Process]:
    """Returns the process that forks grammar compilers, followed by the running compilers."""
    worker = psutil.Process(system.children["worker-0"].pid)
    forkers = [process for process in worker.children() if any("compiler_child" in part for part in process.cmdline())]
    return forkers + [child for forker in forkers for child in forker.children()]


def kill_in_the_middle(system: System, victim: int) -> bool:
    """Kills the process that forks compilers (victim 0) or a running compiler (victim 1).

    Returns:
        False if no compilation runs, so that nothing was killed.
    """
    found = compilers(system)
    if len(found) > 1:
        found[victim].kill()
    return len(found) > 1


def slow_to_compile(marker: str) -> dict[str, Any]:
    """Returns a schema that takes about a second to compile, so that a test can kill the compiler before it is done."""
    return {"enum": [f"{marker}-{index * 7919 % 100_003}" for index in range(10_000)]}


class TestCompilerKilled:
    @pytest.mark.parametrize("victim", [0, 1], ids=["forking process", "compiler"])
    def test_requests_are_served_when_a_process_of_the_grammar_compiler_is_killed(
        self, system: System, client: openai.OpenAI, victim: int
    ) -> None:
        assert chat(client, temperature=0, extra_body={"regex": f"[ab]{{2}}{victim}"})
        slow = slow_to_compile(f"victim{victim}")

        async def ask_and_kill() -> str | openai.APIStatusError:
            request = asyncio.create_task(all_at_once(system, [{"extra_body": {"json_schema": slow}, "temperature": 0}]))
            await asyncio.to_thread(wait_until, lambda: kill_in_the_middle(system, victim), 20, "a compilation to begin")
            try:
                return (await asyncio.wait_for(request, 60))[0]
            except openai.APIStatusError as error:
                return error

        answer = asyncio.run(ask_and_kill())
        if isinstance(answer, openai.APIStatusError):
            assert answer.status_code in (400, 503) and "compil" in answer.message
        else:
            assert json.loads(answer) in slow["enum"]
        again = chat(client, temperature=0, extra_body={"regex": f"[ab]{{3}}{victim}"})
        assert re.fullmatch(f"[ab]{{3}}{victim}", again[0].message.content)
        wait_until(lambda: work_of_worker(system) == 0, 60, "the worker to be idle")

    def test_grammar_compiler_processes_end_after_compilation(self, system: System, client: openai.OpenAI) -> None:
        assert chat(client, temperature=0, extra_body={"regex": "[cd]{2}"})
        wait_until(lambda: len(compilers(system)) == 1, 60, "the last compilation to end")
