"""Which form an answer must have, in any of the ways in which clients ask for one.

Owns the reading of `response_format` and of the fields that vLLM's and llama.cpp's clients use instead. Runs in the
server's worker thread; pure. Never builds the whole grammar: an answer may also reason or call tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from llguidance import LLMatcher

from server.api.input.body import too_long_integer
from server.api.input.schema import GenerationRequest, SamplingFields, StructuredOutputs
from server.errors import InvalidValue, UnsupportedParameter, one_line
from server.grammar import build, gbnf, user_grammar
from server.grammar.checker import Prove
from server.settings import Settings
from server.text.tokenizer import Tokenizer

# llguidance's own search for `start:` takes a GBNF rule of that name for Lark, and Lark with attributes for GBNF.
_LARK = re.compile(r"^\s*(?:%llguidance\b|[?!]?start\s*(?:\[[^\]\n]*\])?\s*:(?!:=))", re.MULTILINE)
_ASCII = {r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]"}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """One form that a request asks for.

    Attributes:
        param: where it stands in the request.
        rule: the grammar rule of what is no JSON.
        lark: the user's own grammar that `rule` consists of, until it is checked.
        schema: the JSON schema, if `rule` is empty.
        of_text: it is a form of the answer's text, where there is text; else of all of the answer.
    """

    param: str
    rule: str = ""
    lark: str = ""
    schema: Any = None
    of_text: bool = field(default=False, compare=False)


Place = tuple[
    str, Any, Callable[[Any, str], AnswerForm]
]  # where a form may be asked for, what stands there, its reader


def read(request: GenerationRequest, settings: Settings) -> AnswerForm | None:
    """The form that the request asks for. Raises InvalidValue for several, or for one that makes no sense."""
    return _only(_forms(request), settings)


def of_structured(request: SamplingFields, settings: Settings) -> AnswerForm | None:
    """The form that `structured_outputs` asks for, raising as `read` does."""
    return _only(_structured(request), settings)


def _only(places: list[Place], settings: Settings) -> AnswerForm | None:
    forms = [(param, value, make) for param, value, make in places if value is not None]
    if not forms:
        return None
    if len(forms) > 1:
        raise InvalidValue(f"{forms[1][0]}: the answer's form is given by {forms[0][0]} already", param=forms[1][0])
    param, value, make = forms[0]
    check_size(value, settings, param)
    return replace(make(value, param), of_text=param.startswith("response_format"))


def of_schema(schema: Any, settings: Settings, param: str) -> AnswerForm:
    """The form of text that follows a JSON schema, which stands at `param` of the request."""
    check_size(schema, settings, param)
    return replace(_json(schema, param), of_text=True)


def of_any_object(param: str) -> AnswerForm:
    """The form of text that is some JSON object."""
    return replace(_any_object(True, param), of_text=True)


def _forms(request: GenerationRequest) -> list[Place]:
    return [
        *_response_format(request),
        *_structured(request),
        ("guided_json", request.guided_json, _json),
        ("guided_regex", request.guided_regex, _regex),
        ("guided_choice", request.guided_choice, _choice),
        ("guided_grammar", request.guided_grammar, _grammar),
        ("regex", request.regex, _regex),
        ("ebnf", request.ebnf, _grammar),
        ("json_schema", request.json_schema, _json),
        ("grammar", request.grammar or None, _grammar),
    ]


def _structured(request: SamplingFields) -> list[Place]:
    nested = request.structured_outputs or StructuredOutputs.model_validate({})
    return [
        ("structured_outputs.json", nested.json_, _json),
        ("structured_outputs.json_object", nested.json_object or None, _any_object),
        ("structured_outputs.regex", nested.regex, _regex),
        ("structured_outputs.choice", nested.choice, _choice),
        ("structured_outputs.grammar", nested.grammar, _grammar),
    ]


def _response_format(request: GenerationRequest) -> list[Place]:
    options = request.response_format
    if options is None or options.type == "text":
        return []
    if options.type == "json_schema" and options.json_schema is not None:
        return [("response_format.json_schema.schema", options.json_schema.schema_, _json)]
    if options.type == "json_schema" and options.schema_ is None:
        message = "response_format: type json_schema needs json_schema"
        raise InvalidValue(message, param="response_format.json_schema")
    if options.schema_ is not None:
        return [("response_format.schema", options.schema_, _json)]
    return [("response_format", True, _any_object)]


def check_size(value: object, settings: Settings, param: str) -> None:
    """Raises for a schema, or another description of a form, that is larger than the settings allow."""
    size = len(json.dumps(value, ensure_ascii=False).encode())
    if size > settings.max_schema_bytes:
        message = f"{param}: the schema has {size} bytes; at most {settings.max_schema_bytes} are taken"
        raise InvalidValue(message, param=param)


def checked(form: AnswerForm, tokenizer: Tokenizer, rows: int | None, prove: Prove) -> AnswerForm:
    """The form, held against the model, which has `rows` logits.

    Raises when the model couldn't write some of the texts that a form may ask for, or no text has the form.
    """
    rows = tokenizer.vocab_size if rows is None else rows
    if missing := tokenizer.unspellable(rows):
        shown = ", ".join(f"0x{byte:02X}" for byte in sorted(missing)[:4])
        message = f"{form.param}: this model can't write every text: it has no tokens for single bytes such as {shown}"
        raise UnsupportedParameter(message, param=form.param)
    if not form.lark:
        return form
    tokens = user_grammar.Tokens(tokenizer.added_id, min(rows, tokenizer.vocab_size))
    return replace(form, rule=_rule(user_grammar.checked(form.lark, form.param, tokens, prove)), lark="")


# ---------------------------------------------------------------- kinds
def _json(value: Any, param: str) -> AnswerForm:
    """A schema, which some clients send as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise InvalidValue(f"{param}: this isn't valid JSON: {error}", param=param) from None
        except ValueError:
            raise InvalidValue(f"{param}: this has {too_long_integer()}", param=param) from None
    if not isinstance(value, dict | bool):
        raise InvalidValue(f"{param}: a JSON schema is an object", param=param)
    return AnswerForm(param, schema=value)


def _any_object(value: Any, param: str) -> AnswerForm:
    return AnswerForm(param, schema=build.ANY_OBJECT)


def _regex(value: str, param: str) -> AnswerForm:
    made = json.loads(LLMatcher.grammar_from_regex(ascii_classes(value)))["grammars"][0]["lark_grammar"]
    return AnswerForm(param, rule=made.removeprefix("start: ").replace("\n", "\\n"))


def ascii_classes(pattern: str) -> str:
    r"""`\d` and `\w` as ASCII: llguidance's are any script's, JSON Schema's are ASCII, and Python's those of its own
    Unicode version. In a negated class they stay as they are: there the wide meaning is what all three share."""
    out: list[str] = []
    brackets: list[bool] = []  # around this place: whether each is negated
    for part in re.findall(r"\\.|\[\^|.", pattern, re.DOTALL):
        if part in _ASCII and not any(brackets):
            part = _ASCII[part]
        elif part in ("[", "[^"):
            brackets.append(part == "[^")
        elif part == "]" and brackets:
            brackets.pop()
        out.append(part)
    return "".join(out)


def _choice(value: list[str], param: str) -> AnswerForm:
    return AnswerForm(param, rule=" | ".join(build.quoted(choice) for choice in value))


def _grammar(value: str, param: str) -> AnswerForm:
    """GBNF as llama.cpp has it, or Lark as llguidance has it."""
    lark = value
    if not _LARK.search(value):
        try:
            lark = gbnf.as_lark(value)
        except Exception as error:  # the converter raises bare ones
            raise InvalidValue(f"{param}: this is no grammar: {one_line(error)}", param=param) from None
    return AnswerForm(param, rule=_rule(lark), lark=lark)


def _rule(lark: str) -> str:
    return f"%lark {{\n{lark}\n}}"
