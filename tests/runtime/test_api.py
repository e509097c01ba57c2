"""The server end to end on loopback, through the official client: answers are those of a request that runs alone."""

from __future__ import annotations

import concurrent.futures
import json
import random
import re
import socket
import threading
import time
from dataclasses import replace
from importlib import metadata

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("prometheus_client")

import httpx
import openai

from replayssm.runtime.generation import generate
from replayssm.runtime.scheduler import SchedulerOptions
from replayssm.runtime.session import Session

WAIT_S = 30
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if flag %}!{% endif %}assistant:"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
PROMPTS = ["The state of a sequence", "is read for every token", "and rewritten when its ring is full", "0123456789"]


@pytest.fixture(scope="module")
def server(start):
    options = {"scheduling": SchedulerOptions(prefix_cache_bytes=1 << 24, time_slice=6), "max_choices": 8}
    return start(chat_template=TEMPLATE, **options)


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def alone(tiny_engine):
    """`alone(prompt, count, **options)` -> GenerationResult of a prompt on its own."""
    engine, known = tiny_engine("nano"), {}

    def make(prompt, count, **options):
        key = (prompt, count, *options)
        if key not in known or options:
            session = Session(engine, slots=1, prefill_chunk=8)
            tokens = engine.tokenizer(prompt)["input_ids"]
            known[key] = generate(session, [tokens], count, tokenizer=engine.tokenizer, **options)[0]
        return known[key]

    return make


def test_completion(client, alone):
    prompt = PROMPTS[0] * 3
    expected = alone(prompt, 16)
    answer = client.completions.create(model="tiny", prompt=prompt, temperature=0)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)
    again = client.completions.create(model="tiny", prompt=expected.prompt_token_ids, temperature=0)
    assert again.choices[0].text == expected.text
    # The last boundary of the prompt's chunks of 8 that lies before its tail of 1 to 4 tokens.
    length = len(expected.prompt_token_ids)
    assert again.usage.prompt_tokens_details.cached_tokens in ((length - 1) // 8 * 8, (length - 4) // 8 * 8)


def test_several_prompts_and_choices(client, alone):
    answer = client.completions.create(model="tiny", prompt=PROMPTS[:3], temperature=0, max_tokens=5, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [alone(p, 5).text for p in PROMPTS[:3] for _ in range(2)]
    assert answer.usage.completion_tokens == 30
    assert answer.usage.prompt_tokens == sum(len(alone(p, 5).prompt_token_ids) for p in PROMPTS[:3])


def test_sampling_follows_the_seed(client):
    def texts(seed, **options):
        answer = client.completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=12, temperature=1.5, n=3, seed=seed, **options
        )
        return [choice.text for choice in answer.choices]

    assert texts(5) == texts(5)
    assert len(set(texts(5))) == 3
    assert texts(6)[:2] == texts(5)[1:]  # choice i of seed s is choice 0 of seed s + i
    assert texts(5, extra_body={"top_k": 1}) != texts(5)
    assert texts(None) != texts(None)


def test_streamed_completion(client, alone):
    expected = alone(PROMPTS[1], 20)
    options = {"model": "tiny", "prompt": PROMPTS[1], "temperature": 0, "max_tokens": 20, "stream": True}
    *pieces, last = client.completions.create(**options, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].text for piece in pieces) == expected.text
    assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
    assert all(piece.choices[0].finish_reason is None for piece in pieces[:-1])
    assert len(pieces) > 3
    assert (last.choices, last.usage.completion_tokens) == ([], 20)
    assert all(piece.usage is None for piece in client.completions.create(**options))
    usages = [
        piece.usage.completion_tokens
        for piece in client.completions.create(**options, stream_options={"continuous_usage_stats": True})
    ]
    assert usages == sorted(usages)
    assert usages[-1] == 20


def test_chat(client, alone):
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    expected = alone("system: Short.\nuser: Hi\nassistant:", 9)
    options = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 9}
    answer = client.chat.completions.create(**options)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    pieces = list(client.chat.completions.create(**options, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.text
    assert {piece.object for piece in pieces} == {"chat.completion.chunk"}
    flagged = client.chat.completions.create(**options, extra_body={"chat_template_kwargs": {"flag": True}})
    assert flagged.choices[0].message.content == alone("system: Short.\nuser: Hi\n!assistant:", 9).text


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ 1 // 0 }}", "{{ ''.__class__.__mro__ }}", "{% if %}"]
)
def test_a_chat_template_that_fails_is_a_bad_request(server, client, monkeypatch, template):
    maker = server.app.state.server.maker
    monkeypatch.setattr(maker, "options", replace(maker.options, chat_template=template))
    with pytest.raises(openai.BadRequestError, match="the chat template refused the messages: "):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])


@pytest.mark.parametrize("name", ["chat_template", "messages", "tokenizer", "conversation"])
def test_template_variables_cannot_replace_the_template(client, name):
    """A client's template would be a program of its own."""
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            max_completion_tokens=1,
            extra_body={"chat_template_kwargs": {name: "x", "tokenize": False}},
        )


def test_stop_strings(client, alone):
    text = alone(PROMPTS[2], 30).text
    stop = text[8:11]
    assert stop not in text[:8]
    for options in ({}, {"stream": True}):
        answer = client.completions.create(
            model="tiny", prompt=PROMPTS[2], temperature=0, max_tokens=30, stop=[stop, "\0never"], **options
        )
        if options:
            choices = [piece.choices[0] for piece in answer]
            assert "".join(choice.text for choice in choices) == text[: text.find(stop)]
            assert choices[-1].finish_reason == "stop"
        else:
            assert answer.choices[0].text == text[: text.find(stop)]
            assert answer.choices[0].finish_reason == "stop"


def test_logprobs(client, alone):
    expected = alone(PROMPTS[0], 6)
    answer = client.completions.create(model="tiny", prompt=PROMPTS[0], temperature=0, max_tokens=6, logprobs=2)
    found = answer.choices[0].logprobs
    assert "".join(found.tokens) == expected.text
    assert all(len(top) in (1, 2) for top in found.top_logprobs)  # two tokens may have the same text
    assert [max(top.values()) for top in found.top_logprobs] == found.token_logprobs
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(6)]
    messages = [{"role": "user", "content": "Hi"}]
    options = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 6, "logprobs": True}
    answer = client.chat.completions.create(**options, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [3] * 6
    assert all(entry.logprob == entry.top_logprobs[0].logprob < 0 for entry in content)
    streamed = [
        entry
        for piece in client.chat.completions.create(**options, stream=True)
        if piece.choices[0].logprobs
        for entry in piece.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_concurrent_clients_some_of_which_leave(server, client, alone):
    """Answers are those of a request alone, and nothing is left over, also behind clients that hang up."""
    counts = [40, 7, 23, 1]

    def run(number):
        choose = random.Random(number)
        prompt, count = PROMPTS[number % 4], counts[choose.randrange(4)]
        options = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": count}
        if number % 3 == 0:
            return client.completions.create(**options).choices[0].text, alone_texts[prompt, count]
        text, stream = "", client.completions.create(**options, stream=True)
        leave_after = choose.randrange(1, 5) if number % 3 == 1 else None
        for index, piece in enumerate(stream):
            text += piece.choices[0].text
            if index == leave_after:
                stream.close()
                return text, alone_texts[prompt, count][: len(text)]
        return text, alone_texts[prompt, count]

    alone_texts = {(prompt, count): alone(prompt, count).text for prompt in PROMPTS for count in counts}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for ours, expected in pool.map(run, range(36)):
            assert ours == expected
    server.until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(server, alone, stream):
    before = server.metrics()['request_success_total{finished_reason="cancelled",model_name="tiny"}']
    body = {"prompt": [1, 2, 3], "max_tokens": 390, "stream": stream, "ignore_eos": True}
    if stream:
        # Leaving after the first piece, not at a pause in the stream: a fast machine makes none.
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=WAIT_S) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=httpx.Timeout(WAIT_S, read=0.05))
    server.until_idle()
    assert server.metrics()['request_success_total{finished_reason="cancelled",model_name="tiny"}'] == before + 1


def test_models_health_metrics(server, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="has the model 'tiny', not 'other/model'"):
        client.models.retrieve("other/model")
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    client.completions.create(model="tiny", prompt="a", max_tokens=3)
    values = server.metrics()
    assert {key for key in values if 'model_name="tiny"' not in key} == set()
    values = {key.replace('{model_name="tiny"}', ""): value for key, value in values.items()}
    assert values["slots"] == 2
    assert values["state_bytes"] == server.loop.scheduler.session.state_bytes
    assert values['request_success_total{finished_reason="length",model_name="tiny"}'] >= 1
    assert values["time_to_first_token_seconds_count"] >= 1
    assert 1 <= values["acceptance_length_sum"] / values["acceptance_length_count"] <= 4
    assert values["generation_tokens_total"] >= 3
    assert values["request_generation_tokens_sum"] <= values["generation_tokens_total"]
    assert values["request_prefill_time_seconds_sum"] <= values["time_to_first_token_seconds_sum"]
    assert values["kv_cache_usage_perc"] in (0, 0.5)
    assert values["prefix_cache_queries_total"] == values["prompt_tokens_total"] + values["prefix_cache_hits_total"]
    assert httpx.get(f"{server.url}/version").json() == {"version": metadata.version("replayssm-trt")}


def test_metrics_have_the_names_of_the_dashboards(start):
    """Panels of vLLM's and trtllm-serve's dashboards find theirs, given the prefix."""
    names = (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
        *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
        *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total", "request_success_total"),
        *("time_to_first_token_seconds_bucket", "time_per_output_token_seconds_sum"),
        *("e2e_request_latency_seconds_count", "request_queue_time_seconds_bucket", "request_prefill_time_seconds_sum"),
        *("request_decode_time_seconds_sum", "request_prompt_tokens_bucket", "request_generation_tokens_bucket"),
        *("request_time_per_output_token_seconds_bucket",),
    )
    server = start(slots=1, draft="none", metrics_prefix="vllm:")
    server.client().completions.create(model="tiny", prompt="a", max_tokens=2)
    for path in ("metrics", "prometheus/metrics"):
        text = httpx.get(f"{server.url}/{path}").text
        assert [name for name in names if f"\nvllm:{name}{{" not in text] == []


def test_stats_and_page(server, client):
    stream = client.completions.create(
        model="tiny", prompt=[1, 2, 3], max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stats = httpx.get(f"{server.url}/stats").json()
    (line,) = stats["requests"]
    assert (line["state"], line["prompt_tokens"], line["max_tokens"]) == ("decode", 3, 300)
    assert 0 <= line["ring"] <= stats["buffer_len"] + stats["draft_len"]
    assert line["done_tokens"] == 3 + line["generated"] - 1
    stream.close()
    server.until_idle()
    assert httpx.get(f"{server.url}/stats").json()["requests"] == []
    page = httpx.get(server.url)
    assert page.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert not re.findall(r"(?:src|href)=|https?://", page.text), "the page must need nothing else"
    used = set(re.findall(r"\b(?:now|last)\.(\w+)", page.text)) | set(re.findall(r"\brequest\.(\w+)", page.text))
    assert used <= set(stats) | set(line)


def test_max_tokens_is_an_upper_bound(server):
    """Clients send generous ones: the answer ends where the engine has no more room."""
    options = {"model": "tiny", "prompt": [1] * 395, "temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = server.client().completions.create(**options, max_tokens=10**6)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("body", "status", "message", "param", "code"),
    [
        ({"prompt": "a", "model": "other"}, 404, "has the model 'tiny', not 'other'", "model", "model_not_found"),
        ({"prompt": "a", "temperature": True}, 400, "expected a number, got true", "temperature", "invalid_type"),
        ({"prompt": "a", "top_k": 2**64}, 400, "top_k must be an integer in", "top_k", "invalid_value"),
        ({"prompt": "a", "colour": 1}, 400, "colour is no parameter", "colour", "unknown_parameter"),
        ({"prompt": "a", "logit_bias": {"1000": 2}}, 400, "token id 1000 is outside the vocabulary", None, None),
        ({"prompt": "a", "stop_token_ids": [1000], "min_tokens": 2}, 400, "token id 1000 is outside", None, None),
        ({"prompt": "a", "n": 9}, 400, "expected 1 to 8 choices", None, None),
        ({"prompt": []}, 400, "choices (prompts times n), got 0", None, None),
        ({"prompt": ""}, 400, "the prompt is empty", None, None),
        ({"prompt": "\ud800"}, 400, "a string has half a surrogate pair", None, "invalid_json"),
        ({"prompt": "a", "n": {"\udfff": 1}}, 400, "a string has half a surrogate pair", None, "invalid_json"),
        ({"prompt": [10**6]}, 400, "token id 1000000 is outside the vocabulary of", None, None),
        ({"prompt": [1] * 400}, 400, "400 with its output: shorten", "prompt", "context_length_exceeded"),
        ({"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "cannot be enforced", "structured_outputs", None),
        ("{", 400, "the body is not JSON: Expecting property name", None, "invalid_json"),
        ('{"prompt": "a", "temperature": NaN}', 400, "NaN is no number", None, "invalid_json"),
    ],
)  # fmt: skip
def test_bad_completions(server, body, status, message, param, code):
    content = body if isinstance(body, str) else json.dumps(body)
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    error = answer.json()["error"]
    assert message in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert code in (None, error["code"])


def test_bad_chats(server):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for body, message in (
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role: expected 'system'"),
        ({**chat, "tools": [TOOL]}, "start it with --tool-parser"),
    ):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_must_say_that_it_is_json(server, content_type):
    """What a page of another site may send without asking must not start work here."""
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "Content-Type: application/json" in error["message"]
    assert error["code"] == "unsupported_content_type"
    accepted = {"Content-Type": "application/json; charset=utf-8"}
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert httpx.post(f"{server.url}/v1/completions", content=body, headers=accepted).status_code == 200


def test_unknown_paths(server):
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        answer = httpx.request(method, server.url + path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
        assert answer.json()["error"]["message"].startswith(f"{method} {path}: ")


def test_limits_and_keys(start, tiny_engine):
    server = start(
        slots=1,
        draft="none",
        scheduling=SchedulerOptions(max_queue=1),
        api_key="secret",
        max_body_bytes=2000,
        timeout_s=0.3,
    )
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="wrong").models.list()
    client = server.client(api_key="secret")
    assert [model.id for model in client.models.list()] == ["tiny"]
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}

    def post(**options):
        return httpx.post(f"{server.url}/v1/completions", headers=headers, timeout=WAIT_S, **options)

    large = b'{"prompt": "' + b"a" * 3000 + b'"}'
    for content in (large, iter([large])):  # with and without a length in front
        answer = post(content=content)
        assert answer.status_code == 413
        assert "larger than 2000 bytes" in answer.json()["error"]["message"]
    step = server.loop.scheduler.session.step
    server.loop.scheduler.session.step = lambda rows: time.sleep(0.02) or step(rows)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        body = {"prompt": [1, 2], "max_tokens": 300, "ignore_eos": True}
        answers = list(pool.map(lambda _: post(json=body), range(6)))
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {429, 504}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    with pytest.raises(openai.APIError, match="longer than the server allows"):
        list(
            client.completions.create(
                model="tiny", prompt=[1], max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
        )
    server.until_idle()


def test_shutdown_ends_streams_and_refuses_requests(start, tiny_engine):
    server = start(slots=1, draft="none")
    step = server.loop.scheduler.session.step
    server.loop.scheduler.session.step = lambda rows: time.sleep(0.005) or step(rows)
    stream = server.client().completions.create(model="tiny", prompt=[1], max_tokens=60, temperature=0, stream=True)
    first = next(iter(stream))
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    text = first.choices[0].text + "".join(piece.choices[0].text for piece in stream)
    engine = tiny_engine("nano")
    expected = generate(Session(engine, slots=1, prefill_chunk=8), [[1]], 60, tokenizer=engine.tokenizer)[0]
    assert text == expected.text  # what runs is finished
    stopper.join(WAIT_S)
    with pytest.raises(openai.APIConnectionError):
        server.client().models.list()


def test_what_is_cut_at_shutdown_ends_with_an_error(start, caplog, monkeypatch):
    """A stream gets an error event, a whole answer status 503, and a client that never ends its body nothing."""
    monkeypatch.setattr("replayssm.runtime.http_server.CLOSE_S", 0.3)
    server = start(slots=2, draft="none", shutdown_timeout_s=0)
    step = server.loop.scheduler.session.step
    server.loop.scheduler.session.step = lambda rows: time.sleep(0.02) or step(rows)
    body = {"prompt": [1], "max_tokens": 390, "ignore_eos": True}
    url = f"{server.url}/v1/completions"
    with (
        concurrent.futures.ThreadPoolExecutor() as pool,
        httpx.stream("POST", url, json={**body, "stream": True}, timeout=WAIT_S) as stream,
        socket.create_connection(server.server.servers[0].sockets[0].getsockname()[:2]) as half,
    ):
        lines = (line for line in stream.iter_lines() if line)
        assert json.loads(next(lines)[6:])["choices"]
        whole = pool.submit(httpx.post, url, json=body, timeout=WAIT_S)
        half.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        while len(server.loop.scheduler.running) < 2:
            time.sleep(0.01)
        server.stop()
        *_, last, done = lines
        assert done == "data: [DONE]"
        answer = whole.result()
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "5"
    assert json.loads(last[6:]) == answer.json()
    error = answer.json()["error"]
    assert "the server is shutting down" in error["message"]
    assert (error["type"], error["code"]) == ("server_error", "service_unavailable")
    assert not [record for record in caplog.records if record.exc_info], "a traceback in the log"


def test_an_error_of_the_server_has_the_shape_of_all(server, monkeypatch):
    """A pair of surrogates is a character, and what breaks behind the checks is 500, not a text without a shape."""
    body = {"prompt": "\U0001f600", "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert httpx.post(f"{server.url}/v1/completions", json=body | {"stop": "\U0001f600"}).status_code == 200

    def fails(*_):
        raise RuntimeError("secret")

    monkeypatch.setattr(server.app.state.server.maker, "make", fails)
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in error["message"]


def test_health_of_a_stopped_engine(start):
    server = start(slots=1, draft="none")
    server.loop.stop()
    answer = httpx.get(f"{server.url}/health")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    with pytest.raises(openai.InternalServerError, match="shutting down"):
        server.client().completions.create(model="tiny", prompt="a")


def test_engine_without_end_tokens_takes_the_tokenizers(tiny_engine):
    engine = tiny_engine("nano")
    bare = replace(engine, manifest=replace(engine.manifest, model={**engine.manifest.model, "eos_token_ids": []}))
    bare.tokenizer.eos_token = bare.tokenizer.decode([5])
    assert bare.end_token_ids == (bare.tokenizer.eos_token_id,)
