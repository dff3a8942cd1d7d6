"""A typed Python function as a tool: its signature is the schema, its docstring the description.

::

    @tool(effects="none")
    async def forecast(ctx: ToolContext, city: str, days: int = 1) -> str: ...

The docstring is in Google's style: what stands before the first section is the description, and
``Args:`` describes the parameters.

Rules:

- Every parameter has a type that JSON can carry; a first parameter annotated `ToolContext` gets
  the context and is not in the schema.
- A plain function runs in a thread, a coroutine function on the event loop.
- Arguments are checked against the signature before the function sees them. What does not fit is
  told to the model by the name of the field, so that it can mend its call.
- It returns text, JSON (a dict, a list, a number, a boolean, None) or `ToolOutput`. Anything else
  is an error result: a repr is no answer.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeAlias, cast, overload

import msgspec

from postroom.domain.event import ToolSpec
from postroom.errors import ToolFailure, UsageError
from postroom.ports.tool import Effects, ToolContext, ToolOutput
from postroom.tools.offload import as_failure, in_thread

Function: TypeAlias = Callable[..., object]

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*\Z")
_ARGUMENT = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)\Z")
_FIELD = re.compile(r"`([^`]*)`")


@overload
def tool(function: Function, /) -> FunctionTool: ...


@overload
def tool(
    *,
    name: str | None = None,
    effects: Effects = "outside",
    exclusive: bool = False,
    timeout_ms: int | None = None,
) -> Callable[[Function], FunctionTool]: ...


def tool(
    function: Function | None = None,
    /,
    *,
    name: str | None = None,
    effects: Effects = "outside",
    exclusive: bool = False,
    timeout_ms: int | None = None,
) -> FunctionTool | Callable[[Function], FunctionTool]:
    """Makes a tool of a function: ``@tool`` or ``@tool(effects="none")``.

    ``name`` None is the function's own. ``effects`` is the cautious ``outside`` unless told
    otherwise. ``timeout_ms`` None is the core's limit.

    Raises:
        UsageError: the function cannot be described to a model; says which parameter and why.
    """

    def make(function: Function) -> FunctionTool:
        return FunctionTool(
            function, name=name, effects=effects, exclusive=exclusive, timeout_ms=timeout_ms
        )

    return make if function is None else make(function)


class FunctionTool:
    """A tool made of a function. Calling it calls the function itself, as in a test."""

    def __init__(
        self,
        function: Function,
        *,
        name: str | None = None,
        effects: Effects = "outside",
        exclusive: bool = False,
        timeout_ms: int | None = None,
    ) -> None:
        self.name = name or getattr(function, "__name__", "")
        if not NAME.match(self.name):
            raise UsageError(
                f"{self.name!r} is no name for a tool",
                hint="1 to 64 letters, digits, underscores or hyphens",
            )
        self.effects: Effects = effects
        self.exclusive = exclusive
        self.timeout_ms = timeout_ms
        self.function = function
        summary, described = _read_docstring(inspect.getdoc(function) or "")
        self._takes_context, fields = _read_signature(self.name, function, described)
        self._fields = tuple(field[0] for field in fields)
        self._arguments = msgspec.defstruct(
            self.name, fields, kw_only=True, forbid_unknown_fields=True
        )
        self.spec = ToolSpec(self.name, summary, msgspec.Raw(_schema(self.name, self._arguments)))

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<tool {self.name}>"

    async def call(self, ctx: ToolContext, arguments: dict[str, object]) -> ToolOutput:
        """Checks the arguments, runs the function, and makes its answer a `ToolOutput`.

        Raises:
            ToolFailure: the arguments do not fit, or the function said so itself.
        """
        keywords = self._check(arguments)
        leading = (ctx,) if self._takes_context else ()
        function = self.function
        if not inspect.iscoroutinefunction(function):
            return await in_thread(
                lambda: output_of(self.name, function(*leading, **keywords)), name=self.name
            )
        try:
            value = await cast("Awaitable[object]", function(*leading, **keywords))
        except SystemExit as error:
            raise as_failure(error) from error
        return output_of(self.name, value)

    def _check(self, arguments: dict[str, object]) -> dict[str, object]:
        try:
            value = msgspec.convert(arguments, self._arguments)
        except msgspec.ValidationError as error:
            # Small models write numbers and booleans as strings. Only where the strict reading
            # fails, so that a string parameter still gets the string "null".
            try:
                value = msgspec.convert(arguments, self._arguments, strict=False)
            except msgspec.ValidationError:
                raise ToolFailure(self._mend(str(error))) from error
        return {name: getattr(value, name) for name in self._fields}

    def _mend(self, reason: str) -> str:
        """The library's sentence, with the field's name put in front."""
        reason, _, place = reason.partition(" - at `$")
        place = place.rstrip("`").lstrip(".")
        field = _FIELD.search(reason)
        if reason.startswith("Object missing required field") and field:
            return f"the argument {_join(place, field[1])} is required"
        if reason.startswith("Object contains unknown field") and field:
            there_is = f"; there is {', '.join(self._fields) or 'none'}" if not place else ""
            return f"there is no argument {_join(place, field[1])}{there_is}"
        reason = reason[:1].lower() + reason[1:].replace("`", "")
        return f"the argument {place or 'object'} does not fit: {reason}"


def output_of(name: str, value: object) -> ToolOutput:
    """What a function returned, as the loop wants it. ``name`` is the tool's, for the error."""
    if isinstance(value, ToolOutput):
        return value
    if isinstance(value, str):
        return ToolOutput(value)
    if value is None:
        return ToolOutput("")
    if inspect.iscoroutine(value):
        value.close()
    try:
        return ToolOutput(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        return ToolOutput(
            f"the tool {name} returned a value ({type(value).__name__}) that is not JSON: {error}",
            is_error=True,
        )


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


_Field: TypeAlias = tuple[str, Any] | tuple[str, Any, Any]


def _read_signature(
    name: str, function: Function, described: dict[str, str]
) -> tuple[bool, list[_Field]]:
    """Whether it takes the context, and its other parameters as the fields of a struct."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UsageError(f"tool {name}: an annotation cannot be resolved: {error}") from error
    takes_context = False
    fields: list[_Field] = []
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if hints.get(parameter.name) is ToolContext:
            if index:
                raise UsageError(f"tool {name}: the context must be its first parameter")
            takes_context = True
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UsageError(f"tool {name}: *{parameter.name} cannot be described to a model")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UsageError(f"tool {name}: {parameter.name} must be usable by its name")
        if parameter.name not in hints:
            raise UsageError(f"tool {name}: {parameter.name} has no type")
        fields.append(_field(parameter, hints[parameter.name], described.get(parameter.name)))
    return takes_context, fields


def _field(parameter: inspect.Parameter, type_: Any, description: str | None) -> _Field:
    if description:
        type_ = Annotated[type_, msgspec.Meta(description=description)]
    if parameter.default is parameter.empty:
        return parameter.name, type_
    default: Any = parameter.default
    if isinstance(default, list | dict | set):
        # A shared mutable default would carry one call's changes into the next.
        fresh: Callable[[], Any] = lambda: copy.deepcopy(parameter.default)  # noqa: E731
        return parameter.name, type_, msgspec.field(default_factory=fresh)
    return parameter.name, type_, parameter.default


def _schema(name: str, arguments: type[msgspec.Struct]) -> bytes:
    """The JSON Schema of the arguments: one object, without a title or a reference at its root."""
    try:
        (root,), definitions = msgspec.json.schema_components(
            [arguments], schema_hook=_any_value, ref_template="#/$defs/{name}"
        )
    except TypeError as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"tool {name}: a parameter cannot be described as JSON: {reason}"
        ) from error
    schema = definitions.pop(root["$ref"].rpartition("/")[2])
    del schema["title"]
    if definitions:
        schema["$defs"] = definitions
    return msgspec.json.encode(schema)


def _any_value(type_: type) -> dict[str, Any]:
    if type_ is object:
        return {"description": "any JSON value"}
    raise TypeError(f"{type_.__name__} has no form in JSON")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description before the first section, and what ``Args:`` says of each parameter."""
    summary: list[str] = []
    described: dict[str, list[str]] = {}
    section = ""
    current: list[str] | None = None
    indent = 0
    for line in text.splitlines():
        heading = _SECTION.match(line)
        if heading:
            section, current = heading[1], None
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            argument = _ARGUMENT.match(line.strip())
            if argument and (current is None or depth <= indent):
                indent, current = depth, described.setdefault(argument[1], [])
                current.append(argument[2])
            elif current is not None:
                current.append(line.strip())
    joined = {name: " ".join(parts).strip() for name, parts in described.items()}
    return "\n".join(summary).strip(), joined
