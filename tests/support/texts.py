"""Varied texts for tokenizer tests, drawn from a seed: scripts, emoji, code, markup, white space, odd characters."""

# ruff: noqa: SIM905  (foreign letters and words in a row are what this file is made of)

import random
from collections.abc import Callable

_LATIN = """
I was charged twice for September, please refund one of the charges. Où est passée ma commande n° 4711 ? Größe & Maße
prüfen; ¿cuánto cuesta el envío? Příliš žluťoučký kůň úpěl ďábelské ódy. Thế giới này rất đẹp. İstanbul'da yağmur.
naïve café, cafe\u0301, don't, it's, e-mail@example.org, $1,234.56 (10%) -- "quoted" 'single' snake_case camelCase
""".split()
_OTHER = """
退款 请问我的订单在哪里？ 日本語のテキスト、カタカナ。 한국어 문장입니다. Где мой заказ? Ελληνικά αβγ.
مرحبا بالعالم שלום עולם
हिन्दी में पाठ বাংলা தமிழ் ไทยภาษา ქართული հայերեն አማርኛ ᚠᚢᚦᚨ 𐎀𐎁𐎂 ꙮ ᠮᠣᠩᠭᠣᠯ
නල් ප්‍රශ්නය ക്ഷമിക്കണം നന്ദി‍ ೠ ဗမာစာ ខ្មែរ བོད་ཡིག ߒߞߏ 𞤀𞤣 ⠓⠑
""".split()
_EMOJI = "😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 ❤️ 🇩🇪 1️⃣ ☃ ⭐️⭐️ 🧑🏿‍💻 \u200d \ufe0f 🫠🫡 ♀️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿".split(" ")
_CODE = """
def f(x):\n\treturn x ** 2|for (int i = 0; i < n; ++i) {\n    a[i] += 1;\n}|SELECT * FROM t WHERE id=42;|#!/bin/sh\n
{"key": [1, 2.5e-3, null]}|\\frac{1}{2}|=====|-----|/* ... */|https://example.org/a?b=c&d=%20|::std::vector<T>&&|0xFF|'''
""".strip().split("|")
_MARKUP = (
    "<b>x</b>|<table><tr><td>1</td></tr></table>|<br/>|<div class='a'>|</html>|<h1>|<h7>|&amp;|<ul>\n<li>|<a href>|<i>"
)
_SPACES = [
    " ",
    "  ",
    "   ",
    " " * 17,
    " " * 40,
    "\n",
    "\n\n",
    "\n" * 7,
    "\n" * 35,
    "\t",
    "\t\t\t",
    "\r\n",
    "\r",
    " \n ",
    "▁",
]
_SPACES += ["▁▁", "\u00a0", "\u2003", "\u3000", "\u2028", "\v", "\f", "\u200b", "\ufeff"]
_CONTROLS = [chr(code) for code in (0, 1, 7, 8, 27, 127, 0x85, 0xAD, 0x202E, 0xFFFD, 0xFFFE, 0xFFFF, 0xE000, 0x10FFFF)]
_NEAR_MARKERS = [
    "<",
    ">",
    "<unused",
    "start_of_turn",
    "[multi",
    "<0x0A>",
    "<0xE2>",
    "<|im_start|>",
    "[INST]",
    "</s>",
    "<s>",
]


def _numbers(rng: random.Random) -> str:
    return rng.choice([str(rng.randrange(10 ** rng.randint(1, 14))), f"{rng.random():.5f}", "1" * rng.randint(1, 9)])


def _any_characters(rng: random.Random) -> str:
    """Code points of one block of the whole range, lone surrogates left out."""
    start = rng.choice(
        [0x20, 0xA0, 0x100, 0x300, 0x900, 0x2000, 0x3040, 0x4E00, 0xA000, 0xFB00, 0x1F300, 0xE0000, 0x10000]
    )
    return "".join(chr(rng.randrange(start, start + 0x400)) for _ in range(rng.randint(1, 4)))


def _repeated(rng: random.Random) -> str:
    return rng.choice(["a", "ab", "ha", "!", "=", "é", "の", "❤️", ".", "-", "<b>", "0"]) * rng.randint(2, 12)


_KINDS: list[tuple[int, Callable[[random.Random], str]]] = [
    (30, lambda rng: rng.choice(_LATIN)),
    (25, lambda rng: rng.choice(_OTHER)),
    (8, lambda rng: rng.choice(_EMOJI)),
    (6, lambda rng: rng.choice(_CODE)),
    (6, lambda rng: rng.choice(_MARKUP.split("|"))),
    (6, lambda rng: rng.choice(_SPACES)),
    (3, lambda rng: rng.choice(_CONTROLS)),
    (3, lambda rng: rng.choice(_NEAR_MARKERS)),
    (6, _numbers),
    (5, _any_characters),
    (3, _repeated),
]


def varied_text(rng: random.Random, parts: int) -> str:
    """`parts` random fragments, most of them joined by one space, the others directly or by other white space."""
    makers = rng.choices([make for _, make in _KINDS], [weight for weight, _ in _KINDS], k=parts)
    text = ""
    for make in makers:
        joint = rng.choice([" ", " ", " ", "", "", rng.choice(_SPACES)]) if text else ""
        text += joint + make(rng)
    return text


def varied_texts(seed: int, count: int, longest: int = 8) -> list[str]:
    """`count` texts of 1 to `longest` fragments each. None spells a control token of Gemma's."""
    rng = random.Random(seed)
    return [varied_text(rng, rng.randint(1, longest)) for _ in range(count)]
