"""A real browser on the web page: on a desktop or a phone, light or dark.

A request to another server, or an error that the page reports, fails the test.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Browser, JSHandle, Page, expect, sync_playwright

from tests.tools import tool

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
WAIT_MS = 90_000
"""the limit for anything to appear; tests do not check how fast it appears"""
AXE = Path(__file__).parent / "axe" / "axe.min.js"
# Runs before the page, and records the pictures shown while the final one was being made.
WATCH_PREVIEWS = """
window.previews = [];
document.addEventListener("load", ({ target }) => {
  if (target.src?.startsWith("data:")) previews.push(target.src);
}, true);
"""
TRANSFER = """([name, file]) => {
  const bytes = Uint8Array.from(atob(file), (character) => character.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type: "image/png" }));
  return transfer;
}"""


@dataclass(frozen=True)
class View:
    name: str
    scheme: Literal["light", "dark"]

    @property
    def context(self) -> dict[str, Any]:
        phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
        desktop = {"viewport": {"width": 1280, "height": 860}}
        size = phone if self.name == "phone" else desktop
        return {**size, "color_scheme": self.scheme, "reduced_motion": "reduce"}

    def __str__(self) -> str:
        return f"{self.name}-{self.scheme}"


VIEWS = [View(name, scheme) for name in ("desktop", "phone") for scheme in ("light", "dark")]
EITHER_WIDTH = [VIEWS[0], VIEWS[3]]
"""for tests that do not depend on the colour scheme"""


@contextmanager
def chromium() -> Iterator[Browser]:
    path = tool("chromium", "chromium")
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


KEPT = """async () => {
  for (const { name } of await indexedDB.databases()) {
    await new Promise((resolve, reject) => {
      const opening = indexedDB.open(name);
      opening.onerror = () => reject(opening.error);
      opening.onsuccess = () => {
        const database = opening.result, stores = [...database.objectStoreNames];
        const reading = database.transaction(stores, "readonly");
        reading.objectStore(stores[0]).count();
        reading.oncomplete = () => { database.close(); resolve(); };
      };
    });
  }
}"""
"""Resolves when all earlier writes are on disk, because a transaction waits for earlier ones."""


@dataclass
class Visit:
    """A browser on one page, with empty storage."""

    page: Page
    origin: str
    view: View
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()
    """words of errors that the test causes on purpose"""

    def wait_for_program(self) -> None:
        """The program loads after the first paint. Until then, clicks have no effect."""
        expect(self.page.locator("#service", has_text="connecting")).to_have_count(0)

    def reload(self) -> None:
        """Wait for the disk first, because a test reloads faster than a person."""
        self.page.evaluate(KEPT)
        self.page.reload()
        self.wait_for_program()

    def generate(self, prompt: str = "", pictures: int = 1, **settings: str) -> None:
        """Generate with these values; without a prompt, with the form's prompt."""
        if prompt:
            self.page.fill("#prompt", prompt)
        if settings:
            self.open_settings()
        for name, value in settings.items():
            self.set(name, value)
        if prompt:
            self.page.locator(f"[name=n][value='{pictures}']").check()
        self.page.click("#generate")

    def open_settings(self) -> None:
        script = (
            "for (const part of document.querySelectorAll('#more, #more details')) part.open = true"
        )
        self.page.evaluate(script)

    def set(self, name: str, value: str) -> None:
        control = self.page.locator(f"[name={name}]")
        if control.first.get_attribute("type") == "radio":
            self.page.locator(f"[name={name}][value='{value}']").check()
        elif control.evaluate("element => element.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)

    def holds(self) -> dict[str, str]:
        """Return the request that the form would send."""
        script = "() => Object.fromEntries(new FormData(document.querySelector('#ask')))"
        found: dict[str, str] = self.page.evaluate(script)
        return found

    def wait_for_pictures(self, count: int = 1) -> None:
        expect(self.page.locator("#stage button.frame img")).to_have_count(count)

    def drop(self, name: str, file: bytes, on: str = "#drop-settings") -> None:
        transfer = {"dataTransfer": self._transfer(name, file)}
        self.page.dispatch_event("body", "dragover", transfer)
        self.page.dispatch_event(on, "drop", transfer)

    def paste(self, file: bytes) -> None:
        script = """(clipboardData) => document.body.dispatchEvent(
          new ClipboardEvent("paste", { clipboardData, bubbles: true }))"""
        self.page.evaluate(script, self._transfer("image.png", file))

    def _transfer(self, name: str, file: bytes) -> JSHandle:
        return self.page.evaluate_handle(TRANSFER, [name, base64.b64encode(file).decode("ascii")])

    def download(self) -> bytes:
        """Return the newest picture of the gallery, as downloaded from the viewer."""
        self.page.locator("#thumbs button").first.click()
        with self.page.expect_download() as coming:
            self.page.click("#download")
        self.page.keyboard.press("Escape")
        return Path(coming.value.path()).read_bytes()

    def violations(self) -> list[str]:
        """Return the accessibility problems that axe-core finds."""
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate("() => axe.run({ resultTypes: ['violations'] })")["violations"]
        return [f"{each['id']}: {node['html']}" for each in found for node in each["nodes"]]

    def check(self) -> None:
        inside = (f"{self.origin}/", "data:", "blob:")
        elsewhere = [url for url in self.asked if not url.startswith(inside)]
        assert not elsewhere, f"asked for outside of {self.origin}: {elsewhere}"
        bad = [text for text in self.complaints if not any(word in text for word in self.expected)]
        assert not bad, f"the browser complains: {bad}"


@contextmanager
def visit(browser: Browser, origin: str, view: View, path: str = "/") -> Iterator[Visit]:
    context = browser.new_context(**view.context, accept_downloads=True)
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    found = Visit(page, origin, view)
    context.on("request", lambda request: found.asked.append(request.url))
    context.on("weberror", lambda error: found.complaints.append(str(error.error)))
    page.on(
        "console",
        lambda message: (
            found.complaints.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.add_init_script(WATCH_PREVIEWS)
    try:
        page.goto(f"{origin}{path}")
        found.wait_for_program()
        yield found
        found.check()
    finally:
        context.close()


def pixels(file: bytes) -> NDArray[np.float64]:
    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(image.convert("RGB")).astype(np.float64)
