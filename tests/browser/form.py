"""What a person does on the page of the form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.browser.checks import check_look

if TYPE_CHECKING:
    from playwright.sync_api import Page


def change(page: Page, name: str, value: str) -> None:
    """Change a field, and wait for the answer."""
    field = page.locator(f'#form [name="{name}"]')
    with page.expect_response(lambda answer: answer.request.method == "POST"):
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def problems_of(page: Page, name: str) -> str:
    """What stands next to a field."""
    return page.locator(f'[id="wrong-{name}"]').inner_text()


def use_preset(page: Page, name: str) -> None:
    """Choose a preset of the forecast."""
    from playwright.sync_api import expect

    page.get_by_role("link", name=f"Use {name}", exact=True).click()
    heading = page.get_by_role("heading", name=name, exact=True)
    expect(page.locator(".preset.chosen", has=heading)).to_be_visible()


def write(page: Page, name: str) -> None:
    """Write the form's values into config/NAME.yaml, once the diff is shown; it is checked."""
    page.locator("#write-name").fill(name)
    page.get_by_role("button", name="Show the changes").click()
    confirm = page.get_by_role("button", name=f"Write config/{name}.yaml")
    confirm.wait_for()
    check_look(page)
    confirm.click()
    page.get_by_role("heading", name=f"config/{name}.yaml is written").wait_for()
