"""How soon the web page and a preview appear, in a real browser on loopback."""

from __future__ import annotations

import statistics

import pytest
from playwright.sync_api import Browser, expect

from tests.serve.service.browsers import VIEWS, visit
from tests.serve.services import Service

PROMPT = "a red circle on a blue background"
FIRST_PAINT_MS, PREVIEW_MS = 200.0, 100.0
VISITS = 7
# Beside the page's own reading of the stream, another that notes when previews arrive.
NOTE_ARRIVALS = """
window.arrivals = [];
window.paints = [];
const ask = window.fetch;
window.fetch = async (...what) => {
  const answer = await ask(...what);
  if (!answer.headers.get("content-type")?.startsWith("text/event-stream")) return answer;
  const [ours, theirs] = answer.body.tee();
  note(ours);
  return new Response(theirs, answer);
};
async function note(stream) {
  let text = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let read; !(read = await reader.read()).done; ) {
    text += read.value;
    for (let end; (end = text.indexOf("\\n\\n")) >= 0; text = text.slice(end + 2)) {
      if (text.slice(0, end).includes("partial_image")) arrivals.push(performance.now());
    }
  }
}
document.addEventListener("load", ({ target }) => {
  if (!target.src?.startsWith("data:")) return;
  // The frame after the next one shows it for certain.
  requestAnimationFrame(() => requestAnimationFrame(() => paints.push(performance.now())));
}, true);
"""
FIRST_PAINT = """() => new Promise((resolve) => {
  const name = "first-contentful-paint";
  const hear = (list) => list.getEntriesByName(name).forEach((paint) => resolve(paint.startTime));
  new PerformanceObserver(hear).observe({ type: "paint", buffered: true });
})"""

pytestmark = pytest.mark.long


def test_the_first_paint_comes_within_200_ms(browser: Browser, running: Service) -> None:
    times = []
    for _ in range(VISITS):
        with visit(browser, running.url, VIEWS[0]) as web:
            expect(web.page.locator("#service")).to_have_text("sdxl-mini")
            times.append(float(web.page.evaluate(FIRST_PAINT)))
    summary = f"first paint after {[round(t) for t in times]} ms, median needed {FIRST_PAINT_MS}"
    print(summary)
    assert statistics.median(times) <= FIRST_PAINT_MS, summary


def test_previews_are_seen_within_100_ms_of_their_events(
    browser: Browser, running: Service
) -> None:
    with visit(browser, running.url, VIEWS[0]) as web:
        web.page.add_init_script(NOTE_ARRIVALS)
        web.reload()
        for seed in range(VISITS):
            web.generate(PROMPT, steps="100", seed=str(seed))
            expect(web.page.locator("#thumbs li")).to_have_count(seed + 1)
        arrivals, paints = web.page.evaluate("[arrivals, paints]")
    assert len(arrivals) == len(paints) == 3 * VISITS, f"{len(arrivals)}, {len(paints)}"
    times = [paint - arrival for arrival, paint in zip(arrivals, paints, strict=True)]
    summary = f"seen after {[round(t) for t in times]} ms, median needed {PREVIEW_MS}"
    print(summary)
    assert statistics.median(times) <= PREVIEW_MS, summary
