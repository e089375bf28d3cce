"""Settings: where they are written, who wins, and what a mistake is answered with."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import mlx.core as mx
import pytest

from server import check, cli
from server.config.cache_folder import cache_folder
from server.config.sources import variable
from server.errors import StartupError
from server.settings import SIZES, Settings, from_json, in_words, load, load_from, option, read_sources


def written(folder: Path, text: str | bytes) -> Path:
    file = folder / "marathon.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def refusal(values: dict[str, object], config: Path | None = None) -> str:
    """The one line that these settings are refused with."""
    with pytest.raises(StartupError) as caught:
        load(values, config)
    (line,) = str(caught.value).splitlines()
    return line


# ---------------------------------------------------------------- who wins
def test_the_command_line_wins_over_the_environment_and_that_over_the_file(monkeypatch, tmp_path):
    file = written(tmp_path, "port = 1\nmax_rows = 2\nqueue_limit = 3\n")
    monkeypatch.setenv("MARATHON_PORT", "11")
    monkeypatch.setenv("marathon_max_rows", "12")
    sources = read_sources({"port": "21"}, file)
    settings = load_from(sources)
    assert (settings.port, settings.max_rows, settings.queue_limit) == (21, 12, 3)
    assert sources.origin("port") == "--port"
    assert sources.origin("max_rows") == "MARATHON_MAX_ROWS"
    assert sources.origin("queue_limit") == f"{file}, line 3"
    assert sources.origin("context") == ""


def test_the_file_may_be_named_in_the_environment_and_begin_with_a_byte_order_mark(monkeypatch, tmp_path):
    monkeypatch.setenv("MARATHON_CONFIG", str(written(tmp_path, b"\xef\xbb\xbfport = 7\n")))
    assert load({}).port == 7


@pytest.mark.parametrize("name", [*Settings.model_fields, "config", "no_such_setting"])
def test_an_empty_variable_is_absent(monkeypatch, name):
    default = load({})
    monkeypatch.setenv(variable(name), "")
    assert load({}) == default


# ---------------------------------------------------------------- mistakes
@pytest.mark.parametrize("name", [name for name in Settings.model_fields if name.endswith(("_seconds", "_days"))])
def test_no_number_is_endless_since_another_process_could_not_be_given_it(name, tmp_path):
    for value in ("inf", "Infinity", "-inf", "nan", "1e400"):
        assert option(name) in refusal({name: value})
    assert name in refusal({}, written(tmp_path, f"{name} = inf\n"))


def test_an_origin_that_no_browser_sends_is_refused():
    for origin in ("localhost:3000", "example", "http://a/b", "http://", "https://*.a.example", "http://a:x", "http://a?b",
                   "http://u@a", "http://a, b"):  # fmt: skip
        line = refusal({"cors_origins": f"http://localhost:3000,{origin}"})
        assert line.startswith("--cors-origins ")
        assert "is no origin, which has a scheme and no path" in line
    for origin in ("*", "null", "file://", "http://a", "HTTPS://A.example:8443/", "http://localhost:*", "http://[::1]:80",
                   "chrome-extension://abcdef", "app://obsidian.md", "tauri://localhost"):  # fmt: skip
        assert load({"cors_origins": origin}).cors_origins == [origin.lower().replace("8443/", "8443")]


@pytest.mark.parametrize("name", ["model", "host", "api_key_file", "cache_dir", "memory_limit", "port", "guard"])
def test_an_option_that_is_left_empty_is_refused_by_name(tmp_path, name):
    assert refusal({name: ""}).startswith(f"{option(name)} '' is empty")
    file = written(tmp_path, f'access_log = true\n{name} = ""\n')
    assert f"{file}, line 2: {name}" in refusal({}, file)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("log_level = 'info'\n\nport = 'x'\n", 3, "port 'x'"),
        ("log_level = 'info'\nprot = 1\n", 2, "did you mean port?"),
        ("[serve]\nport = 1\n", 1, "no table"),
        ("guard = true\nserve.port = 1\n", 2, "no table"),
        ("guard = true\nport : 1\n", 2, "isn't TOML"),
        ("port = 1\nport = 2\n", 2, "isn't TOML"),
        ("'max_rows' = 0\n", 1, "greater than or equal to 1"),
        ("# ü\nlog_level = '".encode() + b"\xff'\n", 2, "isn't UTF-8"),
    ],
)
def test_a_mistake_in_the_file_names_file_and_line(tmp_path, text, line, words):
    file = written(tmp_path, text)
    message = refusal({}, file)
    assert str(file) in message
    assert f"line {line}" in message
    assert words in message


@pytest.mark.parametrize("config", ["nothing.toml", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path, config):
    assert f"config file {tmp_path / config}" in refusal({}, tmp_path / config)


def test_a_mistake_in_the_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv("MARATHON_PORT", "x")
    assert refusal({}).startswith("MARATHON_PORT 'x': ")
    monkeypatch.setenv("MARATHON_PROT", "1")
    assert refusal({}) == "unknown setting in the environment: MARATHON_PROT; did you mean MARATHON_PORT?"


def test_a_key_is_not_repeated_in_an_error(tmp_path):
    assert "12345" not in refusal({}, written(tmp_path, "api_key = 12345\n"))


@pytest.mark.parametrize("host", ["http://127.0.0.1", "127.0.0.1:8080", "localhost:80", "127.0.0.1/"])
def test_a_host_is_a_host_and_nothing_more(host):
    assert refusal({"host": host}).startswith(f"--host {host!r}: a host ")
    assert load({"host": "[::1]"}).host == "::1"


# ---------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("512MiB", 2**29), ("8g", 8 * 10**9), ("1.5 GiB", 3 * 2**29), ("4096", 4096), ("16kb", 16000)],
)
def test_sizes_have_units_everywhere(monkeypatch, tmp_path, text, size):
    assert load({"memory_limit": text}).memory_limit == size
    assert load({}, written(tmp_path, f'prefix_cache = "{text}"')).prefix_cache == size
    monkeypatch.setenv("MARATHON_POOL_LIMIT", text)
    assert load({}).pool_limit == size
    assert load({"memory_limit": in_words("memory_limit", size)}).memory_limit == size


@pytest.mark.parametrize("text", ["8XB", "GB", "-1GB", "8 G B", "eight"])
def test_what_is_no_size_is_refused_with_what_is(text):
    assert "8GB" in (line := refusal({"memory_limit": text}))
    assert "512MiB" in line


@pytest.mark.parametrize("name", ["memory_limit", "prefix_cache", "pool_limit", "kv_disk"])
@pytest.mark.parametrize("text", ["5", " 16 ", "1023"])
def test_a_few_bytes_are_taken_for_a_forgotten_unit(monkeypatch, name, text):
    assert f"{text.strip()}GB is gigabytes" in refusal({name: text})
    monkeypatch.setenv(variable(name), text)
    assert f"{text.strip()}GB is gigabytes" in refusal({})


def test_no_bytes_are_no_bytes_and_a_schema_may_be_small():
    assert load({"max_schema_bytes": "512"}).max_schema_bytes == 512
    assert load({"prefix_cache": "0", "kv_disk": "0"}).prefix_cache == 0


@pytest.mark.parametrize("command", ["serve", "check"])
def test_help_says_the_units_of_every_size(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "512MiB" in shown
    for name in SIZES:
        assert f"{option(name)} SIZE" in shown


# ---------------------------------------------------------------- paths
PATHS = [name for name, field in Settings.model_fields.items() if Path in get_args(field.annotation)]


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def every_way(name: str, value: object, monkeypatch, folder: Path) -> Iterator[Settings]:
    """The settings with this value from each of the three places."""
    yield load({name: value})
    yield load({}, written(folder, f"{name} = {json.dumps(value)}\n"))
    monkeypatch.setenv(variable(name), str(value))
    yield load({})


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("below", ["", "/kept", "/a/~b"])
def test_a_path_may_begin_with_the_home_wherever_it_is_written(monkeypatch, home, tmp_path, name, below):
    for settings in every_way(name, f"~{below}", monkeypatch, tmp_path):
        assert getattr(settings, name) == Path(f"{home}{below}")
        assert getattr(from_json(settings.model_dump_json()), name) == Path(f"{home}{below}")


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("value", ["./~", "a/~/b", "/a~", "a~b", "off"])
def test_no_other_tilde_of_a_path_is_the_home(monkeypatch, home, tmp_path, name, value):
    for settings in every_way(name, value, monkeypatch, tmp_path):
        right = "off" if (name, value) == ("journal", "off") else str(Path(value).absolute())
        assert str(getattr(settings, name)) == right


@pytest.mark.parametrize("name", [*PATHS, "model", "config"])
def test_the_home_of_a_user_that_there_is_not_is_refused_in_one_line(capsys, name):
    line = complaint(capsys, "check", option(name), "~no-such-user/x")
    assert "no home is known for ~no-such-user" in line
    assert "~no-such-user/x" in line.partition(":")[2]


def test_the_home_is_put_into_every_path_of_every_command(capsys, home):
    """Of the options that are no settings, too; those are `load`'s."""
    loads = {option(name) for name in (*Settings.model_fields, "config")}
    tried = []
    for command in cli.offered():
        flags = {offered.flag for offered in command.options if offered.files} - {"--model"}
        for flag in flags if command.name == "certify" else flags - loads:
            given = cli.parse([command.name, f"{flag}=~/x"])[flag.strip("-").replace("-", "_")]
            assert given in (home / "x", [home / "x"])
            assert "no home is known" in complaint(capsys, command.name, f"{flag}=~no-such-user")
            tried.append((command.name, flag))
    assert tried == [("certify", "--cache-dir"), ("cache", "--folder"), ("models", "--folder")]


def test_a_settings_file_may_be_in_the_home(monkeypatch, home):
    home.mkdir()
    written(home, "port = 7\n")
    assert load({}, "~/marathon.toml").port == 7
    monkeypatch.setenv("MARATHON_CONFIG", "~/marathon.toml")
    assert load({}).port == 7


# ---------------------------------------------------------------- the command line
def complaint(capsys, *arguments: str) -> str:
    """The one line on stderr with which these arguments end in exit code 2."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["srve"], ["there is no command 'srve'", "; did you mean serve?", "marathon --help"]),
        (["xyzzy"], ["there is no command 'xyzzy'", "serve, check", "marathon --help"]),
        (["serve", "--prot", "8"], ["--prot", "did you mean --port?", "marathon serve --help"]),
        (["serve", "--log_level=debug"], ["--log_level;", "did you mean --log-level?", "marathon serve --help"]),
        (["check", "--modle", "x"], ["did you mean --model?", "marathon check --help"]),
        (["certify", "--token", "5"], ["did you mean --tokens?", "marathon certify --help"]),
        (["serve", "--zzz"], ["unknown option --zzz (see", "marathon serve --help"]),
        (["serve", "some/model"], ["'some/model'", "--model some/model"]),
        (["--port", "8"], ["marathon serve --port"]),
        (["server"], ["serve", "check", "certify"]),
    ],
)
def test_an_unknown_word_points_to_the_help_that_lists_what_there_is(capsys, arguments, words):
    line = complaint(capsys, *arguments)
    for word in words:
        assert word in line


@pytest.mark.parametrize("option", ["--model", "--model-alias", "--prefix-cache", "--config"])
def test_bytes_that_the_locale_has_no_text_for_are_refused_in_one_line(capsys, monkeypatch, option):
    """As Python hands them on: `ünï` of a UTF-8 terminal, where the locale is plain C."""
    value = "ünï".encode().decode("ascii", "surrogateescape")
    assert "locale" in complaint(capsys, "serve", option, value)
    assert "locale" in complaint(capsys, "check", f"{option}={value}")
    monkeypatch.setenv("MARATHON_MODEL_ALIAS", "x\udcff")
    assert "MARATHON_MODEL_ALIAS isn't text in this locale" in complaint(capsys, "serve")


@pytest.mark.parametrize("host", ["http://x", "x/", "a b", "x:8080", "me@x", "*.x", "[::1]:80", "a:80"])
def test_a_host_that_no_request_could_name_is_refused(capsys, host):
    assert repr(host) in complaint(capsys, "check", f"--allowed-hosts={host}")


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_key_file_without_a_key_is_noticed_before_anything_is_fetched(capsys, monkeypatch, tmp_path, command):
    monkeypatch.setattr("server.model_files.starter.ensure_starter", lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr("server.model_files.locate.ensure_starter", lambda *_: pytest.fail("fetched"))
    (tmp_path / "empty").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, words in (("none", "No such file"), ("empty", "no key"), ("bytes", "UTF-8"), (".", "directory")):
        line = complaint(capsys, command, "--port=0", f"--api-key-file={tmp_path / name}")
        assert f"--api-key-file {tmp_path / name}" in line
        assert words in line


# ---------------------------------------------------------------- marathon check
def test_check_says_what_differs_from_the_default_and_where_it_was_set(monkeypatch, tmp_path):
    monkeypatch.setenv("MARATHON_API_KEY", "secret")
    file = written(tmp_path, 'memory_limit = "8GB"\nguard = true\n')
    sources = read_sources({"port": "81"}, file)
    shown = check.effective(load_from(sources), sources)
    assert shown["port"] == "81  (default 8080; set by --port)"
    assert shown["memory_limit"] == f"8GB  (default -; set by {file}, line 1)"
    assert shown["api_key"] == "1 given  (default -; set by MARATHON_API_KEY)"
    assert shown["guard"] == "on"
    assert shown.keys() == Settings.model_fields.keys()
    assert "secret" not in str(shown)


def test_check_says_whether_the_weights_fit(tmp_path):
    for number, size in ((1, 750_000), (2, 1_250_000)):
        mx.save_safetensors(str(tmp_path / f"model-{number}.safetensors"), {f"w{number}": mx.zeros(size)})
    assert check.fits(tmp_path, 10**9).startswith("yes: weights 0.01 GB of 1.00 GB; 0.99 GB are left")
    assert check.fits(tmp_path, 8_000_000).startswith("no: ")


# ---------------------------------------------------------------- the cache folder
def test_the_cache_is_where_the_user_keeps_caches(monkeypatch, empty_home, tmp_path):
    assert cache_folder() == Path(os.environ["XDG_CACHE_HOME"]) / "mlx-marathon"
    for unset in ("", None):
        monkeypatch.setenv("XDG_CACHE_HOME", "") if unset == "" else monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(sys, "platform", "linux")
        assert cache_folder() == empty_home / ".cache" / "mlx-marathon"
        monkeypatch.setattr(sys, "platform", "darwin")
        assert cache_folder() == empty_home / "Library" / "Caches" / "mlx-marathon"
    assert cache_folder(tmp_path) == tmp_path


def test_another_process_gets_every_setting_but_the_keys(tmp_path):
    (tmp_path / "keys").write_text("from-a-file\n")
    chosen = load({"api_key": "secret", "api_key_file": str(tmp_path / "keys"), "context": 77})
    sent = chosen.for_a_process()
    assert "secret" not in sent
    assert "from-a-file" not in sent
    without = chosen.model_copy(update={"api_key": from_json("{}").api_key, "api_key_file": None})
    assert from_json(sent) == without


# ---------------------------------------------------------------- mistakes of a kind
OF_TOML = ["false", "true", "7", "-3", "1.5", "inf", "nan", '"x"', '["a", 1]', "[]", "[[false]]", "2020-01-01"]
OF_TOML += ["2020-01-01T10:00:00Z", "10:00:00", "[{ a = 1 }]"]


@pytest.mark.parametrize("name", Settings.model_fields)
def test_no_mistake_in_a_file_is_answered_in_words_of_python(name, tmp_path):
    for value in OF_TOML:
        try:
            load({}, written(tmp_path, f"{name} = {value}\n"))
        except StartupError as error:
            line = str(error)
            assert not any(word in line for word in ("<class", "datetime", "pathlib", "False", "True", "None")), line
            assert line.count("line 1") == 1 or "needs --api-key" in line, line


def test_a_switch_is_no_number_and_no_path(tmp_path):
    for name, field in Settings.model_fields.items():
        if field.annotation in (bool, int, float) or name in ("context", "journal", "cache_dir", "buffer_limit"):
            given = written(tmp_path, f"{name} = true\n")
            if field.annotation is bool:
                load({}, given)
            else:
                assert f"{name} true: input should be a" in refusal({}, given)
    assert "journal false: input should be a path in quotes or 'off'" in refusal({}, written(tmp_path, "journal=false"))


@pytest.mark.parametrize("command", ["serve", "check", "agents"])
def test_a_value_that_begins_with_a_minus_is_refused_as_behind_an_equals_sign(command, capsys):
    for name, field in Settings.model_fields.items():
        if field.annotation is bool:
            continue
        apart = parsed(command, option(name), "-8GB")
        assert apart == parsed(command, f"{option(name)}=-8GB")
        assert apart[name] == "-8GB"
    with pytest.raises(SystemExit):
        cli.main([command, "--memory-limit", "-8GB"])
    assert "--memory-limit '-8GB': a size is a number of bytes" in capsys.readouterr().err


def parsed(*arguments: str) -> dict[str, object]:
    return cli.parse(arguments)


def test_an_option_is_no_value_of_the_one_before_it(capsys):
    for following in (["--host", "x"], ["-h"], []):
        with pytest.raises(SystemExit) as ended:
            cli.main(["serve", "--port", *following])
        assert ended.value.code == 2
        assert "argument --port: expected one argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("agents --url http://x", "it is an option of marathon status, top, ask"),
        ("check --url x", "it is an option of marathon status, top, ask"),
        ("journal --url x", "it is an option of marathon status, top, ask"),
        ("cache --cache-dir x", "it is a setting, which MARATHON_CACHE_DIR in the environment sets here"),
        ("cache --kv-disk=1GB", "it is a setting, which MARATHON_KV_DISK in the environment sets here"),
        ("models --model x", "it is a setting, which MARATHON_MODEL in the environment sets here"),
        ("config --port 1", "it is an option of marathon serve, check, agents"),
        ("status --config x", "it is an option of marathon serve, check, agents, cache"),
        ("cache --foldr x", "did you mean --folder?"),
        ("serve --prot 1", "did you mean --port?"),
    ],
)
def test_a_foreign_option_is_named_with_its_owner_and_a_misspelt_one_with_its_like(arguments, hint, capsys):
    words = arguments.split()
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    flag = words[1].partition("=")[0]
    assert line == f"marathon: unknown option {flag}; {hint} (see marathon {words[0]} --help)"


MISTAKEN = ["-5", "-5.5", "-x", "-xyz", "--nope", "-5 hi", "- hi", "--nope hi", "-5=hi", "---"]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_nothing_that_begins_with_a_dash_is_text_before_a_double_dash(command):
    for word in MISTAKEN:
        for arguments in ([word, "hi"], [word], ["list", word] if command == "journal" else [word, "--", "hi"]):
            with pytest.raises(StartupError) as refused:
                cli.parse([command, *arguments])
            line = str(refused.value)
            assert f"unknown option {word.partition('=')[0]}" in line
            assert f"(see marathon {command} --help)" in line
            assert ("follows --" in line) == (command in ("ask", "journal"))


@pytest.mark.parametrize("text", [*MISTAKEN, "-", "--model", "-h", "hi"])
def test_behind_a_double_dash_everything_is_text(text):
    assert parsed("ask", "--", text, "-5")["text"] == [text, "-5"]
    assert parsed("ask", "--model", "m", "--", text)["text"] == [text]
    assert parsed("journal", "show", "--", text)["ids"] == [text]


def test_a_foreign_option_is_never_taken_for_one_that_has_no_word_of_it():
    """Every option of every command, given to every other one."""
    own = {command.name: {offered.flag for offered in command.options} for command in cli.offered()}
    every = set().union(*own.values())
    for name, flags in own.items():
        for flag in every - flags:
            with pytest.raises(StartupError) as refused:
                cli.parse([name, flag, "x"])
            words = set(str(refused.value).partition("; ")[2].split()[3].strip("-?").split("-"))
            assert f"unknown option {flag}; it is " in str(refused.value) or words & set(flag.strip("-").split("-"))


# ---------------------------------------------------------------- words that must not be taken for something else
@pytest.mark.parametrize("word", ["off", "OFF", " Off ", "false", "False", "no", "0", "none"])
def test_a_journal_that_is_switched_off_is_no_file(monkeypatch, word):
    assert load({"journal": word}).journal == "off"
    monkeypatch.setenv("MARATHON_JOURNAL", word)
    assert load({}).journal == "off"


@pytest.mark.parametrize("word", ["on", "TRUE", "yes", "1"])
def test_a_journal_that_is_switched_on_by_a_word_is_refused(word):
    assert "neither a file" in refusal({"journal": word})
    assert load({"journal": f"./{word}"}).journal == Path(word).absolute()


@pytest.mark.parametrize("words", [" , ", ",", "   ", ",,,"])
def test_keys_of_commas_and_blanks_leave_no_server_open(monkeypatch, words):
    assert "holds no key" in refusal({"api_key": words})
    monkeypatch.setenv("MARATHON_API_KEY", words)
    assert "holds no key" in refusal({})


def test_a_number_beyond_64_bits_is_refused_before_anything_starts():
    for name, field in Settings.model_fields.items():
        if int in (field.annotation, *get_args(field.annotation)):
            word = "99999999999TB" if name in SIZES else str(2**64)
            assert option(name) in refusal({name: word}) or name in refusal({name: word})


def test_switches_know_their_words_in_any_case():
    for word, is_on in (("ON", True), ("Off", False), (" on ", True)):
        assert load({"guard": word}).guard is is_on
