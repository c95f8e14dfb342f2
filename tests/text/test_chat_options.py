"""Tools, calls, thoughts and continued messages in chat templates, as transformers renders them."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.text.chat import ChatTemplate
from engine.types.errors import RequestError
from engine.types.prompt import ChatOptions, ChatTurn, ToolCall

# Written after the shapes that the families use.
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}"
    "{%- endfor %}{{- '<tool_call>...</tool_call><|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}{%- endif %}"
    "{{- message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
PLAIN = (
    "{%- for message in messages %}{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<do>", "parameters": {"type": "object"}}}]
TURNS = [
    ChatTurn("user", "look"),
    ChatTurn("assistant", "", reasoning="hm", tool_calls=(ToolCall("c1", "f", '{"x": [1, "é"]}'),)),
    ChatTurn("tool", "seen", tool_call_id="c1"),
    ChatTurn("assistant", "I see ", name="bot"),
]
MESSAGES = [
    {"role": "user", "content": "look"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}}],
    },
    {"role": "tool", "content": "seen", "tool_call_id": "c1"},
    {"role": "assistant", "content": "I see ", "name": "bot"},
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, origin="test", variables={})


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_tools_and_calls_render_as_in_transformers(begins: bool, variables: dict[str, object]) -> None:
    expected, _ = render_jinja_template(
        [MESSAGES], tools=TOOLS, chat_template=QWEN, add_generation_prompt=begins, **variables
    )
    options = ChatOptions(json.dumps(TOOLS), json.dumps(variables), begins)
    assert template(QWEN).render(TURNS, options) == expected[0]


def test_the_last_message_goes_on_as_in_transformers() -> None:
    for source in (QWEN, PLAIN):
        expected, _ = render_jinja_template(
            [MESSAGES], chat_template=source, continue_final_message=True, add_generation_prompt=False
        )
        options = ChatOptions(add_generation_prompt=False, continue_final=True)
        assert template(source).render(TURNS, options).rstrip() == expected[0].rstrip()
        assert template(source).render(TURNS, options).endswith("I see ")


@pytest.mark.parametrize("content", ["im", "|", "assistant", "user", "a\n", "{{ x }}"])
def test_the_last_message_may_say_what_the_template_says(content: str) -> None:
    options = ChatOptions(add_generation_prompt=False, continue_final=True)
    turns = [ChatTurn("user", content), ChatTurn("assistant", content)]
    rendered = template(QWEN).render(turns, options)
    assert rendered.endswith(f"<|im_start|>assistant\n{content}")
    assert template(QWEN).render(turns, ChatOptions(add_generation_prompt=False)).startswith(rendered)


@pytest.mark.parametrize("content", ["", "  "])
def test_an_empty_message_cannot_go_on(content: str) -> None:
    options = ChatOptions(add_generation_prompt=False, continue_final=True)
    with pytest.raises(RequestError) as refused:
        template(PLAIN).render([ChatTurn("assistant", content)], options)
    assert refused.value.param == "continue_final_message"


def test_a_template_that_knows_no_tools_is_helped_out() -> None:
    options = ChatOptions(tools=json.dumps(TOOLS))
    text = template(PLAIN).render([ChatTurn("user", "hi")], options)
    assert text.startswith("<|system|>You may call")
    assert text.count('"name":"f"') == 1
    text = template(PLAIN).render([ChatTurn("system", "Be brief."), ChatTurn("user", "hi")], options)
    assert text.startswith("<|system|>Be brief.\n\nYou may call")
    assert text.count("<|system|>") == 1


def test_variables_cannot_replace_what_a_template_is_given() -> None:
    options = ChatOptions(variables=json.dumps({"messages": [], "add_generation_prompt": False, "tools": [1]}))
    assert template(PLAIN).render([ChatTurn("user", "hi")], options) == "<|user|>hi<|end|><|assistant|>"
