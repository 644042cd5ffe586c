"""Pages in Debian's Chromium, as a person sees them: light and dark, on a phone and on a screen.

What a page complains about, and each request that leaves the machine, fails the test. Screenshots
are kept in results/browser.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from PIL import Image
from tests.browser.builder_server import Builder, serve
from tests.browser.checks import CAPTIONS
from tests.builders.images import write_pictures
from tests.conftest import ROOT, copy_quick_project

from zerotrain.data.fonts import CJK, LATIN, font_file

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

HERE = Path(__file__).parent
SCREENSHOTS = ROOT / "results" / "browser"
IN_DOCS = {
    "from_nothing_to_an_offloading_phase_of_sdxl-chosen": ("builder.png", 1060),
    "training-running": ("builder-run.png", 900),
    "training-switch": ("builder-switch.png", 500),
}
"""Screenshots that docs/builder.md shows, with their files in docs/images and heights in pixels;
--fix renews them."""
LOCAL = ("file:", "data:", "blob:", "http://127.0.0.1:")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
FONTS = """<fontconfig>
{folders}<cachedir>{folder}/cache</cachedir>
<match><test name="family" qual="all" compare="not_eq"><string>monospace</string></test>
<edit name="family" mode="prepend" binding="same"><string>Noto Sans</string></edit></match>
</fontconfig>"""
REFUSED = 422
"""Status of the builder's answer to a value that is wrong."""
EXPECTED = (
    "Failed to load resource: the server responded",  # complained about by its address
    "Response Status Error Code 422",
    "htmx:afterRequest",  # of a request that the next change has replaced
    "htmx:sendAbort",
)
"""How errors in the console begin that are none."""
TIMEOUT = 60_000
"""Milliseconds that an element may take to appear, on a machine that is busy."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What lies here runs in `make test-browser` alone."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Keep what the pages of a failed test show."""
    report = yield
    if report.failed and "visits" in getattr(item, "funcargs", {}):
        item.funcargs["visits"].keep_all("failed")
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say where the screenshots are, whether or not a test failed."""
    if config.getoption("--fix"):
        renew_pictures()
    if pictures := [*SCREENSHOTS.glob("*.png")]:
        terminalreporter.write_line(f"{len(pictures)} screenshots: {SCREENSHOTS}")


def renew_pictures() -> None:
    """Write the pictures of docs/builder.md, of the screenshots that were taken."""
    for name, (file, height) in IN_DOCS.items():
        if (source := SCREENSHOTS / f"{name}.png").is_file():
            with Image.open(source) as whole:
                top = whole.convert("RGB").crop((0, 0, whole.width, min(height, whole.height)))
            top.quantize(256, Image.Quantize.MAXCOVERAGE).save(
                ROOT / "docs" / "images" / file, optimize=True
            )


@pytest.fixture(scope="session")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of fontconfig with fonts of installed packages alone: those that draw the grids, and
    one of equal widths. This machine may have few, and screenshots agree everywhere."""
    import matplotlib
    from fontTools.subset import Subsetter
    from fontTools.ttLib import TTFont

    folder = tmp_path_factory.mktemp("fonts")
    mono = TTFont(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSansMono.ttf"))
    signs = Subsetter()
    signs.populate(unicodes=range(0x0590))  # its own Arabic is not to stand in for Noto's
    signs.subset(mono)
    mono.save(folder / "mono.ttf")
    places = (*(font_file(face).parent for face in (LATIN, CJK)), folder)
    folders = "".join(f"<dir>{escape(str(place))}</dir>" for place in places)
    made = folder / "fonts.conf"
    made.write_text(FONTS.format(folders=folders, folder=folder))
    return made


@pytest.fixture(scope="session")
def browser(fonts: Path) -> Iterator[Browser]:
    """One Chromium for all pages of a process."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium")
    assert program, "chromium is not installed: `make test-browser` installs it"
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=program, args=ARGUMENTS, env={"FONTCONFIG_FILE": str(fonts)}
        )
        yield made
        made.close()


class Visits:
    """Opens pages and remembers what is wrong with them."""

    def __init__(self, browser: Browser, name: str) -> None:
        self._browser, self._name = browser, name
        self._contexts: list[BrowserContext] = []
        self.complaints: list[str] = []

    def open(
        self, address: str, *, scheme: Any = "light", width: int = 1280, scripts: bool = True
    ) -> Page:
        """Open a page in a context of its own, without cookies and history."""
        context = self._browser.new_context(
            color_scheme=scheme,
            viewport={"width": width, "height": 900},
            java_script_enabled=scripts,
            reduced_motion="reduce",
        )
        context.set_default_timeout(TIMEOUT)
        self._contexts.append(context)
        context.on("request", lambda request: self._hold_local(request.url))
        context.on("response", self._hold_found)
        page = context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(f"script: {error}"))
        page.on("console", self._hear)
        page.goto(address)
        page.wait_for_url(lambda url: "token=" not in url)  # kept in a cookie
        return page

    def keep(self, page: Page, what: str, *, full: bool = True) -> Path:
        """Keep a screenshot among the others; its file."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        file = SCREENSHOTS / f"{self._name}-{what}.png"
        # Else a style is put into the page, which its own policy refuses.
        page.screenshot(path=file, full_page=full, caret="initial")
        return file

    def keep_all(self, what: str) -> None:
        """Keep a screenshot of each open page."""
        pages = [page for context in self._contexts for page in context.pages]
        for number, page in enumerate(pages):
            self.keep(page, f"{what}-{number}")

    def close(self) -> None:
        """Close all pages."""
        for context in self._contexts:
            context.close()

    def _hold_local(self, url: str) -> None:
        if not url.startswith(LOCAL):
            self.complaints.append(f"request to {url}")

    def _hold_found(self, response: Any) -> None:
        # A value that is refused, with a sentence, is what some tests ask for.
        if response.status >= 400 and response.status != REFUSED:
            self.complaints.append(f"{response.status} of {response.url}")

    def _hear(self, message: Any) -> None:
        if message.type == "error" and not message.text.startswith(EXPECTED):
            self.complaints.append(f"console: {message.text}")


@pytest.fixture
def visits(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Visits]:
    """Pages of one test, which may complain about nothing and ask nothing of another machine."""
    made = Visits(browser, request.node.name.partition("[")[0].removeprefix("test_"))
    yield made
    made.close()
    assert made.complaints == []


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """The builder of a project with images whose captions are of all scripts."""
    project = copy_quick_project(tmp_path_factory.mktemp("builder") / "project")
    write_pictures(project / "pictures", [*CAPTIONS.values()], side=32, count=12)
    with serve(project) as made:
        yield made
    # A training outlives its page; only after a failure is there one.
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] == str(project):
            process.terminate()


@pytest.fixture(scope="session")
def trained(browser: Browser, builder: Builder) -> Path:
    """The folder of a run that was trained from the page and switched while it ran."""
    from tests.browser.training import train_from_the_page

    visits = Visits(browser, "training")
    try:
        folder = train_from_the_page(visits, builder)
    except Exception:
        visits.keep_all("failed")
        raise
    visits.close()
    assert visits.complaints == []
    return folder
