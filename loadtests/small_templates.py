"""Small chat templates that are particular about turns, each in a way that templates of real models are."""

from __future__ import annotations

JSON_CALLS = "{#- <tool_call> tool_call.name #}"  # by these words mlx-lm knows the format of calls
ANSWER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
ALTERNATING = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
)
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}"
CALLS = (
    "{% for call in m.tool_calls or [] %}{% set call = call.function %}"
    "{{ '<tool_call>{\"name\": \"' + call.name + '\", \"arguments\": ' + call.arguments | tojson + '}</tool_call>' }}"
    "{% endfor %}"
)
TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
OPEN = "{{ '<|im_start|>' + m.role + '\n' }}"
CLOSE = "{{ '<|im_end|>\n' }}"
SHOWN = OPEN + "{{ m.content }}" + CALLS + CLOSE + "{% endfor %}" + ANSWER

# No system role, and turns alternate.
STRICT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('system role not supported') }}{% endif %}"
    "{% for m in messages %}" + ALTERNATING + TURN + "{% endfor %}" + ANSWER
)
# One system message, which stands before the first turn's text.
PREFIXED = (
    "{% set front = '' %}{% set turns = messages %}{% if messages[0].role == 'system' %}"
    "{% set front = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}{% endif %}{% for m in turns %}"
    + ALTERNATING
    + OPEN
    + "{{ (front if loop.first else '') + m.content | trim }}"
    + CLOSE
    + "{% endfor %}"
    + ANSWER
)
# The same inside brackets, and the assistant's turns without a header.
BRACKETED = (
    "{% set front = '' %}{% set turns = messages %}{% if messages[0].role == 'system' %}"
    "{% set front = '<<SYS>>' + messages[0].content + '<</SYS>>' %}{% set turns = messages[1:] %}{% endif %}"
    "{% for m in turns %}"
    + ALTERNATING
    + "{% if m.role == 'user' %}{{ '[INST] ' + (front if loop.first else '') + m.content | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + '<|im_end|>' }}{% endif %}{% endfor %}"
)
# Calls, results, a system message at the front, and at least one turn of the user's.
FIRST_ONLY = (
    JSON_CALLS + TOOLS + "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('no user query') }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system must be first') }}{% endif %}" + SHOWN
)
# Everything is shown as it comes.
EASY = JSON_CALLS + TOOLS + "{% for m in messages %}" + SHOWN
# System messages are gathered in front, and calls are shown only where there is no content, not even an empty one.
GATHERING = (
    JSON_CALLS + TOOLS + "{% for m in messages if m.role == 'system' %}{{ m.content + '\n\n' }}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}"
    + OPEN
    + "{% if m.content is not defined %}"
    + CALLS
    + "{% else %}{{ m.content }}{% endif %}"
    + CLOSE
    + "{% endfor %}"
    + ANSWER
)
# The system message stands in the last turn, ids have nine letters, and calls hide the text beside them.
LATE = (
    JSON_CALLS + "{% set front = '' %}{% set turns = messages %}{% if messages[0].role == 'system' %}"
    "{% set front = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}{% endif %}"
    "{% for m in turns | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') %}"
    + ALTERNATING
    + "{% endfor %}{% for m in turns %}"
    + OPEN
    + "{% if m.role == 'tool' or m.tool_calls is defined %}"
    "{% for id in ([m.tool_call_id] if m.role == 'tool' else m.tool_calls | map(attribute='id')) %}"
    "{% if id | length != 9 %}{{ raise_exception('ids need nine letters') }}{% endif %}{% endfor %}{% endif %}"
    "{% if m.tool_calls is defined %}"
    + CALLS
    + "{% else %}{{ (front if loop.last and m.role == 'user' else '') + m.content }}{% endif %}"
    + CLOSE
    + "{% endfor %}"
    + ANSWER
)
# One call a message, and one result.
SINGLE = (
    JSON_CALLS + TOOLS + "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}" + SHOWN
)
# The assistant must have said something; turns alternate, calls and results apart.
TALKING = (
    JSON_CALLS
    + TOOLS
    + "{% for m in messages | rejectattr('role', 'equalto', 'tool') | rejectattr('tool_calls') %}"
    + ALTERNATING
    + "{% endfor %}{% for m in messages %}{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{ raise_exception('say something') }}{% endif %}" + SHOWN
)
# A tool's answer counts as the user's turn and a call as the assistant's: all alternate.
COUNTING = (
    JSON_CALLS + TOOLS + "{% for m in messages %}"
    "{% if (m.role in ['user', 'tool']) != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + SHOWN
)
# Only the assistant may speak behind a result.
ANSWERED = (
    JSON_CALLS
    + TOOLS
    + "{% for m in messages %}{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'tool' %}"
    "{{ raise_exception('no answer to the result') }}{% endif %}" + SHOWN
)
# Calls are left out; what tools said is shown.
DEAF = JSON_CALLS + TOOLS + "{% for m in messages %}" + TURN + "{% endfor %}" + ANSWER
# Contents are lists of parts.
PARTED = (
    "{% for m in messages %}"
    + OPEN
    + "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    + CLOSE
    + "{% endfor %}"
    + ANSWER
)
# The first of several turns of one role is all that is shown.
FORGETTING = (
    "{% set seen = namespace(role='') %}{% for m in messages %}{% if m.role != seen.role %}"
    + TURN
    + "{% endif %}{% set seen.role = m.role %}{% endfor %}"
    + ANSWER
)
# Results are looked for behind their calls, and nowhere else.
SCANNING = (
    JSON_CALLS
    + TOOLS
    + "{% for m in messages %}{% if m.role != 'tool' %}"
    + OPEN
    + "{{ m.content }}"
    + CALLS
    + "{% if m.tool_calls %}"
    "{% set scan = namespace(on=true) %}{% for r in messages[loop.index0 + 1:] %}{% if r.role != 'tool' %}"
    "{% set scan.on = false %}{% elif scan.on %}{{ '<result>' + r.content + '</result>' }}{% endif %}{% endfor %}"
    "{% endif %}" + CLOSE + "{% endif %}{% endfor %}" + ANSWER
)

PARTICULAR = {
    "strict": STRICT,
    "prefixed": PREFIXED,
    "bracketed": BRACKETED,
    "first_only": FIRST_ONLY,
    "easy": EASY,
    "gathering": GATHERING,
    "late": LATE,
    "single": SINGLE,
    "talking": TALKING,
    "counting": COUNTING,
    "answered": ANSWERED,
    "deaf": DEAF,
    "parted": PARTED,
    "forgetting": FORGETTING,
    "scanning": SCANNING,
}
