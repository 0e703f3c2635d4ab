"""A person at the page of a gateway, in a real browser: page_calls.py CHROMIUM URL KEY TOKEN PICTURES."""

import sys
from pathlib import Path

from playwright.sync_api import ConsoleMessage, Locator, Page, expect, sync_playwright

HOPS = ["submit", "tokenize", "queue", "prefill", "decode", "detokenize", "deliver"]
STREAMS = ["prompts", "requests", "steps", "results", "tokens", "text"]
LIMIT_MS = 180_000
BELOW = "log.scrollHeight - log.scrollTop - log.clientHeight"


def problems(told: ConsoleMessage) -> list[str]:
    """An error that the console shows; that a call was refused stands there too, and is meant."""
    return [told.text] if told.type == "error" and "status of 4" not in told.text else []


def let_in(page: Page, key: str, token: str) -> None:
    """By the keyboard alone: the page asks for a key, since it is refused without one."""
    expect(page.locator("#keys")).to_be_visible()
    expect(page.locator("#problem")).to_contain_text("Authorization")
    page.locator("#api-key").press_sequentially(key)
    page.keyboard.press("Tab")
    page.keyboard.type(token)
    page.keyboard.press("Enter")
    expect(page.locator("#keys")).to_be_hidden()
    expect(page.locator("#model option")).to_have_count(1)
    expect(page.locator("#problem")).to_be_hidden()


def ask(page: Page, text: str) -> None:
    page.locator("#text").focus()
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def chat(page: Page, pictures: Path) -> None:
    """An answer's way is drawn when it has ended, and the map shows what is kept of it."""
    ask(page, "to and fro")
    answer = page.locator(".message.assistant").first
    expect(answer.locator("details .text")).to_contain_text("now here")
    expect(answer.locator("footer")).to_contain_text("stop", timeout=LIMIT_MS)
    expect(answer.locator("details + .text")).to_contain_text("So be it.")
    lines = answer.locator(".text > div").evaluate_all("lines => lines.map(each => each.childNodes.length)")
    assert lines == [1, 1, 1], lines  # one text each, however many tokens it came in
    expect(page.locator("[data-span=deliver]")).to_be_attached()
    spans = [each.get_attribute("data-span") for each in page.locator("[data-span]").all()]
    assert spans == HOPS, spans
    assert [each.get_attribute("data-hop") for each in page.locator("[data-hop]").all()] == STREAMS
    kept = page.locator('[data-worker="worker-0"] [data-cached]:not([data-cached="0"])')
    expect(kept.first).to_be_attached()
    expect(page.locator('[data-worker="worker-0"] [data-used]:not([data-used="0"])')).to_have_count(0)
    page.screenshot(path=pictures / "ended.png", full_page=True)


def stop(page: Page, pictures: Path) -> None:
    """An answer streams, the map follows its blocks, and Escape ends it; the next one goes on from what came."""
    ask(page, "on and on")
    answer = page.locator(".message.assistant").nth(1)
    expect(answer.locator("details .text")).to_contain_text("now here")
    expect(page.locator('[data-worker="worker-0"] [data-used]:not([data-used="0"])').first).to_be_attached()
    expect(page.locator("#figures")).to_contain_text("running1")
    expect(answer).to_have_class("message assistant is-going")
    page.screenshot(path=pictures / "going.png")
    read_above(page, answer)
    page.keyboard.press("Escape")
    expect(answer.locator("footer")).to_contain_text("stopped")
    expect(page.locator("#figures")).to_contain_text("running0")
    expect(page.locator("#send")).to_be_visible()


def read_above(page: Page, answer: Locator) -> None:
    """What comes is followed by who reads at its end, and leaves alone who has scrolled up."""
    messages = page.locator("#messages")
    size = page.viewport_size
    assert size is not None
    page.set_viewport_size({"width": size["width"], "height": 480})
    grow(answer)
    assert messages.evaluate(f"log => {BELOW}") < 40
    messages.evaluate("log => { log.scrollTop = 0; }")
    grow(answer)
    assert messages.evaluate("log => log.scrollTop") == 0
    assert messages.evaluate(f"log => {BELOW}") > 40
    page.set_viewport_size(size)


def grow(answer: Locator) -> None:
    """Waits until more of an answer is drawn."""
    text = answer.locator(".text").first
    shown = text.inner_text()
    expect(text).not_to_have_text(shown, use_inner_text=True)


def refuse(page: Page) -> None:
    """The page says what the gateway said, and the message is not lost."""
    page.locator("#settings summary").click()
    page.locator("#max-tokens").fill("100000")
    ask(page, "how much")
    expect(page.locator("#problem")).to_contain_text("max")
    expect(page.locator("#text")).to_have_value("how much")
    page.locator("#max-tokens").fill("")


def begin_anew(page: Page) -> None:
    page.locator("#clear").click()
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#messages .hint")).to_be_visible()


def main(chromium: str, url: str, key: str, token: str, pictures: Path) -> None:
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1360, "height": 960}, color_scheme=scheme)
            page.set_default_timeout(LIMIT_MS)
            expect.set_options(timeout=LIMIT_MS)
            page.on("console", lambda told: wrong.extend(problems(told)))
            page.on("pageerror", lambda error: wrong.append(str(error)))
            page.goto(url)
            let_in(page, key, token)
            (pictures / scheme).mkdir(parents=True, exist_ok=True)
            chat(page, pictures / scheme)
            stop(page, pictures / scheme)
            if scheme == "light":
                refuse(page)
                begin_anew(page)
            page.close()
        browser.close()
    assert not wrong, wrong


if __name__ == "__main__":
    main(*sys.argv[1:5], Path(sys.argv[5]))
