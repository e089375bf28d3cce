"""What `marathon agents` prints: the lines of configuration with which coding agents use this server.

Owns those lines. Runs in the main thread of a short-lived process; reads the settings and the model's configuration,
never its weights.
"""

from __future__ import annotations

import json
from typing import Any

from server.model_files import model_config
from server.model_files.locate import locate
from server.settings import Settings

MODEL = "default"  # the name under which any model answers
KEY = "none"  # where no key is configured, any will do
CATALOG = "marathon-models.json"


def report(settings: Settings) -> str:
    """A section an agent. Raises StartupError where there is no such model."""
    folder = locate(settings).path
    config = model_config.read(folder, "config.json")
    own = model_config.read(folder, "tokenizer_config.json")
    context = settings.allowed_context(model_config.context_length(config, own))
    url = settings.base_url
    key = KEY
    if settings.api_key or settings.api_key_file:
        key = "YOUR-API-KEY"
    sections = {
        "Claude Code (environment)": claude_code(url, context, key),
        "Codex CLI (~/.codex/config.toml)": codex(url, context),
        f"Codex CLI (~/.codex/{CATALOG})": json.dumps({"models": [codex_model(context)]}, indent=2),
        "opencode (opencode.json)": opencode(url, context, key),
        "qwen-code and other programs with OpenAI's SDK (environment)": openai(url, key),
    }
    return "\n\n".join(f"# {title}\n{lines}" for title, lines in sections.items())


def claude_code(url: str, context: int, key: str) -> str:
    """Its base URL has no /v1. Of a model that it doesn't know it assumes a million tokens."""
    values = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return _exports(values)


def codex(url: str, context: int) -> str:
    """A key is read from the environment, as MARATHON_API_KEY."""
    return f"""model = "{MODEL}"
model_provider = "marathon"
model_context_window = {context}
model_catalog_json = "{CATALOG}"

[model_providers.marathon]
name = "Marathon"
base_url = "{url}/v1"
wire_api = "responses\""""


def codex_model(context: int) -> dict[str, Any]:
    """An entry of Codex's catalog; `freeform` makes apply_patch a custom tool."""
    return {
        "slug": MODEL,
        "display_name": "Marathon",
        "description": "the served model",
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": context,
        "default_reasoning_level": "medium",
        "supported_reasoning_levels": [
            {"effort": "low", "description": "thinks little"},
            {"effort": "medium", "description": "thinks"},
        ],
        "support_verbosity": False,
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
        "base_instructions": "You are a coding agent.",
        "supports_reasoning_summaries": False,
        "supports_reasoning_summary_parameter": False,
        "experimental_supported_tools": [],
        "default_reasoning_summary": "none",
        "input_modalities": ["text"],
    }


def opencode(url: str, context: int, key: str) -> str:
    model = {"name": "Marathon", "limit": {"context": context, "output": context // 4}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Marathon",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {MODEL: model},
    }
    return json.dumps({"provider": {"marathon": provider}, "model": f"marathon/{MODEL}"}, indent=2)


def openai(url: str, key: str) -> str:
    return _exports({"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": MODEL})


def _exports(values: dict[str, str]) -> str:
    return "\n".join(f"export {name}={value}" for name, value in values.items())
