"""Masks painted on the web page, and their display afterwards, in a real browser."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import expect

from sdxl.images import read_parameters
from tests.serve.service.browsers import Visit, pixels
from tests.serve.service.test_web_editing import PROMPT, SOURCE, photo

SIDE = 128


@pytest.fixture
def web(web: Visit) -> Visit:
    """The page with a picture to start from."""
    web.drop("photo.png", PHOTO, SOURCE)
    expect(web.page.locator("#source-name")).to_have_text("photo.png")
    return web


PHOTO = photo(SIDE, SIDE)


def paint(web: Visit, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Paint a stroke between two points, as shares of the picture: by mouse or finger."""
    box = web.page.locator("#painter-canvas").bounding_box()
    assert box
    points = [
        (
            box["x"] + box["width"] * (start[0] + (end[0] - start[0]) * i / 4),
            box["y"] + box["height"] * (start[1] + (end[1] - start[1]) * i / 4),
        )
        for i in range(5)
    ]
    drag(web, points)


def drag(web: Visit, points: list[tuple[float, float]]) -> None:
    if web.view.name == "phone":
        touch(web, points)
        return
    mouse = web.page.mouse
    mouse.move(*points[0])
    mouse.down()
    for point in points[1:]:
        mouse.move(*point)
    mouse.up()


def touch(web: Visit, points: list[tuple[float, float]]) -> None:
    session = web.page.context.new_cdp_session(web.page)
    for i, (x, y) in enumerate(points):
        kind = "touchMove" if i else "touchStart"
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y}]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def painted(web: Visit) -> int:
    """Return the painted percentage that the page shows."""
    says = web.page.locator("#painter-says")
    expect(says).to_contain_text("%")
    return int(says.inner_text().partition("%")[0])


def changed(file: bytes) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (pixels(file) != pixels(PHOTO)).any(axis=2)
    return found


@pytest.mark.phone
def test_the_painted_part_is_made_anew_and_the_rest_stays_to_the_byte(web: Visit) -> None:
    web.page.click("#mask")
    expect(web.page.locator("#painter-canvas")).to_be_focused()
    paint(web, (0.25, 0.5), (0.75, 0.5))
    assert 5 < painted(web) < 20
    assert web.violations() == []
    web.page.click("#painter-use")
    expect(web.page.locator("#mask")).to_contain_text("Change")
    expect(web.page.locator("#strength")).to_have_attribute("placeholder", "1")
    web.generate(PROMPT, steps="4")
    web.wait_for_pictures()
    file = web.download()
    assert read_parameters(file)["strength"] == 1.0
    where = np.argwhere(changed(file))
    (top, left), (bottom, right) = where.min(0), where.max(0)
    assert 16 <= left <= 32 and 96 <= right <= 112, f"changed from {left} to {right}"
    assert 48 <= top <= 60 and 68 <= bottom <= 80, f"changed from {top} to {bottom}"


def test_strokes_are_erased_undone_inverted_and_found_again(web: Visit) -> None:
    act = web.page.locator("#painter")
    web.page.click("#mask")
    assert painted(web) == 0
    paint(web, (0.2, 0.2), (0.8, 0.2))
    once = painted(web)
    paint(web, (0.2, 0.8), (0.8, 0.8))
    twice = painted(web)
    assert 0 < once < twice
    web.page.check("#tool-eraser")
    paint(web, (0.2, 0.8), (0.8, 0.8))
    assert abs(painted(web) - once) <= 1
    for expected in (twice, once, 0):
        act.get_by_role("button", name="Undo").click()
        assert painted(web) == expected
    expect(act.get_by_role("button", name="Undo")).to_be_disabled()
    act.get_by_role("button", name="Redo").click()
    act.get_by_role("button", name="Invert").click()
    assert painted(web) in (100 - once, 101 - once, 99 - once)
    web.page.click("#painter-use")
    expect(web.page.locator("#mask")).to_contain_text("Change")
    web.reload()
    web.page.click("#mask")
    assert painted(web) in (100 - once, 101 - once, 99 - once)
    act.get_by_role("button", name="Clear").click()
    web.page.click("#painter-use")
    expect(web.page.locator("#mask")).to_contain_text("Paint")
    expect(web.page.locator("#source-mask")).to_be_hidden()


def test_the_keyboard_alone_paints_a_mask(web: Visit) -> None:
    keys = web.page.keyboard
    web.page.locator("#mask").focus()
    keys.press("Enter")
    expect(web.page.locator("#painter-canvas")).to_be_focused()
    keys.press("]")
    keys.down("Space")
    for _ in range(4):
        keys.press("ArrowRight")
    keys.up("Space")
    once = painted(web)
    keys.press("ArrowDown")
    keys.press("Enter")
    expect(web.page.locator("#painter-says")).to_have_text("painting")
    keys.press("Shift+ArrowDown")
    keys.press("Enter")
    twice = painted(web)
    assert 0 < once < twice
    keys.press("z")
    assert painted(web) == once
    keys.press("y")
    assert painted(web) == twice
    for _ in range(9):
        keys.press("Tab")
        if web.page.evaluate("document.activeElement.id") == "painter-use":
            break
    keys.press("Enter")
    expect(web.page.locator("#mask")).to_contain_text("Change")


@pytest.mark.phone
def test_a_picture_is_seen_larger_and_in_one_place_with_its_source(web: Visit) -> None:
    web.generate(PROMPT, steps="4", strength="1")
    web.wait_for_pictures()
    web.page.locator("#stage button.frame").click()
    width = "() => document.querySelector('#viewer-image').clientWidth"
    fitted = web.page.evaluate(width)
    assert fitted > 2 * SIDE, f"{fitted} pixels wide, needed most of the screen"
    web.page.locator("#viewer-image").dblclick()
    assert web.page.evaluate(width) == SIDE
    for expected in (2 * SIDE, 4 * SIDE, 8 * SIDE):
        web.page.keyboard.press("+")
        assert web.page.evaluate(width) == expected
    expect(web.page.locator("#zoom-says")).to_have_text("800%")
    web.page.get_by_role("button", name="Fit").click()
    assert web.page.evaluate(width) == fitted

    web.page.get_by_role("button", name="Before and after").click()
    slider = web.page.get_by_role("slider", name="Visible part of before")
    expect(slider).to_be_focused()
    assert web.violations() == []

    def columns(at: int) -> NDArray[np.float64]:
        slider.fill(str(at))
        shot = pixels(web.page.locator(".wipe").screenshot())
        found: NDArray[np.float64] = shot[60:].mean(axis=0)
        return found

    before, after, now = (columns(at) for at in (100, 0, 25))
    share_of_after = float((abs(now - after).sum(1) < abs(now - before).sum(1)).mean())
    assert 0.7 < share_of_after < 0.8
    web.page.keyboard.press("ArrowRight")
    expect(slider).to_have_value("26")


@pytest.mark.phone
def test_the_frame_is_dragged_to_a_larger_canvas_that_is_filled(web: Visit) -> None:
    web.page.click("#extend")
    assert web.violations() == []
    right = web.page.get_by_role("slider", name="right")
    box, shown = right.bounding_box(), web.page.locator("#painter-image").bounding_box()
    assert box and shown
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    drag(web, [(x + shown["width"] * i / 16, y) for i in range(5)])
    expect(right).to_have_attribute("aria-valuenow", "32")
    web.page.get_by_role("slider", name="top").focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowDown"):
        web.page.keyboard.press(key)
    expect(web.page.locator("#painter-says")).to_have_text("160 × 144")
    web.page.click("#painter-use")
    expect(web.page.locator("#source-size")).to_have_text("160 × 144")
    only = web.page.get_by_label("Only masked")
    for is_checked, padding in ((True, "32"), (False, "")):
        only.set_checked(is_checked)
        expect(web.page.get_by_label("Mask padding")).to_be_visible(visible=is_checked)
        assert web.holds()["mask_padding"] == padding
    only.check()
    web.generate(PROMPT, steps="4", mask_padding="24")
    web.wait_for_pictures()
    file = web.download()
    stored = read_parameters(file)
    assert (stored["strength"], stored["mask_padding"]) == (1.0, 24)
    now = pixels(file)
    assert now.shape == (144, 160, 3)
    assert np.array_equal(now[16:, :128], pixels(PHOTO))
    assert now[:, 128:].std() > 1, "nothing was made beside it"
