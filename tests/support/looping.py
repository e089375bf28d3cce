"""The engine's main loop driven step by step in process: commands put in, events taken out, tokens by row."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import ClassVar

from driving import knowing, model

from server.engine.loop import Loop
from server.engine.model import LoadedModel, row_cost
from server.faults import Faults, parse
from server.ipc.messages import Preemption, Rotate, RowFailure, Start, Steps, Submit
from server.ipc.probe import Probe
from server.ipc.snapshot import Snapshot
from server.settings import load

EPOCH = 7


class FakeChannel:
    """Commands that the test puts in, events that the loop sends, and how long the loop was ready to wait."""

    def __init__(self):
        self.inbox, self.sent, self.waits = [], [], []

    def receive(self, timeout):
        self.waits.append(timeout)
        return self.inbox.pop(0) if self.inbox else None

    def wake(self):
        pass

    def received(self):
        while self.inbox:
            yield self.inbox.pop(0)

    def send(self, event):
        self.sent.append(event)


class Calm:
    """A residency that never has anything to say."""

    source = SimpleNamespace(name="off", limit=None, raw=lambda: None)
    room = 10**12
    acts: ClassVar[list] = []

    def tick(self, holdings):
        acts, self.acts = self.acts, []
        holdings.kv_bytes()
        return acts

    def spent_buffers(self):
        return 0

    def read_memory(self):
        pass


class Flaky:
    """A model that throws where `fault(inputs)` says so."""

    def __init__(self, inner, fault):
        self._inner, self._fault = inner, fault

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def __call__(self, inputs, cache=None):
        if error := self._fault(inputs):
            raise error
        return self._inner(inputs, cache=cache)


class Engine:
    """A loop, driven step by step."""

    def __init__(self, family="llama", *, fault=lambda inputs: None, group_bytes=10**9, batching="batched", folder=".",
                 faults="", chunk_peak=0, tokens=None, residency=None, opening=None, **settings):  # fmt: skip
        """`residency(settings, snapshot)` makes one that reads what there is; without it memory is never short."""
        self.raw = model(family)
        self.channel, self.snapshot = FakeChannel(), Snapshot()
        self.heartbeat = SimpleNamespace(count=0)
        self.heartbeat.beat = lambda: setattr(self.heartbeat, "count", self.heartbeat.count + 1)
        reads = "padded" if batching == "batched" else "alone"
        probe = Probe(2048, batching, row_cost(self.raw), chunk_peak, group_bytes, reads)
        self.residency = residency(load(settings), self.snapshot) if residency else Calm()
        self.loaded = LoadedModel(Flaky(self.raw, fault), {}, 4096, 0, probe)
        self.plan = []  # every operation so far
        self.opening = opening
        self.loop = Loop(
            self.channel, self.heartbeat, self.snapshot, Start(EPOCH, str(folder), "{}"), load(settings),
            self.loaded, self.residency,
            Faults(parse(faults), epoch=1, write_garbage=lambda: None), grammars=tokens and knowing(tokens),
            opening=opening,
        )  # fmt: skip
        self.tokens, self.logprobs = defaultdict(list), defaultdict(list)
        self.ends, self.failed, self.started, self.preempted, self.rotations = {}, {}, {}, [], []

    def submit(self, one, generated=()):
        self.channel.inbox.append(Submit(EPOCH, one.seq, one.sequence, list(generated)))

    def turn(self, times=1):
        for _ in range(times):
            self.loop.turn()
            self.plan += self.loop.runner.record
            self._take()

    def run(self, limit=500):
        self.turn()
        while self.loop.rows or self.channel.inbox:
            self.turn()
            limit -= 1
            assert limit, "it never ends"

    def _take(self):
        sent, self.channel.sent = self.channel.sent, []
        for event in sent:
            assert event.epoch == EPOCH
            if isinstance(event, Steps):
                for begun in event.started:
                    self.started[begun.seq] = begun
                for seq, token in zip(event.seqs, event.tokens, strict=True):
                    assert seq not in self.ends
                    assert seq not in self.failed
                    self.tokens[seq].append(token)
                    if seq in event.logprobs:
                        self.logprobs[seq].append(event.logprobs[seq])
                assert set(event.logprobs) <= set(event.seqs)
                self.ends |= {end.seq: end.finish for end in event.ends}
            elif isinstance(event, RowFailure):
                assert event.seq not in self.ends
                self.failed[event.seq] = event
            elif isinstance(event, Preemption):
                self.preempted.append(event.seq)
            elif isinstance(event, Rotate):
                self.rotations.append(event)
