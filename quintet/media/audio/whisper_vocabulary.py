"""Whisper's languages, codes in the order of their tokens, and timestamps. Source: openai-whisper's tokenizer.py."""

SECONDS_PER_TIMESTAMP = 0.02
TIMESTAMPS = 1501  # <|0.00|> to <|30.00|>

_TABLE = """
en:english zh:chinese de:german es:spanish ru:russian ko:korean fr:french ja:japanese pt:portuguese tr:turkish pl:polish
ca:catalan nl:dutch ar:arabic sv:swedish it:italian id:indonesian hi:hindi fi:finnish vi:vietnamese he:hebrew
uk:ukrainian el:greek ms:malay cs:czech ro:romanian da:danish hu:hungarian ta:tamil no:norwegian th:thai ur:urdu
hr:croatian bg:bulgarian lt:lithuanian la:latin mi:maori ml:malayalam cy:welsh sk:slovak te:telugu fa:persian
lv:latvian bn:bengali sr:serbian az:azerbaijani sl:slovenian kn:kannada et:estonian mk:macedonian br:breton eu:basque
is:icelandic hy:armenian ne:nepali mn:mongolian bs:bosnian kk:kazakh sq:albanian sw:swahili gl:galician mr:marathi
pa:punjabi si:sinhala km:khmer sn:shona yo:yoruba so:somali af:afrikaans oc:occitan ka:georgian be:belarusian tg:tajik
sd:sindhi gu:gujarati am:amharic yi:yiddish lo:lao uz:uzbek fo:faroese ht:haitian_creole ps:pashto tk:turkmen
nn:nynorsk mt:maltese sa:sanskrit lb:luxembourgish my:myanmar bo:tibetan tl:tagalog mg:malagasy as:assamese tt:tatar
haw:hawaiian ln:lingala ha:hausa ba:bashkir jw:javanese su:sundanese yue:cantonese
"""

NAMES = {code: name.replace("_", " ") for code, name in (each.split(":") for each in _TABLE.split())}
CODES = {name: code for code, name in NAMES.items()} | {"jv": "jw", "cmn": "zh", "mandarin": "zh"}


def code_of(language: str) -> str:
    """Returns Whisper's code of a code or an English name: "en" of "EN", "en-US" and "English". ValueError if it knows
    no such language."""
    wanted = language.strip().lower()
    for each in (wanted, wanted.partition("-")[0].partition("_")[0]):
        if each in NAMES or each in CODES:
            return CODES.get(each, each)
    raise ValueError(f"language {language[:40]!r} is none of Whisper's; give an ISO 639-1 code such as 'en'")
