"""gpt-oss's format: an answer is messages with channels, and a call is a message to a function.

Owns its tags and where they lead; mlx-lm has no states for it. Constants, used in the server process.
"""

from __future__ import annotations

from server.text.tokens.control import NORMAL, REASONING, TOOL, Transitions

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
END = "<|end|>"
CALL = "<|call|>"
TO = " to=functions."
HEADER = "header"  # the state in front of a message's text
TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL)

HARMONY: Transitions = {
    HEADER: (
        (f"analysis{MESSAGE}", REASONING),
        (f"final{MESSAGE}", NORMAL),
        (f"commentary{MESSAGE}", NORMAL),
        (f"{CONSTRAIN}json{MESSAGE}", NORMAL),
        (TO, TOOL),
    ),
    REASONING: ((END, HEADER),),
    NORMAL: ((END, HEADER), ("<|return|>", HEADER)),
    TOOL: ((CALL, HEADER),),
}
