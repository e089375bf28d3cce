"""One model's tokenizer and what its files say about text.

Owns the loaded tokenizer, chat template included, and the facts that come with it: which ids end an answer, how
reasoning and tool calls are marked, the defaults for generation. Loaded once, then immutable; used by the server's
worker thread and event loop. Importing mlx-lm pulls MLX in, so `load` pins MLX to the CPU before; no array is ever
made here.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.config import open_files
from server.errors import StartupError
from server.ipc.sequence import TokenTable
from server.model_files import generation_config, model_config
from server.model_files.hub import VOCABULARIES
from server.model_files.stumbles import in_words
from server.text.templates import files
from server.text.templates.chat_template import ChatTemplate, Renderer
from server.text.templates.markers import markers, samples
from server.text.templates.source import literals, variables
from server.text.templates.turn import Message
from server.text.tokens import harmony
from server.text.tokens.control import Tags, Transitions
from server.text.tokens.encoding import PROBE, Encoder
from server.text.tokens.vocabulary import Vocabulary

log = logging.getLogger("marathon")
_WORTH_A_MARK = 16  # a shorter prefix is read again sooner than it is found
BARE = "bare_json"
_CODE = "<|python_tag|>"  # which Llama 3 may write before a call
# How a template tells its model to write calls without tags.
_BARE_CALL = re.compile(r'\{\s*"name"\s*:\s*function name\s*,\s*"parameters"\s*:')
_SPELLED_THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the model writes a tool call.

    Attributes:
        name: of mlx-lm's parser; "harmony" or `BARE` where it has none.
        start, end: tags around calls; `end` may be empty: until the end of the answer.
        is_json: between the tags stands exactly `{"name": …, "arguments": {…}}`, so that a grammar can be built.
        parse: (text between the tags, tools) → call or calls; raises whatever it likes.
    """

    name: str
    start: str
    end: str
    is_json: bool
    parse: Callable[[str, list[dict[str, Any]] | None], Any]

    @property
    def is_bare(self) -> bool:
        """Whether a call is a JSON object in the answer's text; `start` may stand before it."""
        return self.name == BARE


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as token ids.

    Attributes:
        marks: how many ids are worth a prefix snapshot, ascending: up to the last message's text (with templates that
            forget what they write before an answer, up to its end too), and the whole prompt.
        reasoning: the prompt ends inside a reasoning block, so the answer begins with reasoning.
        settled: it ends behind one, which the template has closed: reasoning is over, or isn't wanted.
    """

    ids: list[int]
    marks: list[int]
    reasoning: bool
    settled: bool = False


class Tokenizer:
    """Construct with `load`.

    Attributes:
        vocab_size: ids that the tokenizer knows; the model's may be padded beyond.
        eos_ids: ids that end an answer.
        defaults: sampling values that the model's makers recommend, by our names.
        context: positions that the model was made for.
        think: the tags around reasoning, or None.
        tool_format: how tool calls look, or None.
        transitions, first_state: for models whose answers have a structure of their own (mlx-lm's response formats).
        silent: further tags that are never part of an answer's text.
        speaks_harmony: answers are messages with channels, as gpt-oss writes them.
        has_template: whether `chat` can work at all.
        able: what its template can take.
        info: what the files say about the tokenizer.
        folder: where the files lie.
    """

    folder: Path

    def __init__(
        self, wrapper: Any, config: Mapping[str, Any], generation: Mapping[str, Any], own: Mapping[str, Any]
    ) -> None:
        self.hf = wrapper._tokenizer
        self.info = {"tokenizer_class": type(self.hf).__name__, "chat_template": self.hf.chat_template, **own}
        self._vocabulary = Vocabulary(self.hf)
        self.encoder = Encoder(self.hf, self._vocabulary, _markers(wrapper))
        self.vocab_size = self._vocabulary.size
        self.think = _think(wrapper)
        self.transitions: Transitions = {s: tuple(edges) for s, edges in wrapper.response_transitions.items()}
        self.first_state: str | None = wrapper.response_initial_state
        self.silent: tuple[str, ...] = tuple(wrapper.structural_markers)
        self.speaks_harmony = _speaks_harmony(self.encoder)
        self.tool_format = _tool_format(wrapper, self)
        self.has_template = _has_template(wrapper)
        self._template = _template(wrapper, self.encoder, self.think)
        self.able = self._template.able
        self.defaults = generation_config.defaults(generation)
        self.context = model_config.context_length(config, own)
        named = [*model_config.eos_ids(config, generation), *wrapper.eos_token_ids, *self._chat_end()]
        self.eos_ids = frozenset(token for token in named if token >= 0)
        self._added = {entry.content: token for token, entry in self.hf.added_tokens_decoder.items()}
        self._tags: dict[int | None, Tags] = {}

    @classmethod
    def load(cls, path: Path, *, trust_remote_code: bool) -> Tokenizer:
        """Raises StartupError with one line when the model's folder has no usable tokenizer."""
        import mlx.core as mx

        mx.set_default_device(mx.cpu)
        with open_files.kept():
            from mlx_lm.utils import load_tokenizer

        config = model_config.read(path, "config.json")
        generation = generation_config.read(path)
        own = model_config.read(path, "tokenizer_config.json")
        extra: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        try:
            if (template := files.chat_template(path, own)) is not None:
                extra["chat_template"] = template
            with generation_config.without_broken(path) as folder:
                made = cls(load_tokenizer(folder, extra), config, generation, own)
        except Exception as error:  # foreign files and foreign code
            reason = model_config.fault(path) or model_config.tokenizer_fault(path) or in_words(error, "transformers")
            if not any((path / name).is_file() for name in VOCABULARIES):
                reason = f"there is none of {', '.join(VOCABULARIES)}"
            raise StartupError(f"the tokenizer in {path} can't be loaded: {reason}") from error
        made.folder = path
        if made.has_template and (fault := made._template.fault()):
            log.warning("the chat template in %s fails at a message of the user's: %s", path, fault)
        return made

    def with_tools(self, form: ToolFormat) -> Tokenizer:
        """The same tokenizer for a model that writes its calls in `form`."""
        equipped = copy.copy(self)
        equipped.tool_format = form
        equipped._tags = {}
        return equipped

    # ---------------------------------------------------------------- control tokens
    def tags(self, rows: int | None = None) -> Tags:
        """How the model's tags are written, if it has logits for the first `rows` ids."""
        if rows not in self._tags:
            self._tags[rows] = Tags(self._tag_texts(), self._added, rows)
        return self._tags[rows]

    def _tag_texts(self) -> list[str]:
        texts = [*(self.think or ()), *self.silent, *(harmony.TAGS if self.speaks_harmony else ())]
        states = [*self.transitions.values(), *(harmony.HARMONY.values() if self.speaks_harmony else ())]
        texts += [tag for edges in states for tag, _ in edges]
        if self.tool_format is None:
            return texts
        return [*texts, self.tool_format.start, self.tool_format.end]

    def token_table(self) -> TokenTable:
        """What the engine needs to know for following a grammar; takes up to a second."""
        texts = self._vocabulary.texts()
        control = {*self._vocabulary.special, *self.eos_ids, *self.tags().ids}
        return TokenTable(texts, *(sorted(t for t in ids if t < len(texts)) for ids in (control, self.eos_ids)))

    def added_id(self, text: str) -> int | None:
        """The id of the added token that is spelled `text`, as control tokens are."""
        return self._added.get(text)

    def unspellable(self, rows: int) -> frozenset[int]:
        """Bytes that the model can't write by themselves, given its number of logits."""
        return self._vocabulary.unspellable(rows)

    # ---------------------------------------------------------------- text → ids
    def encode(self, text: str, *, special: bool = False, bos: bool = True, most: int | None = None) -> list[int]:
        """Ids of a bare text. What spells a control token in it stays text unless `special`.

        Raises ContextLengthError for a text that is far longer than `most` tokens, without reading all of it.
        """
        return self.encoder.encode(text, special=special, bos=bos, most=most)

    def chat(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        reasoning_effort: str | None = None,
        continue_final_message: bool = False,
        begin_answer: bool = True,
        most: int | None = None,
    ) -> ChatPrompt:
        """The prompt for the next answer, or for going on with the last message; without `begin_answer` for neither.

        Raises InvalidValue when the model has no template, or with the template's words when it refuses, and
        ContextLengthError for a prompt that is far longer than `most` tokens, without reading all of it.
        """
        if most is not None:
            self._check_lengths(messages, most)
        begins = begin_answer and not continue_final_message
        made = self._template.render(messages, tools, kwargs or {}, reasoning_effort, continue_final_message, begins)
        ids, counts = self.encoder.encode_marked(made.text, made.places, most=most)
        marks = sorted({*(count for count in counts if count >= _WORTH_A_MARK), len(ids)})
        return ChatPrompt(ids, marks, made.reasoning, made.settled)

    def _check_lengths(self, messages: list[Message], most: int) -> None:
        """Raises for what is said to the model where it can't fit by itself. No template leaves any of it out but the
        blanks around it, and rendering 30 MB takes many times as long as finding this out. Of what the assistant said,
        templates may leave out the reasoning."""
        for message in messages:
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            for text in (part.get("text") for part in parts if message["role"] != "assistant"):
                if isinstance(text, str):
                    self.encoder.check_length(text.strip(), most)

    # ---------------------------------------------------------------- ids → text
    def token_bytes(self, token: int) -> bytes:
        """What one id stands for; special tokens give their text, ids beyond the tokenizer nothing."""
        return self._vocabulary.token_bytes(token)

    def spell(self, token: int) -> tuple[str, bytes]:
        """One token as logprobs show it: readable text, and its true bytes."""
        data = self.token_bytes(token)
        return data.decode("utf-8", "replace"), data

    def piece(self, token: int) -> str:
        """One token as the vocabulary writes it."""
        return str(self.hf.convert_ids_to_tokens(token) or "")

    def is_special(self, token: int) -> bool:
        return token in self._vocabulary.special

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of some ids with its leading space; special tokens are left out unless `special`."""
        return self._vocabulary.decode(tokens, special=special)

    def _chat_end(self) -> list[int]:
        """The special token that the template puts behind an answer. Some models' files don't list it. Where answers
        consist of several messages it ends only one of them."""
        if self.speaks_harmony or self.first_state is not None:
            return []
        try:
            history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
            text = self.hf.apply_chat_template(history, tokenize=False)
        except Exception:  # no template, or none for these messages
            return []
        match = self.encoder.shield.pattern.fullmatch(str(text).rpartition(PROBE)[2].strip())
        if match:
            return [self.hf.convert_tokens_to_ids(match[0])]
        return []


# ---------------------------------------------------------------- facts
def _tool_format(wrapper: Any, tokenizer: Tokenizer) -> ToolFormat | None:
    if tokenizer.speaks_harmony:
        return ToolFormat("harmony", " to=functions.", "<|call|>", False, _no_parser)
    if not wrapper.has_tool_calling:
        if any(_BARE_CALL.search(text) for source in _sources(wrapper) for text in literals(source)):
            return ToolFormat(BARE, _CODE, "", False, _no_parser)
        return None
    name = wrapper.tool_parser.__module__.rpartition(".")[2]
    return ToolFormat(name, wrapper.tool_call_start, wrapper.tool_call_end, name == "json_tools", wrapper.tool_parser)


def _think(wrapper: Any) -> tuple[str, str] | None:
    if wrapper.has_thinking:
        return wrapper.think_start, wrapper.think_end
    # mlx-lm wants the tags to be tokens, but a model can spell them, too
    source = str(wrapper._tokenizer.chat_template or "")
    if all(tag in source for tag in _SPELLED_THINK):
        return _SPELLED_THINK
    return None


def _speaks_harmony(encoder: Encoder) -> bool:
    return {"<|start|>", "<|channel|>", "<|message|>"} <= encoder.control


def _no_parser(text: str, tools: list[dict[str, Any]] | None) -> Any:
    raise ValueError("calls in this format are read as they form, or not at all")


def _template(wrapper: Any, encoder: Encoder, think: tuple[str, str] | None) -> ChatTemplate:
    if not _has_template(wrapper):
        return ChatTemplate(None, frozenset(), encoder.shield, think)
    sources = _sources(wrapper)
    # Templates that are Python code know one switch, which mlx-lm translates.
    if sources:
        names = frozenset[str]().union(*map(variables, sources))
    else:
        names = frozenset({"enable_thinking"})
    return ChatTemplate(_renderer(wrapper), names, encoder.shield, think)


def _has_template(wrapper: Any) -> bool:
    """Whether there is one. A file or a field may be there and blank."""
    sources = _sources(wrapper)
    return bool(wrapper.has_chat_template) and (not sources or any(source.strip() for source in sources))


def _sources(wrapper: Any) -> list[str]:
    """The model's templates, the usual one first; none where they are Python code."""
    given = wrapper._tokenizer.chat_template
    if wrapper._chat_template is not None or not isinstance(given, str | dict):
        return []
    if isinstance(given, str):
        return [given]
    return [given.get("default", ""), *given.values()]


def _renderer(wrapper: Any) -> Renderer:
    if _sources(wrapper):
        render = wrapper._tokenizer.apply_chat_template
    else:
        render = wrapper.apply_chat_template
    return lambda messages, **given: str(render(messages, tokenize=False, **given))


def _markers(wrapper: Any) -> frozenset[int]:
    """The added tokens that structure a chat."""
    added = {token: entry.content for token, entry in wrapper._tokenizer.added_tokens_decoder.items()}
    tags = (wrapper.think_start, wrapper.think_end, wrapper.tool_call_start, wrapper.tool_call_end)
    edges = (tag for edges in wrapper.response_transitions.values() for tag, _ in edges)
    named = getattr(wrapper._tokenizer, "chat_control_tokens", None) or ()  # by newer files
    texts = [text for text in (*tags, *wrapper.structural_markers, *edges, *named) if text]
    if wrapper.has_chat_template:
        texts += [text for source in _sources(wrapper) for text in literals(source)]
        texts += samples(_renderer(wrapper))
    return markers(added, texts)
