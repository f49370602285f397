"""Pages, opened in a headless Chromium."""

import contextlib
import os
import shutil

import pytest

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if CHROMIUM is None or sync_playwright is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("no Chromium, or no playwright")
    with sync_playwright() as p:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        running = p.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield running
        running.close()


@contextlib.contextmanager
def opened(browser, path, drawn, width=1100, color_scheme="light"):
    """The page, once it is drawn; afterwards it must have said nothing in the console and asked for no other file."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=color_scheme)
    context.set_default_timeout(120_000)  # milliseconds, on a machine that does other work
    page, said, asked = context.new_page(), [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector(f"body[data-drawn={drawn}]")
    yield page
    context.close()
    said = [text for text in said if "willReadFrequently" not in text]  # about what tests read of canvases
    assert said == [] and set(asked) == {path.as_uri()}
