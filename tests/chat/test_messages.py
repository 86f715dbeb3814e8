"""Chats rendered as transformers renders them; hostile templates reach nothing and end."""

import time
from pathlib import Path

import pytest

import quintet
from quintet.api.chat_call import ChatCall
from quintet.chat import template as templates
from quintet.chat.messages import ChatOptions, conversations, load_chat_template, render_chat
from quintet.chat.template import render_template
from quintet.config import StructuredOutputsConfig
from quintet.tokenizers.tokenizer import load_tokenizer
from tests.helpers.checkpoints import tokenizers as builders

BUNDLED = Path(quintet.__file__).parent / "bundled"
USER = {"role": "user", "content": "Hello"}

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}{%- endif %}
    {%- if message.reasoning_content is defined and loop.index0 == ns.last %}
        {{- '<think>' ~ message.reasoning_content ~ '</think>' }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ call.function.name ~ ' ' ~ call.function.arguments | tojson(indent=2) ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
TRIMMING = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] | trim %}
{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if loop.first and system %}{{ '[SYS] ' + system + '\n' }}{% endif %}
    {{ '[' + message['role'] | upper + '] ' + message['content'] | trim + eos_token }}
{% endfor %}
{% if add_generation_prompt %}{{ '[ASSISTANT]' }}{% endif %}"""
PARTS = """{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
{%- endif %}
{% generation %}{{ message.role }}{% endgeneration %}{% if message.role == 'assistant' %}{% break %}{% endif %}
{% endfor %}"""

CHATS = [
    [USER],
    [{"role": "system", "content": " Be  kind. "}, {"role": "user", "content": "  spaced\n"}],
    [USER, {"role": "assistant", "content": "Hi <|end|> \ufffd👋🏽"}, {"role": "user", "content": "מה"}],
    [USER, {"role": "assistant", "content": "so", "reasoning": "because"}],
    [USER, {"role": "assistant", "content": "so", "reasoning_content": None, "name": None}],
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "x": "é<>&'"}}}]


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request, tmp_path_factory):
    return getattr(builders, request.param)(tmp_path_factory.mktemp("chat"))


def render_chats(tokenizer, messages, **options):
    return [render_chat(tokenizer, each, ChatOptions(**options)) for each in conversations(messages)]


def as_transformers(tokenizer, messages, **options):
    extra = options.pop("chat_template_kwargs", {})
    text = tokenizer.hf.apply_chat_template(messages, tokenize=False, **options, **extra)
    return text, tokenizer.hf.apply_chat_template(messages, tokenize=True, return_dict=False, **options, **extra)


@pytest.mark.parametrize("template", [builders.TEMPLATE, CHATML, TRIMMING, PARTS], ids=["plain", "ml", "trim", "parts"])
@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
def test_text_and_ids_equal_transformers(tokenizer, template, chat):
    for options in ({"add_generation_prompt": True}, {"add_generation_prompt": False}, {"tools": TOOLS}):
        wanted = as_transformers(tokenizer, chat, chat_template=template, **{"add_generation_prompt": True, **options})
        (prompt,) = render_chats(tokenizer, chat, chat_template=template, **options)
        assert (prompt.text, prompt.token_ids) == wanted


def test_variables_for_the_template_equal_transformers(tokenizer):
    options = {"chat_template": CHATML, "chat_template_kwargs": {"enable_thinking": False}}
    (prompt,) = render_chats(tokenizer, [USER], **options)
    assert prompt.text == as_transformers(tokenizer, [USER], add_generation_prompt=True, **options)[0]
    assert prompt.text.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("template", [builders.TEMPLATE, CHATML, TRIMMING], ids=["plain", "ml", "trim"])
@pytest.mark.parametrize("content", ["Once upon", "Once upon ", "user", "assistant"])
def test_continuing_the_last_message_equals_transformers(tokenizer, template, content):
    chat = [USER, {"role": "assistant", "content": content}]
    options = {"chat_template": template, "continue_final_message": True}
    (prompt,) = render_chats(tokenizer, chat, **options)
    assert (prompt.text, prompt.token_ids) == as_transformers(tokenizer, chat, **options)
    assert prompt.text.rstrip().endswith(content.rstrip())


def test_generate_on_the_rendered_text_gives_the_same_ids(tokenizer):
    (prompt,) = render_chats(tokenizer, [USER])
    assert tokenizer.encode(prompt.text) == prompt.token_ids
    assert prompt.token_ids.count(tokenizer.bos_id) == 1


def test_parts_of_text_are_joined_or_left_to_a_template_that_takes_them(tokenizer):
    parts = [{"type": "text", "text": "one"}, "two", {"type": "input_text", "text": "three"}]
    chat = [{"role": "user", "content": parts}]
    (joined,) = render_chats(tokenizer, chat)
    assert "one\ntwo\nthree" in joined.text
    (own,) = render_chats(tokenizer, chat, chat_template=PARTS)
    assert "onetwothree" in own.text
    (one,) = render_chats(tokenizer, [{"role": "user", "content": parts[:1]}])
    assert one == render_chats(tokenizer, [{"role": "user", "content": "one"}])[0]


def test_arguments_of_a_tool_call_may_be_json_text(tokenizer):
    def chat(arguments):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    (text,) = render_chats(tokenizer, chat('{"a": 1}'), chat_template=CHATML)
    (data,) = render_chats(tokenizer, chat({"a": 1}), chat_template=CHATML)
    assert text == data
    assert '"a": 1' in text.text


def test_several_conversations_in_order(tokenizer):
    other = [{"role": "user", "content": "fox"}]
    one, two = render_chats(tokenizer, [[USER], other])
    assert [one, two] == [*render_chats(tokenizer, [USER]), *render_chats(tokenizer, other)]


def test_a_template_from_a_file_but_not_for_a_server(tokenizer, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(builders.TEMPLATE)
    assert load_chat_template(str(file)) == load_chat_template(file) == builders.TEMPLATE
    (literal,) = render_chats(tokenizer, [USER], chat_template=str(file))
    assert literal.text == str(file)
    with pytest.raises(ValueError, match="neither Jinja text nor a readable file"):
        load_chat_template("nowhere.jinja")


def test_an_option_that_is_not_known_is_refused(tokenizer):
    with pytest.raises(ValueError, match="unknown chat option 'tool'; did you mean 'tools'"):
        ChatCall(tokenizer, "", [USER], {"tool": []}, StructuredOutputsConfig())


def test_a_role_or_key_that_the_template_names_is_known(tokenizer):
    template = "{% for m in messages %}{% if m.role == 'ipython' %}{{ m.content ~ m.channel }}{% endif %}{% endfor %}"
    (prompt,) = render_chats(
        tokenizer, [{"role": "ipython", "content": "x", "channel": "y"}], chat_template=template, tools=None
    )
    assert prompt.text == "xy"


@pytest.mark.parametrize(
    "copied",
    [
        {"annotations": None, "audio": None, "refusal": None, "tool_calls": None},  # openai, model_dump()
        {"parsed": None}, {"annotations": [{"type": "url_citation"}]}, {"images": []}, {"thinking_blocks": [{}]},
        {"provider_specific_fields": {"refusal": None}, "reasoning_details": [{}]},  # litellm
        {"cache_control": {"type": "ephemeral"}}, {"index": None},
    ],
)  # fmt: skip
def test_what_clients_copy_from_answers_changes_nothing(tokenizer, copied):
    said = [USER, {"role": "assistant", "content": "so"}, USER]
    (plain,) = render_chats(tokenizer, said)
    (with_copy,) = render_chats(tokenizer, [USER, {**said[1], **copied}, USER])
    assert with_copy.token_ids == plain.token_ids


@pytest.mark.parametrize("more", [{"images": [{"url": "x"}]}, {"audio": {"id": "a"}}])
def test_what_would_change_an_answer_is_not_passed_over(tokenizer, more):
    with pytest.raises(ValueError, match="unknown key of message 0"):
        render_chats(tokenizer, [{"role": "assistant", "content": "so", **more}, USER])


def test_a_template_per_purpose(tmp_path):
    tokenizer = builders.byte_level(tmp_path)
    tokenizer.chat_template = {"default": "plain{{ messages[0].content }}", "tool_use": "tools"}
    assert render_chats(tokenizer, [USER])[0].text == "plainHello"
    assert render_chats(tokenizer, [USER], tools=TOOLS)[0].text == "tools"
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        render_chats(tokenizer, [USER])


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "messages must be a list"),
        ("Hello", {}, "messages must be a list"),
        (None, {}, "messages must be a list"),
        ([[]], {}, "1 to 10000 messages, not 0"),
        ([USER, "Hello"], {}, "message 1 must be a dict"),
        ([7], {}, "a conversation is a list of messages, not int"),
        ([{"content": "x"}], {}, "message 0 has the role None"),
        ([{"role": "usr", "content": "x"}], {}, "unknown role 'usr'; did you mean 'user'"),
        ([{"role": "user|>", "content": "x"}], {}, "unknown role"),
        ([{"role": "user"}], {}, r"message 0 \(user\) has no content"),
        ([{"role": "user", "contnt": "x"}], {}, "unknown key of message 0 'contnt'; did you mean 'content'"),
        ([{"role": "user", "content": 5}], {}, "content must be text or a list of parts, not int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "kind image, which is not served: this model"),
        ([{"role": "user", "content": [5]}], {}, "parts of type 'int' are not supported"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "part of type 'text' must hold text"),
        ([{"role": "user", "content": "a\udc00"}], {}, r"content of message 0 has a lone surrogate, U\+DC00"),
        ([{**USER, "name": object()}], {}, "message 0: name must be plain data"),
        ([{**USER, "name": float("nan")}], {}, "must be plain data"),
        ([{"role": "assistant", "tool_calls": "x"}], {}, "tool_calls must be a list"),
        ([USER], {"tools": [print]}, "tools must be a list of dicts"),
        ([USER], {"chat_template_kwargs": {"enable_thinkin": 1}, "chat_template": CHATML}, "mean 'enable_thinking'"),
        ([USER], {"chat_template": "{% if %}"}, "chat template has an error in line 1"),
        ([USER], {"chat_template": "{{ nothing.at_all }}"}, "needs something that was not given: 'nothing'"),
        ([USER], {"chat_template": "{{ raise_exception('not so') }}"}, "refuses these messages: not so"),
        ([USER], {"chat_template": "{{ messages[0].content + 1 }}"}, "fails on these messages: TypeError"),
        ([USER], {"chat_template": "{{ 1 }}", "continue_final_message": True}, "leaves out the last message"),
        ([{"role": "assistant"}], {"continue_final_message": True}, "needs a last message with text"),
        ([USER, USER], {"chat_template": TRIMMING}, "roles must alternate"),
        ([USER], {"chat_template": "{# #}" + "x" * 2**18}, "the limit is"),
    ],
)
def test_bad_chats_are_refused_with_the_reason(tokenizer, messages, options, message):
    with pytest.raises(ValueError, match=message):
        render_chats(tokenizer, messages, **options)


def test_the_bundled_models_chats_equal_transformers():
    tokenizer = load_tokenizer(BUNDLED)
    for chat in CHATS:
        for options in ({}, {"tools": TOOLS}, {"chat_template_kwargs": {"enable_thinking": True}}):
            wanted = as_transformers(tokenizer, chat, add_generation_prompt=True, **options)
            (prompt,) = render_chats(tokenizer, chat, **options)
            assert (prompt.text, prompt.token_ids) == wanted
            assert tokenizer.encode(prompt.text) == prompt.token_ids


# ---------------------------------------------------------------------------------------------------- hostile templates

DOUBLING = "{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{{% set ns.x = {step} %}}{{% endfor %}}{end}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{{ '('" + "* 9" * 1000 + " }}",
        "{{ " + "(" * 500 + "1" + ")" * 500 + " }}",
        "{{ 'a' * 10**10 }}",
        "{{ 10 ** 10 ** 10 ** 10 }}",
        "{{ 'a'.center(10**10) }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ 'a' | indent(10000000000, true) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=9999999999) }}",
        "{{ '\\t'.expandtabs(10**10) }}",
        "{{ [1] | batch(9999999999, 'x') | list }}",
        "{{ range(100000) | map('center', 16000000) | list }}",
        "{{ range(10**9) }}",
        "{{ {} | tojson(indent=10**9) }}",
        "{{ strftime_now('%99999999Y') }}",
        "{{ lipsum(10**9) }}",
        DOUBLING.format(start="'aa'", step="ns.x ~ ns.x", end=""),
        DOUBLING.format(start="'aa'", step="ns.x + ns.x", end=""),
        DOUBLING.format(start="'aa'", step="ns.x.replace('a', 'aa')", end=""),
        DOUBLING.format(start="'aa'", step="[ns.x, ns.x] | join(ns.x)", end=""),
        DOUBLING.format(start="'aa'", step="ns.x.join([ns.x, ns.x])", end=""),
        DOUBLING.format(start="'aa'", step="'%s%s' % (ns.x, ns.x)", end=""),
        DOUBLING.format(start="'aa'", step="'{0}{0}'.format(ns.x)", end=""),
        DOUBLING.format(start="[1]", step="[ns.x, ns.x]", end="{{ ns.x | tojson }}"),
        DOUBLING.format(start="[1]", step="{'a': ns.x, 'b': ns.x}", end="{{ ns.x }}"),
        DOUBLING.format(start="[1]", step="dict(a=ns.x, b=ns.x)", end="{{ ns.x }}"),
        DOUBLING.format(start="[1]", step="ns.x + ns.x", end=""),
    ],
)
def test_a_hostile_template_ends(monkeypatch, source):
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.3)
    started = time.thread_time()
    with pytest.raises(ValueError, match="^the chat template (was stopped|nests|fails|needs|has an error)"):
        render_template(source, {"messages": [USER]})
    assert time.thread_time() - started < 10


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict._paid.__self__ }}",
        "{{ dict.fromkeys.__func__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ ('{0.__class__}' | format(1)) ~ '%s'.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace(a=1) %}{% set ns.__class__ = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.getcwd() }}",
        "{{ [].__class__ }}{{ (1).__class__ }}",
        "{{ loop.__class__ }}",
    ],
)
def test_a_hostile_template_reaches_no_python_object(source):
    messages = [dict(USER)]
    try:
        text = render_template(source, {"messages": messages})
    except ValueError as error:
        assert str(error).startswith("the chat template")
    else:
        assert text.strip(" []{}'") in ("", "Undefined")
    assert messages == [USER]


def test_ordinary_expressions_are_not_in_the_way():
    table = {
        "{{ 'a' in 'abc' and 1 < 2 < 3 and not (2 == 3) }}": "True",
        "{{ [3, 1] | sort | join(',') }}": "1,3",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}": "1",
        "{{ 'a,b'.split(',') }}{{ 'abc'[::-1] }}{{ (1, 2)[:1] }}": "['a', 'b']cba(1,)",
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% break %}{% endfor %}": "a1",
        "{% for k, v in {'a': 1} | items %}{{ k }}{{ v }}{% endfor %}": "a1",
        "{{ none }} {{ 1.5 }} {{ true }} {{ 7 // 2 }} {{ 7 % 4 }} {{ '%d-%s' % (1, 'x') }}": "None 1.5 True 3 3 1-x",
        "{{ '{}-{a}'.format(1, a=2) }}{{ dict(a=1) }}{{ dict.fromkeys([1]) }}": "1-2{'a': 1}{1: None}",
        "{% set a, b = 1, 2 %}{{ b }}{{ a if a == 1 else b }}": "21",
        "{{ '<é>&' | tojson }}{{ {'b': 1, 'a': 2} | tojson }}": '"<é>&"{"b": 1, "a": 2}',
        "{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) ~ m('a') }}": "[1][a]",
        "{% set x %}inner{% endset %}{{ x | upper | length }}": "5",
        "{{ strftime_now('%Y') | length }}": "4",
        "{{ (messages[0].content | default('', true))[-2:] }}": "lo",
    }
    for source, wanted in table.items():
        assert render_template(source, {"messages": [USER]}) == wanted, source


def test_a_long_chat_is_not_stopped(tokenizer):
    chat = [USER, {"role": "assistant", "content": "Hi there. " * 50}] * 1000
    (prompt,) = render_chats(tokenizer, chat, chat_template=TRIMMING)
    assert len(prompt.text) > 1000 * 500
