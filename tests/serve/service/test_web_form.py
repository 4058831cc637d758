"""The page's form: several models, sizes and folded groups."""

from __future__ import annotations

from playwright.sync_api import Browser, Route, expect

from sdxl.checkpoint import MINI, Checkpoint
from sdxl.images import read_parameters
from sdxl.pipeline import Pipeline
from serve.front.api import create_app
from serve.settings import ServeSettings
from tests.fakes import fake_engines
from tests.serve.servers import listening_to
from tests.serve.service.browsers import View, Visit, visit
from tests.serve.workers import running

PROMPT = "a red circle on a blue background"


def test_a_model_is_chosen_and_makes_the_picture(browser: Browser, view: View) -> None:
    other = Pipeline(Checkpoint("other", MINI), fake_engines((1, 2, 4)))
    tables = ({"model": "mini"}, {"model": "/models/other"})
    with (
        running() as first,
        running(other) as second,
        listening_to(create_app([first, second], ServeSettings(models=tables))) as url,
        visit(browser, url, view) as web,
    ):
        page = web.page
        late: list[Route] = []
        page.route("**/v1/images/examples?model=sdxl-mini", lambda route: late.append(route))
        web.reload()
        model = page.get_by_label("Model", exact=True)
        expect(model.locator("option")).to_have_text(["sdxl-mini", "other"])
        model.select_option("other")
        expect(page.locator("#service")).to_have_text("other")
        expect(page.locator("#examples button")).to_have_count(3)
        # Examples that come late are not those of another model.
        (held,) = late
        with page.expect_response("**/v1/images/examples?model=sdxl-mini"):
            held.continue_()
        page.wait_for_timeout(200)
        expect(page.locator("#shown button")).to_have_count(0)
        assert not web.violations()
        page.unroute_all()
        web.reload()
        expect(page.locator("#service")).to_have_text("other")
        web.generate(PROMPT, steps="2")
        web.wait_for_pictures()
        made = web.download()
        assert read_parameters(made)["model"] == "other"
        model.select_option("sdxl-mini")
        web.drop("made.png", made)
        expect(page.locator("#notices")).to_contain_text("Generate makes the same picture.")
        expect(page.locator("#service")).to_have_text("other")
        # A model that is served no longer.
        page.evaluate("localStorage.setItem('settings', JSON.stringify({ model: 'gone' }))")
        web.reload()
        expect(page.locator("#service")).to_have_text("sdxl-mini")
        expect(model).to_have_value("sdxl-mini")
        expect(model.locator("option")).to_have_count(2)


def test_a_size_is_a_usual_one_or_typed_and_can_be_swapped(web: Visit) -> None:
    page = web.page
    web.open_settings()
    sizes = page.locator("#size option").all_inner_texts()
    assert sizes[:3] == ["128 × 128", "144 × 112", "112 × 144"], "SDXL's 1152 × 896 at 128"
    page.locator("#size").select_option("144x112")
    expect(page.get_by_label("Width", exact=True)).to_have_value("144")
    page.get_by_role("button", name="Swap width and height").click()
    assert web.holds()["size"] == "112x144"
    page.get_by_label("Width", exact=True).fill("96")
    page.get_by_label("Height", exact=True).fill("72")
    assert web.holds()["size"] == "96x72"
    page.get_by_role("button", name="Swap width and height").click()
    assert web.holds()["size"] == "72x96"
    assert page.locator("#size option").all_inner_texts() == [*sizes, "72 × 96"], "one typed size"
    web.reload()
    assert web.holds()["size"] == "72x96"
    web.open_settings()
    page.get_by_label("Width", exact=True).fill("100")
    web.generate(PROMPT)
    expect(page.locator("#across")).to_be_focused()
    page.get_by_label("Width", exact=True).fill("")
    page.get_by_label("Height", exact=True).fill("")
    assert web.holds()["size"] == "auto"


def test_rare_settings_are_folded_named_and_shown_if_they_are_wrong(web: Visit) -> None:
    negative = web.page.get_by_label("Negative prompt")
    expect(negative).to_be_visible()
    web.page.locator("#prompt").focus()
    web.page.keyboard.press("Tab")
    expect(negative).to_be_focused()
    web.page.locator("#more > summary").click()
    groups = web.page.locator("#groups summary")
    expect(groups).to_have_text(["Variation", "DeepCache", "Guidance", "Upscale"])
    expect(web.page.locator("#upscale")).to_be_hidden()
    groups.nth(3).click()
    web.page.fill("#upscale", "9")
    groups.nth(3).click()
    web.page.locator("#more > summary").click()
    expect(web.page.locator("#unusual")).to_have_text("Upscale")
    web.generate(PROMPT)
    expect(web.page.locator("#upscale")).to_be_focused()
    expect(web.page.locator("#upscale")).to_be_visible()
    web.set("seed", "7")
    web.set("steps", "1000")
    expect(web.page.locator("#unusual")).to_have_text("Steps, Seed, Upscale")
    web.page.click("#reset")
    expect(web.page.locator("#unusual")).to_have_text("")
