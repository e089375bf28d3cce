"""Rows' KV on disk: what is saved of rows that live, where it is found again, and that no step waits for it."""

import functools
import stat
from contextlib import contextmanager
from time import monotonic

import pytest
from driving import Rig, model, prompt, row
from little_room import files_end_at
from looping import EPOCH, Engine

from server.engine import checkpoints, tail
from server.engine.checkpoints import INTERVAL, LEAST
from server.faults import parse
from server.ipc.messages import Cancel, Drain
from server.kv_store import trial
from server.kv_store.files import folder
from server.kv_store.opening import opened
from server.memory.pressure import PressureAction, Verb
from server.settings import load

FAMILIES = ["llama", "qwen3_5", "gemma3_text"]
PATIENCE = 60.0


@contextmanager
def engine(tiny, home, family="llama", *, faults="", **settings):
    """An engine whose store lies in `home`; at the end it is gone as after a kill, with what was written by then."""
    asked = load({"kv_disk": "1GiB", "kv_disk_folder": str(home)})
    opening = opened(asked, parse(faults), tiny(family))
    opening.learn(model(family), batches=True)
    one = Engine(family, opening=opening, **settings)

    try:
        yield one
    finally:
        opening.close()


def finish(one):
    """Until all rows have ended; a row that waits for the disk takes turns in which nothing happens."""
    until = monotonic() + PATIENCE
    while one.loop.rows or one.channel.inbox:
        one.turn()
        assert monotonic() < until, "it never ends"


def flush(one):
    assert one.opening.tier.writer.flush(PATIENCE)
    assert one.opening.tier.tail.flush(PATIENCE)


@functools.cache
def alone(family, given, length):
    """The row's text by the plainest loop."""
    return Rig(family).alone(row(0, given, max_tokens=length))[0]


def pieces(home):
    return [found for found in folder.files(home) if found.name.kind == "piece"]


def ends(home):
    return max((found.name.end for found in folder.files(home)), default=0)


# ---------------------------------------------------------------- live rows
@pytest.mark.parametrize(("family", "prefix_cache"), [("llama", 0), ("qwen3_5", 1 << 30), ("gemma3_text", 0)])
def test_a_row_goes_on_in_the_next_engine_almost_where_it_was(family, prefix_cache, tiny, tmp_path):
    rows = [row(1, prompt(LEAST), max_tokens=70), row(2, prompt(200), max_tokens=130)]
    with engine(tiny, tmp_path, family, prefix_cache=prefix_cache) as first:
        for one in rows:
            first.submit(one)
        while len(first.tokens[2]) < 120:
            first.turn()
        flush(first)
    with engine(tiny, tmp_path, family, prefix_cache=prefix_cache) as later:
        for one in rows:
            later.submit(one, first.tokens[one.seq][: one.sequence.max_tokens - 1])
        finish(later)
    ended = first.tokens[1]
    assert later.started[2].reused >= 320 - INTERVAL - 2 * checkpoints.LOOK_EVERY
    assert later.started[2].cached == 200
    for one, text in ((rows[0], ended), (rows[1], first.tokens[2] + later.tokens[2])):
        assert text == alone(family, tuple(one.sequence.prompt), one.sequence.max_tokens)


@pytest.mark.parametrize("undelivered", [0, 1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "mamba2"])
def test_a_death_costs_a_few_tokens_of_each_row_also_of_short_ones(family, undelivered, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "SHARE", 1.0)  # a test's steps take no time that a share of would do
    rows = [row(1, prompt(7), max_tokens=90), row(2, prompt(120), max_tokens=90), row(3, prompt(LEAST), max_tokens=90)]
    with engine(tiny, tmp_path, family) as first:
        for one in rows:
            first.submit(one)
        while len(first.tokens[3]) < 60:
            first.turn()
        flush(first)
    delivered = {one.seq: first.tokens[one.seq][: len(first.tokens[one.seq]) - undelivered] for one in rows}
    with engine(tiny, tmp_path, family) as later:
        for one in rows:
            later.submit(one, delivered[one.seq])
        finish(later)
    for one in rows:
        length = len(one.sequence.prompt) + len(delivered[one.seq])
        assert length - later.started[one.seq].reused <= 4
        assert delivered[one.seq] + later.tokens[one.seq] == alone(family, tuple(one.sequence.prompt), 90)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_death_behind_the_first_token_costs_no_prefill_of_a_short_prompt(family, tiny, tmp_path):
    with engine(tiny, tmp_path, family) as first:
        one = row(1, prompt(300), max_tokens=90)
        first.submit(one)
        while not first.tokens[1]:
            first.turn()
        flush(first)
        delivered = list(first.tokens[1])
        assert len(delivered) <= 2
    with engine(tiny, tmp_path, family) as later:
        later.submit(one, delivered)
        finish(later)
    assert later.started[1].reused >= 300
    assert delivered + later.tokens[1] == alone(family, tuple(one.sequence.prompt), 90)


def test_an_answer_of_one_token_is_not_written(tiny, tmp_path):
    with engine(tiny, tmp_path) as one:
        for seq in range(3):
            one.submit(row(seq, prompt(100, seq), max_tokens=1))
        finish(one)
        flush(one)
        assert one.opening.tier.store.counts.written_bytes == 0


def test_the_engine_after_one_that_died_with_rows_knows_it(tiny, tmp_path):
    one = row(1, prompt(20), max_tokens=90)
    for deaths in range(2):
        with engine(tiny, tmp_path) as running:
            assert running.opening.tier.recovered == deaths
            running.submit(one)
            while len(running.tokens[1]) < 10:
                running.turn()
            flush(running)
    with engine(tiny, tmp_path) as last:
        last.submit(one)
        finish(last)
        flush(last)
    with engine(tiny, tmp_path) as after:
        assert after.opening.tier.recovered == 0


def test_a_row_that_the_log_follows_is_saved_in_larger_pieces(tiny, tmp_path, monkeypatch):
    """What a death costs is in the log, and a piece costs much the same however long it is."""
    monkeypatch.setattr(tail, "SHARE", 1.0)
    monkeypatch.setattr(checkpoints, "SHARE", 1.0)
    with engine(tiny, tmp_path) as one:
        one.submit(row(1, prompt(LEAST), max_tokens=700))
        while len(one.tokens[1]) < 600:
            one.turn()
        flush(one)
        lengths = [found.name.end - found.name.start for found in pieces(tmp_path)]
        assert len(lengths) <= 5, lengths
        assert ends(tmp_path) >= LEAST + 600 - (INTERVAL + checkpoints.PUT_OFF + 2 * checkpoints.LOOK_EVERY)


def test_a_prompt_that_is_read_once_and_answered_shortly_is_not_written(tiny, tmp_path):
    with engine(tiny, tmp_path) as one:
        for seq in range(3):
            one.submit(row(seq, prompt(2 * LEAST, seq), max_tokens=INTERVAL // 2))
        finish(one)
        flush(one)
        assert ends(tmp_path) == 0
        assert one.opening.tier.store.counts.written_bytes == 0


def test_a_prompt_that_took_long_to_read_is_written(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "LIVED", 0.0)
    with engine(tiny, tmp_path) as one:
        one.submit(row(1, prompt(2 * LEAST), max_tokens=20))
        finish(one)
        flush(one)
        assert ends(tmp_path) >= 2 * LEAST


def test_a_long_prompt_is_saved_while_it_is_read(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "LIVED", 0.0)
    monkeypatch.setattr(checkpoints, "SHARE", 1.0)
    with engine(tiny, tmp_path) as one:
        one.submit(row(1, prompt(12 * LEAST), max_tokens=4))
        while not one.tokens[1]:
            one.turn()
        flush(one)
        assert ends(tmp_path) >= 8 * LEAST


@pytest.mark.parametrize("family", FAMILIES)
def test_the_turns_of_a_conversation_outlive_the_engine(family, tiny, tmp_path):
    tokens = prompt(LEAST + 40)
    with engine(tiny, tmp_path, family) as first:
        for turn in range(1, 4):
            first.submit(row(turn, tokens, max_tokens=12, marks=[len(tokens) - 1]))
            finish(first)
            tokens = tokens + first.tokens[turn] + prompt(30, turn)
        flush(first)
    with engine(tiny, tmp_path, family) as later:
        later.submit(row(9, tokens, max_tokens=12))
        finish(later)
        assert later.started[9].cached >= len(tokens) - 31
        assert later.snapshot.kv_lookups == {"disk": 1}
    assert later.tokens[9] == alone(family, tuple(tokens), 12)


def test_memory_is_asked_before_the_disk(tiny, tmp_path):
    tokens = prompt(LEAST + 40)
    with engine(tiny, tmp_path) as one:
        for turn in range(1, 4):
            one.submit(row(turn, tokens, max_tokens=12))
            finish(one)
        assert one.snapshot.kv_lookups == {"none": 1, "memory": 2}
        assert one.snapshot.kv_lookup_tokens == {"none": LEAST + 39, "memory": 2 * (LEAST + 39)}
        assert one.opening.tier.store.counts.read_bytes == 0


# ---------------------------------------------------------------- rows that leave
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_that_is_asked_to_leave_saves_its_rows_first(family, tiny, tmp_path):
    with engine(tiny, tmp_path, family) as first:
        first.submit(row(1, prompt(LEAST), max_tokens=150))
        while len(first.tokens[1]) < 133:
            first.turn()
        first.channel.inbox.append(Drain(EPOCH))
        first.turn()
        flush(first)
    with engine(tiny, tmp_path, family) as later:
        later.submit(row(1, prompt(LEAST), max_tokens=150), first.tokens[1])
        while 1 not in later.started:
            later.turn()
        lost = LEAST + len(first.tokens[1]) - 1 - later.started[1].reused
        finish(later)
    assert lost <= (0 if family == "llama" else INTERVAL + checkpoints.LOOK_EVERY)
    text = first.tokens[1] + later.tokens[1]
    assert text == alone(family, tuple(prompt(LEAST)), 150)


def test_a_row_whose_engine_dies_right_after_a_checkpoint_has_the_one_before(tiny, tmp_path):
    with engine(tiny, tmp_path, "gemma3_text") as first:
        first.submit(row(1, prompt(LEAST), max_tokens=400))
        while len(first.tokens[1]) < 3 * INTERVAL:
            first.turn()
        flush(first)
    newest = LEAST + len(first.tokens[1]) - ends(tmp_path)
    with engine(tiny, tmp_path, "gemma3_text") as later:
        later.submit(row(1, prompt(LEAST), max_tokens=400), first.tokens[1][: len(first.tokens[1]) - newest])
        while 1 not in later.started:
            later.turn()
        assert later.started[1].reused >= ends(tmp_path) - INTERVAL - 2 * checkpoints.LOOK_EVERY
        assert later.started[1].reused < ends(tmp_path)


def test_a_preempted_row_comes_back_from_the_disk(tiny, tmp_path):
    with engine(tiny, tmp_path, prefix_cache=0) as one:
        rows = [row(1, prompt(40), max_tokens=60), row(2, prompt(LEAST), max_tokens=60)]
        for each in rows:
            one.submit(each)
        while len(one.tokens[2]) < 21:
            one.turn()
        one.residency.acts = [PressureAction(Verb.PREEMPT, "bytes", 9.0, 5.0)]
        one.turn(2)
        assert one.preempted == [2]
        flush(one)
        one.submit(rows[1], one.tokens[2])
        finish(one)
        assert one.started[2].reused >= LEAST + 20
    assert one.tokens[2] == alone("llama", tuple(prompt(LEAST)), 60)


def test_a_cancelled_row_costs_nothing_that_others_have(tiny, tmp_path):
    with engine(tiny, tmp_path, faults="slow-disk:100000") as one:
        tokens = prompt(2 * LEAST)
        one.submit(row(1, tokens, max_tokens=400))
        while len(one.tokens[1]) < 2 * INTERVAL:
            one.turn()
        one.channel.inbox.append(Cancel(EPOCH, 1))
        one.turn()
        assert not one.loop.rows
        one.submit(row(2, prompt(40), max_tokens=5))
        finish(one)
        assert len(one.tokens[2]) == 5


# ---------------------------------------------------------------- reading
def _saved(tiny, home, tokens):
    with engine(tiny, home) as first:
        first.submit(row(1, tokens, max_tokens=3 * INTERVAL))
        finish(first)
        flush(first)
        return first.tokens[1]


def test_rows_step_while_another_waits_for_the_disk(tiny, tmp_path):
    tokens = prompt(2 * LEAST)
    tokens = tokens + _saved(tiny, tmp_path, tokens) + [5]
    with engine(tiny, tmp_path, faults="slow-disk:4000000") as one:
        one.submit(row(1, prompt(20), max_tokens=150))
        one.turn(4)
        one.submit(row(2, tokens, max_tokens=5))
        while not one.tokens[2]:
            one.turn()
        assert one.started[2].reused >= len(tokens) - 3
        assert len(one.tokens[1]) > 20
        finish(one)
    for seq, given, length in ((1, prompt(20), 150), (2, tokens, 5)):
        assert one.tokens[seq] == alone("llama", tuple(given), length)


def test_a_disk_that_is_slower_than_a_prefill_is_given_up(tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoints, "PATIENCE", 0.05)
    tokens = prompt(2 * LEAST)
    tokens = tokens + _saved(tiny, tmp_path, tokens) + [5]
    with engine(tiny, tmp_path, faults="slow-disk:300000") as one:
        one.submit(row(2, tokens, max_tokens=5))
        while not one.tokens[2]:
            one.turn()
        finish(one)
        assert one.started[2].reused == 0
    assert "the disk is too slow" in caplog.text
    assert one.tokens[2] == alone("llama", tuple(tokens), 5)


def test_a_row_that_is_cancelled_while_it_is_fetched_leaves_nothing(tiny, tmp_path):
    tokens = prompt(2 * LEAST)
    tokens = tokens + _saved(tiny, tmp_path, tokens) + [5]
    with engine(tiny, tmp_path, faults="slow-disk:300000") as one:
        one.submit(row(2, tokens, max_tokens=5))
        one.turn()
        one.channel.inbox.append(Cancel(EPOCH, 2))
        one.turn()
        assert not one.loop.rows
        one.submit(row(3, prompt(20), max_tokens=3))
        finish(one)
        assert len(one.tokens[3]) == 3


def test_scored_prompts_are_read_whole(tiny, tmp_path):
    tokens = prompt(2 * LEAST)
    tokens = tokens + _saved(tiny, tmp_path, tokens)
    with engine(tiny, tmp_path) as one:
        one.submit(row(2, tokens, max_tokens=3, prompt_logprobs=True, logprobs=1))
        finish(one)
        assert len(one.started[2].prompt_logprobs) == len(tokens) - 1


def test_a_prompt_that_is_read_sooner_than_its_caches_is_not_fetched(tiny, tmp_path):
    tokens = prompt(2 * LEAST)
    tokens = tokens + _saved(tiny, tmp_path, tokens) + [5]
    with engine(tiny, tmp_path) as one:
        one.opening.tier.paces.note_prefill(10**9, 1e-9)
        one.submit(row(2, tokens, max_tokens=3))
        finish(one)
        assert one.started[2].reused == 0
    assert one.tokens[2] == alone("llama", tuple(tokens), 3)


def test_an_engine_knows_how_fast_the_one_before_it_read(tiny, tmp_path):
    with engine(tiny, tmp_path) as first:
        for seq in (1, 2):
            first.submit(row(seq, prompt(4 * LEAST, seq), max_tokens=1))
        finish(first)
        first.loop._checkpoints._reported = 0.0
        first.turn()
        seen = first.opening.tier.paces.token_seconds
        assert seen > 0
    with engine(tiny, tmp_path) as later:
        assert later.opening.tier.paces.token_seconds == seen


def test_how_a_models_caches_behave_is_learned_once(tiny, tmp_path, monkeypatch):
    asked = load({"kv_disk": "1GiB", "kv_disk_folder": str(tmp_path / "kv"), "cache_dir": str(tmp_path / "cache")})
    learned = []
    for family in FAMILIES:
        learned.append(_learned(asked, tiny(family), family))
    monkeypatch.setattr(trial, "learn", lambda *_, **__: 1 // 0)
    assert [_learned(asked, tiny(family), family) for family in FAMILIES] == learned


def _learned(asked, folder, family):
    """The digest that the caches of a model have in its files, and how they are laid out."""
    opening = opened(asked, parse(""), folder, "a device")
    opening.learn(model(family), batches=True)
    tier = opening.tier
    opening.close()
    assert tier is not None
    return tier.layout.digest(), tier.layout


# ---------------------------------------------------------------- the disk
@pytest.mark.parametrize("faults", ["full-disk", "slow-disk"])
def test_a_bad_disk_changes_no_answer_and_stops_no_step(faults, tiny, tmp_path):
    with engine(tiny, tmp_path, faults=faults) as one:
        one.submit(row(1, prompt(LEAST), max_tokens=3 * INTERVAL))
        finish(one)
    assert one.tokens[1] == alone("llama", tuple(prompt(LEAST)), 3 * INTERVAL)


def test_an_engine_that_starts_on_a_full_disk_reads_what_is_kept(tiny, tmp_path):
    tokens = prompt(2 * LEAST)
    tokens = tokens + _saved(tiny, tmp_path, tokens) + [5]
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    with files_end_at(1), engine(tiny, tmp_path) as one:
        one.submit(row(2, tokens, max_tokens=5))
        finish(one)
        assert one.started[2].reused >= len(tokens) - 3
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before
    assert not list(tmp_path.rglob("*.part"))


def test_cache_that_can_not_be_copied_ends_the_tier_and_no_row(tiny, tmp_path, monkeypatch, caplog):
    with engine(tiny, tmp_path) as one:
        monkeypatch.setattr(one.opening.tier.keeper, "save", lambda *_, **__: 1 // 0)
        one.submit(row(1, prompt(LEAST), max_tokens=200))
        finish(one)
        assert len(one.tokens[1]) == 200
    assert caplog.text.count("can't be saved") == 1


# ---------------------------------------------------------------- whose it is
def test_without_the_setting_nothing_is_opened(tiny, tmp_path):
    assert opened(load({"kv_disk_folder": str(tmp_path / "kv")}), parse(""), tiny("llama")) is None
    assert not (tmp_path / "kv").exists()


def test_a_second_server_goes_without_and_says_so(tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("server.kv_store.opening.LOCK_SECONDS", 0.1)
    with engine(tiny, tmp_path), engine(tiny, tmp_path) as second:
        assert second.opening.tier is None
        second.submit(row(1, prompt(LEAST), max_tokens=2 * INTERVAL))
        finish(second)
        assert len(second.tokens[1]) == 2 * INTERVAL
    assert "in use by another server" in caplog.text


def test_a_folder_that_can_not_be_made_is_said_and_harms_nothing(tiny, tmp_path, caplog):
    (tmp_path / "file").write_text("x")
    with engine(tiny, tmp_path / "file") as one:
        assert one.opening.tier is None
        one.submit(row(1, prompt(20), max_tokens=3))
        finish(one)
        assert len(one.tokens[1]) == 3
    assert "no KV is kept" in caplog.text


def test_what_lies_on_disk_is_for_its_owner_alone(tiny, tmp_path):
    _saved(tiny, tmp_path / "kv", prompt(2 * LEAST))
    everything = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in everything}
    assert modes == {(True, 0o700), (False, 0o600)}


def test_another_models_kv_is_not_found(tiny, tmp_path):
    _saved(tiny, tmp_path, prompt(2 * LEAST))
    with engine(tiny, tmp_path, "smollm3") as other:
        other.submit(row(1, [*prompt(2 * LEAST), 5], max_tokens=3))
        finish(other)
        assert other.started[1].reused == 0


# ---------------------------------------------------------------- what is reported
def test_the_snapshot_has_the_figures(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "REPORT_SECONDS", 0.0)
    with engine(tiny, tmp_path) as one:
        one.submit(row(1, prompt(LEAST), max_tokens=600))
        while len(one.tokens[1]) < 4 * INTERVAL:
            one.turn()
        flush(one)
        one.turn()
        reported = one.snapshot
        counts = one.opening.tier.store.counts
        assert reported.kv_disk_files == len(pieces(tmp_path)) > 1
        assert reported.kv_disk_bytes == sum(found.size for found in folder.files(tmp_path))
        assert reported.kv_disk_bytes < reported.kv_disk_written_bytes <= counts.written_bytes
        assert reported.kv_disk_seconds["write"] > 0
        assert 0 <= reported.kv_disk_checkpoint_age < 60
        finish(one)
        assert reported.kv_disk_checkpoint_age is None
