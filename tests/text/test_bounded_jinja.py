"""A template is bounded in time and in what it makes, and renders as ever where it stays within."""

import time
from datetime import datetime

import pytest

from engine.text import bounded_jinja
from engine.text.chat import ChatTemplate
from engine.types.errors import RequestError
from engine.types.prompt import ChatTurn

TURNS = [ChatTurn("user", "hello"), ChatTurn("assistant", "hi"), ChatTurn("user", "bye")]


def render(source: str) -> str:
    template = ChatTemplate(source, origin="a test", variables={}, now=lambda: datetime(2026, 1, 1))
    return template.render(TURNS)


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops in a set": "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endset %}",
    "macros that call twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
}  # fmt: skip
LARGE = {
    "a wide format": "{{ '{:>2000000000}'.format('x') }}",
    "a width that is given": "{{ '{:>{w}}'.format('x', w=2000000000) }}",
    "a wide old format": "{{ '%2000000000d' % 1 }}",
    "a wide format by a filter": "{{ '%2000000000d'|format(1) }}",
    "ljust": "{{ 'x'.ljust(2000000000) }}",
    "center": "{{ 'x'|center(2000000000) }}",
    "times": "{{ 'x' * 2000000000 }}",
    "a list times": "{{ ([1] * 2000000000)|length }}",
    "replace": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "replace by a filter": "{{ ('x' * 1000000)|replace('x', 'y' * 1000000) }}",
    "join": "{{ (['x' * 1000000] * 1000000)|join }}",
    "join by its method": "{{ ''.join(['x' * 1000000] * 1000000) }}",
    "doubling by ~": "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a macro's text": "{% set b = 'x' * 1000000 %}{% macro m() %}{% for i in range(9999) %}{{ b }}{% endfor %}"
    "{% endmacro %}{{ m()|length }}",
    "output": "{% set b = 'x' * 1000000 %}{% for i in range(9999) %}{{ b }}{% endfor %}",
    "powers": "{{ 9 ** 99999 }}",
    "squares": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "indented JSON": "{{ messages|tojson(indent=2000000000) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_never_ends_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_jinja, "LONGEST_S", 0.2)
    began = time.thread_time()
    with pytest.raises(RequestError, match=r"longer than 0\.2 s"):
        render(ENDLESS[name])
    assert time.thread_time() - began < 5


@pytest.mark.parametrize("name", LARGE)
def test_a_template_makes_nothing_huge(name: str) -> None:
    began = time.thread_time()
    with pytest.raises(RequestError, match=r"the template (makes|asks|formats)"):
        render(LARGE[name])
    assert time.thread_time() - began < 1


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role ~ ': ' ~ m.content }};{% endfor %}",
         "1/3user: hello;2/3assistant: hi;3/3user: bye;"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{{ '' if loop.last else ',' }}{% endfor %}",
         "hello,bye"),
        ("{% for m in [] %}x{% else %}nothing{% endfor %}", "nothing"),
        ("{% for m in messages recursive %}{{ m.content|upper }}{% endfor %}", "HELLOHIBYE"),
        ("{{ messages|map(attribute='role')|join(', ') }} {{ messages|length }}", "user, assistant, user 3"),
        ("{{ '%03d' % 7 }} {{ '{:>4}'.format('x') }} {{ 'ab'.replace('a', 'b') * 2 }} {{ 2 ** 10 }}",
         "007    x bbbb 1024"),
        ("{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}", "hello"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ none ~ 1 }}", "a1None1"),
    ],
)  # fmt: skip
def test_what_stays_within_renders_as_ever(source: str, expected: str) -> None:
    assert render(source) == expected
