"""Requests as Codex CLI and Claude Code send them, field by field, with texts of the tests' own.

Owns their shapes: which members come, in which order, with which types. They were held against captured traffic of
Codex 0.171 and Claude Code 2.1.332. A conversation is a list of its turns, so each later request holds the earlier.
"""

from __future__ import annotations

from typing import Any

Shape = dict[str, Any]

# ---------------------------------------------------------------- Codex
THREAD = "01a22e3b-359a-7702-92fa-81c26216d11e"
PATCH = "*** Begin Patch\n*** Add File: a.txt\n+a\n*** End Patch\n"


def _function(name: str, *required: str, **properties: Shape) -> Shape:
    form = {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}
    return {"type": "function", "name": name, "description": f"Does {name}.", "strict": False, "parameters": form}


_TEXT = {"type": "string", "description": "a text"}
_SEVERAL = {"type": "array", "description": "some", "items": {"type": "string"}}
_OPTION = {"type": "object", "properties": {"label": _TEXT}, "required": ["label"], "additionalProperties": False}
APPLY_PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)+/'},
}
CODEX_TOOLS = [
    _function("exec_command", "cmd", cmd=_TEXT, login={"type": "boolean"}, yield_time_ms={"type": "number"}),
    _function("write_stdin", "session_id", session_id={"type": "number"}, chars=_TEXT),
    _function("request_user_input", "questions", questions={"type": "array", "items": _OPTION}),
    APPLY_PATCH,
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Runs other agents.",
        "tools": [
            _function("close_agent", "target", target=_TEXT),
            _function("wait_agent", "targets", targets=_SEVERAL),
        ],
    },
    _function("get_goal"),
    {"type": "web_search", "external_web_access": True},
]


def _message(role: str, *texts: str) -> Shape:
    return {
        "type": "message",
        "id": f"msg_{THREAD}",
        "role": role,
        "content": [{"type": "input_text", "text": text} for text in texts],
    }


def _thought(text: str) -> Shape:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, "encrypted_content": None}


def _said(text: str) -> Shape:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "status": "completed", "id": "msg_2", "role": "assistant", "content": content}


def _called(kind: str, call_id: str, **members: str) -> Shape:
    return {"type": kind, "status": "completed", "id": "fc_1", "call_id": call_id, **members}


def _result(kind: str, call_id: str, output: Any) -> Shape:
    return {"type": kind, "id": f"fco_{THREAD}", "call_id": call_id, "output": output}


CODEX_FRONT = [
    _message("developer", "You are a coding agent."),
    _message("developer", "You may write here.", "Ask before you leave."),
    _message("user", "The folder is /a."),
    _message("user", "SCRIPT:ab List the files."),
]
CODEX_TURNS = [
    [
        _thought("I list them."),
        _said("I will look. "),
        _called("function_call", "call_1", name="exec_command", arguments='{"cmd": "ls"}'),
        _result("function_call_output", "call_1", "a.txt"),
    ],
    [
        _thought("I patch."),
        _called("custom_tool_call", "call_2", name="apply_patch", input=PATCH),
        _result("custom_tool_call_output", "call_2", [{"type": "input_text", "text": "Done."}]),
        _called("function_call", "call_3", name="close_agent", namespace="multi_agent_v1", arguments='{"target": "b"}'),
        _result("function_call_output", "call_3", "There is no such agent."),
        _message("developer", "It has grown late."),
    ],
]
CHECKPOINT = _message("user", "CONTEXT CHECKPOINT COMPACTION. Write down how far you are.")


def codex(turns: int = 0, **fields: Any) -> Shape:
    """The request after so many turns of the model's; `input` is the whole conversation."""
    return {
        "model": "default",
        "stream": True,
        "input": [*CODEX_FRONT, *(item for turn in CODEX_TURNS[:turns] for item in turn)],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": THREAD,
        "client_metadata": {"thread_id": THREAD, "x-codex-turn-metadata": '{"request_kind": "turn"}'},
    } | fields


def codex_compaction() -> Shape:
    """The request for a summary: no tools, and still a choice among them."""
    asked = codex(2, tools=[], parallel_tool_calls=False)
    return asked | {"input": [*asked["input"], CHECKPOINT]}


def codex_after_compaction() -> Shape:
    """The summary stands in a user's message; nothing of the assistant's is left."""
    return codex() | {"input": [*CODEX_FRONT, _message("user", "So far a file was written.")]}


def codex_with_a_schema() -> Shape:
    form = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    return codex(
        text={"format": {"type": "json_schema", "name": "codex_output_schema", "strict": True, "schema": form}}
    )


# ---------------------------------------------------------------- Claude Code
ROLLING = {"cache_control": {"type": "ephemeral"}}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def _tool(name: str, *required: str, **properties: Shape) -> Shape:
    form = {"$schema": _DRAFT, "type": "object", "properties": properties, "required": [*required]}
    return {"name": name, "description": f"Does {name}.", "input_schema": form | {"additionalProperties": False}}


PLACEHOLDER = {
    "name": "DeferredToolPlaceholder",
    "description": "Stands for others.",
    "input_schema": {"type": "object", "properties": {}},
    "defer_loading": True,
}
BASH = _tool("Bash", "command", command=_TEXT, timeout={"type": "number"}, run_in_background={"type": "boolean"})
CRON_LIST = _tool("CronList") | {"defer_loading": True}
CLAUDE_TOOLS = [
    BASH,
    _tool("Read", "file_path", file_path=_TEXT),
    _tool("ToolSearch", "query", query=_TEXT),
    PLACEHOLDER,
]


def _block(text: str, **more: Any) -> Shape:
    return {"type": "text", "text": text, **more}


def _use(use_id: str, name: str, **given: str) -> Shape:
    return {"type": "tool_use", "id": use_id, "name": name, "input": given}


def _answered(use_id: str, content: Any, **more: Any) -> Shape:
    return {"role": "user", "content": [{"tool_use_id": use_id, "type": "tool_result", "content": content, **more}]}


CLAUDE_FRONT = [
    {
        "role": "user",
        "content": [_block("<reminder>The folder is /a.</reminder>"), _block("SCRIPT:ab List the files.")],
    },
    {"role": "system", "content": "Other tools can be searched for: CronList."},
]
CLAUDE_TURNS = [
    [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I list them.", "signature": "none"},
                _block("I will look. "),
                _use("toolu_1", "Bash", command="ls", description="Lists files"),
            ],
        },
        _answered("toolu_1", "a.txt", is_error=False),
    ],
    [
        {"role": "assistant", "content": [_use("toolu_2", "ToolSearch", query="select:CronList")]},
        _answered("toolu_2", [{"type": "tool_reference", "tool_name": "CronList"}]),
    ],
    [
        {"role": "assistant", "content": [_use("toolu_3", "CronList")]},
        _answered("toolu_3", "None.", **ROLLING),
        {"role": "system", "content": "<total_tokens>1000</total_tokens>"},
    ],
]


def claude(turns: int = 0, **fields: Any) -> Shape:
    """The request after so many turns of the model's. A tool that was searched for stands in the middle of the list;
    the text behind the first turn is a list of blocks at first, and a string later."""
    messages = [*CLAUDE_FRONT, *(message for turn in CLAUDE_TURNS[:turns] for message in turn)]
    if not turns:
        messages[1] = {"role": "system", "content": [_block(CLAUDE_FRONT[1]["content"], **ROLLING)]}
    tools = CLAUDE_TOOLS
    if turns > 1:
        tools = [BASH, CRON_LIST, *CLAUDE_TOOLS[1:]]
    billing = f"x-anthropic-billing-header: cc_version=2.1.{turns}; cc_entrypoint=sdk-cli;"
    return {
        "model": "default",
        "messages": messages,
        "system": [_block(billing), _block("You are an agent.", **ROLLING), _block("Be brief.", **ROLLING)],
        "tools": tools,
        "metadata": {"user_id": "{}"},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    } | fields


def claude_continued() -> Shape:
    """What follows an answer that was cut: the answer as a turn, and a wish for more."""
    made = claude(1, max_tokens=128000)
    cut = {"role": "assistant", "content": [_block("It was a")]}
    return made | {"messages": [*made["messages"], cut, {"role": "user", "content": "Go on where you stopped."}]}


def claude_count() -> Shape:
    """One of the many counts of `/context`."""
    return {"model": "default", "messages": [{"role": "user", "content": "foo"}], "tools": [BASH]}
