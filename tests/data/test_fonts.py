"""Text of every script is drawn with the characters' own shapes, in the order of reading."""

# ruff: noqa: RUF001 (letters that look like others are what is drawn)
from __future__ import annotations

import pytest
from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont

from zerotrain.data.fonts import (
    CHINESE,
    CJK,
    EMOJI,
    FACES,
    JAPANESE,
    KOREAN,
    LATIN,
    NOT_SHOWN,
    Line,
    font_file,
    line_height,
    load_font,
    wrap,
)

TEXTS = {
    "Arabic": "صورة منزل أحمر، ٣ نوافذ",
    "Armenian": "կարմիր տուն",
    "Bengali": "একটি লাল বাড়ি",
    "Chinese": "一座红色的房子，有三扇窗户。臺灣",
    "Cyrillic": "Красный дом, ёлка",
    "Devanagari": "एक लाल घर, क्षत्रिय श्री",
    "emoji": "😀 👨‍👩‍👧 ❤️ 🇩🇪 👍🏽 1️⃣ 🪙",
    "Ethiopic": "ቀይ ቤት",
    "Georgian": "წითელი სახლი",
    "Greek": "κόκκινο σπίτι",
    "Gujarati": "લાલ ઘર",
    "Gurmukhi": "ਲਾਲ ਘਰ",
    "Hebrew": "בית אדום, שָׁלוֹם",
    "Japanese": "赤い家の写真、カメラ",
    "Kannada": "ಕೆಂಪು ಮನೆ",
    "Khmer": "ផ្ទះក្រហម",
    "Korean": "빨간 집",
    "Lao": "ເຮືອນສີແດງ",
    "Latin": "a naïve “red” house – Tiếng Việt, łódź, é",
    "Malayalam": "ചുവന്ന വീട്",
    "Myanmar": "အိမ်အနီ",
    "Oriya": "ନାଲି ଘର",
    "Sinhala": "රතු ගෙදර",
    "signs": "∑ ∈ → ★ ☃ ½ € ₹ ™ ♫",
    "Tamil": "சிவப்பு வீடு",
    "Telugu": "ఎర్ర ఇల్లు",
    "Thai": "บ้านสีแดงที่สวยงาม",
}


def shown(line: Line) -> str:
    """The text of a line from left to right, each run in the order of reading."""
    return "".join(run.text for run in line.runs)


def draw(line: Line) -> Image.Image:
    """A line on paper of its own size."""
    paper = Image.new("L", (int(line.width) + 8, line_height(line.size)), 255)
    line.draw(ImageDraw.Draw(paper), 4, 0, "black")
    return paper


@pytest.fixture(scope="module")
def characters() -> dict[str, set[int]]:
    """The code points that each font's own table has."""
    fonts = {face: TTFont(font_file(face), fontNumber=0, lazy=True) for face in FACES}
    return {face: set(font.getBestCmap()) for face, font in fonts.items()}


@pytest.mark.parametrize("script", TEXTS)
def test_no_character_is_the_box_of_a_missing_glyph(script: str, characters) -> None:
    """Each run's font has all of its characters, apart from joiners, which have no shape."""
    [line] = wrap(TEXTS[script], 10_000, 13, 1)
    assert sorted(shown(line)) == sorted(" ".join(TEXTS[script].split()))
    for run in line.runs:
        needed = {*map(ord, run.text)} - {0x200D, 0xFE0F}
        assert needed <= characters[run.face], run
    assert draw(line).getextrema()[0] < 128


def test_a_character_without_a_font_is_shown_as_one() -> None:
    """Tibetan, a control character, and half of a pair, which is no text."""
    [line] = wrap("a \u0f56 \x07 \ud800", 1000, 13, 1)
    assert shown(line) == f"a {NOT_SHOWN} {NOT_SHOWN} {NOT_SHOWN}"
    assert {run.face for run in line.runs} == {LATIN}


def test_letters_are_joined() -> None:
    """Arabic letters change their shape in a word; a family of emoji is one picture."""
    [word] = wrap("بيت", 1000, 40, 1)
    alone = sum(wrap(letter, 1000, 40, 1)[0].width for letter in "بيت")
    assert word.width < 0.8 * alone
    family, man = (wrap(text, 1000, 40, 1)[0].width for text in ("👨‍👩‍👧", "👨"))
    assert family < 1.5 * man


def test_letters_have_the_regular_weight() -> None:
    """The CJK font's own default is its thinnest."""
    thin = ImageFont.truetype(str(font_file(CJK)), 40)
    assert sum(load_font(CJK, 40).getmask("木")) > 1.5 * sum(thin.getmask("木"))


@pytest.mark.parametrize(
    ("text", "left_to_right"),
    [
        ("abc אבג def", ["abc ", "אבג", " def"]),
        ("אבג abc דהו", ["דהו", "abc", "אבג"]),
        ("אבג 12 דהו", ["דהו", "12", "אבג"]),
        ("abc אבג 12, 34 def", ["abc ", "34", "12", "אבג", "def"]),
        ("abc 12 def", ["abc 12 def"]),
        ("ثم (abc) بيت", ["بيت", "abc", "ثم"]),
    ],
)
def test_runs_are_in_the_order_of_reading(text: str, left_to_right: list[str]) -> None:
    """As UAX #9 orders them: the first letter decides where the line starts."""
    [line] = wrap(text, 1000, 13, 1)
    words = [run.text for run in line.runs if any(letter.isalnum() for letter in run.text)]
    assert [word.strip(" ()") for word in words] == [word.strip() for word in left_to_right]


@pytest.mark.parametrize(
    ("text", "place"), [("東京の写真", JAPANESE), ("漢字 한글", KOREAN), ("東京", CHINESE)]
)
def test_han_characters_have_the_shapes_of_their_language(text: str, place: int) -> None:
    """Kana or Hangul near them tell which."""
    [line] = wrap(text, 1000, 13, 1)
    assert line.han == place
    assert load_font(CJK, 13, JAPANESE).getname() != load_font(CJK, 13, CHINESE).getname()


@pytest.mark.parametrize("script", TEXTS)
def test_lines_fit_and_lose_nothing(script: str) -> None:
    """Scripts without spaces break between letters; signs never begin a line."""
    text = " ".join([TEXTS[script]] * 3)
    lines = wrap(text, 120, 13, 50)
    assert all(line.width <= 120 for line in lines)
    assert sorted("".join(map(shown, lines)).replace(" ", "")) == sorted(text.replace(" ", ""))
    assert not any(shown(line)[0] in "。，、" for line in lines)


@pytest.mark.parametrize("text", ["word " * 20_000, "字" * 100_000, "w" * 100_000, "ب " * 50_000])
def test_what_does_not_fit_is_cut_with_an_ellipsis(text: str) -> None:
    lines = wrap(text, 120, 13, 3)
    assert len(lines) == 3
    assert all(60 < line.width <= 120 for line in lines)
    assert "…" in shown(lines[-1])
    assert "…" not in shown(lines[0]) + shown(lines[1])


def test_an_empty_text_has_no_lines() -> None:
    assert wrap(" \n ", 120, 13, 3) == []


def test_digits_after_an_emoji_are_letters() -> None:
    """The emoji font has digits too, which belong to key caps."""
    [line] = wrap("😀 12", 1000, 13, 1)
    assert [run.face for run in line.runs] == [EMOJI, LATIN]
