"""The words and characters of the tiny vocabulary. Every entry of `WORDS` becomes a piece of its own."""

_COMMON = """
the of and to in is for that with was on as are it this be by from or at not have you your we our they his her its an
a I he she what who when where which how why can could would should will do does did has had were been if then so no
yes customer support message refund charge charged charges twice billing bill technical account shipping cancellation
invoice payment order please help answer question asking article topic news sport politics business science text about
one two three four first last positive negative neutral true false good bad price
Yes No Is Does Answer Question The Customer Topic Which What A B C D True False Billing Text Article
YES NO BILLING TRUE FALSE
"""
_BARE = """
yes no Yes No YES NO true false a b c A B C D refund billing technical account shipping Answer Question
退款 客户 ing ation ll
"""

WORDS: tuple[str, ...] = tuple(dict.fromkeys([f"▁{word}" for word in _COMMON.split()] + _BARE.split()))

ZWJ, VARIATION, WOMAN, HEART, THUMB, TONE = "\u200d", "\ufe0f", "\U0001f469", "\u2764", "\U0001f44d", "\U0001f3fd"

# Pieces across character classes, where a content and a template may merge. Halves stand before wholes.
EXTRA_PIECES: tuple[str, ...] = (
    "..", "...", "?!", "!!", "!▁", "::", "▁(", ").", "),", "'s", "▁'", '▁"', '".', "//", "://", "--", "▁-", "==", "▁=",
    "▁<", "▁</", ">▁</", "▁$", "$1", "00", "000", "20", "10", "12", "19", "▁1", "é", "▁é", "n't",
    THUMB + TONE, WOMAN + ZWJ, ZWJ + HEART, HEART + VARIATION,
)  # fmt: skip

_LATIN = "".join(chr(code) for code in range(0x21, 0x7F))
_OTHER = "▁éèüößñçàâêîôûø¿¡€£“”…·退款客户您好请问日本語のбвгдежз" + ZWJ + VARIATION + WOMAN + HEART + THUMB + TONE
CHARACTERS: tuple[str, ...] = tuple(dict.fromkeys(_LATIN + _OTHER))
