"""Pre-tokenizers: how a byte-level vocabulary's texts are cut into words before merges, by the name in the file.

The expressions are llama.cpp's reading of those in the models' tokenizer.json: letters outside of ASCII are upper and
lower case at once where a model tells the cases apart. They are for Oniguruma, as tokenizers uses it.
"""

from collections.abc import Mapping
from typing import NamedTuple

_SHORT = "'s|'t|'re|'ve|'m|'ll|'d"
_SHORT_ANY = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

_WORDS = rf"{_SHORT_ANY}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_GPT2 = _SHORT + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_MARKED = rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_MARKED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
# Counted from a number's end. What stands before the first stays with it, and its spaces are cut by what comes next.
_GROUPS_OF_THREE = r"[^\p{N}]*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_LINES = r"[^\n]+|\n+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


def _cased(
    upper: str, lower: str, short: str, numbers: str, rest: str = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
) -> str:
    """Words that end where a small letter is followed by a capital."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return rf"{first}{upper}*{lower}+{short}|{first}{upper}+{lower}*{short}|{numbers}|{rest}"


_UPPERS, _LOWERS = r"[\p{L}\p{M}]", r"[\p{L}\p{M}]"
_GPT4O = _cased(_UPPER, _LOWER, f"{_SHORT_ANY}?", r"\p{N}{1,3}")
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ebef\U0002f800-\U0002fa1f"
_NOT_HAN = rf"[\p{{L}}&&[^{_HAN}]]"
_KIMI = rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN}+{_SHORT_ANY}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_JAIS2 = "|".join(
    [*(rf"\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s"]
)

# Letters that have a case, as Unicode had them when DeepSeek's first tokenizer was made.
_DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d"
    "\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_KANA}"
)


class PreTokenizer(NamedTuple):
    """Patterns that cut texts into words, and settings that come with them."""

    patterns: tuple[str, ...]  # each is looked for in what the ones before it left, and what it matches stands alone
    ignore_merges: bool = False  # a word that is a token is that token, whatever merges say (ignore_merges)
    bos: bool = False  # a text begins with BOS, where the file does not say
    spelled: bool = True  # words are written in GPT-2's letters for bytes; else as they are, with U+2581 for spaces


def _named(words: PreTokenizer, names: str) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), words)


WORDS: Mapping[str, PreTokenizer] = {
    **_named(PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
    **_named(
        PreTokenizer((_LLAMA3,), ignore_merges=True, bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    **_named(PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    **_named(PreTokenizer((_LLAMA3,), ignore_merges=True), "glm4 glm5"),
    **_named(
        PreTokenizer((rf"{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|{_JAIS2}",)),
        "jais-2",
    ),
    **_named(
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
                r"\s+\z",
                "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    **_named(
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")),
        "deepseek-coder",
    ),
    **_named(PreTokenizer((r"\p{N}{1,3}", _KANA, _DEEPSEEK3)), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    **_named(
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _KANA,
                rf"{_MARKED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
                r"\p{N}",
            )
        ),
        "spark2_5",
    ),
    **_named(
        PreTokenizer((_YOUTU, _cased(_UPPERS, _LOWERS, f"{_SHORT_ANY}?", r"\p{N}")), ignore_merges=True),
        "youtu",
    ),
    **_named(PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    **_named(PreTokenizer((r"\p{N}", _GPT2)), "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    **_named(
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert exaone4 jina-v1-en "
        "jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling",
    ),
    **_named(
        PreTokenizer((_QWEN2,)),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
    ),
    **_named(
        PreTokenizer(
            (
                rf"{_SHORT_ANY}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
                rf"|{_SPACES}",
            )
        ),
        "qwen35",
    ),
    **_named(PreTokenizer((rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS}|{_SPACES}",)), "ufakzeka"),
    **_named(PreTokenizer((_LINES, _QWEN2)), "laguna"),
    **_named(PreTokenizer((_BLOOM,)), "poro-chat bloom gpt3-finnish"),
    **_named(PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    **_named(PreTokenizer((_cased(_UPPER, _LOWER, "", r"\p{N}"),), ignore_merges=True, bos=True), "tekken"),
    **_named(
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            bos=True,
        ),
        "chameleon",
    ),
    **_named(PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    **_named(
        PreTokenizer(
            (_cased(r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]", f"{_SHORT_ANY}?", r"\p{N}{1,3}"),),
            ignore_merges=True,
        ),
        "granite-embed-multi-97m",
    ),
    **_named(
        PreTokenizer((_GROUPS_OF_THREE, _cased(_UPPERS, _LOWERS, f"{_SHORT_ANY}?", r"\p{N}{1,3}"))),
        "tiny_aya cohere2moe",
    ),
    **_named(PreTokenizer((_KIMI,)), "kimi-k2"),
    **_named(PreTokenizer((r"\p{N}+", r"(?=([0-9]{3})+(?![0-9]))")), "superbpe"),
    **_named(
        PreTokenizer(
            (
                r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        "bailingmoe bailingmoe2 llada-moe",
    ),
    **_named(
        PreTokenizer((rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
        "seed-coder",
    ),
    **_named(
        PreTokenizer(
            (
                _GROUPS_OF_THREE,
                _ASIAN,
                _DEEPSEEK3,
            )
        ),
        "afmoe",
    ),
    **_named(
        PreTokenizer(
            (
                rf"{_SHORT_ANY}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        "exaone-moe",
    ),
    **_named(
        PreTokenizer((r"\p{N}{1,3}", rf"{_WORDS}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"), ignore_merges=True),
        "minicpm5",
    ),
    **_named(PreTokenizer((_LINES,), bos=True, spelled=False), "gemma4 granite-embed-multi-311m"),
    **_named(PreTokenizer((_LINES,), spelled=False), "sarvam-moe"),
}
