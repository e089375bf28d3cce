"""What an iteration does is a plan of plain values: compared here, and carried out by an executor without arrays."""

from itertools import count
from types import SimpleNamespace

import pytest
from driving import prompt, row
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes import Scripted

from server.compute.rows import StepOutput
from server.engine.loop import Loop
from server.engine.model import LoadedModel
from server.engine.plan import Abandon, Begin, Census, FetchTokens, Join, KeepRow, Leave, Read, Split, Step
from server.faults import Faults, parse
from server.ipc.messages import Cancel, Start, Submit
from server.ipc.probe import LayerCost, Probe
from server.ipc.snapshot import Snapshot
from server.memory.pressure import PressureAction, Verb
from server.settings import load

EPOCH = 3
A_LOT = 10**12


class CountingBatch:
    """Draws the same token for ever, and has no caches."""

    caches = ()

    def __init__(self):
        self.rows, self.known = [], set()

    def __len__(self):
        return len(self.rows)

    @property
    def seqs(self):
        return [one.seq for one in self.rows]

    @property
    def longest(self):
        return max(map(self.length, self.rows), default=0)

    def length(self, one):
        return one.length

    def produced(self, one):
        return one.produced

    def is_fetched(self, one):
        return one.seq in self.known

    def held_tokens(self, one):
        return one.tokens

    def single_caches(self, place):
        return []

    def join(self, rows):
        self.known |= {one.seq for one in rows if not one.solo}
        self.rows += rows

    def leave(self, rows, *, keep_caches=False):
        self.rows = [one for one in self.rows if one not in rows]

    def abandon(self):
        self.rows = []

    def step(self):
        """The first step of a row reads its last prompt token, and has nothing to report of it."""
        unread = [one for one in self.rows if one.seq not in self.known]
        self.known.clear()
        return self._drawn(unread)

    def fetch(self):
        unread = [one for one in self.rows if one.seq not in self.known]
        self.known = set(self.seqs)
        return self._drawn(unread)

    def _drawn(self, unread):
        for one in unread:
            one.tokens.append(7)
        ended = [(one, "length") for one in unread if one.produced >= one.sequence.max_tokens]
        return StepOutput([one.seq for one in unread], [7] * len(unread), ended, {})


class Engine:
    """A loop whose plans are carried out without arrays."""

    def __init__(self, *, fails=(), each=1, group_bytes=10**9, **options):
        self.inbox, self.sent = [], []
        self.executor = Scripted(CountingBatch, fails, reads=True)
        self.acts = []
        probe = Probe(2048, "batched", [LayerCost(0, each, 256, 0)], 0, group_bytes, "alone")
        heartbeat = SimpleNamespace(count=0)
        heartbeat.beat = lambda: setattr(heartbeat, "count", heartbeat.count + 1)
        stub = SimpleNamespace(make_cache=list)
        times = count()
        self.loop = Loop(
            self, heartbeat, Snapshot(), Start(EPOCH, ".", "{}"), load(options), LoadedModel(stub, {}, 4096, 0, probe),
            self, Faults(parse(""), epoch=1, write_garbage=lambda: None), self.executor,
            clock=lambda: next(times) / 1000,
        )  # fmt: skip

    # the channel
    def receive(self, timeout):
        return self.inbox.pop(0) if self.inbox else None

    def wake(self):
        pass

    def received(self):
        while self.inbox:
            yield self.inbox.pop(0)

    def send(self, event):
        self.sent.append(event)

    # memory
    source = SimpleNamespace(name="off", limit=None, raw=lambda: None)
    room = A_LOT

    def tick(self, holdings):
        acts, self.acts = self.acts, []
        return acts

    def spent_buffers(self):
        return 0

    def read_memory(self):
        pass

    def submit(self, seq, length, max_tokens=100):
        one = row(seq, prompt(length), max_tokens=max_tokens)
        self.inbox.append(Submit(EPOCH, seq, one.sequence))

    def turn(self):
        """The operations of one iteration, those apart that come with each."""
        self.loop.turn()
        return [act for act in self.loop.runner.record if not isinstance(act, Census)]


def test_a_lone_prompt_is_read_joins_and_is_stepped():
    engine = Engine()
    engine.submit(0, 100)
    first = [Begin(0), Read(((0, 64),)), Read(((0, 35),)), Join(1, (0,)), Step(1), FetchTokens(1)]
    assert engine.turn() == first, "the first chunk is short, since nothing is known of the pace"
    assert engine.turn() == [Step(1)]


def test_a_prompt_of_one_token_needs_no_chunk():
    engine = Engine()
    engine.submit(0, 1)
    assert engine.turn() == [Begin(0), Join(1, (0,)), Step(1), FetchTokens(1)]


def test_a_burst_is_read_shortest_first_and_joins_at_once():
    engine = Engine()
    for seq, length in enumerate((90, 30, 60)):
        engine.submit(seq, length)
    begun = [Begin(1), Begin(2), Begin(0)]
    plan = engine.turn()
    assert [act for act in plan if isinstance(act, Begin)] == begun
    assert [act for act in plan if isinstance(act, Read)] == [Read(((1, 29),)), Read(((2, 59),)), Read(((0, 89),))]
    assert plan[-3:] == [Join(1, (0, 1, 2)), Step(1), FetchTokens(1)]


def test_a_long_prompt_beside_a_running_row_is_read_in_chunks_between_steps():
    engine = Engine(prefill_stall_ms=1)
    engine.submit(0, 10)
    engine.turn()
    engine.submit(1, 4000)
    plans = [engine.turn() for _ in range(3)]
    assert plans[0] == [Begin(1), Read(((1, 64),)), Step(1)]
    assert all(plan[-1] == Step(1) for plan in plans)
    assert not any(isinstance(act, Join) for plan in plans for act in plan)


def test_rows_of_other_lengths_get_a_batch_of_their_own_and_move_where_that_pays():
    engine = Engine(each=1000, group_bytes=1000)
    engine.submit(0, 2000)
    engine.turn()
    engine.submit(1, 10)
    assert Join(2, (1,)) in engine.turn()
    assert {tuple(batch) for batch in engine.loop.engine_state.batches} == {(0,), (1,)}


def test_a_row_that_ends_leaves_and_what_it_read_is_kept():
    engine = Engine(prefix_cache=10**6)
    engine.submit(0, 40, max_tokens=2)
    engine.turn()
    assert engine.turn() == [Step(1)], "its input is known already"
    assert engine.turn() == [Step(1), KeepRow(1, 0), Leave(1, (0,))]
    assert engine.loop.rows == {}


def test_a_cancelled_row_leaves_between_two_iterations():
    engine = Engine()
    for seq in (0, 1):
        engine.submit(seq, 10)
    engine.turn()
    engine.inbox.append(Cancel(EPOCH, 0))
    engine.turn()
    assert Leave(1, (0,)) in engine.executor.plan
    assert list(engine.loop.rows) == [1]


def test_the_rows_of_a_failed_step_are_read_again_together_and_then_apart():
    engine = Engine(fails=[Step(1), Step(2)])
    for seq in (0, 1):
        engine.submit(seq, 10)
    assert engine.turn()[-2:] == [Join(1, (0, 1)), Abandon(1)]
    assert engine.turn()[-2:] == [Join(2, (0, 1)), Abandon(2)]
    assert engine.turn()[-6:] == [Join(3, (0,)), Join(4, (1,)), Step(3), Step(4), FetchTokens(3), FetchTokens(4)]


def test_the_newest_row_gives_its_memory_back():
    engine = Engine()
    for seq in (0, 1):
        engine.submit(seq, 10)
    engine.turn()
    engine.acts = [PressureAction(Verb.PREEMPT, "bytes", 2.0, 1.0)]
    plan = engine.turn()
    assert plan[0] == Leave(1, (1,))
    assert plan[-1] == Step(1)
    assert list(engine.loop.rows) == [0]


arrivals = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 6), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12
)


@settings(max_examples=40, deadline=None)
@given(
    arrivals=arrivals, group_bytes=st.sampled_from([10, 10**5, 10**9]), breaks=st.sets(st.integers(1, 9), max_size=2)
)
def test_every_plan_can_be_carried_out_and_ends_every_row(arrivals, group_bytes, breaks):
    """The scripted executor insists on what the real one needs: rows that exist, chunks within prompts, joins of rows
    that are read, batches that have rows."""
    engine = Engine(each=10, group_bytes=group_bytes, fails=[Step(number) for number in breaks])
    for seq, (length, tokens, leaves, turns) in enumerate(arrivals):
        engine.submit(seq, length, tokens)
        if leaves:
            engine.inbox.append(Cancel(EPOCH, seq // 2))
        for _ in range(turns):
            engine.turn()
    for _ in range(400):
        if not engine.loop.rows:
            break
        engine.turn()
    assert engine.loop.rows == {}
    assert engine.loop.engine_state.is_empty


@pytest.mark.parametrize("number", [1, 2])
def test_a_plan_can_be_printed_and_carried_out_again(number):
    engine = Engine()
    for seq in range(number):
        engine.submit(seq, 20 + seq)
    plan = engine.turn()
    assert eval(repr(plan), {kind.__name__: kind for kind in (Begin, Read, Join, Split, Step, FetchTokens)}) == plan
    again = Scripted(CountingBatch)
    again.rows = {seq: row(seq, prompt(20 + seq)) for seq in range(number)}
    for operation in plan:
        again.run(operation)
    assert [batch.seqs for batch in again.batches.values()] == engine.loop.engine_state.batches
