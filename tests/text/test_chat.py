"""Chat templates render as transformers renders them, and fail as a 400."""

from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.text.chat import ChatTemplate
from engine.text.codec import TextCodec
from engine.types.errors import RequestError, WeightsError
from engine.types.prompt import ChatOptions, ChatTurn
from tests.text.specimens import byte_level, codec, gemma, save

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# Written after the shapes that the families use.
TEMPLATES = {
    "chatml": (
        "{%- if messages[0].role == 'system' %}\n"
        "    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}\n"
        "{%- endif %}\n"
        "{%- set ns = namespace(turns=0, last='') %}\n"
        "{%- for message in messages if message.role != 'system' %}\n"
        "    {%- set ns.turns = ns.turns + 1 %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' + (message.content | trim) + '<|im_end|>' + '\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
    ),
    "alternating": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
        "{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "every feature": (
        "{% for message in messages %}\n"
        "  {% if loop.index > 3 %}{% break %}{% endif %}\n"
        "  {% if message.role == 'assistant' %}\n"
        "    {% set shade = 'inside' %}{% generation %}{% set shade = 'changed' %}"
        "{{ message.content }}{{ shade }}{% endgeneration %}{{ shade }}\n"
        "  {% else %}\n"
        "    {{ message | tojson }} {{ message | tojson(indent=2) }} {{ tools }} {{ documents is none }}\n"
        "  {% endif %}\n"
        "{% endfor %}\n"
        "{{ dict(a=1) | tojson }} {{ range(3) | list }} {{ add_generation_prompt }} {{ missing is defined }}\n"
        "{% macro shout(text) %}{{ text | upper }}{% endmacro %}{{ shout('end') }}\n"
    ),
}
CONVERSATIONS = {
    "one": [("user", "Hello <b>you</b> & “quotes” 🙂")],
    "three": [("user", " a "), ("assistant", "b\n"), ("user", "c")],
    "long": [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "")],
}


def turns(conversation: list[tuple[str, str]]) -> list[ChatTurn]:
    return [ChatTurn(role, content) for role, content in conversation]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, origin="chat_template.jinja", variables=TOKENS)


@pytest.mark.parametrize("conversation", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_rendering_agrees_with_transformers(source, conversation):
    expected, _ = render_jinja_template(
        conversations=[[{"role": role, "content": content} for role, content in conversation]],
        chat_template=source,
        add_generation_prompt=True,
        **TOKENS,
    )
    assert template(source).render(turns(conversation)) == expected[0]


def test_the_clock_of_a_template_is_the_one_given():
    source = "{{ strftime_now('%d %b %Y') }}"
    clocked = ChatTemplate(source, origin="x", variables={}, now=lambda: datetime(2024, 7, 26))
    assert clocked.render(turns([("user", "a")])) == "26 Jul 2024"


def test_a_template_that_raises_is_a_400_with_its_message():
    with pytest.raises(RequestError, match="roles must alternate") as refusal:
        template(TEMPLATES["alternating"]).render(turns([("assistant", "first")]))
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ undefined_function() }}",
        "{{ messages[0].nope.nope }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{% set ns = namespace(_private=1) %}",
        "{% macro loop_for_ever(n) %}{{ loop_for_ever(n) }}{% endmacro %}{{ loop_for_ever(1) }}",
        "{{ raise_exception('x' * 100000) }}",
    ],
)
def test_however_a_template_fails_it_is_a_short_400(source):
    with pytest.raises(RequestError) as refusal:
        template(source).render(turns([("user", "hello")]))
    assert refusal.value.status == 400
    assert len(refusal.value.message) < 600


AT_THE_START = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{{ message.role[0] }}:{{ message.content }};{% endfor %}"
)
FIRST_ONLY = (
    "{% if messages[0].role == 'system' %}s:{{ messages[0].content }};{% endif %}"
    "{% for message in messages if message.role != 'system' %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
)
ANYWHERE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
NOWHERE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% elif (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
)
AGENTS_TURNS = {
    "two at the start": [("system", "a"), ("system", "b"), ("user", "c")],
    "one behind the user": [("system", "a"), ("user", "b"), ("system", "c")],
    "none at the start": [("user", "b"), ("system", "c"), ("assistant", "d"), ("system", "e")],
}
KEPT = {
    "two at the start": "s:a;s:b;u:c;",
    "one behind the user": "s:a;u:b;s:c;",
    "none at the start": "u:b;s:c;a:d;s:e;",
}
ONE_AT_THE_START = {
    "two at the start": "s:a\n\nb;u:c;",
    "one behind the user": "s:a;u:b\n\nc;",
    "none at the start": "u:b\n\nc;a:d;u:e;",
}
ALL_THE_USERS = {
    "two at the start": "u:a\n\nb\n\nc;",
    "one behind the user": "u:a\n\nb\n\nc;",
    "none at the start": "u:b\n\nc;a:d;u:e;",
}


@pytest.mark.parametrize("conversation", AGENTS_TURNS)
@pytest.mark.parametrize(
    "source, expected",
    [(ANYWHERE, KEPT), (AT_THE_START, ONE_AT_THE_START), (FIRST_ONLY, ONE_AT_THE_START), (NOWHERE, ALL_THE_USERS)],
    ids=["anywhere", "at the start", "the first, others left out", "nowhere"],
)
def test_system_messages_stand_where_the_template_takes_them(source, expected, conversation):
    assert template(source).render(turns(AGENTS_TURNS[conversation])) == expected[conversation]


def test_a_conversation_that_grows_by_system_messages_begins_as_before():
    grown = [("system", "a"), ("user", "b"), ("system", "c"), ("assistant", "d"), ("user", "e"), ("system", "f")]
    for source in (AT_THE_START, FIRST_ONLY, NOWHERE):
        ours = template(source)
        assert ours.render(turns(grown)).startswith(ours.render(turns(grown[:3])))


def test_what_a_template_takes_in_no_arrangement_is_refused_for_its_first_reason():
    with pytest.raises(RequestError, match="must be at the beginning"):
        template(AT_THE_START + "{{ 1 / 0 }}").render(turns([("user", "a"), ("system", "b")]))
    assert template("x").render(turns([("user", "a"), ("system", "b")])) == "x"


def test_tools_are_explained_to_a_model_whose_template_has_no_system_message():
    text = template(NOWHERE).render(turns([("user", "a")]), ChatOptions(tools='[{"name":"f"}]'))
    assert text.startswith("u:You may call")
    assert text.endswith("\n\na;")


def test_a_namespace_takes_any_public_name():
    source = "{% set ns = namespace(self=1, a=2) %}{% set ns.b = 3 %}{{ ns.self + ns.a + ns.b }}"
    assert template(source).render(turns([("user", "hello")])) == "6"


def test_a_broken_template_is_named_at_the_start(tmp_path):
    directory = save(byte_level(), tmp_path, chat_template="{{ 'one' }}\n{% if %}")
    with pytest.raises(WeightsError, match=r"tokenizer_config\.json: the chat template is broken at line 2"):
        TextCodec.load(directory)


def test_chats_are_encoded_without_a_second_bos(tmp_path):
    ours = codec(gemma(), tmp_path, chat_template=TEMPLATES["alternating"], bos_token="<s>")
    token_ids = ours.encode_chat(turns([("user", "fox")])).token_ids
    assert token_ids.tolist().count(1) == 1
    assert ours.decode(token_ids, skip_special_tokens=False) == "<s>[INST] fox [/INST]"
    assert ours.encode("fox").tolist()[0] == 1


def test_a_model_without_template_refuses_messages(codecs_by_kind):
    with pytest.raises(RequestError, match="no chat template") as refusal:
        codecs_by_kind["byte_level"].encode_chat(turns([("user", "hello")]))
    assert (refusal.value.status, refusal.value.code) == (400, "no_chat_template")


def test_the_template_file_stands_above_the_configuration_and_default_above_other_names(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    directory = save(byte_level(), tmp_path, chat_template=named)
    (user,) = turns([("user", "hello")])
    ours = TextCodec.load(directory)
    assert ours.decode(ours.encode_chat([user]).token_ids) == "default"
    (directory / "chat_template.jinja").write_text("file")
    ours = TextCodec.load(directory)
    assert ours.decode(ours.encode_chat([user]).token_ids) == "file"
    only_named = codec(byte_level(), tmp_path / "named", chat_template=named[:1])
    with pytest.raises(RequestError, match="no chat template"):
        only_named.encode_chat([user])


def test_a_document_is_a_message_like_others_where_the_template_knows_that_role(tmp_path):
    named = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ours = codec(byte_level(), tmp_path, chat_template=named)
    conversation = turns([("user", "what does it say?"), ("document", "fish swim")])
    assert ours.decode(ours.encode_chat(conversation).token_ids) == "<user>what does it say?<document>fish swim"
