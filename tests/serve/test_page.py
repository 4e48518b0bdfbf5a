"""The chat page in headless Chromium against a scripted OpenAI server: streaming, stopping, figures, errors, hostile answers."""

from __future__ import annotations

import json
import mimetypes
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent.parent / "rayneuron" / "serve" / "page"
WAIT_S = 60
HURRIED = "const wait = setTimeout; window.setTimeout = (what, ms) => wait(what, ms / 20)"  # the page looks every five seconds
LONG_NAME = "organisation/A-Model-With-A-Name-70B-Instruct-Of-60-Letters!"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> [a](javascript:alert(1))"
MARKDOWN = (
    "# Title\n\nSome **bold**, *soft* and `x<y`.\n\n1. one\n2. two\n   - inner\n\n```python\nif a < b:\n    print('&amp;')\n```\nafter 🙂"
)
WIDE = f"""```\n{"a line of code that does not end " * 9}\n```

{"Unbreakable" * 40} and `{"code" * 60}`

| column | another | third |\n|---|:-:|---|\n| {"cell" * 30} | 1 \\| 2 | **x** |\n\n---\nend"""

pytestmark = [
    pytest.mark.chromium,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="no Chromium here: apt-get install chromium chromium-driver",
    ),
]


class Script:
    """What the server was asked, and the moments a test waits for."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.not_ready = False
        self.refusals = 0
        self.checked = 0
        self.draining = False
        self.lost = False
        self.card: dict[str, Any] = {"id": "scripted", "object": "model", "max_model_len": 64}
        self.more: list[dict[str, Any]] = []  # other models, of a gateway
        self.release = threading.Event()
        self.gone = threading.Event()


class Server(BaseHTTPRequestHandler):
    """The page's files and a chat endpoint whose answer depends on the last message."""

    protocol_version = "HTTP/1.1"
    script: Script

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, content: bytes, kind: str = "application/json", **more: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **more}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        path = self.path.removeprefix("/m/demo")
        if self.script.lost and path in ("/health", "/v1/models"):
            self.close_connection = True
            return None
        if path == "/health":
            self.script.checked += 1
            draining = self.script.draining
            return self.reply(503 if draining else 200, b'{"error": {"message": "shutting down"}}' if draining else b"")
        if path == "/v1/models":
            self.script.keys.append(self.headers.get("Authorization"))
            if self.script.not_ready:
                return self.reply(503, b'{"error": {"message": "loading weights", "code": 503}}')
            return self.reply(200, json.dumps({"object": "list", "data": [self.script.card, *self.script.more]}).encode())
        file = PAGE / ("index.html" if path == "/" else path.removeprefix("/page/"))
        if file.is_file():
            return self.reply(200, file.read_bytes(), mimetypes.guess_type(file.name)[0] or "text/plain")
        self.reply(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        size = sum(len(message["content"].split()) for message in body["messages"])
        if self.path == "/tokenize":
            return self.reply(200, json.dumps({"count": size, "max_model_len": self.script.card["max_model_len"]}).encode())
        if size >= self.script.card["max_model_len"]:
            return self.reply(400, b'{"error": {"message": "too long", "code": 400}}')
        self.script.bodies.append(body)
        self.script.keys.append(self.headers.get("Authorization"))
        asked = body["messages"][-1]["content"]
        if asked == "busy" and self.script.refusals:
            self.script.refusals -= 1
            return self.reply(429, b'{"error": {"message": "the queue is full", "type": "rate_limit", "code": 429}}', Retry_After="7")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        getattr(self, f"say_{asked}", self.say_text)()

    def event(self, data: dict[str, Any] | str, pieces: int = 1) -> None:
        line = f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n".encode()
        for part in range(pieces):
            self.wfile.write(line[part * len(line) // pieces : (part + 1) * len(line) // pieces])
            self.wfile.flush()

    def delta(self, text: str, finish: str | None = None, pieces: int = 1) -> None:
        choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": finish}
        self.event({"object": "chat.completion.chunk", "choices": [choice]}, pieces)

    def end(self, tokens: int, reason: str = "stop") -> None:
        self.delta("", reason)
        self.event({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": tokens, "total_tokens": 12 + tokens}})
        self.event("[DONE]")

    def say_text(self, text: str = "Hello, you.", reason: str = "stop") -> None:
        words = re.findall(r"\s*\S+", text)
        for word in words:
            self.delta(word, pieces=len(word))  # a character may be cut in two
        self.end(len(words), reason)

    def say_markdown(self) -> None:
        self.say_text(MARKDOWN, "length")

    def say_wide(self) -> None:
        self.say_text(WIDE)

    def say_hostile(self) -> None:
        self.say_text(HOSTILE)

    def say_waiting(self) -> None:
        self.delta("half")
        self.script.release.wait(WAIT_S)
        self.delta(" whole")
        self.end(2)

    def say_endless(self) -> None:
        try:
            while True:
                self.delta("on and on ")
                self.script.release.wait(0.02)
        except OSError:
            self.script.gone.set()

    def say_failing(self) -> None:
        self.delta("so far")
        self.script.release.wait(WAIT_S)

    def say_broken(self) -> None:
        self.delta("so far")
        self.event({"error": {"message": "a rank is gone", "code": 503}})

    def say_cut(self) -> None:
        self.delta("so f")


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Scripted", (Server,), {"script": script}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    script.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for word in ("--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run").split():
        options.add_argument(word)
    for word in ("--disable-background-networking --disable-component-update --disable-sync --window-size=900,800").split():
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": HURRIED})
    yield driver
    driver.quit()


class Page:
    """The page as a person sees it."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver = driver
        driver.get(address)
        driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        driver.get_log("browser")
        driver.get(address)

    def until(self, what: Any) -> Any:
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        waiting = WebDriverWait(self.driver, WAIT_S, 0.05, ignored_exceptions=[StaleElementReferenceException])
        return waiting.until(lambda _: what())

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return [node.text for node in self.all(selector)]

    def ready(self) -> Page:
        self.until(lambda: self.find("#state").get_attribute("data-state") == "ready")
        return self

    def say(self, text: str) -> None:
        self.find("#prompt").send_keys(text + "\n")

    def answer(self, index: int = -1) -> str:
        """The text of an answer when it is complete."""
        self.until(lambda: self.all("article.assistant") and not self.all("article.busy"))
        return self.texts("article.assistant .body")[index]

    def figures(self) -> str:
        return self.texts("article.assistant footer")[-1]

    def greedy(self) -> None:
        """Temperature 0, as if the slider were drawn to its left end."""
        draw = "const t = document.getElementById('temperature'); t.value = 0; t.dispatchEvent(new Event('input', {bubbles: true}))"
        self.driver.execute_script(draw)

    def complaints(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


@pytest.fixture
def page(browser: Any, address: str) -> Page:
    return Page(browser, address + "/").ready()


def test_conversation_streams_and_shows_its_figures(page: Page, script: Script) -> None:
    assert page.find("#model").text == "scripted"
    page.say("hi")
    assert page.answer() == "Hello, you."
    assert "first token" in page.figures() and "tokens/s" in page.figures() and "12 + 2 tokens" in page.figures()
    page.say("again")
    page.until(lambda: len(page.all("article.assistant")) == 2)
    assert page.answer() == "Hello, you."
    said = [(message["role"], message["content"].strip()) for message in script.bodies[1]["messages"]]
    assert said == [("user", "hi"), ("assistant", "Hello, you."), ("user", "again")]
    assert {key: value for key, value in script.bodies[0].items() if key != "messages"} == {
        "model": "scripted",
        "temperature": 0.7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert page.complaints() == []


def test_text_is_shown_while_it_comes(page: Page, script: Script) -> None:
    page.say("waiting")
    page.until(lambda: page.texts("article.busy .body") == ["half"])
    assert page.find("#stop").is_displayed() and not page.find("#send").is_displayed()
    script.release.set()
    assert page.answer() == "half whole"
    assert page.find("#send").is_displayed()


UNREACHABLE = """
const wrong = [];
if (document.documentElement.scrollWidth > innerWidth) wrong.push(`the page is ${document.documentElement.scrollWidth} wide`);
const log = document.getElementById("log");
if (log.scrollWidth > log.clientWidth) wrong.push(`the log is ${log.scrollWidth} wide`);
for (const node of document.querySelectorAll("button, select, input, textarea")) {
  if (!node.checkVisibility()) continue;
  node.scrollIntoView({ block: "nearest", inline: "nearest" });
  const { left, right, top, bottom } = node.getBoundingClientRect();
  const hit = document.elementFromPoint((left + right) / 2, (top + bottom) / 2);
  const inside = left >= 0 && right <= innerWidth && top >= 0 && bottom <= innerHeight;
  if (!inside || (hit !== node && !node.contains(hit))) wrong.push(`${node.id || node.textContent} at ${left} ${top} ${right} ${bottom}`);
}
return wrong;
"""


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_every_width_holds_everything(colours: str, browser: Any, address: str, script: Script) -> None:
    """From a small phone to a desktop nothing sticks out and every control can be hit, in every state the page has."""
    assert len(LONG_NAME) == 60
    script.card["id"], script.card["max_model_len"], script.refusals = LONG_NAME, 4096, 1
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": colours}]})
    page = Page(browser, address + "/").ready()

    def check(state: str) -> None:
        for width, height in ((320, 568), (360, 640), (414, 896), (667, 375), (768, 1024), (1200, 800)):
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            assert browser.execute_script(UNREACHABLE) == [], f"{state} at {width} x {height}"

    try:
        check("empty")
        page.say("wide")
        page.answer()
        page.say("busy")
        page.until(lambda: page.texts(".offer") == ["Try again"])
        check("conversation and error")
        page.say("waiting")
        page.find("#prompt").send_keys("next")
        page.until(lambda: page.find("#stop").is_displayed() and page.find("#send").is_displayed())
        check("answering")
        page.find("#toggle").click()
        check("settings")
        ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(251, 251, 250)") == (colours == "light")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_what_is_typed_meanwhile_is_sent_after(page: Page, script: Script) -> None:
    """In order, each below its own question; and it is said so."""
    page.say("waiting")
    page.until(lambda: page.texts("article.busy .body") == ["half"])
    page.say("second")
    page.say("third")
    assert page.texts("article.waiting") == ["second", "third"] and "Sent when this answer is complete" in page.find("#hint").text
    assert len(script.bodies) == 1 and page.find("#log").get_attribute("aria-busy") == "true"
    script.release.set()
    page.until(lambda: len(page.all("article.assistant:not(.busy)")) == 3)
    shown = [(node.get_attribute("class"), node.text.split("\n")[0]) for node in page.all("article")]
    assert [text for kind, text in shown] == ["waiting", "half whole", "second", "Hello, you.", "third", "Hello, you."]
    assert not page.all("article.waiting") and page.find("#hint").text == "" and page.find("#log").get_attribute("aria-busy") == "false"
    said = [message["content"] for message in script.bodies[-1]["messages"]]
    assert said == ["waiting", "half whole", "second", "Hello, you.", "third"]


@pytest.mark.parametrize("end", ["stop", "error"])
def test_what_is_typed_meanwhile_comes_back(end: str, page: Page, script: Script) -> None:
    """After a stop or a failure nothing is sent behind the person's back, and nothing is lost."""
    page.say("endless" if end == "stop" else "failing")
    page.until(lambda: page.all("article.busy .body p"))
    page.say("second")
    page.find("#prompt").send_keys("third")
    page.find("#stop").click() if end == "stop" else script.release.set()
    page.answer()
    page.until(lambda: page.find("#prompt").get_property("value") == "second\nthird")
    assert len(script.bodies) == 1 and page.texts("article.user") == ["endless" if end == "stop" else "failing"]
    assert page.driver.switch_to.active_element.get_attribute("id") == "prompt"


TITLES = """
const state = document.getElementById("state");
window.titles = [];
new MutationObserver(() => titles.push(state.title)).observe(state, { attributeFilter: ["title"] });
"""


def test_the_dot_tells_the_truth(page: Page, script: Script) -> None:
    """A server that drains, then comes back as another model with another length; and one that is gone."""
    state = page.find("#state")
    page.until(lambda: script.checked > 0)  # asked though nobody does anything
    page.driver.execute_script(TITLES)
    script.draining = script.not_ready = True
    page.until(lambda: page.driver.execute_script("return titles")[:2] == ["shutting down", "loading weights"])
    assert state.get_attribute("data-state") == "wait"
    page.find("#prompt").send_keys("early\n")
    assert "Not sent" in page.find("#hint").text and page.find("#prompt").get_property("value") == "early"
    script.card |= {"id": "another", "max_model_len": 99}
    script.draining = script.not_ready = False
    page.ready()
    assert page.find("#model").text == "another" and page.find("#hint").text == ""
    assert page.find("#max-tokens").get_attribute("max") == "99" and "99" in page.find("#max-tokens").get_attribute("placeholder")
    page.find("#prompt").send_keys("\n")
    page.answer()
    assert script.bodies[-1]["model"] == "another"
    script.lost = True
    page.until(lambda: state.get_attribute("data-state") == "lost")
    script.lost = False
    page.ready()


def test_a_history_beyond_the_length_can_be_shortened(page: Page, script: Script) -> None:
    """The oldest turns go, as many as make room for an answer, and can still be read."""
    for number in range(3):
        page.say(f"{number} " * 18)
        page.answer()
    page.say("last " * 20)
    page.until(lambda: page.texts(".offer") == ["Drop the oldest turns and try again"])
    assert page.texts(".error") == ["Error 400: too long"]
    page.find(".offer").click()
    page.until(lambda: len(page.all("article.assistant:not(.busy)")) == 4)
    said = [message["content"].split()[0] for message in script.bodies[-1]["messages"]]
    assert said == ["2", "Hello,", "last"]  # 18 + 2 + 20 of 64 tokens: a quarter is left for the answer
    assert [text.split()[0] for text in page.texts("article.dropped")] == ["0", "Hello,", "1", "Hello,"] and not page.all(".error")


@pytest.mark.parametrize("how", ["button", "escape", "new chat"])
def test_stopping_closes_the_connection(how: str, page: Page, script: Script) -> None:
    from selenium.webdriver.common.keys import Keys

    page.say("endless")
    page.until(lambda: "on and on" in page.find("article.busy .body").text)
    match how:
        case "button":
            page.find("#stop").click()
        case "escape":
            page.find("#prompt").send_keys(Keys.ESCAPE)
        case "new chat":
            page.find("#clear").click()
    assert script.gone.wait(WAIT_S), "the server must see the client go"
    if how == "new chat":
        assert page.find("#hello").is_displayed() and not page.all("article")
    else:
        assert page.answer().startswith("on and on") and "stopped" in page.figures()
    page.say("next")
    page.until(lambda: page.texts("article.assistant .body")[-1:] == ["Hello, you."])
    roles = [message["role"] for message in script.bodies[-1]["messages"]]
    assert roles == (["user"] if how == "new chat" else ["user", "assistant", "user"])


def test_markdown_becomes_elements(page: Page) -> None:
    page.say("markdown")
    page.answer()
    body = "article.assistant .body "
    assert page.texts(body + "h1") == ["Title"] and page.texts(body + "strong") == ["bold"] and page.texts(body + "em") == ["soft"]
    assert page.texts(body + "p code") == ["x<y"] and page.texts(body + "ol > li > ul > li") == ["inner"]
    assert page.find(body + "pre code").get_property("textContent") == "if a < b:\n    print('&amp;')"
    assert page.find(body + "figcaption").text.startswith("python") and page.texts(body + "p")[-1] == "after 🙂"
    assert "token limit reached" in page.figures()
    page.say("wide")
    page.answer()
    assert [cell.strip() for cell in page.texts("article.assistant:last-child td")] == ["cell" * 30, "1 | 2", "x"]
    assert page.texts("article.assistant:last-child th") == ["column", "another", "third"] and page.all("article.assistant hr")


def test_hostile_answer_stays_text(page: Page) -> None:
    page.say("hostile")
    assert page.answer() == HOSTILE
    assert not page.all("article img, article script, article a, article [onerror]")
    assert page.driver.title == "rayneuron" and page.complaints() == []


def test_refusal_is_shown_and_can_be_tried_again(page: Page, script: Script) -> None:
    script.refusals = 1
    page.say("busy")
    page.until(lambda: page.texts(".error") == ["Error 429: the queue is full (try again in 7 s)"])
    page.find(".offer").click()
    assert page.answer() == "Hello, you."
    assert not page.all(".error") and [message["content"] for message in script.bodies[-1]["messages"]] == ["busy"]


@pytest.mark.parametrize(
    ("asked", "kept", "error"),
    [("broken", "so far", "Error 503: a rank is gone"), ("cut", "so f", "the connection ended before the answer did")],
)
def test_late_error_keeps_what_came(asked: str, kept: str, error: str, page: Page) -> None:
    page.say(asked)
    assert page.answer() == kept
    assert page.texts(".error") == [error]


def test_settings_are_sent_and_survive_a_reload(page: Page, script: Script) -> None:
    page.find("#toggle").click()
    page.find("#system").send_keys("Be brief.")
    page.find("#key").send_keys("s3cret")
    page.find("#max-tokens").send_keys("33")
    page.greedy()
    page.driver.refresh()
    page.ready()
    assert not page.find("#settings").is_displayed()
    page.say("hi")
    page.answer()
    assert script.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (script.bodies[0]["temperature"], script.bodies[0]["max_tokens"], script.keys[-1]) == (0, 33, "Bearer s3cret")


def test_one_of_several_models_is_chosen_and_stays_so(browser: Any, address: str, script: Script) -> None:
    """Also after a reload and a restart of the server; until it is gone."""
    from selenium.webdriver.support.ui import Select

    script.more = [{"id": "other", "object": "model", "max_model_len": 32}]
    page = Page(browser, address + "/").ready()
    choice = Select(page.find("#model"))
    assert [option.text for option in choice.options] == ["scripted", "other"] and page.find("#model").is_enabled()
    choice.select_by_visible_text("other")
    assert page.find("#max-tokens").get_attribute("max") == "32"
    page.say("hi")
    page.answer()
    page.driver.refresh()
    page.ready().say("hi")
    page.answer()
    script.draining = script.not_ready = True
    page.until(lambda: page.find("#state").get_attribute("data-state") == "wait")
    script.draining = script.not_ready = False
    page.ready().say("hi")
    page.until(lambda: len(script.bodies) == 3)
    script.more = []
    page.driver.refresh()
    page.ready().say("hi")
    page.answer()
    assert [body["model"] for body in script.bodies] == ["other", "other", "other", "scripted"]


def test_waits_for_a_server_that_is_starting(browser: Any, address: str, script: Script) -> None:
    script.not_ready = True
    page = Page(browser, address + "/")
    page.until(lambda: page.find("#model").text == "loading weights")
    page.find("#prompt").send_keys("early\n")
    script.not_ready = False
    page.ready()
    assert not script.bodies and page.find("#prompt").get_property("value") == "early"


def test_works_under_a_route_prefix(browser: Any, address: str, script: Script) -> None:
    page = Page(browser, address + "/m/demo/").ready()
    page.say("hi")
    assert page.answer() == "Hello, you."
    assert page.complaints() == []


def test_the_real_application(browser: Any, tiny: Path) -> None:
    """The real routes and engine, a random model: an answer to the token limit, then one stopped half-way, and nothing is left behind."""
    from rayneuron.serve.replica import Replica
    from tests.serve.scripted import Site

    said = {"model": {"path": str(tiny), "name": "tiny"}, "dtype": "fp32", "max_model_len": 4096, "max_num_seqs": 2}
    site = Site(Replica({**said, "speculative_config": False}))  # a random model repeats itself, and would have ended before the click
    try:
        page = Page(browser, site.url + "/").ready()
        assert page.find("#model").text == "tiny"
        page.greedy()  # sampling would meet EOS by chance
        page.find("#toggle").click()
        page.find("#max-tokens").send_keys("9")
        page.say("hello")
        page.until(lambda: "+ 9 tokens" in page.figures() if page.all("article.assistant") else False)
        assert "token limit reached" in page.figures() and page.complaints() == []
        page.find("#max-tokens").clear()
        page.say("on and on")
        page.until(lambda: "first token" in page.find("article.busy footer").text)
        page.find("#stop").click()
        page.answer()
        assert "stopped" in page.figures()
        site.settle()
    finally:
        site.close()
