"""Chat templates render as transformers renders them, and what a template refuses comes back in its words."""

from typing import Any

import pytest
from checkpoint_files import CHATML, tokenizer

from contract.domain.errors import Fault, PenstockError
from contract.domain.request import Message
from tokenizer_svc.core.chat import MAX_RENDERED_CHARS, MAX_TEMPLATE_CHARS, ChatTemplates

_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

_HEADERS = """\
{{- bos_token }}
{%- if not date is defined %}
    {%- set date = "1 January" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "Be brief." %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\nToday: " + date + "\\n" }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{{- system + "<|eot|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("one tool call at a time, please") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>' + call.name + ': ' + (call.arguments | tojson) + '<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""

_ALTERNATING = """\
{{ bos_token }}{% set ns = namespace(index=0) %}
{% for message in messages %}
    {% if (message.role == 'user') != (ns.index % 2 == 0) %}
        {{ raise_exception('roles must alternate user/assistant/user/...') }}
    {% endif %}
    {% set ns.index = ns.index + 1 %}
    {% if message.role == 'user' %}
        {{ ' [INST] ' + message.content + ' [/INST]' }}
    {% elif message.role == 'assistant' %}
        {% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
"""

_LOOPS = """\
{% for message in messages %}
{% if loop.index > 2 %}{% break %}{% endif %}
{% if message.role == 'tool' %}{% continue %}{% endif %}
{{ loop.index0 }}:{{ message.role }}={{ message.content | upper }};{{ message.name or 'nobody' }}
{% endfor %}
{% for document in documents or [] %}[{{ document.title }}]{% endfor %}
{{ {"a": "<b> & 'c'", "ü": [1, none, true]} | tojson }}
{% macro greet(who) %}hi {{ who }}{% endmacro %}{{ greet(flavour | default("you")) }}
"""

_TEMPLATES = {"chatml": CHATML, "headers": _HEADERS, "alternating": _ALTERNATING, "loops": _LOOPS}

_TURNS = (Message("user", " What is <1> & 2? "), Message("assistant", "Three."), Message("user", "日本語 \n é"))
_SYSTEM = (Message("system", " Speak up. "), *_TURNS)
_CALLS: tuple[Message, ...] = (
    Message("user", "Rain?"),
    Message(
        "assistant",
        "",
        {"tool_calls": [{"type": "function", "function": {"name": "rain", "arguments": {"at": "Köln <3"}}}]},
    ),
    Message("tool", "yes", {"name": "rain"}),
)
_TOOLS = [{"type": "function", "function": {"name": "rain", "parameters": {"at": {"type": "string"}}}}]


@pytest.mark.parametrize("name", _TEMPLATES)
@pytest.mark.parametrize(
    ("messages", "kwargs"),
    [
        (_TURNS, {}),
        (_TURNS, {"add_generation_prompt": False}),
        (_TURNS[:1], {"date": "2 May", "flavour": "salt"}),
        (_TURNS, {"documents": [{"title": "one", "text": "…"}]}),
        (_SYSTEM, {}),
        (_CALLS, {"tools": _TOOLS}),
        (_TURNS[:2], {"continue_final_message": True}),
    ],
)
def test_rendering_equals_transformers(name: str, messages: tuple[Message, ...], kwargs: dict[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), **_SPECIAL)
    conversation = [{"role": m.role, "content": m.content, **(m.extra or {})} for m in messages]
    theirs = {"add_generation_prompt": not kwargs.get("continue_final_message"), **kwargs}
    refused = False
    expected = ""
    try:
        expected = reference.apply_chat_template(conversation, chat_template=_TEMPLATES[name], tokenize=False, **theirs)
    except Exception:  # noqa: BLE001  whatever they raise, we must refuse as well
        refused = True
    chat = ChatTemplates({"default": _TEMPLATES[name]}, _SPECIAL)
    if refused:
        with pytest.raises(PenstockError) as caught:
            chat.render(messages, kwargs)
        assert caught.value.fault is Fault.CALLER
    else:
        assert chat.render(messages, kwargs) == expected


def test_some_of_these_conversations_are_refused_and_in_the_templates_words() -> None:
    chat = ChatTemplates({"default": _ALTERNATING}, _SPECIAL)
    with pytest.raises(PenstockError, match="roles must alternate") as caught:
        chat.render(_SYSTEM)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ messages[7].content }}", Fault.CALLER),
        ("{{ messages[0].content + 1 }}", Fault.CALLER),
        ("{{ nothing.at.all }}", Fault.CALLER),
        ("{{ messages[0].content / 2 }}", Fault.CALLER),
        ("{{ ''.__class__.__mro__ }}", Fault.OPERATOR),
        ("{% set _ = messages.append(1) %}", Fault.OPERATOR),
        ("{% for i in range(10 ** 9) %}{% endfor %}", Fault.CALLER),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", Fault.CALLER),
    ],
)
def test_what_a_template_cannot_do_is_an_error_with_an_owner(template: str, fault: Fault) -> None:
    with pytest.raises(PenstockError) as caught:
        ChatTemplates({"default": template}, {}).render(_TURNS)
    assert caught.value.fault is fault


def test_output_without_end_is_cut_off() -> None:
    template = "{% for i in range(90000) %}{% for j in range(90000) %}{{ messages[0].content }}{% endfor %}{% endfor %}"
    with pytest.raises(PenstockError, match=str(MAX_RENDERED_CHARS)):
        ChatTemplates({"default": template}, {}).render((Message("user", "x" * 4096),))


def test_the_date_is_that_of_the_requests_arrival() -> None:
    chat = ChatTemplates({"default": "{{ strftime_now('%Y-%m-%d %H:%M') }}"}, {})
    assert chat.render(_TURNS, now_ns=1_700_000_000 * 10**9) == "2023-11-14 22:13"


def test_tojson_takes_the_settings_that_templates_pass() -> None:
    template = "{{ {'b': 'é<', 'a': 1} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}"
    assert ChatTemplates({"default": template}, {}).render(_TURNS) == '{"a":1,"b":"\\u00e9<"}'


@pytest.mark.parametrize(
    ("messages", "kwargs", "words"),
    [
        ((), {}, "at least one"),
        (_TURNS, {"messages": []}, "must not set messages"),
        (_TURNS, {"continue_final_message": True, "add_generation_prompt": True}, "exclude"),
        ((Message("user", None, {"name": "x"}),), {"continue_final_message": True}, "final message"),
    ],
)
def test_wrong_arguments_are_the_callers(messages: tuple[Message, ...], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(PenstockError, match=words) as caught:
        ChatTemplates({"default": CHATML}, {}).render(messages, kwargs)
    assert caught.value.fault is Fault.CALLER


def test_without_a_template_messages_are_refused() -> None:
    chat = ChatTemplates({}, {})
    assert not chat
    with pytest.raises(PenstockError, match="no chat template"):
        chat.render(_TURNS)


def test_what_was_asked_for_by_a_field_of_its_own_must_be_read() -> None:
    reads = ChatTemplates({"default": "{% if documents %}{{ documents[0].text }}{% endif %}{{ reasoning_effort }}"}, {})
    kwargs = {"documents": [{"text": "a fact. "}], "reasoning_effort": "low"}
    assert reads.render(_TURNS, kwargs, required=("documents", "reasoning_effort")) == "a fact. low"
    ignores = ChatTemplates({"default": "{{ messages[0].content }}"}, {})
    with pytest.raises(PenstockError, match="does nothing with documents") as caught:
        ignores.render(_TURNS, kwargs, required=("documents",))
    assert caught.value.param == "documents"
    assert ignores.render(_TURNS, kwargs) == _TURNS[0].content


def test_a_template_of_a_request_is_taken_where_requests_are_trusted_and_nowhere_else() -> None:
    brought = {"chat_template": "{{ messages | length }} of {{ eos_token }}"}
    trusting = ChatTemplates({"default": CHATML}, {"eos_token": "</s>"}, trusts_requests=True)
    assert trusting.render(_TURNS, brought) == f"{len(_TURNS)} of </s>"
    assert ChatTemplates({}, {"eos_token": "</s>"}, trusts_requests=True).render(_TURNS, brought)
    assert trusting.render(_TURNS, {"chat_template": "default"}) == trusting.render(_TURNS)
    with pytest.raises(PenstockError, match="--trust-request-chat-template") as caught:
        ChatTemplates({"default": CHATML}, {}).render(_TURNS, brought)
    assert (caught.value.param, caught.value.fault) == ("chat_template", Fault.CALLER)


@pytest.mark.parametrize(
    "template",
    [
        7,
        "{% if %}",
        "x" * (MAX_TEMPLATE_CHARS + 1),
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "(" * 9000 + "{{" + "(" * 9000,
    ],
)
def test_what_is_wrong_with_a_template_of_a_request_is_its_callers_fault(template: object) -> None:
    trusting = ChatTemplates({"default": CHATML}, {}, trusts_requests=True)
    with pytest.raises(PenstockError) as caught:
        trusting.render(_TURNS, {"chat_template": template})
    assert (caught.value.param, caught.value.fault) == ("chat_template", Fault.CALLER)


@pytest.mark.parametrize(
    ("knows", "role"), [("", "system"), ("{% if m.role == 'developer' %}{% endif %}", "developer")]
)
def test_a_developer_is_the_system_to_templates_that_do_not_know_the_role(knows: str, role: str) -> None:
    chat = ChatTemplates(
        {"default": "{% for m in messages %}" + knows + "{{ m.role }}: {{ m.content }}{% endfor %}"}, {}
    )
    assert chat.render([Message("developer", "hm")]) == f"{role}: hm"
