"""The engine's main loop in process: rows in, tokens out, and what happens when a forward pass throws."""

import gc
import itertools
import logging
import random
import threading
from concurrent.futures import Future

import mlx.core as mx
import pytest
from driving import Rig, model, prompt, row
from looping import EPOCH, Engine

from server.compute import columns
from server.engine import loop, pending_grammars, prefill
from server.engine.constraints import Grammars
from server.engine.loop import IDLE_SECONDS, WAIT_SECONDS, DeviceWedge
from server.engine.model import row_cost
from server.engine.plan import KeepPrompt, Read
from server.grammar.build import answer
from server.ipc.messages import Cancel, Drain
from server.ipc.snapshot import PromptProgress
from server.memory.pressure import PressureAction, Verb
from server.memory.residency import NoCount, Residency
from server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone():
    """The greedy text of a row by the plain loop."""
    rigs, known = {}, {}

    def text(one, family="llama"):
        key = family, tuple(one.sequence.prompt), one.sequence.max_tokens
        if key not in known:
            rig = rigs.setdefault(family, Rig(family))
            known[key] = rig.alone(row(0, one.sequence.prompt, max_tokens=one.sequence.max_tokens))[0]
        return known[key]

    return text


def some_rows(*lengths, max_tokens=8, first=0, **options):
    return [row(first + i, prompt(length), max_tokens=max_tokens, **options) for i, length in enumerate(lengths)]


def assert_all_right(engine, rows, alone, family="llama"):
    assert engine.failed == {}
    for one in rows:
        assert engine.tokens[one.seq] == alone(one, family), one.seq
        assert engine.ends[one.seq] == "length"
    assert engine.loop.rows == {}
    assert engine.loop.engine_state.is_empty


# ---------------------------------------------------------------- in and out
@pytest.mark.parametrize("group_bytes", [10**9, 20_000], ids=["one group", "many groups"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_rows_in_tokens_out(alone, family, group_bytes):
    engine = Engine(family, group_bytes=group_bytes)
    rows = some_rows(5, 70, 1, 33, 300)
    for one in rows[:3]:
        engine.submit(one)
    engine.turn(3)
    for one in rows[3:]:
        engine.submit(one)
    engine.run()
    assert_all_right(engine, rows, alone, family)
    assert {seq: begun.cached for seq, begun in engine.started.items()} == dict.fromkeys(range(5), 0)
    assert engine.snapshot.generated_tokens == 40


def test_a_model_that_does_not_batch_serves_all_rows_in_turns(alone):
    engine = Engine("llama4", batching="no merge")
    rows = some_rows(5, 40, 9)
    for one in rows:
        engine.submit(one)
    engine.turn(3)
    assert len(engine.loop.engine_state.batches) == 3
    engine.run()
    assert_all_right(engine, rows, alone, "llama4")


def test_the_snapshot_shows_how_far_each_prompt_is_read(monkeypatch):
    monkeypatch.setattr(loop, "ALONE_SECONDS", 0.0)  # a chunk an iteration, and about one beside a row that decodes
    monkeypatch.setattr(prefill, "CHUNKS", (64, 32))  # several for each prompt, however fast the machine seems to be
    shown = []
    engine: Engine = Engine("llama", fault=lambda _: shown.append(engine.snapshot.prompts), prefill_stall_ms=1)
    engine.submit(row(1, prompt(300), max_tokens=4), generated=[5, 6])
    engine.submit(row(2, prompt(500), max_tokens=4))
    seen, beats = [], []
    while 2 not in engine.ends:
        engine.turn()
        seen.append([(one.seq, one.done, one.total) for one in engine.snapshot.prompts])
        assert len(engine.snapshot.prompts) == engine.snapshot.prefilling
        if engine.snapshot.prompts:
            beats.append(engine.heartbeat.count)
    first = [done for turn in seen for seq, done, total in turn if (seq, total) == (1, 302)]
    second = [done for turn in seen for seq, done, total in turn if (seq, total) == (2, 500)]
    assert first == sorted(first)
    assert second == sorted(second)
    assert second[0] == 0
    assert len(set(first)) > 1
    assert len(set(second)) > 1
    assert beats == sorted(set(beats)), "each chunk counts as progress"
    assert shown[0] == [PromptProgress(1, 0, 302), PromptProgress(2, 0, 500)], "the first chunk may take long"
    assert seen[-1] == []


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_a_resumed_row_goes_on_with_the_same_text(alone, family):
    one = row(0, prompt(40), max_tokens=20)
    engine = Engine(family)
    engine.submit(one, generated=alone(one, family)[:9])
    engine.submit(row(1, prompt(9), max_tokens=20))
    engine.run()
    assert engine.tokens[0] == alone(one, family)[9:]


def test_a_resume_that_has_all_its_tokens_ends_at_once():
    engine = Engine()
    engine.submit(row(0, prompt(9), max_tokens=3), generated=[4, 5, 6])
    engine.run()
    assert (engine.tokens, engine.ends) == ({}, {0: "length"})


def test_a_cancelled_row_is_gone_in_every_phase(alone):
    engine = Engine(prefill_stall_ms=1)
    waiting, reading, decoding, other = [row(i, prompt(900 if i < 2 else 9, i), max_tokens=30) for i in range(4)]
    for one in (decoding, other):
        engine.submit(one)
    engine.turn(5)
    for one in (reading, waiting):
        engine.submit(one)
    engine.turn()
    for one in (waiting, reading, decoding):
        engine.channel.inbox.append(Cancel(EPOCH, one.seq))
    seen = len(engine.tokens[2])
    engine.run()
    assert len(engine.tokens[2]) == seen
    assert set(engine.tokens) == {2, 3}
    assert engine.tokens[3] == Rig("llama").alone(other)[0]
    engine.channel.inbox.append(Cancel(EPOCH, 3))
    engine.channel.inbox.append(Cancel(EPOCH, 99))
    engine.turn(2)
    assert engine.channel.waits[-1] == IDLE_SECONDS


def test_a_first_token_is_reported_before_the_next_chunk_of_a_longer_prompt(alone):
    engine = Engine(prefill_stall_ms=1)
    short, long, later = row(0, prompt(9), max_tokens=30), row(1, prompt(900), max_tokens=3), row(2, prompt(20, 1))
    for one in (short, long):
        engine.submit(one)
    engine.turn()
    assert engine.tokens == {0: alone(short)[:1]}
    engine.turn()
    assert engine.loop.engine_state.prefilling, "the long one is still being read"
    engine.submit(later)
    while 2 not in engine.tokens:
        chunks = engine.heartbeat.count
        engine.turn()
    assert engine.heartbeat.count <= chunks + 2, "a chunk and a step"
    engine.run()
    assert_all_right(engine, [short, long, later], alone)
    assert engine.snapshot.generated_tokens == sum(map(len, engine.tokens.values()))


def test_prompt_logprobs_come_once_and_a_request_for_no_tokens_ends(alone):
    engine = Engine()
    engine.submit(row(0, prompt(30), max_tokens=0, prompt_logprobs=True, logprobs=2))
    engine.submit(row(1, prompt(30), max_tokens=4, prompt_logprobs=True, logprobs=2))
    engine.run()
    assert engine.ends == {0: "length", 1: "length"}
    assert [len(engine.started[seq].prompt_logprobs) for seq in (0, 1)] == [29, 29]
    assert [len(engine.logprobs[seq]) for seq in (0, 1)] == [0, 4]


def test_the_prefix_of_an_ended_row_serves_the_next_one(alone):
    engine = Engine(prefix_cache=10**8)
    first = row(0, prompt(60), max_tokens=8)
    engine.submit(first)
    engine.run()
    longer = prompt(60) + engine.tokens[0] + prompt(20, 3)
    rows = [row(1, prompt(60), max_tokens=8), row(2, longer, max_tokens=8), row(3, longer[:50], max_tokens=8)]
    for one in rows:
        engine.submit(one)
    engine.run()
    assert_all_right(engine, [first, *rows], alone)
    assert {seq: begun.cached for seq, begun in engine.started.items()} == {0: 0, 1: 59, 2: 67, 3: 49}


def until_received(engine, seq, count):
    """Turns until so many tokens of a row are known; then its reader leaves."""
    for _ in range(1000):
        if len(engine.tokens[seq]) >= count:
            break
        engine.turn()
    engine.channel.inbox.append(Cancel(EPOCH, seq))
    engine.turn()


@pytest.mark.parametrize("company", [0, 1])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4", "qwen3_5"])
def test_each_turn_finds_the_one_before_though_its_answer_was_cut_off(family, company):
    """Llama 4's chunks turn over between the prompt and the end of the first answer, Gemma's windows before."""
    batching = "batched" if family != "llama4" else "its caches have no merge"
    engine, plain = (Engine(family, prefix_cache=kept, batching=batching) for kept in (10**8, 0))
    for i in range(company):
        engine.submit(row(100 + i, prompt(50, i), max_tokens=1000))
    tokens, before = prompt(45), 0
    for turn in range(4):
        engine.submit(row(turn, tokens, max_tokens=200, marks=[len(tokens)]))
        until_received(engine, turn, 22)
        assert engine.started[turn].cached >= 0.9 * before
        plain.submit(row(turn, tokens, max_tokens=len(engine.tokens[turn])))
        before, tokens = len(tokens), tokens + engine.tokens[turn][:10] + prompt(20, turn)
    plain.run()
    assert all(engine.tokens[turn] == plain.tokens[turn] for turn in range(4))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_a_prompt_whose_reader_left_is_read_on_where_it_was_left(family, alone):
    engine = Engine(family, prefix_cache=10**8, prefill_stall_ms=1)
    engine.submit(beside := row(0, prompt(9), max_tokens=30))
    engine.turn(3)
    engine.submit(row(1, prompt(300), max_tokens=8))
    engine.turn(3)
    assert not engine.tokens[1]
    engine.channel.inbox.append(Cancel(EPOCH, 1))
    engine.submit(again := row(2, prompt(300), max_tokens=8))
    engine.run()
    assert engine.started[2].cached >= 64
    assert_all_right(engine, [beside, again], alone, family)


def test_a_prompt_that_was_only_scored_serves_the_next_one(alone):
    engine = Engine(prefix_cache=10**8)
    engine.submit(row(0, prompt(60), max_tokens=0, prompt_logprobs=True))
    engine.run()
    engine.submit(again := row(1, prompt(60), max_tokens=8))
    engine.run()
    assert engine.started[1].cached == 59
    assert_all_right(engine, [again], alone)


def test_where_an_answer_was_cut_off_a_state_that_can_not_be_trimmed_is_of_no_use():
    """The next prompt goes on from the cut, which the engine has passed already."""
    engine = Engine("qwen3_5", prefix_cache=10**8)
    engine.submit(row(0, prompt(60), max_tokens=200))
    until_received(engine, 0, 20)
    assert engine.snapshot.prefix_entries == 1


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_a_burst_that_begins_alike_reads_the_beginning_once(alone, family):
    engine = Engine(family, prefix_cache=10**8)
    rows = [row(i, prompt(80) + prompt(20 + i, i), max_tokens=4, marks=[80]) for i in range(6)]
    for one in rows:
        engine.submit(one)
    engine.run()
    assert_all_right(engine, rows, alone, family)
    assert [engine.started[i].cached for i in range(6)] == [0, *[80] * 5]


def test_a_prefix_that_is_kept_is_not_kept_again_for_those_who_wait():
    engine = Engine(prefix_cache=10**8)
    for i in range(50):
        engine.submit(row(i, prompt(80) + prompt(9, i), max_tokens=2))
    engine.run()
    assert [act.length for act in engine.plan if isinstance(act, KeepPrompt)] == [88]
    assert [engine.started[i].cached for i in range(50)] == [0, *[80] * 49]


def test_what_an_ended_row_read_is_kept_only_where_memory_has_room_for_a_copy(alone):
    engine = Engine(prefix_cache=10**8)
    engine.residency.room = engine.loaded.row_bytes(68) - 1
    first, again = row(0, prompt(60), max_tokens=8), row(1, prompt(60), max_tokens=8)
    engine.submit(first)
    engine.run()
    assert engine.snapshot.prefix_entries == 0
    engine.residency.room += 1
    engine.submit(again)
    engine.run()
    assert engine.snapshot.prefix_entries == 1
    assert engine.started[1].cached == 0
    assert_all_right(engine, [first, again], alone)


def test_a_snapshot_of_a_prompt_is_kept_only_where_memory_has_room_for_a_copy():
    engine = Engine("qwen3_5", prefix_cache=10**8)
    engine.residency.room = 0
    engine.submit(row(0, prompt(60), max_tokens=8))
    engine.run()
    assert engine.snapshot.prefix_entries == 0


def test_a_prompt_is_read_in_chunks_that_memory_has_room_for(alone):
    engine = Engine(chunk_peak=2048 * 1000)
    engine.residency.room = 300 * (1000 + engine.loaded.row_bytes(2048) // 2048)
    engine.submit(one := row(0, prompt(600), max_tokens=8))
    engine.run()
    sizes = [size for act in engine.plan if isinstance(act, Read) for _, size in act.parts]
    assert max(sizes) <= 300
    assert sum(sizes) == 599
    assert_all_right(engine, [one], alone)


def test_drain_ends_the_loop():
    engine = Engine()
    engine.channel.inbox.append(Drain(EPOCH))
    engine.loop.run()


def test_the_newest_row_is_preempted_and_the_oldest_never(alone):
    engine = Engine()
    rows = some_rows(5, 9, 20, max_tokens=20)
    for one in rows:
        engine.submit(one)
    engine.turn(3)
    for _ in range(3):
        engine.residency.acts = [PressureAction(Verb.PREEMPT, "bytes", 2.0, 1.0)]
        engine.turn()
    assert engine.preempted == [2, 1]
    assert engine.failed[0].kind == "memory"
    assert engine.loop.rows == {}


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ({"tokens": []}, "empty"),
        ({"tokens": [5, 2048]}, "prompt"),
        ({"tokens": [-1]}, "prompt"),
        ({"tokens": [5], "stop_ids": [2, 9999], "min_tokens": 3}, "stop_ids"),
        ({"tokens": [5], "logit_bias": {2048: 1.0}}, "logit_bias"),
    ],
)
def test_a_sequence_that_can_not_run_fails_before_it_meets_others(alone, broken, why):
    engine = Engine()
    mate = row(1, prompt(9), max_tokens=8)
    engine.submit(mate)
    engine.turn(2)
    engine.submit(row(0, **broken))
    engine.submit(row(2, [5]), generated=[7, 2048])
    engine.run()
    assert why in engine.failed.pop(0).message
    assert "prompt" in engine.failed.pop(2).message
    assert_all_right(engine, [mate], alone)


# ---------------------------------------------------------------- grammars
class Never:
    """Grammars that are still being compiled."""

    def __init__(self):
        self.future = Future()

    def compile(self, sequence, generated):
        return self.future

    def seconds(self):
        return 0.0


def test_while_a_grammar_is_compiled_others_run_and_the_loop_doesnt_spin(alone, monkeypatch):
    monkeypatch.setattr(loop, "Grammars", lambda *_: Never())
    engine = Engine()
    free = row(1, prompt(9), max_tokens=8)
    engine.submit(row(0, prompt(9), grammar=answer({"type": "boolean"}), stop_ids=[2]))
    engine.submit(free)
    engine.turn(15)
    assert engine.tokens[1] == alone(free)
    assert engine.channel.waits[-1] == WAIT_SECONDS
    engine.channel.inbox.append(Cancel(EPOCH, 0))
    engine.turn()
    assert engine.loop.rows == {}


@pytest.mark.parametrize("leaves", [False, True], ids=["its row waits", "its row has left"])
def test_a_grammar_that_is_compiled_for_ever_ends_its_row_and_the_process(alone, tiny, monkeypatch, leaves):
    monkeypatch.setattr(pending_grammars, "COMPILE_SECONDS", 0.2)
    engine, go_on, begun = Engine(folder=tiny("llama")), threading.Event(), threading.Event()
    monkeypatch.setattr(Grammars, "_build", lambda *_: begun.set() or go_on.wait(20))
    free = row(1, prompt(9), max_tokens=8)
    try:
        engine.submit(row(0, prompt(9), grammar=answer({"type": "boolean"}), stop_ids=[2]))
        engine.submit(free)
        engine.turn()
        assert begun.wait(5)
        if leaves:
            engine.channel.inbox.append(Cancel(EPOCH, 0))
        while not engine.rotations:
            engine.turn()
        engine.turn(12)
        assert engine.tokens[1] == alone(free)
        assert ["compiled" in failed.message for failed in engine.failed.values()] == ([] if leaves else [True])
        assert len(engine.rotations) == 1
        assert not engine.rotations[0].is_leak
    finally:
        go_on.set()


def test_a_grammar_row_runs_beside_free_ones_and_a_broken_grammar_fails_alone(alone, tiny):
    engine = Engine(folder=tiny("llama"), tokens=Tokenizer.load(tiny("llama"), trust_remote_code=False).token_table())
    free = row(2, prompt(20), max_tokens=12)
    engine.submit(row(0, prompt(9), grammar=answer({"enum": ["no"]}), stop_ids=[2], max_tokens=12))
    engine.submit(row(1, prompt(9), grammar=SimpleGrammar, stop_ids=[2], max_tokens=12))
    engine.submit(free)
    engine.run(limit=5000)
    assert engine.ends == {0: "stop", 2: "length"}
    assert engine.tokens[2] == alone(free)
    assert "grammar" in engine.failed[1].message


SimpleGrammar = type(answer({"enum": [1]}))("start: (")


# ---------------------------------------------------------------- errors of the forward pass
def once(place):
    """A fault that happens one time, at the given call of its kind."""
    left = [place]

    def fault(inputs):
        left[0] -= 1
        return ValueError("boom") if left[0] == 0 else None

    return fault


@pytest.mark.parametrize("at", [1, 2, 4, 9], ids=["first chunk", "later chunk", "first step", "later step"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_pass_that_fails_once_costs_no_row_a_token(alone, family, at):
    engine = Engine(family, fault=once(at))
    rows = some_rows(5, 40, 9)
    for one in rows:
        engine.submit(one)
    engine.run()
    assert_all_right(engine, rows, alone, family)


def test_seeded_and_penalised_text_survives_a_rebuild_too():
    plain, broken = Engine(), Engine(fault=once(9))
    for engine in (plain, broken):
        for seq, length in enumerate((5, 40, 9)):
            engine.submit(row(seq, prompt(length), max_tokens=12, temperature=0.9, seed=seq, presence_penalty=1.0,
                              frequency_penalty=0.5, logprobs=1))  # fmt: skip
        engine.run()
    assert broken.tokens == plain.tokens
    assert {seq: len(entries) for seq, entries in broken.logprobs.items()} == dict.fromkeys(range(3), 12)


def test_a_row_that_always_fails_ends_alone(alone):
    """Its token poisons every pass that it is in."""
    bad = 1999
    engine = Engine(fault=lambda inputs: ValueError("boom") if inputs.shape[1] == 1 and bad in inputs.tolist()[-1] + [
        line[0] for line in inputs.tolist()] else None)  # fmt: skip
    rows = some_rows(5, 40, 9, first=1)
    for one in rows[:2]:
        engine.submit(one)
    engine.turn(4)
    engine.submit(row(0, [*prompt(8), bad], max_tokens=8))
    engine.submit(rows[2])
    engine.run()
    assert set(engine.failed) == {0}
    assert engine.failed[0].kind == "row"
    engine.failed.clear()
    assert_all_right(engine, rows, alone)


def test_a_prompt_that_can_not_be_read_ends_alone(alone):
    bad = 1999
    engine = Engine(fault=lambda inputs: ValueError("boom") if bad in inputs.tolist()[0] else None)
    rows = some_rows(5, 40, first=1)
    engine.submit(row(0, [bad, *prompt(77)], max_tokens=8))
    for one in rows:
        engine.submit(one)
    engine.run()
    assert set(engine.failed) == {0}
    engine.failed.clear()
    assert_all_right(engine, rows, alone)


def test_what_one_group_drew_is_delivered_though_the_next_one_fails(alone):
    failures = [3]

    def fault(inputs):
        if inputs.shape == (1, 1) and failures[0]:
            failures[0] -= 1
            return ValueError("boom") if failures[0] == 0 else None
        return None

    engine = Engine(fault=fault, group_bytes=10_000)
    rows = [*some_rows(5, 5, 5), row(9, prompt(700), max_tokens=8)]
    for one in rows:
        engine.submit(one)
    engine.run()
    assert failures == [0]
    assert_all_right(engine, rows, alone)


@pytest.mark.parametrize("times", [1, 10**6], ids=["once", "always"])
def test_a_join_that_fails_costs_no_row_anything(monkeypatch, alone, times):
    merge, left = columns.merged, [times]

    def failing(rows):
        if left[0]:
            left[0] -= 1
            raise StopIteration
        return merge(rows)

    monkeypatch.setattr(columns, "merged", failing)
    engine = Engine()
    rows = some_rows(5, 40, 9)
    for one in rows[:2]:
        engine.submit(one)
    engine.turn(4)
    engine.submit(rows[2])
    engine.run()
    assert_all_right(engine, rows, alone)


def test_a_leave_that_fails_costs_no_row_anything(monkeypatch, alone):
    keep, left = columns.kept, [1]

    def failing(caches, places, **how):
        if left[0]:
            left[0] -= 1
            raise ValueError("boom")
        return keep(caches, places, **how)

    monkeypatch.setattr(columns, "kept", failing)
    engine = Engine()
    rows = [row(0, prompt(5), max_tokens=3), *some_rows(40, 9, first=1)]
    for one in rows:
        engine.submit(one)
    engine.run()
    assert left == [0]
    assert_all_right(engine, rows, alone)


def test_rebuilds_are_forgiven_once_a_row_has_gone_on(alone):
    calls = [0]

    def fault(inputs):
        calls[0] += 1
        return ValueError("boom") if calls[0] % 9 == 0 and calls[0] < 60 else None

    engine = Engine(fault=fault)
    rows = some_rows(5, 40, 9, max_tokens=16)
    for one in rows:
        engine.submit(one)
    engine.run()
    assert_all_right(engine, rows, alone)


@pytest.mark.parametrize("words", ["[metal::malloc] Resource limit (499000) exceeded.", "Unable to allocate 9 bytes"])
def test_what_the_device_can_not_survive_ends_the_loop_at_once(words):
    engine = Engine(fault=lambda inputs: RuntimeError(words) if inputs.shape[1] == 1 else None)
    engine.submit(row(0, prompt(9)))
    with pytest.raises(DeviceWedge, match="can't go on"):
        engine.turn(3)
    assert engine.failed == {}


def test_a_prompt_that_fails_in_company_takes_no_other_along(alone):
    bad = prompt(30, 5)[7]
    engine = Engine(fault=lambda inputs: ValueError("boom") if bad in inputs.flatten().tolist() else None)
    rows = [row(i, prompt(30, i), max_tokens=8) for i in range(8)]
    assert [bad in one.tokens for one in rows].count(True) == 1
    for one in rows:
        engine.submit(one)
    engine.run()
    assert list(engine.failed) == [5]
    assert engine.failed[5].kind == "row"
    engine.failed.clear()
    assert_all_right(engine, [one for one in rows if one.seq != 5], alone)


# ---------------------------------------------------------------- anything at any time
@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_of_arrivals_cancels_resumes_and_faults_gives_every_row_its_text(alone, seed):
    rng = random.Random(seed)
    family = ["llama", "gemma3_text", "qwen3_5", "llama"][seed]
    breaks = {rng.randrange(10, 120) for _ in range(3)}
    calls = [0]

    def fault(inputs):
        calls[0] += 1
        return ValueError("boom") if calls[0] in breaks else None

    engine = Engine(family, fault=fault, group_bytes=rng.choice([10_000, 10**8]), prefill_stall_ms=rng.choice([1, 250]),
                    prefix_cache=rng.choice([0, 10**8]))  # fmt: skip
    rows, cancelled, before = [], set(), {}
    for turn in range(70):
        if turn < 50 and rng.random() < 0.3:
            one = row(len(rows), prompt(rng.choice([1, 2, 5, 33, 40, 70, 120])), max_tokens=rng.choice([1, 2, 7, 12]))
            before[one.seq] = alone(one, family)[: rng.choice([0, 0, 1, 4])]
            rows.append(one)
            engine.submit(one, before[one.seq])
        if rows and rng.random() < 0.06:
            cancelled.add(seq := rng.randrange(len(rows)))
            engine.channel.inbox.append(Cancel(EPOCH, seq))
        engine.turn()
    engine.run()
    assert engine.failed == {}
    for one in rows:
        text = before[one.seq] + engine.tokens[one.seq]
        whole = alone(one, family)
        assert text == whole[: len(text)]
        assert one.seq in cancelled or text == whole
    assert engine.loop.engine_state.is_empty
    assert engine.snapshot.pending == 0


# ---------------------------------------------------------------- weights that leave little
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("share", [0.82, 0.95])
def test_a_model_that_fills_most_of_the_limit_still_has_a_prefix_cache(family, share, caplog):
    ticks = itertools.count(step=0.25)
    weights = mx.zeros(int(share * 100e6), dtype=mx.uint8)
    mx.eval(model(family).parameters(), weights)
    mx.clear_cache()
    made = []

    def opened(settings, snapshot):
        made.append(Residency(NoCount("none"), settings, snapshot, lambda: next(ticks)))
        made[0].note_weights()
        return made[0]

    gc.collect()
    engine = Engine(family, residency=opened, memory_limit=int(mx.get_active_memory() / share))
    with caplog.at_level(logging.WARNING):
        for seq in range(60):
            engine.submit(row(seq, prompt(120, seq % 3), max_tokens=4))
            engine.run()
            engine.turn(8)
    assert engine.failed == {}
    assert min(engine.started[seq].cached for seq in range(3, 60)) >= 0.9 * 119
    assert engine.snapshot.prefix_evictions == {}
    assert caplog.records == []
    assert next(ticks) > 100, "a reading now and then"
    assert weights.size


def test_kept_prefixes_alone_never_mean_pressure():
    """Whatever budget was asked for: more of them than the room beside the weights could hold."""
    ticks = itertools.count(step=0.25)
    mx.eval(model("llama").parameters())
    limit = mx.get_active_memory() + 30 * sum(cost.bytes(120) for cost in row_cost(model("llama")))
    levels = []

    def opened(settings, snapshot):
        residency = Residency(NoCount("none"), settings, snapshot, lambda: next(ticks))
        residency.note_weights()
        return residency

    engine = Engine("llama", residency=opened, memory_limit=limit, prefix_cache="1GiB")
    for seq in range(45):
        engine.submit(row(seq, prompt(250, seq), max_tokens=4))
        engine.run()
        engine.turn()
        levels.append(engine.snapshot.pressure)
    assert set(levels) == {"calm"}
    assert set(engine.snapshot.prefix_evictions) == {"bytes"}
    assert engine.snapshot.prefix_entries > 10
