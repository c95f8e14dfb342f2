"""The web page in a real browser: it streams, shows the engine, needs no mouse, and loads nothing from elsewhere."""

import ast
import re
import time
from collections.abc import Iterator

import msgspec
import pytest

from engine.features.explain.explanation import Explained, TimeShare
from engine.features.lora.files import Adapter
from engine.messages import Finish
from engine.settings.sections import ServerSection
from server.operators.site import FOLDER
from tests.extensions.adapters.cards import card_with
from tests.server.browser_tab import Tab, busy_server, launched, needs_browser, playwright
from tests.server.fake_ingress import FakeIngress
from tests.server.http_client import ask
from tests.server.live_server import CARD, LiveServer

PAGE_FILES = sorted(path.name for path in FOLDER.iterdir() if path.name != "index.html")
MOST_BYTES = 110_000  # of the whole page, without a build step or compression
expect = playwright.expect


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with launched() as one:
        yield one


@needs_browser
def test_a_chat_streams_into_the_log_without_a_mouse(browser: "playwright.Browser") -> None:
    with LiveServer(FakeIngress(delay_s=0.03)) as live, Tab(browser, live.url) as page:
        expect(page.locator("#status")).to_have_text("ready")
        page.keyboard.press("Tab")  # the skip link
        page.keyboard.press("Enter")
        page.locator("#prompt").focus()
        page.keyboard.type("<img src=x onerror=alert(1)>")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("second line")
        page.keyboard.press("Enter")
        mine, answer = page.locator("#log .turn").nth(0), page.locator("#log .turn").nth(1)
        expect(mine.locator("pre")).to_have_text("<img src=x onerror=alert(1)>\nsecond line")
        expect(page.locator("#stop")).to_be_enabled()
        expect(answer.locator("pre")).to_contain_text(re.compile(r"\w"))
        expect(answer.locator("footer")).to_contain_text("12 tokens")
        expect(page.locator("#stop")).to_be_disabled()
        assert page.locator("#log img").count() == 0
        page.keyboard.type("and then")
        page.keyboard.press("Enter")
        expect(page.locator("#log .turn")).to_have_count(4)
        expect(page.locator("#log .turn").nth(3).locator("footer")).to_contain_text("tokens")
        turns = live.ingress.asked[1][0]
        assert [turn.role for turn in turns] == ["user", "assistant", "user"]  # type: ignore[union-attr]


@needs_browser
def test_an_adapter_is_asked_and_the_engine_of_its_model_is_shown(browser: "playwright.Browser") -> None:
    adapter = Adapter("digest", "/path")
    card = card_with({"sql": adapter})
    with LiveServer(card=card) as live, Tab(browser, live.url) as page:
        expect(page.locator("#model")).to_contain_text(CARD.about)
        page.locator("#models").select_option("sql")
        expect(page.locator("#model")).to_contain_text(CARD.about)  # news of the engine still comes
        page.locator("#prompt").fill("one")
        page.keyboard.press("Enter")
        expect(page.locator("#log .turn").nth(1).locator("footer")).to_contain_text("tokens")
        assert [options.parts for *_, options in live.ingress.asked] == [adapter.parts]


@needs_browser
def test_a_completion_continues_its_prompt_with_the_settings_given(browser: "playwright.Browser") -> None:
    with LiveServer() as live, Tab(browser, live.url) as page:
        page.get_by_label("Completion", exact=True).check()
        page.get_by_label("Most tokens").fill("5")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Seed").fill("7")
        page.locator("#prompt").fill("def f(")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn footer")).to_contain_text("5 tokens")
        expect(page.locator(".turn .prompt-text")).to_have_text("def f(")
        prompt, params, _ = live.ingress.asked[0]
        assert (prompt, params.max_tokens, params.temperature, params.seed) == ("def f(", 5, 0.5, 7)


@needs_browser
def test_escape_stops_an_answer_and_its_request(browser: "playwright.Browser") -> None:
    with LiveServer(FakeIngress(delay_s=0.05)) as live, Tab(browser, live.url) as page:
        page.locator("#prompt").fill("go on")
        page.keyboard.press("Enter")
        expect(page.locator(".turn").nth(1).locator("pre")).to_contain_text(re.compile(r"\w"))
        page.keyboard.press("Escape")
        expect(page.locator(".turn").nth(1).locator("footer span")).to_have_text("stopped")
        assert live.wait_until(lambda: live.ingress.num_open == 0, 2)


@needs_browser
def test_a_question_waits_until_the_name_of_the_model_is_known(browser: "playwright.Browser") -> None:
    with LiveServer() as live, Tab(browser, live.url) as page:
        page.route("**/stats", lambda route: None)  # held until the handler goes
        page.reload(wait_until="domcontentloaded")
        page.locator("#prompt").fill("go on")
        page.keyboard.press("Enter")
        expect(page.locator("#send")).to_be_disabled()
        page.unroute("**/stats")
        expect(page.locator(".turn").nth(1).locator("pre")).to_contain_text(re.compile(r"\w"))


@needs_browser
@pytest.mark.parametrize("prompt, said", [("!refuse", "too long by 7 tokens"), ("!fail", "not finite")])
def test_errors_are_said_and_a_refused_question_is_not_lost(
    browser: "playwright.Browser", prompt: str, said: str
) -> None:
    with LiveServer() as live, Tab(browser, live.url) as page:
        page.get_by_label("Completion", exact=True).check()
        page.locator("#prompt").fill(prompt)
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").filter(has_text=said)).to_be_visible()
        expect(page.locator("#prompt")).to_have_value(prompt if prompt == "!refuse" else "")


@needs_browser
def test_a_refused_question_is_in_the_box_and_not_in_the_log(browser: "playwright.Browser") -> None:
    with LiveServer() as live, Tab(browser, live.url) as page:
        page.locator("#prompt").fill(9000 * "x")
        page.keyboard.press("Enter")
        expect(page.locator("#play-error")).to_contain_text("characters, 8192 can fit")
        expect(page.locator("#prompt")).to_have_value(9000 * "x")
        expect(page.locator("#log .turn")).to_have_count(0)
        page.locator("#prompt").fill("one")
        page.keyboard.press("Enter")
        expect(page.locator("#log .turn")).to_have_count(2)
        assert [turn.content for turn in live.ingress.asked[-1][0]] == ["one"]  # type: ignore[union-attr]


@needs_browser
def test_an_answer_that_was_cut_says_so_and_goes_on(browser: "playwright.Browser") -> None:
    with LiveServer() as live, Tab(browser, live.url) as page:
        page.get_by_label("Most tokens").fill("3")
        page.locator("#prompt").fill("one")
        page.keyboard.press("Enter")
        answer = page.locator("#log .turn").nth(1)
        expect(answer.locator("footer")).to_contain_text("cut at 3 tokens")
        page.get_by_label("Most tokens").fill("")
        before = answer.locator("pre").inner_text()
        page.get_by_role("button", name="Go on").click()
        expect(answer.locator("footer")).to_contain_text(re.compile("^12 tokens"))
        expect(page.get_by_role("button", name="Go on")).to_have_count(0)
        turns, _, options = live.ingress.asked[1]
        assert [turn.role for turn in turns] == ["user", "assistant"]  # type: ignore[union-attr]
        assert options.chat.continue_final
        assert answer.locator("pre").inner_text().startswith(before)
        page.locator("#prompt").fill("two")
        page.keyboard.press("Enter")
        expect(page.locator("#log .turn")).to_have_count(4)
        assert live.wait_until(lambda: len(live.ingress.asked) == 3, 5)
        turns = live.ingress.asked[2][0]
        assert [turn.role for turn in turns] == ["user", "assistant", "user"]  # type: ignore[union-attr]


@needs_browser
def test_code_is_a_block_before_its_fence_closes(browser: "playwright.Browser") -> None:
    with LiveServer() as live, Tab(browser, live.url) as page:
        text = "So:\n```python\nx = 1\n```\nand `y`.\n~~~~\n```\nz"
        page.evaluate("() => document.body.append(Object.assign(document.createElement('pre'), { id: 'probe' }))")
        for length in range(1, len(text) + 1):  # as it comes
            page.evaluate(SHOW_FENCED, text[:length])
            if text[:length].endswith("x ="):
                assert page.locator("#probe code").all_text_contents() == ["x ="]
        assert page.locator("#probe code").all_text_contents() == ["x = 1\n", "```\nz"]
        assert page.locator("#probe span").all_text_contents() == ["So:\n", "and `y`.\n"]
        page.locator("#prompt").fill("Why?\n```\nx = 1")
        page.keyboard.press("Enter")
        expect(page.locator("#log .mine code")).to_have_text("x = 1")


@needs_browser
def test_prompts_to_try_suit_the_model(browser: "playwright.Browser") -> None:
    for about, prompt in (("a toy", "What is a page?"), ("", "What is the capital of France?")):
        with LiveServer(card=msgspec.structs.replace(CARD, about=about)) as live, Tab(browser, live.url) as page:
            expect(page.locator(".sample").first).to_have_text(prompt)


@needs_browser
def test_a_server_that_is_gone_is_dimmed_until_it_answers(browser: "playwright.Browser") -> None:
    with LiveServer() as live:
        tab = Tab(browser, live.url, "#engine", reduced_motion="reduce")
        with tab as page:
            expect(page.locator("#status")).to_have_text("ready")
            expect(page.locator("body")).not_to_have_class("lost")
            page.context.set_offline(True)
            expect(page.locator("#status")).to_have_text("no answer")
            expect(page.locator("#seen")).to_have_text(re.compile(r"^last seen \d+ s ago$"))
            assert float(page.evaluate("getComputedStyle(document.querySelector('#engine')).opacity")) < 1
            page.locator("#tab-playground").click()
            page.locator("#prompt").fill("one")
            page.keyboard.press("Enter")
            expect(page.locator("#play-error")).to_have_text("the server does not answer")
            expect(page.locator("#log .turn")).to_have_count(0)
            page.context.set_offline(False)
            expect(page.locator("#status")).to_have_text("ready")
            expect(page.locator("#seen")).to_have_text("")
            expect(page.locator("body")).not_to_have_class("lost")
            tab.errors.clear()  # the browser logs each request that found no server


@needs_browser
def test_the_engine_is_shown_as_it_is(browser: "playwright.Browser") -> None:
    shared = list(range(64))
    with LiveServer() as live:

        def work() -> None:
            for number in range(40):
                live.monitor.run(seconds=0.01, decodes=20, prefill_tokens=300 if number % 8 == 0 else 0)
            live.monitor.end()
            for first in (100, 200, 300):
                live.monitor.cache([*shared, *range(first, first + 48)])

        live.call(work)
        with Tab(browser, live.url) as page:
            page.get_by_role("tab", name="Playground").focus()
            page.keyboard.press("ArrowRight")
            expect(page.get_by_role("tab", name="Engine")).to_have_attribute("aria-selected", "true")
            expect(page.locator("#figures")).to_contain_text("2,000 tokens/s")
            expect(page.locator("#figures")).to_contain_text("40 %")
            expect(page.locator("#pool")).to_have_attribute("aria-label", "Of 100 pages: 20 used, 30 cached, 50 free")
            expect(page.locator("#steps svg > g")).to_have_count(40)
            expect(page.locator("#tree [role=treeitem]")).to_have_count(4)
            expect(page.locator("#mailboxes tr")).to_have_count(1)
            # Through the picture by keys: from the shared prefix to one of its continuations, and to the next.
            page.locator("#tree [role=treeitem]").first.focus()
            expect(page.locator("#node")).to_contain_text("64 tokens from 0 on")
            page.keyboard.press("ArrowRight")
            expect(page.locator("#node")).to_contain_text("48 tokens from 64 on")
            before = page.locator("#node").inner_text()
            page.keyboard.press("ArrowDown")
            expect(page.locator("#node")).not_to_have_text(before)
            live.call(lambda: live.monitor.run(seconds=0.01, decodes=20))
            expect(page.locator("#steps svg > g")).to_have_count(41)  # it looks again by itself
            page.locator("#tree-panel summary").click()
            expect(page.locator("#prefixes tr")).to_have_count(4)


@needs_browser
def test_each_request_has_a_line_on_the_board_until_it_is_aborted(browser: "playwright.Browser") -> None:
    with busy_server() as live, Tab(browser, live.url, "#engine", reduced_motion="reduce") as page:
        lines = page.get_by_role("table", name="Requests").get_by_role("row")
        expect(lines.nth(1)).to_contain_text("!hang What is a page?")
        told = [[cell.inner_text() for cell in lines.nth(at).locator(".flaps > .hidden").all()] for at in (1, 5, 6, 7)]
        assert told[0] == ["1", "!hang What is a page?", "DECODING", "66%", "35", "68.0"]
        age, client, end = (lines.nth(1).locator(f".{name}").inner_text() for name in ("age", "client", "id"))
        assert (age, client, len(end)) == ("72 s", "127.0.0.1", 6)
        assert (lines.nth(1).get_attribute("title") or "").endswith(end)
        assert [cells[2] for cells in told[1:]] == ["PREFILL 3/3", "WAITING", "RETRACTED"]
        page.get_by_role("button", name="Abort request 2,").click()
        expect(page.locator("#board-said")).to_have_text("Request 2 was aborted.")
        assert live.wait_until(lambda: live.ingress.num_open == 6, 2)
        live.call(lambda: setattr(live.monitor, "rows", tuple(row for row in live.monitor.rows if row.request_id != 2)))
        expect(lines.nth(2)).to_contain_text("DEPARTED")
        expect(lines.nth(3)).to_contain_text("night train")  # who stays keeps the line


@needs_browser
def test_where_a_requests_time_went_is_a_bar_and_sentences(browser: "playwright.Browser") -> None:
    with busy_server() as live, Tab(browser, live.url, "#engine", reduced_motion="reduce") as page:
        now = time.monotonic()
        parts = (
            TimeShare("queue", 3.0, {"rows": 3.0, "running": 1.0}, ((2, 3.0),)),
            TimeShare("decode", 1.0, {"steps": 35.0}),
        )
        told = Explained(1, now, now + 4.0, Finish.RUNNING, 0.0, 48, 32, None, 0, {}, parts)
        live.call(lambda: setattr(live.monitor, "explained", (told,)))
        page.get_by_role("button", name="Why request 1 ").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#why-title")).to_be_focused()
        expect(page.locator("#why-said")).to_contain_text("48 prompt tokens")
        queued = page.locator("#why-parts li").filter(has_text="queue")
        expect(queued).to_contain_text("It waited for its first step: all 64 rows were taken for")
        expect(page.locator("#why-bar").get_by_role("img", name="queue")).to_be_visible()
        assert page.locator("#why-bar rect").count() == page.locator("#why-parts li").count()
        before = page.locator("#why-said").inner_text()
        expect(page.locator("#why-said")).not_to_have_text(before)  # it has not ended, and is asked for again
        assert page.evaluate(LEAST_CONTRAST) >= 4.5
        assert page.evaluate(NAMELESS) == []
        page.get_by_label("Its id").fill("nobody's")
        page.keyboard.press("Enter")
        expect(page.locator("#why-said")).to_contain_text("no request of yours is known by this id")
        expect(page.locator("#why-parts li")).to_have_count(0)


@needs_browser
def test_pages_and_prefixes_and_requests_light_up_together(browser: "playwright.Browser") -> None:
    with busy_server() as live, Tab(browser, live.url, "#engine", reduced_motion="reduce") as page:
        expect(page.locator("#tree [role=treeitem]")).to_have_count(4)
        page.locator("#pool").hover(position={"x": 4, "y": 4})
        expect(page.locator("#tree .lit")).to_have_attribute("data-index", "0")
        expect(page.locator("#pool-about")).to_contain_text("page 0 · shared by several requests · part of a prefix")
        page.locator("#pool").hover(position={"x": 5 * 24, "y": 4})
        expect(page.locator("#board .lit")).to_contain_text("What is a page?")
        pictures = [page.locator("#pool").screenshot()]
        for index in ("0", "1"):
            page.locator(f"#tree [data-index='{index}']").focus()
            pictures.append(page.locator("#pool").screenshot())
        assert len(set(pictures)) == 3


@needs_browser
def test_the_load_is_bounded_and_the_tour_ends(browser: "playwright.Browser") -> None:
    with LiveServer() as live, Tab(browser, live.url, "#engine", reduced_motion="reduce") as page:
        expect(page.locator("#figures")).to_contain_text("Running")
        page.get_by_role("button", name="20-second tour").click()
        expect(page.get_by_role("complementary", name="Tour")).to_contain_text("1 of 5")
        page.get_by_role("button", name="Next").click()
        expect(page.get_by_role("complementary", name="Tour")).to_contain_text("2 of 5")
        page.keyboard.press("Escape")
        expect(page.get_by_role("complementary", name="Tour")).to_be_hidden()
        expect(page.locator("#board-said")).to_have_text("48 requests have been answered.")
        assert len(live.ingress.asked) == 48
        assert all((params.max_tokens or 999) <= 240 for _, params, _ in live.ingress.asked)


@needs_browser
def test_words_of_the_engine_are_explained(browser: "playwright.Browser") -> None:
    with LiveServer() as live, Tab(browser, live.url, "#engine") as page:
        expect(page.locator("#figures")).to_contain_text("Running")
        page.get_by_role("button", name="radix tree").focus()
        expect(page.get_by_role("tooltip")).to_contain_text("branches that begin alike share their pages")
        page.keyboard.press("Escape")
        expect(page.get_by_role("tooltip")).to_be_hidden()
        terms = re.findall(r'^  "?([a-z ]+)"?: "', (FOLDER / "help.js").read_text(), re.MULTILINE)
        used = page.evaluate("[...document.querySelectorAll('.term')].map((one) => one.dataset.term)")
        assert set(terms) == set(used)
        assert len(terms) > 15


@needs_browser
def test_a_sample_is_sent_and_can_be_had_as_code(browser: "playwright.Browser") -> None:
    with LiveServer() as live, Tab(browser, live.url) as page:
        expect(page.locator("#status")).to_have_text("ready")
        page.get_by_role("button", name="def fibonacci(n):").click()
        expect(page.locator(".turn .prompt-text")).to_have_text("def fibonacci(n):")
        expect(page.locator(".turn footer")).to_contain_text("12 tokens")
        page.get_by_text("What was sent, as code").click()
        curl, python = page.locator(".snippet pre").all_inner_texts()
        assert curl.startswith(f"curl {live.url}/v1/completions")
        assert python.startswith("import os\n"), "the page has a key, and its code says where to put it"
        call = ast.parse(python).body[3].value  # type: ignore[attr-defined]
        fields = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        assert fields == {"model": "fake/model-1", "max_tokens": 256, "prompt": "def fibonacci(n):"}
        page.get_by_label("Monospace").check()
        family = "getComputedStyle(document.querySelector('.turn pre')).fontFamily"
        assert "mono" in page.evaluate(family)


@needs_browser
def test_the_page_asks_for_the_key_and_keeps_it_for_itself(browser: "playwright.Browser") -> None:
    server = ServerSection(api_key="a client's", operator_key="s3cret")
    with LiveServer(server=server) as live, Tab(browser, live.url, key="") as page:
        expect(page.get_by_label("This server asks for an API key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("That key was not accepted.")
        page.keyboard.type("s3cret")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("ready")
        expect(page.locator("#links")).to_be_hidden()  # a link brings no key
        assert page.evaluate("document.cookie + location.href").count("s3cret") == 0
        page.locator("#prompt").fill("hello")
        page.keyboard.press("Enter")
        expect(page.locator(".turn footer")).to_contain_text("tokens")


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_either_theme(browser: "playwright.Browser", scheme: str) -> None:
    with busy_server() as live, Tab(browser, live.url, color_scheme=scheme, reduced_motion="reduce") as page:
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        assert page.evaluate(LEAST_CONTRAST) >= 4.5  # WCAG AA
        page.locator("#tab-engine").click()
        expect(page.locator("#board")).to_contain_text("DECODING")
        assert page.evaluate(LEAST_CONTRAST) >= 4.5
        page.get_by_role("button", name="theme").click()
        other = "dark" if scheme == "light" else "light"
        expect(page.locator("html")).to_have_attribute("data-theme", other)
        page.reload()
        expect(page.locator("html")).to_have_attribute("data-theme", other)


@needs_browser
@pytest.mark.parametrize("width", [340, 600, 740, 820, 940, 1240, 1300, 1920])
def test_a_lines_buttons_are_on_the_board(browser: "playwright.Browser", width: int) -> None:
    with busy_server() as live, Tab(browser, live.url, "#engine") as page:
        page.set_viewport_size({"width": width, "height": 900})
        line = page.locator(".line:not(.head):not(.blank)").first
        button = line.get_by_role("button", name="Abort")
        expect(button).to_be_visible()
        inner, outer = button.bounding_box(), line.bounding_box()
        assert inner is not None
        assert outer is not None
        assert inner["x"] + inner["width"] <= outer["x"] + outer["width"] + 1


@needs_browser
def test_everything_has_a_name_and_fits_a_telephone(browser: "playwright.Browser") -> None:
    with busy_server() as live, Tab(browser, live.url, "#engine", viewport={"width": 360, "height": 700}) as page:
        expect(page.locator("#figures")).to_contain_text("Running")
        for view in ("engine", "playground"):
            page.locator(f"#tab-{view}").click()
            assert page.evaluate("document.documentElement.scrollWidth") <= 360
            assert page.evaluate(NAMELESS) == []


def test_browsers_are_told_to_load_nothing_else_and_run_nothing_inline(live: LiveServer) -> None:
    reply = ask(live.port, "GET", "/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    text = reply.body.decode()
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=|https?://", text)


def test_files_are_given_with_their_type_and_asked_for_again_only_if_they_changed(live: LiveServer) -> None:
    for name in PAGE_FILES:
        reply = ask(live.port, "GET", f"/page/{name}")
        assert reply.status == 200
        again = ask(live.port, "GET", f"/page/{name}", headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
    assert ask(live.port, "GET", "/page/app.js").headers["content-type"].startswith("text/javascript")
    assert ask(live.port, "GET", "/page/").status == 404


def test_the_page_is_open_where_the_api_is_not() -> None:
    with LiveServer(server=ServerSection(api_key="s3cret")) as live:
        assert ask(live.port, "GET", "/").status == 200
        assert ask(live.port, "GET", "/page/app.js").status == 200
        assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST_BYTES
        assert ask(live.port, "GET", "/page/nothing.js").status == 404
        assert ask(live.port, "GET", "/stats").status == 401


# The least contrast of any visible text with what lies behind it.
LEAST_CONTRAST = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if ((numbers(colour)[3] ?? 1) > 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  let least = 21;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility() || element.closest(":disabled, script"))
      continue;
    const [one, other] = [light(getComputedStyle(element).color), light(behind(element))].sort((a, b) => b - a);
    least = Math.min(least, (one + 0.05) / (other + 0.05));
  }
  return least;
}"""
SHOW_FENCED = """async (text) => {
  const { showFenced } = await import("/page/fences.js");
  showFenced(document.getElementById("probe"), text);
}"""
# Whatever can be focused and seen and has no name for a screen reader.
NAMELESS = """() => [...document.querySelectorAll("button, input, textarea, a, [tabindex]")]
  .filter((one) => one.checkVisibility() && one.id !== "main")
  .filter((one) => !(one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim()
                     || one.getAttribute("aria-labelledby")))
  .map((one) => one.outerHTML)"""
