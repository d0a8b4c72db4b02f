"""Inputs that failed on other inference servers, as issues report. Each is sent to every API, with and without streaming.

A row is a kind of input. The ids of the test cases have the name of the row.

    A1  an assistant message without text         A2  empty lists and objects in a message
    A3  arguments that are not an object          A4  text parts in each role
    A5  two calls in one turn                     A6  system messages in any order
    A7  fields that switch thinking               B1  a call in open reasoning
    B2  a call without its closing marks          B3  a call format that a template describes in words
    B4  a call with an empty body                 B5  a call with damaged arguments
    B6  a grammar that ends without a stop token  C1  a forced call of a function without parameters
    C2  schemas that zod and pydantic write       C3  schemas with keywords that are not supported
    D1  end of sequence in only one config file   D2  a folder without tokenizer.json
    E1  HTTP/1.0                                  E2  top_p 0
    E3  hosted tools                              G1  a queue length of 0
    G5  a folder without a chat template          G9  a model that does not sample

Other files test more cases of some rows, and the rows that a request to the running system cannot test:

    A1 to A6  each form of template               tests/services/tokenizer/test_history.py
    B1 to B5  damaged outputs of every format     tests/services/gateway/output/test_damaged_outputs.py
    C2        every schema, and its outputs       tests/grammar/test_generated_schemas.py
    D3        layer types                         tests/exec/test_transformers_model.py
    F         chart values                        tests/chart
    G2, G6    processes and models that fail      tests/e2e/test_start_ends.py
    G3        memory of the host tier             tests/services/worker/test_tier_options.py
    G4, G7    printed commands and causes         tests/e2e/test_make_run.py
    G8        the examples of each page           tests/e2e/test_documented_examples.py
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import jsonschema
import pytest

from rootstock_llm.services.local.ports import HOST, free_ports
from rootstock_llm.services.shared.hf_tokenizer import load_tokenizer
from rootstock_llm.services.worker.settings import WorkerSettings
from rootstock_llm.services.worker.text.tokenizer_folder import with_tokenizer
from tests.e2e.changed_tokenizer import ChangedTokenizer
from tests.e2e.reciting_model import selector, write_reciting_model
from tests.e2e.reported_apis import (
    CHAT,
    CHATS,
    COMPLETIONS,
    EVERY,
    GENERATE,
    MESSAGES,
    RESPONSES,
    STREAMED,
    Answer,
    ask,
    body_of,
    field_of,
    forced,
    post,
    read,
    tools_of,
    with_schema,
)
from tests.e2e.reported_chats import BODIES, ROWS, STRICT, bodies_of
from tests.e2e.reported_outputs import FAMILY_ROWS, IN_WORDS, OUTPUTS, READ, Output
from tests.e2e.system import DEMO, ROOT, System, wait_until

PARALLEL = 12  # number of concurrent requests
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SMALL = {"type": "integer", "minimum": 0, "maximum": 9}
WITH_STOPS = (CHAT, COMPLETIONS, GENERATE)  # APIs with the field stop_token_ids
ZOD = json.loads((ROOT / "tests" / "grammar" / "zod_schemas.json").read_text())["schemas"]
GENERATED = (
    *("z.uuid()", "z.iso.date()", "z.ipv4()", "z.cidrv4()", "z.nanoid()", "z.ulid()", "z.int().multipleOf(5)", "z.boolean()"),
    *('z.record(z.enum(["a", "b"]), z.number())', "z.e164()", 'z.literal(["a", 1, true])'),
)
# Hosted tools, which agents send together with functions. This server does not offer them.
HOSTED = {
    CHAT: [{"type": "custom", "custom": {"name": "a"}}],
    RESPONSES: [{"type": "web_search"}, {"type": "local_shell"}, {"type": "image_generation"}, {"type": "custom", "name": "a"}],
    MESSAGES: [{"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}],
}
T = TypeVar("T")


def of(row: str, paths: Sequence[str] = EVERY) -> Any:
    """Returns a parametrization with the cases of a row: whole and streamed for each API."""
    cases = [(path, stream) for path in paths for stream in (False, True)]
    ids = [f"{row}-{path}-{'streamed' if stream else 'whole'}" for path, stream in cases]
    return pytest.mark.parametrize(("path", "stream"), cases, ids=ids)


def faults_of(cases: Sequence[T], fault_of: Callable[[T], str]) -> list[str]:
    """Runs `fault_of` for all cases in parallel and returns the faults. `fault_of` returns "" for no fault."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        return [fault for fault in pool.map(fault_of, cases) if fault]


def bare_folder(folder: Path) -> Path:
    """Writes the demo model without a chat template, and with vocab.json and merges.txt instead of tokenizer.json."""
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(DEMO / name)
    described = json.loads((DEMO / "tokenizer.json").read_text())
    added = {str(token["id"]): {key: token[key] for key in token if key != "id"} for token in described["added_tokens"]}
    settings = {**json.loads((DEMO / "tokenizer_config.json").read_text()), "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "Qwen2Tokenizer"}))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in described["model"]["merges"]]
    (folder / "vocab.json").write_text(json.dumps(described["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return folder


@pytest.fixture(scope="module")
def no_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChangedTokenizer]:
    """A system with a model folder without tokenizer.json and chat template. A flag sets the strict template."""
    folder = tmp_path_factory.mktemp("bare")
    template = folder / "strict.jinja"
    template.write_text(STRICT)
    model = with_tokenizer(bare_folder(folder / "model"), folder / "built")
    settings = {"served_model_name": "demo", "chat_template": str(template), "admin_port": free_ports(1)[0]}
    with System(folder / "logs", model=str(model), **settings) as running:
        yield ChangedTokenizer(running)


@pytest.fixture
def closed(no_files: ChangedTokenizer) -> Iterator[System]:
    """The system with a queue length of 0 during the test, so that its worker accepts no request."""
    system = no_files.set()
    settings = system.parts["gateway"].settings
    assert settings is not None
    url, name = f"http://{HOST}:{settings.admin_port}/set_internal_state", "max_queued_requests"
    for value in (0, WorkerSettings.model_fields[name].default):
        assert httpx.post(url, json={"server_args": {name: value}}).status_code == 200
        if not value:
            yield system
    wait_until(lambda: post(system, GENERATE, body_of(GENERATE, most=1)).status_code == 200, 60, "the worker to accept requests")


class TestChats:
    """Chat histories, thinking switches and chat templates."""

    @STREAMED
    @pytest.mark.parametrize("row", ROWS)
    def test_chat_is_answered_when_the_template_is_strict(self, no_files: ChangedTokenizer, row: str, stream: bool) -> None:
        system = no_files.set()

        def fault(name: str) -> str:
            path, body = BODIES[name]
            response = post(system, path, {"model": "demo", "temperature": 0, **body}, stream)
            return f"{name}: {response.text}" if response.status_code != 200 or '"error":{' in response.text else ""

        assert faults_of(bodies_of(row), fault) == []

    @of("A7", (CHAT, RESPONSES))
    def test_thinking_switch_reaches_the_template(self, no_files: ChangedTokenizer, path: str, stream: bool) -> None:
        """The template's only switch for thinking is `think`."""
        for name in ("think", "enable_thinking", "thinking"):
            response = post(no_files.set(), path, {**body_of(path, most=2), name: True}, stream)
            if name == "think":
                assert response.status_code == 200, response.text
            else:
                error = response.json()["error"]
                assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")

    def test_general_thinking_field_is_accepted_when_the_template_ignores_it(self, no_files: ChangedTokenizer) -> None:
        for path, switch in (
            (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
            (MESSAGES, {"thinking": {"type": "disabled"}}),
        ):
            response = post(no_files.set(), path, {**body_of(path, most=2), **switch})
            assert response.status_code == 200, response.text

    def test_refusal_names_the_message_that_the_template_cannot_render(self, no_files: ChangedTokenizer) -> None:
        user = {"role": "user", "content": "Hi"}
        messages = [user, {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function"}]}, user]
        response = post(no_files.set(), CHAT, {"model": "demo", "messages": messages})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[1]"), response.text
        assert "call_1" not in response.text

    @of("D2")
    def test_answer_has_text_when_the_tokenizer_was_converted(self, no_files: ChangedTokenizer, path: str, stream: bool) -> None:
        assert ask(no_files.set(), path, body_of(path, temperature=0), stream).text.strip()

    @of("G1")
    def test_request_is_refused_at_once_when_the_queue_length_is_0(self, closed: System, path: str, stream: bool) -> None:
        response = post(closed, path, body_of(path), stream)
        assert response.status_code in (503, 529) and "max_queued_requests" in response.text, response.text

    @of("G5")
    def test_refusal_of_a_chat_has_the_remedy_when_the_model_has_no_chat_template(
        self, no_files: ChangedTokenizer, path: str, stream: bool
    ) -> None:
        """Completions are still served. The other tests of this class set --chat-template, which is the remedy."""
        response = post(no_files.set("--chat-template", ""), path, body_of(path), stream)
        if path in CHATS:
            assert response.status_code == 400 and "--chat-template" in response.text, response.text
        else:
            assert response.status_code == 200, response.text


RECITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if 'OPENED' in messages[-1].content %}<think>\n{% endif %}"
)
ENDED = ("Hello there.", "Hello there.<|return|> And more.")  # one text for each end-of-sequence token
TEXTS = (*(output.text for output in OUTPUTS), *ENDED, *(call for _, call in IN_WORDS.values()))
MOST = 400  # largest number of output tokens; more than any text has


@pytest.fixture(scope="module")
def reciting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChangedTokenizer]:
    """A system with a reciting model of TEXTS. Its config files and tokenizer name different end-of-sequence tokens."""
    folder = tmp_path_factory.mktemp("reciting")
    write_reciting_model(folder / "model", TEXTS, RECITING)
    tokenizer = load_tokenizer(folder / "model")
    for name in ("config.json", "generation_config.json"):
        path = folder / "model" / name
        ends = [tokenizer.token_id(mark) for mark in ("<|return|>", "<|call|>")]
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    with System(folder / "logs", model=str(folder / "model"), max_total_tokens=65_536) as running:
        yield ChangedTokenizer(running)


def recited(system: System, path: str, stream: bool, text: str, opens: bool = False, tools: bool = True) -> Answer:
    """Returns the response whose output is this text of TEXTS."""
    body = body_of(path, f"{'OPENED ' if opens else ''}{selector(TEXTS.index(text))}", "model", MOST)
    body |= tools_of(path, READ) if tools else {}
    return ask(
        system, path, {**body, "thinking": {"type": "enabled", "budget_tokens": 1024}} if path == MESSAGES else body, stream
    )


def parsed(answer: Answer) -> tuple[Any, ...]:
    calls = tuple((name, json.loads(arguments)) for name, arguments in answer.calls)
    return calls, answer.text.strip(), answer.reasoning.strip(), answer.end


class TestOutputs:
    """Outputs whose calls or reasoning break the model's format, and ends of outputs."""

    @pytest.mark.parametrize(("family", "row"), FAMILY_ROWS, ids=[f"{row}-{family}" for family, row in FAMILY_ROWS])
    def test_tool_calls_are_parsed_when_the_output_breaks_the_format(
        self, reciting: ChangedTokenizer, family: str, row: str
    ) -> None:
        reasoning = "harmony" if family == "harmony" else "think"
        system = reciting.set("--tool-call-parser", family, "--reasoning-parser", reasoning)

        def fault(case: tuple[Output, str, bool]) -> str:
            output, path, stream = case
            found = parsed(recited(system, path, stream, output.text, output.opens))
            wanted = (output.calls, output.beside, output.reasoning, "tool_calls" if output.calls else "stop")
            return f"{path} {stream} {output.text!r}: {found}" if found != wanted else ""

        outputs = [output for output in OUTPUTS if (output.family, output.row) == (family, row)]
        assert (
            faults_of([(output, path, stream) for output in outputs for path in CHATS for stream in (False, True)], fault) == []
        )

    @pytest.mark.parametrize("family", IN_WORDS, ids=lambda family: f"B3-{family}")
    def test_tool_calls_are_found_when_the_template_describes_the_format_in_words(
        self, reciting: ChangedTokenizer, family: str, tmp_path: Path
    ) -> None:
        instruction, text = IN_WORDS[family]
        template = tmp_path / "in_words.jinja"
        template.write_text("{% if tools %}{{ '" + instruction + "' }}{{ tools | tojson }}{% endif %}" + RECITING)
        system = reciting.set("--chat-template", str(template))
        for path in CHATS:
            for stream in (False, True):
                assert parsed(recited(system, path, stream, text)) == ((("read", {"path": "a"}),), "", "", "tool_calls")

    @of("D1")
    def test_output_ends_at_the_end_of_sequence_token_of_each_model_file(
        self, reciting: ChangedTokenizer, path: str, stream: bool
    ) -> None:
        for text in ENDED:
            answer = recited(reciting.set(), path, stream, text, tools=False)
            assert (answer.text, answer.end) == ("Hello there.", "stop")


class TestSchemas:
    """Schemas of functions and of output texts, on the demo model."""

    @of("C1", CHATS)
    def test_forced_tool_call_has_no_arguments_when_the_function_has_no_parameters(
        self, system: System, path: str, stream: bool
    ) -> None:
        """Functions are tested with and without `strict`. A schema that permits any object also gives an empty object."""

        def fault(case: tuple[Any, bool]) -> str:
            answer = ask(
                system, path, {**body_of(path, most=200), **tools_of(path, case[0], strict=case[1]), **forced(path)}, stream
            )
            return f"{case}: {answer}" if parsed(answer) != ((("read", {}),), "", "", "tool_calls") else ""

        empty = (..., None, {}, {"type": "object", "properties": {}}, {"properties": {}})
        assert faults_of([(parameters, strict) for parameters in empty for strict in (False, True)], fault) == []

    @of("C2")
    def test_answer_satisfies_a_generated_schema(self, system: System, path: str, stream: bool) -> None:
        def fault(name: str) -> str:
            schema = ZOD[name]["required"]
            answer = ask(system, path, with_schema(body_of(path, most=300), path, schema), stream)
            if answer.end != "stop":
                return f"{name}: {answer}"
            jsonschema.validate(json.loads(answer.text), schema)
            return ""

        assert faults_of(GENERATED, fault) == []

    @of("C3", CHATS)
    def test_call_of_a_function_that_is_not_strict_is_served_despite_unsupported_keywords(
        self, system: System, path: str, stream: bool
    ) -> None:
        enforced = {"type": "array", "items": SMALL, "maxItems": 2}
        for more in ({"uniqueItems": True}, {"nullable": True}, {"contains": {}}):
            schema = objects(list={**enforced, **more}, n=SMALL)
            answer = ask(system, path, {**body_of(path, most=200), **tools_of(path, schema), **forced(path)}, stream)
            arguments = json.loads(answer.calls[0][1])
            assert jsonschema.Draft202012Validator(objects(list=enforced, n=SMALL)).is_valid(arguments), arguments

    @of("C3", CHATS)
    def test_refusal_of_a_strict_function_has_the_field_name_of_the_client(self, system: System, path: str, stream: bool) -> None:
        for keyword in ("uniqueItems", "nullable"):
            schema = objects(a={"type": "array", "items": SMALL, keyword: True})
            body = {**body_of(path), **tools_of(path, schema, strict=True), **forced(path)}
            response = post(system, path, body, stream)
            assert response.status_code == 400
            assert response.json()["error"]["message"] == (
                f"{field_of(path)}: #/properties/a/{keyword}: this keyword is not supported"
            )

    @of("B6")
    def test_response_reports_no_stop_token_when_the_grammar_ends_the_output(
        self, system: System, path: str, stream: bool
    ) -> None:
        one = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
        for stops in ([], [0, 7]):
            body = body_of(path, most=90, temperature=0, **({"stop_token_ids": stops} if stops and path in WITH_STOPS else {}))
            answer = ask(system, path, with_schema(body, path, one), stream)
            assert json.loads(answer.text) == {"a": 1} and (answer.end, answer.matched) == ("stop", None)


def objects(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


class TestClients:
    """Requests in forms that clients of other servers send, on the demo model."""

    @of("E1")
    def test_http_1_0_response_is_not_chunked(self, system: System, path: str, stream: bool) -> None:
        body = body_of(path, temperature=0)
        connection = http.client.HTTPConnection(HOST, system.port, timeout=60)
        connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
        connection.request("POST", path, json.dumps({**body, "stream": stream}), {"connection": "keep-alive"})
        answer = connection.getresponse()
        content = answer.read().decode()
        connection.close()
        assert answer.status == 200 and answer.getheader("transfer-encoding") is None
        assert read(path, content, stream) == ask(system, path, body, stream)

    @of("E2")
    def test_top_p_of_0_gives_the_likeliest_tokens(self, system: System, path: str, stream: bool) -> None:
        greedy = ask(system, path, body_of(path, temperature=0), stream)
        assert greedy.text and ask(system, path, body_of(path, temperature=1, top_p=0), stream) == greedy

    @of("E3", CHATS)
    def test_hosted_tools_are_ignored(self, system: System, path: str, stream: bool) -> None:
        for hosted in HOSTED[path]:
            offered = tools_of(path, SCHEMA)
            body = {**body_of(path), "tools": [hosted, *offered["tools"]]}
            response = post(system, path, body, stream)
            assert response.status_code == 200, response.text
            assert response.headers["x-rootstock-omitted-tools"].partition(":")[0] == hosted["type"]
            choice = {"type": "tool", "name": hosted.get("name")} if path == MESSAGES else hosted
            assert post(system, path, {**body, "tool_choice": choice}, stream).status_code == 400

    @of("G9")
    def test_default_temperature_is_0_when_the_model_does_not_sample(self, system: System, path: str, stream: bool) -> None:
        card = httpx.get(f"{system.url}/v1/models").json()["data"][0]
        assert card["sampling_defaults"]["temperature"] == 0
        assert ask(system, path, body_of(path), stream) == ask(system, path, body_of(path, temperature=0), stream)
