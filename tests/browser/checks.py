"""What holds for every page: it can be read by all, fits its window, and shows letters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

LOOKS = [(scheme, width) for scheme in ("light", "dark") for width in (390, 1280)]
"""Colour schemes and widths of a window in pixels: a phone's and a screen's."""
CAPTIONS = {
    "Latin": "a naïve “red” house, łódź",
    "Cyrillic": "Красный дом, ёлка",
    "Chinese": "一座红色的房子。有三扇窗户",
    "Arabic": "صورة منزل أحمر",
    "Amharic": "ቀይ ቤት",
    "emoji": "😀🏠🎨",
}
"""The same caption in the scripts that a page and a grid must show."""
FACES = {
    "Latin": "",
    "Cyrillic": "",
    "Chinese": "CJK",
    "Arabic": "Arabic",
    "Amharic": "Ethiopic",
    "emoji": "Emoji",
}
"""A part of the name of the font that must draw it; an empty one: any font that has letters."""
_PLACES = """text => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const start = node.data.indexOf(text);
    if (start < 0 || !node.parentElement.checkVisibility()) continue;
    const place = at => {
      const range = document.createRange();
      range.setStart(node, at); range.setEnd(node, at + 1);
      return range.getBoundingClientRect().x;
    };
    return [place(start), place(start + text.length - 1)];
  }
}"""


def serious_problems(page: Page) -> list[str]:
    """What axe-core calls a serious or critical violation, with the elements that have it."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']} ({one['impact']}): {node['target']} {node['html'][:200]}"
        for one in found
        for node in one["nodes"]
        if one["impact"] in ("serious", "critical")
    ]


def sideways(page: Page) -> int:
    """By how many pixels the page is wider than its window."""
    wide, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    return wide - window


def check_look(page: Page) -> None:
    """Check that a page fits its window and axe-core finds nothing serious, with all unfolded."""
    assert sideways(page) <= 0, page.url
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert sideways(page) <= 0, page.url
    assert serious_problems(page) == [], page.url


def fonts_of(page: Page, text: str) -> dict[str, int]:
    """The fonts that draw the innermost visible element with a text, with their numbers of glyphs.

    A box for a character without a glyph counts for the page's first font.
    """
    session = page.context.new_cdp_session(page)
    session.send("DOM.enable")
    session.send("CSS.enable")
    root = session.send("DOM.getDocument")["root"]["nodeId"]
    page.get_by_text(text).first.evaluate("element => element.dataset.shown = 1")
    node = session.send("DOM.querySelector", {"nodeId": root, "selector": "[data-shown]"})
    used = session.send("CSS.getPlatformFontsForNode", {"nodeId": node["nodeId"]})["fonts"]
    page.evaluate("delete document.querySelector('[data-shown]').dataset.shown")
    session.detach()
    return {one["familyName"]: int(one["glyphCount"]) for one in used}


def ends(page: Page, text: str) -> tuple[float, float]:
    """Where the first and the last letter of a text begin, in pixels from the left."""
    first, last = page.evaluate(_PLACES, text)
    return first, last
