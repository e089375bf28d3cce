"""The `llm` command: prompt, stream, schema and embedded errors. Runs in an environment of its own."""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

URL, MODEL, KEY = (os.environ[f"MARATHON_CLIENT_{name}"] for name in ("URL", "MODEL", "KEY"))
MODELS = f"""
- model_id: marathon
  model_name: {json.dumps(MODEL)}
  api_base: {json.dumps(URL)}
  api_key_name: marathon
  supports_schema: true
  supports_tools: true
"""
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}

with tempfile.TemporaryDirectory() as home:
    Path(home, "extra-openai-models.yaml").write_text(MODELS, encoding="utf-8")

    def llm(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).with_name("llm")), "prompt", "-m", "marathon", "--key", KEY, *arguments]
        return subprocess.run(command, env=os.environ | {"LLM_USER_PATH": home}, capture_output=True, text=True)

    fixed = ("-o", "temperature", "0", "-o", "max_tokens", "8", "Say hello.")
    whole, streamed = llm("--no-stream", *fixed), llm(*fixed)
    assert whole.returncode == 0 and whole.stdout.strip(), whole.stderr
    assert streamed.stdout == whole.stdout, (streamed.stdout, whole.stdout)
    city = llm("--schema", json.dumps(SCHEMA | {"additionalProperties": False}), "-o", "max_tokens", "100", "A city.")
    assert json.loads(city.stdout)["city"] in {"Oslo", "Rome"}, city
    wrong = llm("-o", "max_tokens", "99", "-o", "logit_bias", '{"99999999": 1}', "Hello")
    assert wrong.returncode and "vocabulary" in wrong.stderr, wrong
print("llm", version("llm"))
