"""From a conversation to sequences, the same for every protocol that has conversations.

Owns everything between a protocol's understanding of its request and `respond`: the prompt, the grammar, one sequence
and one text a choice. Runs in the server's worker thread, or in the process for large requests; pure but for the seed
that it draws.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from server.api.context import ServedModel
from server.api.input import generic_tools, tools
from server.api.input.conversation import Conversation
from server.api.input.identity import AnswerIdentity, StoreOptions
from server.api.input.results import in_call_order
from server.api.input.sequences import Bounds, most_tokens, sequences, truncated
from server.api.input.tools import FormConstraint
from server.api.output.respond import PreparedRequest, ProtocolFormat
from server.errors import ContextLengthError, InvalidValue, RequestError
from server.ipc.sequence import TokenSequence
from server.text.detokenizer import TextState
from server.text.tokenizer import ChatPrompt, Tokenizer

COUNTED = 250_000  # tokens that are counted for any model, in a second or two
COUNTED_CONTEXTS = 2  # times the context that is
Result = TypeVar("Result")


def prepared(
    served: ServedModel,
    conversation: Conversation,
    bounds: Bounds,
    form: ProtocolFormat,
    unknown: list[str],
    *,
    identity: AnswerIdentity | None = None,
    store: StoreOptions | None = None,
) -> PreparedRequest:
    """All that is left is to do it. `form`: what the answer looks like on the wire; `unknown`: fields that no schema
    knows; `identity`: what the ids of calls follow from; `store`: how the answer is kept. Raises RequestError that
    names the field at fault."""
    asked = conversation.sampling
    prompt = render(served.tokenizer, conversation, most_tokens(asked, bounds))
    if not prompt.ids:
        message = "the model's chat template makes an empty prompt of this conversation"
        raise InvalidValue(message, param=conversation.param)
    bounds.check_ids(prompt.ids, conversation.param)
    ids = truncated(prompt.ids, asked, bounds, conversation.max_tokens)
    constraint = _constraint(served, conversation, prompt, bounds)
    grammar = None
    if constraint:
        grammar = constraint.grammar
    marks = [len(ids)]
    if ids is prompt.ids:
        marks = prompt.marks
    made = sequences(
        asked,
        [ids],
        tokenizer=served.tokenizer,
        bounds=bounds,
        max_tokens=conversation.max_tokens,
        logprobs=conversation.logprobs,
        grammar=grammar,
        marks=marks,
    )
    texts = [_text(served.tokenizer, conversation, prompt, one, constraint, bounds, identity) for one in made]
    return PreparedRequest(asked, made, texts, form, unknown, store)


def render(tokenizer: Tokenizer, conversation: Conversation, most: int | None = None) -> ChatPrompt:
    """The conversation as the model reads it. Raises ContextLengthError where it's far longer than `most` tokens, and
    names the protocol's own field where the template refuses."""
    listed = conversation.tools.for_template
    said = list(in_call_order(conversation.messages))
    messages, offered = generic_tools.rewritten(tokenizer, said, listed)
    try:
        return tokenizer.chat(
            messages,
            tools=offered,
            kwargs=conversation.variables,
            reasoning_effort=conversation.effort,
            continue_final_message=conversation.continues,
            begin_answer=conversation.begins,
            most=most,
        )
    except RequestError as error:
        if error.param == "messages":
            error.param = conversation.param
        raise


def counted(served: ServedModel, count: Callable[[int], Result]) -> Result:
    """`count(most)`: what needs a prompt's ids and no engine, up to so many of them.

    Raises ContextLengthError for a prompt that has far more. Large requests wait for each other, and counting 32 MiB to
    their end would take half a minute to say what its beginning says.
    """
    context = served.settings.allowed_context(served.tokenizer.context)
    most = max(COUNTED_CONTEXTS * context, COUNTED)
    try:
        return count(most)
    except ContextLengthError as error:
        fewest = error.numbers["n_prompt_tokens"]
        raise ContextLengthError(
            f"This model's maximum context length is {context} tokens. However, the prompt has at least {fewest} "
            f"tokens; prompts of more than {most} aren't always counted to their end.",
            numbers={"n_prompt_tokens": fewest, "n_ctx": context},
        ) from None


def _constraint(
    served: ServedModel, conversation: Conversation, prompt: ChatPrompt, bounds: Bounds
) -> FormConstraint | None:
    return tools.constraint(
        conversation.form,
        conversation.tools,
        prompt,
        served.tokenizer,
        rows=bounds.vocabulary,
        thinks=conversation.thinks,
        continues=conversation.continues,
        prove=served.checker.fault,
    )


def _text(
    tokenizer: Tokenizer,
    conversation: Conversation,
    prompt: ChatPrompt,
    sequence: TokenSequence,
    constraint: FormConstraint | None,
    bounds: Bounds,
    identity: AnswerIdentity | None,
) -> TextState:
    asked = conversation.sampling
    call_seed = ""
    if identity is not None:
        call_seed = identity.call_seed(sequence.choice)
    return TextState(
        tokenizer,
        stops=[stop for stop in asked.stop or [] if stop],
        stop_ids=sequence.stop_ids,
        tools=conversation.tools.for_parsing,
        reasoning=prompt.reasoning,
        continues=conversation.continues,
        show_special=asked.shows_special,
        earlier_calls=list(conversation.call_ids()),
        call_seed=call_seed,
        rows=bounds.vocabulary,
        follows=constraint is not None,
        reasons=constraint is not None and constraint.reasons,
    )
