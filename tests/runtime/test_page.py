"""The page in a real browser, used as a person would: headless Chromium, driven over its DevTools pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time

import pytest

pytest.importorskip("fastapi")

from replayssm.runtime.generation import generate
from replayssm.runtime.logits_processor import LogitsProcessor
from replayssm.runtime.session import Session

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
WAIT_S = 30


class Browser:
    """One page. DevTools messages are JSON objects, each ended by a zero byte, on descriptors 3 and 4."""

    def __init__(self, profile):
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        )
        # A shell, because pass_fds cannot choose the numbers.
        redirect = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", CHROMIUM, *options, "about:blank"],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._number, self._buffer, self._session = 0, b"", None
        self.failures = []
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                piece = os.read(self._in, 1 << 16)
                assert piece, "the browser has ended"
                self._buffer += piece
            text, self._buffer = self._buffer.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("method") == "Runtime.exceptionThrown":
                self.failures.append(answer["params"]["exceptionDetails"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url):
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression):
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression):
        """Wait until the expression is true, and return its value."""
        deadline = time.monotonic() + WAIT_S
        while not (found := self.value(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.02)
        return found

    def click(self, element):
        """A mouse click in the middle of an element."""
        box = f"document.getElementById('{element}').getBoundingClientRect()"
        self.value(f"document.getElementById('{element}').scrollIntoView({{block: 'center'}})")
        x, y = (self.value(f"{box}.{side} + {box}.{size} / 2") for side, size in (("x", "width"), ("y", "height")))
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, element, text):
        """Put the cursor into a field, mark what is there, and type."""
        self.click(element)
        self.value(f"document.getElementById('{element}').select()")
        self._call("Input.insertText", text=text)

    def close(self):
        self._call("Browser.close")
        self._process.wait(WAIT_S)
        os.close(self._in)
        os.close(self._out)


TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
TEXT = "document.getElementById('{}').textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
    assert browser.failures == []


@pytest.fixture(scope="module")
def server(start):
    return start(chat_template=TEMPLATE, reasoning_parser="qwen3")


@pytest.fixture
def page(browser, server):
    browser.open(server.url)
    browser.until(TEXT.format("status") + " === 'live'")
    return browser


def alone(engine, text, count):
    tokens = engine.tokenizer(text)["input_ids"]
    session = Session(engine, slots=1, prefill_chunk=8)
    return generate(session, [tokens], count, tokenizer=engine.tokenizer)[0].text


def test_levels_at_rest(page, server):
    assert page.value(TEXT.format("model")) == "tiny"
    assert page.value(TEXT.format("batch")) == "0 / 2"
    bytes_held = server.loop.scheduler.session.state_bytes
    assert page.value(TEXT.format("memory")) == f"{bytes_held / 1e6:.1f} MB"
    assert page.value("document.querySelectorAll('#requests tr').length") == 0


@pytest.mark.parametrize("chat", [True, False])
def test_a_question_and_its_answer(page, server, tiny_engine, chat):
    """Typed, sent by a click, and answered with what a request alone gets."""
    if not chat:
        page.click("chat")
    page.write("prompt", "The state of")
    page.write("tokens", "20")
    page.click("send")
    prompt = "user: The state of\nassistant:" if chat else "The state of"
    expected = alone(tiny_engine("nano"), prompt, 20)
    page.until("!document.getElementById('send').disabled && document.getElementById('answer').textContent !== ''")
    assert page.value(TEXT.format("answer")) == expected
    assert page.value("document.getElementById('stop').disabled")
    server.until_idle()


def test_a_running_request_is_shown_and_can_be_stopped(page, server):
    step = server.loop.scheduler.session.step
    server.loop.scheduler.session.step = lambda rows: time.sleep(0.02) or step(rows)
    try:
        page.write("prompt", "is read")
        page.write("tokens", "380")
        page.click("send")
        page.until(TEXT.format("batch") + " === '1 / 2'")
        page.until("document.querySelectorAll('#requests tr').length === 1")
        cells = page.value("[...document.querySelectorAll('#requests td')].map(cell => cell.textContent)")
        assert cells[1] in ("prompt", "decode")
        assert cells[4].endswith(" / 380")
        assert page.until("+" + TEXT.format("rate") + ".replace(/[^0-9]/g, '')") > 0
        assert page.value("document.getElementById('send').disabled")
        page.until(TEXT.format("answer") + " !== ''")
        page.click("stop")
        page.until("!document.getElementById('send').disabled")
        server.until_idle()
        page.until("document.querySelectorAll('#requests tr').length === 0")
    finally:
        server.loop.scheduler.session.step = step


def test_markup_in_an_answer_is_text_and_thoughts_are_set_apart(page, server, sentence, monkeypatch):
    """The model is made to write marks; the page must show them as text, and the reasoning in another colour."""
    said = "<think>hm</think><img src=x onerror=document.title=1>"
    maker = server.app.state.server.maker
    tokens = maker.tokenizer(said)["input_ids"]

    grammar = sentence(tokens, maker.session.engine.vocab_size)
    monkeypatch.setattr(maker, "_processor", lambda body, prompt, ends: LogitsProcessor(prompt, grammar=grammar))
    page.write("prompt", "?")
    page.click("send")
    page.until("!document.getElementById('send').disabled && document.getElementById('answer').textContent !== ''")
    parts = page.value(
        "[...document.getElementById('answer').children].map(part => [part.className, part.textContent])"
    )
    assert parts == [["thought", "hm"], ["said", "<img src=x onerror=document.title=1>"]]
    assert page.value("document.title") == "ReplaySSM"


def test_errors_and_keys_are_shown(browser, start):
    server = start(slots=1, draft="none", api_key="secret")
    browser.open(server.url)
    browser.until(TEXT.format("status") + " === 'needs the API key'")
    browser.click("chat")
    browser.write("prompt", "a")
    browser.write("tokens", "3")
    browser.click("send")
    assert "a valid API key is needed" in browser.until(TEXT.format("answer"))
    browser.write("key", "secret")
    browser.until(TEXT.format("status") + " === 'live'")
    browser.until("!document.getElementById('send').disabled")
    browser.click("send")
    browser.until(
        "!document.getElementById('send').disabled && !document.getElementById('answer').textContent.includes('[')"
    )
    server.until_idle()
