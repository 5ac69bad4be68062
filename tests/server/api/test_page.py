"""The web page, in a real browser."""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested with playwright, not installed here")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
TIMEOUT_MS = 15_000
KEY = "sk-of-the-page-test"
SLOW = "!slow tell me"  # 50 ms a step: hundreds of tokens take long enough to look at

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: install it, or set CHROMIUM to its path")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Guard:
    """What a page did that it must not do."""

    def __init__(self, page, url: str) -> None:
        self.foreign: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: None if request.url.startswith(url) else self.foreign.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self._listen(message))

    def _listen(self, message) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)  # violations of the content security policy among them


@pytest.fixture
def open_page(browser) -> Iterator[Callable]:
    """(server, fragment, **context options) -> the page, which is checked at the end for what it must not do."""
    opened = []

    def open_page(server, fragment: str = "", **options):
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 740}} | options)
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        opened.append((context, Guard(page, server.url)))
        page.goto(f"{server.url}/{fragment}")
        return page

    yield open_page
    for context, guard in opened:
        context.close()
        assert guard.foreign == []
        assert guard.complaints == []


def is_ready(page) -> None:
    page.wait_for_selector('#engine-dot[data-state="ready"]')


def until(page, condition: str) -> None:
    """Until this JavaScript is true. (Playwright's own way is `eval`, which the page's policy forbids.)"""
    deadline = time.monotonic() + TIMEOUT_MS / 1e3
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def text_of_answer(page) -> str:
    return page.locator(".message.assistant .body").last.inner_text()


def figure(page, term: str) -> str:
    """A number of the live view."""
    return page.locator("#figures > div", has_text=term).locator("dd").inner_text()


def wait_for_figure(page, term: str, value: str) -> None:
    expected = page.locator("#figures > div", has_text=term).locator("dd", has_text=re.compile(f"^{re.escape(value)}$"))
    expected.wait_for()


def test_a_message_is_answered_token_by_token_and_stop_ends_its_request(stub_server, open_page):
    page = open_page(stub_server)
    is_ready(page)
    page.fill("#prompt", SLOW)
    page.press("#prompt", "Enter")
    until(page, "document.querySelector('.message.assistant .body')?.textContent.length >= 5")
    early = text_of_answer(page)
    until(page, f"document.querySelector('.message.assistant .body').textContent.length > {len(early)}")
    assert text_of_answer(page).startswith(early)
    assert page.locator(".message.user").inner_text() == SLOW

    page.click("nav >> text=Live")
    wait_for_figure(page, "Running", "1")
    assert page.locator(".chart", has_text="Requests by state").locator("path.area").count() == 6

    page.click("nav >> text=Playground")
    page.click("#stop")
    page.wait_for_selector("#send:visible")
    stopped = text_of_answer(page)
    assert "stopped" in page.locator(".foot").inner_text()
    stub_server.wait_until_idle()

    page.click("nav >> text=Live")
    wait_for_figure(page, "Running", "0")
    assert figure(page, "KV cache in use") == "0%"
    page.click("nav >> text=Playground")
    assert text_of_answer(page) == stopped
    assert page.evaluate("document.activeElement.id") == "prompt"


def test_an_answer_that_ends_says_how_long_it_took(stub_server, open_page):
    page = open_page(stub_server)
    page.fill("#prompt", "!say:Hello")
    page.click("#send")
    page.wait_for_selector(".foot")
    assert text_of_answer(page).startswith("Hello")
    assert re.search(r"\d+ tokens · first after \d+ ms · [\d.]+ tokens/s", page.locator(".foot").inner_text())


def test_the_conversation_and_the_settings_are_sent(stub_server, open_page):
    page = open_page(stub_server)
    is_ready(page)
    bodies = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.post_data else None)
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.3")
    page.fill("#top-p", "0.9")
    page.fill("#top-k", "40")
    page.fill("#seed", "7")
    page.fill("#max-tokens", "6")
    for text in ("first", "second"):
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
        until(page, f"document.querySelectorAll('.foot').length === {1 + (text == 'second')}")
    assert "cut off" in page.locator(".foot").last.inner_text()
    body = bodies[-1]
    roles = [message["role"] for message in body.pop("messages")]
    assert roles == ["system", "user", "assistant", "user"]
    assert body == {
        "model": "stub",
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "max_completion_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    page.click("#new-conversation")
    assert page.locator(".message").count() == 0
    assert page.is_visible("#welcome")


def test_tokens_tell_what_else_was_likely(stub_server, open_page):
    page = open_page(stub_server)
    page.locator("#logprobs").check()
    page.fill("#prompt", "!say:Good day")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".foot")
    tokens = page.locator(".token")
    assert "".join(tokens.all_text_contents()) == text_of_answer(page)
    assert tokens.count() >= len("Good day")  # the stub's tokens are bytes
    tokens.first.hover()
    card = page.locator("#token-card")
    assert card.is_visible()
    assert card.locator(".token-head code").inner_text() == "G"
    assert "log-probability" in card.inner_text()
    assert card.locator("li").count() == 5
    page.mouse.move(5, 500)
    assert card.is_hidden()


def test_a_character_of_several_tokens_is_one_piece(stub_server, open_page):
    page = open_page(stub_server)
    page.locator("#logprobs").check()
    page.fill("#prompt", "!say:Grüße, 🚀!")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".foot")
    texts = page.locator(".token").all_text_contents()
    assert "".join(texts) == text_of_answer(page)
    assert {"ü", "ß", "🚀", "!"} <= set(texts)
    page.locator(".token", has_text="🚀").hover()
    assert page.locator("#token-card .token-head").count() == 4  # a byte each


def test_all_of_it_works_with_the_keyboard_alone(stub_server, open_page):
    page = open_page(stub_server)
    is_ready(page)
    page.locator("#logprobs").focus()
    page.keyboard.press("Space")
    page.locator("#prompt").focus()
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type(SLOW)
    page.keyboard.press("Enter")
    page.wait_for_selector(".token >> nth=3")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert page.locator(".message.user").inner_text() == f"line one\n{SLOW}"
    page.locator(".message.assistant .body").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")
    assert page.locator("#token-card").is_visible()
    page.locator("nav >> text=Live").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#live:visible")
    page.locator("#key-button").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#key-dialog", state="hidden")


def test_a_key_is_asked_for_kept_in_the_tab_and_sent_with_requests(start_stub, open_page, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"key": KEY, "name": "page"}]}))
    server = start_stub(api_keys_file=str(keys))
    page = open_page(server)
    page.wait_for_selector("#engine-text >> text=an API key is needed")
    page.fill("#prompt", "!say:Hi")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#key-dialog[open]")
    assert page.input_value("#prompt") == "!say:Hi"  # handed back
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    is_ready(page)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".foot")
    assert text_of_answer(page).startswith("Hi")
    assert page.evaluate("Object.values(sessionStorage)") == [KEY]
    assert page.evaluate("localStorage.length") == 0
    assert page.context.cookies() == []
    assert KEY not in page.content()
    page.reload()
    is_ready(page)


def test_a_refusal_is_shown_and_the_question_handed_back(stub_server, open_page):
    page = open_page(stub_server)
    is_ready(page)
    page.fill("#prompt", "x" * 5000)
    page.press("#prompt", "Enter")
    alert = page.locator(".failure")
    alert.wait_for()
    assert "2,048" in alert.inner_text()  # the server's words: the limit
    assert page.input_value("#prompt") == "x" * 5000
    assert page.locator(".message").count() == 0
    page.fill("#prompt", "!say:Fine")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".foot")
    assert alert.count() == 0


def test_an_engine_that_is_stuck_is_seen_to_be(start_stub, open_page):
    server = start_stub(watchdog_s=1.0)
    page = open_page(server)
    is_ready(page)
    page.fill("#prompt", "!hang")
    page.press("#prompt", "Enter")
    page.wait_for_selector('#engine-dot[data-state="stuck"]')
    assert page.inner_text("#engine-text") == "the engine is stuck"
    page.click("nav >> text=Live")
    assert page.locator("#live-notice").inner_text().startswith("Requests are not served now: ")


def test_a_server_that_is_gone_is_seen_to_be_and_so_is_its_return(stub_server, open_page):
    page = open_page(stub_server, "#live")
    is_ready(page)
    page.route("**/live", lambda route: route.abort())
    page.wait_for_selector('#engine-dot[data-state="unknown"]')
    assert page.locator("#live-notice").inner_text() == "The server cannot be reached. Trying again…"
    page.unroute("**/live")
    is_ready(page)
    assert page.locator("#live-notice").is_hidden()


def test_text_of_a_model_is_never_markup(stub_server, open_page):
    page = open_page(stub_server)
    page.fill("#prompt", "!say:<img/src=x/onerror=alert(1)><b>")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".foot")
    assert "<img/src=x/onerror=alert(1)><b>" in text_of_answer(page)
    assert page.locator(".message img, .message b").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(stub_server, open_page, scheme):
    """4.5 to 1, which WCAG 2 asks for at level AA."""
    page = open_page(stub_server, color_scheme=scheme)
    is_ready(page)
    ratios = page.evaluate(
        """() => {
            const context = new OffscreenCanvas(1, 1).getContext('2d');
            const luminance = (color) => {
                context.fillStyle = color;
                context.fillRect(0, 0, 1, 1);
                const [r, g, b] = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((value) => value / 255)
                    .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const behind = (element) => {
                for (; element; element = element.parentElement) {
                    const color = getComputedStyle(element).backgroundColor;
                    if (color !== 'rgba(0, 0, 0, 0)') return color;
                }
            };
            return ['h2', '#welcome p', '#suggestions button', '.field label', '#engine-text', '#send', '.hint',
                    '.views a[aria-current]', '.views a:not([aria-current])', '.brand'].map((selector) => {
                const element = document.querySelector(selector);
                const [a, b] = [luminance(getComputedStyle(element).color), luminance(behind(element))];
                return [selector, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
            });
        }"""
    )
    assert all(ratio >= 4.5 for _, ratio in ratios), ratios
    paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (paper == "rgb(22, 24, 27)") == (scheme == "dark")


@pytest.mark.parametrize("fragment", ["#playground", "#live"])
@pytest.mark.parametrize("width", [340, 700, 1600])
def test_nothing_is_cut_off_at_the_side(stub_server, open_page, fragment, width):
    page = open_page(stub_server, fragment, viewport={"width": width, "height": 700})
    is_ready(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#settings").evaluate("element => element.open") == (width > 960)


def test_every_control_has_a_name_for_screen_readers(stub_server, open_page):
    page = open_page(stub_server)
    nameless = page.evaluate(
        """[...document.querySelectorAll('input, select, textarea, button')]
            .filter((element) => !element.labels?.length && !element.ariaLabel && !element.textContent.trim())
            .map((element) => element.id)"""
    )
    assert nameless == []
    page.click("nav >> text=Live")
    page.wait_for_selector(".plot >> nth=0")
    until(page, "document.querySelector('.plot').getAttribute('aria-label')?.includes('now: decoding 0')")


def test_the_page_needs_nothing_from_elsewhere(stub_server):
    answer = httpx.get(f"{stub_server.url}/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    names = re.findall(r'(?:src|href)="static/([^"]+)"', answer.text)
    assert {"app.js", "style.css", "icon.svg"} <= set(names)
    for name in names:
        file = httpx.get(f"{stub_server.url}/static/{name}")
        assert file.status_code == 200
        again = httpx.get(f"{stub_server.url}/static/{name}", headers={"if-none-match": file.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    assert "://" not in answer.text
    assert httpx.get(f"{stub_server.url}/static/..%2froutes%2fpage.py").status_code == 404


def test_a_server_without_the_page_has_none(start_stub):
    server = start_stub(ui=False)
    for path in ("/", "/live", "/static/app.js"):
        assert httpx.get(server.url + path).status_code == 404
    assert httpx.get(f"{server.url}/metrics").status_code == 200
