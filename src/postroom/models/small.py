"""How a small model is asked, and how its answer is read. Pure.

A model of half a billion parameters answers plain questions well and tool questions badly: it
calls no tool by itself, invents tools, and with a page of tool descriptions before it even its
plain answers suffer. So:

- Tools are offered only where the request touches one: its words are among those of a tool's name
  or of the first words said of it, or it names a file, a URL or something `in backticks`, or the
  turn before used tools. Any other question is asked as it is, which is also much faster.
- Where tools are offered a grammar leaves the model two ways to begin: a code block with one
  call, of a tool there is and with the arguments its schema demands; or text, which may well begin
  with code. Nothing else can be said, and text can be shown as it comes.
- Only arguments that are required are offered (where none is, all are): optional ones get
  nonsense.
- After a result the model is asked to say in words what it says. It may call another tool, each
  once a turn and ``CALLS_MAX`` in all: a small model would go on with the same one for ever.

The body is a function of the request alone. It is that of llama.cpp's ``/chat/completions``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec

from postroom import mint
from postroom.domain.context import ContextMessage
from postroom.domain.event import ToolSpec
from postroom.domain.message import Block, Finish, Reasoning, Text, ToolCall, Usage
from postroom.models.media import text_with_lines
from postroom.ports.model import (
    CallDelta,
    Delta,
    ModelRequest,
    ReasoningDelta,
    Reply,
    TextDelta,
)

REPLY_TOKENS = 1024
TEMPERATURE = 0.2
RESULT_CHARS = 4000
CALLS_MAX = 3
# After a result, how much less likely a code block is than the model thinks.
CALL_AGAIN_BIAS = -4

# Without it a question is too often answered with the same question.
ANSWER = "Answer the question; do not repeat it."

_FENCE = "```"
_OPEN = '```json\n{"name": "'
_ARGUMENTS = '", "arguments": '
_CLOSE = "}\n```"


def body_of(request: ModelRequest) -> bytes:
    """The JSON body of the request."""
    tools = offered(request)
    body: dict[str, object] = {
        "messages": _messages(request),
        "stream": True,
        "stream_options": {"include_usage": True},
        # Progress while the prompt is read: moments at which a cancel is noticed.
        "return_progress": True,
        "max_tokens": request.params.max_tokens or REPLY_TOKENS,
        "temperature": (
            TEMPERATURE if request.params.temperature is None else request.params.temperature
        ),
        # The same request gives the same reply; a retry is another request.
        "seed": request.number,
    }
    if tools or any(message.role == "tool" for message in request.messages):
        body["grammar"] = _grammar(tools)
    if tools and request.messages[-1].role == "tool":
        body["logit_bias"] = [[_FENCE, CALL_AGAIN_BIAS]]
    return msgspec.json.encode(body)


# ---- which tools ----


def offered(request: ModelRequest) -> tuple[ToolSpec, ...]:
    """The tools that this request's answer may call."""
    called = _calls_in(request.messages[_asked(request) + 1 :])
    if len(called) >= CALLS_MAX:
        return ()
    return tuple(tool for tool in _listed(request) if tool.name not in called)


def _listed(request: ModelRequest) -> tuple[ToolSpec, ...]:
    """The tools the model is told of: all or none, and the same throughout a turn, so that what
    it has read of the conversation stays read.
    """
    messages = request.messages
    asked = _asked(request)
    begin = asked
    while begin > 0 and messages[begin - 1].role == "user":
        begin -= 1
    before = max((at for at in range(begin) if messages[at].role == "user"), default=0)
    text = "\n".join([text_with_lines(m.content) for m in messages[max(begin, 0) : asked + 1]])
    if _calls_in(messages[before:]) or _touches(text, request.tools):
        return request.tools
    return ()


def _asked(request: ModelRequest) -> int:
    """Where the last message of a person stands; -1: there is none."""
    return max((at for at, m in enumerate(request.messages) if m.role == "user"), default=-1)


def _calls_in(messages: Iterable[ContextMessage]) -> list[str]:
    return [
        block.name
        for message in messages
        for block in message.content
        if isinstance(block, ToolCall)
    ]


_NAMED = re.compile(
    r"https?://"  # a URL
    r"|`[^`\n]+`"
    r"|\b(?:\w[\w-]+\.[A-Za-z]\w{0,4}|\w\.[A-Za-z]\w{1,4})\b"  # a file: notes.txt, a.py
    r"|(?<![\w/])(?:\.{1,2}|~)?/[\w.]"  # a path
    r"|\w/(?!\S)"  # a folder
)
_WORD = re.compile(r"[^\W\d_]{3,}")
_FOREIGN = re.compile(r"[^\W\d_\u0000-\u024f]")
_COMMON = frozenset(
    re.findall(
        r"\w+",
        """the and for with from this that these those what when where which who whom why how are
        was were been being have has had does did doing will would can could shall should may might
        must you your yours they them their its not but all any each one two some such than then
        there here out into onto about over under also only just more most very too use used using
        give gives given get gets got make makes made take takes answer answers question tell tells
        say says said let like need want please""",
    )
)


def _touches(text: str, tools: Sequence[ToolSpec]) -> bool:
    if not tools:
        return False
    # Words of other scripts are in no tool's description: that tells nothing.
    if _NAMED.search(text) or _FOREIGN.search(text):
        return True
    known = {stem for tool in tools for stem in _stems(f"{_spelled(tool.name)} {_first(tool)}")}
    return not known.isdisjoint(_stems(text))


def _spelled(name: str) -> str:
    """``read_file`` and ``readFile`` as words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name)


def _stems(text: str) -> set[str]:
    return {_stem(word) for word in _WORD.findall(text.lower()) if word not in _COMMON}


def _stem(word: str) -> str:
    """The word without its ending, roughly: file, files; write, writing; run, running."""
    for ending in ("ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word.removesuffix(ending)
            break
    return word[:-1] if len(word) > 3 and word[-1] == word[-2] else word


def _first(tool: ToolSpec) -> str:
    """The first thing that is said of a tool."""
    return re.split(r"[.;:\n]", tool.description, maxsplit=1)[0].strip()


# ---- the conversation ----


def _messages(request: ModelRequest) -> list[dict[str, str]]:
    """Roles take turns: some models' templates demand it."""
    turns: list[tuple[str, str]] = []
    system = "\n\n".join(filter(None, (request.system, ANSWER, _catalogue(_listed(request)))))
    if system:
        turns.append(("system", system))
    names: dict[str, str] = {}
    messages = request.messages
    for at, message in enumerate(messages):
        names |= {b.call_id: b.name for b in message.content if isinstance(b, ToolCall)}
        if message.role == "tool":
            last = at + 1 == len(messages) or messages[at + 1].role != "tool"
            text = _result(names.get(message.call_id or "", "It"), message, last)
        else:
            text = _said(message)
        role = "assistant" if message.role == "assistant" else "user"
        if turns and turns[-1][0] == role:
            text = f"{turns.pop()[1]}\n\n{text}"
        turns.append((role, text))
    return [{"role": role, "content": _sound(text)} for role, text in turns]


def _said(message: ContextMessage) -> str:
    calls = [
        f"{_OPEN}{block.name}{_ARGUMENTS}{block.arguments}{_CLOSE}"
        for block in message.content
        if isinstance(block, ToolCall)
    ]
    return "\n".join(filter(None, (text_with_lines(message.content), *calls)))


def _result(name: str, message: ContextMessage, last: bool) -> str:
    """Without the question a small model takes a result for a request, or calls once more."""
    text = _cut(text_with_lines(message.content)) or "(nothing)"
    ask = "\nWhat does this tell us? Answer in words." if last else ""
    return f'{name} answered:\n"""\n{text}\n"""{ask}'


def _cut(text: str) -> str:
    """A result that would fill the window keeps its beginning and its end."""
    left_out = len(text) - RESULT_CHARS
    if left_out <= 0:
        return text
    head = RESULT_CHARS * 3 // 4
    return f"{text[:head]}\n[… {left_out} characters left out …]\n{text[head + left_out :]}"


def _sound(text: str) -> str:
    """Half a surrogate pair, which no encoding has, becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# ---- the tools, and the grammar of a call ----


def _catalogue(tools: Sequence[ToolSpec]) -> str:
    if not tools:
        return ""
    lines = [
        _json({"name": tool.name, "description": _first(tool), "arguments": _shown(tool)})
        for tool in tools
    ]
    # An example with a real tool in it makes its calls, and those of the others, far better.
    example = next((tool for tool in tools if tool.name == "bash"), tools[0])
    arguments = {name: _EXAMPLES.get(name, "…") for name in _shown(example)}
    call = f"{_OPEN}{example.name}{_ARGUMENTS}{_json(arguments)}{_CLOSE}"
    return (
        "# Tools\n\nYou can call these functions:\n<tools>\n"
        + "\n".join(lines)
        + f"\n</tools>\n\nTo call one, answer with a JSON object in a code block, for example:\n{call}"
    )


_EXAMPLES = {"command": "ls", "path": "README.md", "url": "https://example.org", "pattern": "*.py"}

_encode = msgspec.json.Encoder().encode


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _shown(tool: ToolSpec) -> list[str] | dict[str, object]:
    """The arguments a small model is told of: their names, or what they are if left alone."""
    rules = _object(_arguments(tool).get("properties"))
    defaults = {name: rule["default"] for name, rule in rules.items() if "default" in _object(rule)}
    return defaults if defaults and len(defaults) == len(rules) else list(rules)


def _arguments(tool: ToolSpec) -> dict[str, Any]:
    """The tool's schema, with only its required arguments if it has any."""
    try:
        schema = msgspec.json.decode(tool.parameters, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"type": "object"}
    rules = _object(schema.get("properties"))
    required = _list(schema.get("required"))
    if rules and required:
        schema["properties"] = {name: rule for name, rule in rules.items() if name in required}
    return schema


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _grammar(tools: Sequence[ToolSpec]) -> str:
    """Lark, as llguidance reads it: a call of one of the tools, or text that is none."""
    rules = [
        "%llguidance {}",
        "start: TEXT" if not tools else "start: call | TEXT",
        # Text may begin with code, but not with the block of a call.
        r"TEXT: /([^{`\s]|`[^`]|```[^j\s])(.|\n)*/",
    ]
    if tools:
        ways = " | ".join(f"call{at}" for at in range(len(tools)))
        rules.append(f"call: {_quoted(_OPEN)} ({ways}) {_quoted(_CLOSE)}")
    for at, tool in enumerate(tools):
        schema = _constraint(_arguments(tool))
        if "$ref" not in schema:
            schema["type"] = "object"
        schema["x-guidance"] = {
            "whitespace_flexible": False,
            "item_separator": ", ",
            "key_separator": ": ",
        }
        rules.append(f"call{at}: {_quoted(tool.name + _ARGUMENTS)} arguments{at}")
        rules.append(f"arguments{at}: %json {_encode(schema).decode()}")
    return "\n".join(rules) + "\n"


def _quoted(text: str) -> str:
    return _encode(text).decode()


# What the grammar's engine is sure to know. Leaving a rule out only allows more, and the tool
# checks its arguments itself; a rule it does not know would undo the whole grammar.
_KEPT = frozenset({"type", "enum", "const", "required", "minimum", "maximum", "minItems"})
_NESTED = frozenset({"items"})
_LISTS = frozenset({"anyOf", "oneOf"})
_MAPS = frozenset({"properties", "$defs", "definitions"})


def _constraint(schema: object) -> dict[str, Any]:
    """The schema with only the rules that are sure to be understood."""
    out: dict[str, Any] = {}
    for name, rule in _object(schema).items():
        if name in _KEPT or (name == "$ref" and str(rule).startswith("#/")):
            out[name] = rule
        elif name in _NESTED:
            out[name] = _constraint(rule)
        elif name in _LISTS and _list(rule):
            out["anyOf"] = [_constraint(one) for one in _list(rule)]
        elif name in _MAPS:
            out[name] = {key: _constraint(one) for key, one in _object(rule).items()}
    if "properties" in out:
        out["additionalProperties"] = False
        required = _list(out.get("required"))
        out["required"] = [name for name in required if name in out["properties"]]
    return out


# ---- the answer ----


class Answer:
    """The reply so far: takes what the model says and gives the deltas of it.

    A call is held back until it is whole; only that it has begun is told.
    """

    def __init__(self, request: ModelRequest) -> None:
        self._names = frozenset(tool.name for tool in offered(request))
        self._reasoning = ""
        self._text = ""
        self._told = False

    def think(self, text: str) -> list[Delta]:
        self._reasoning += text
        return [ReasoningDelta(text)]

    def say(self, text: str) -> list[Delta]:
        held = self._text if self._holds_back else ""
        self._text += text
        if not self._holds_back:
            return [TextDelta(held + text)]
        if not self._told and (name := self._name) is not None:
            self._told = True
            return [CallDelta(name)]
        return []

    def end(self) -> list[Delta]:
        """What was held back and turned out to be text."""
        if self._holds_back and self._call("stop") is None and self._call("length") is None:
            return [TextDelta(self._text)]
        return []

    def reply(self, finish: Finish, usage: Usage, model: str, request_id: str | None) -> Reply:
        content: list[Block] = [Reasoning(self._reasoning)] if self._reasoning else []
        call = self._call(finish) if self._holds_back else None
        if call is not None:
            content.append(call)
            finish = "tool_calls" if finish == "stop" else finish
        elif self._text:
            content.append(Text(self._text))
        return Reply(tuple(content), finish, usage, model, request_id)

    @property
    def _holds_back(self) -> bool:
        """Whether it may be, or is, a call."""
        if not self._names:
            return False
        return self._text.startswith(_OPEN) or _OPEN.startswith(self._text)

    @property
    def _name(self) -> str | None:
        """The tool that is being called, once its name is whole."""
        if not self._text.startswith(_OPEN):
            return None
        name, whole, _ = self._text.removeprefix(_OPEN).partition('"')
        return name if whole and name in self._names else None

    def _call(self, finish: Finish) -> ToolCall | None:
        """The call in the text; None: it is none. One cut off has what there is of its arguments."""
        name = self._name
        if name is None:
            return None
        _, _, rest = self._text.partition(_ARGUMENTS)
        arguments = rest.removesuffix(_CLOSE)
        if finish == "length":
            return ToolCall(mint.call_id(), name, arguments)
        try:
            value = msgspec.json.decode(arguments)
        except msgspec.DecodeError:
            return None
        return ToolCall(mint.call_id(), name, arguments) if isinstance(value, dict) else None
