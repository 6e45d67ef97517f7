"""The bare state machine, driven by hypothesis as an edge would: actions in flight end one way or the
other."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dsec.core import sandbox_state as sm
from dsec.core.errors import BY_CODE, Internal
from dsec.core.sandbox_state import Action, Failure, SandboxMachine, State

FAILURE = Failure("launch_failed", "no")
OUTCOMES: dict[Action, list[sm.Event]] = {
    Action.LAUNCH: [sm.Launched(), sm.LaunchFailed(FAILURE), sm.LaunchFailed(FAILURE, dead=False)],
    Action.RECOVER: [sm.Recovered(), sm.RecoverFailed(FAILURE)],
    Action.PAUSE: [sm.Paused(), sm.PauseFailed()],
    Action.RESUME: [sm.Resumed(), sm.ResumeFailed(FAILURE)],
    Action.STOP: [sm.Stopped(), sm.StopFailed()],
    Action.DESTROY: [sm.Destroyed(), sm.DestroyFailed()],
    Action.RETRY: [sm.RetryDue()],
}
GOOD: dict[Action, sm.Event] = {a: events[0] for a, events in OUTCOMES.items()}


class Sandboxes(RuleBasedStateMachine):
    """One sandbox, what an edge would do for it, and the record that survives the edge."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = SandboxMachine()
        self.flying: Action | None = None
        self.launched_once = False
        self.released = 0
        self.saved: tuple[State, str, Failure | None, bool] | None = None
        self.feed(sm.Created())

    def feed(self, event: sm.Event) -> None:
        before = self.machine.state
        for action in self.machine.handle(event):
            if action is Action.SAVE:
                m = self.machine
                self.saved = (m.state, m.reason, m.failure, m.gone)
            elif action in OUTCOMES:
                assert self.flying is None, f"{action} while {self.flying} is in flight"
                self.flying = action
            elif action is Action.RELEASE:
                self.released += 1
        if self.machine.state is not before:
            assert self.saved is not None and self.saved[0] is self.machine.state, "a state that is not saved"

    @precondition(lambda self: self.flying is not None)
    @rule(data=st.data())
    def outcome(self, data: st.DataObject) -> None:
        assert self.flying is not None
        event = data.draw(st.sampled_from(OUTCOMES[self.flying]))
        self.flying = None
        self.feed(event)

    @rule(event=st.sampled_from([sm.StopAsked("requested"), sm.StopAsked("ttl_max")]))
    def stop(self, event: sm.Event) -> None:
        self.feed(event)

    @precondition(lambda self: self.machine.state is not State.CREATING)
    @rule(event=st.sampled_from([sm.Lost(FAILURE), sm.Breached(FAILURE)]))
    def fail(self, event: sm.Event) -> None:
        self.feed(event)

    @rule(event=st.sampled_from([sm.Exited(exit_code=1), sm.Exited(signal=9, host_oom=True)]))
    def exit(self, event: sm.Event) -> None:
        self.feed(event)

    @rule()
    def deadline(self) -> None:
        self.feed(sm.DeadlinePassed(Failure("deadline_exceeded", "late")))

    @precondition(lambda self: self.machine.state is State.RUNNING and self.flying is None)
    @rule()
    def pause(self) -> None:
        self.feed(sm.PauseAsked())

    @precondition(lambda self: self.machine.state is State.PAUSED and self.flying is None)
    @rule()
    def resume(self) -> None:
        self.feed(sm.ResumeAsked())

    @rule()
    def crash(self) -> None:
        """The edge is killed and started again: what is left is the record."""
        assert self.saved is not None
        self.machine, self.flying = SandboxMachine.restored(*self.saved), None
        if not self.machine.gone:
            self.feed(sm.Restarted())

    @invariant()
    def valid(self) -> None:
        self.machine.validate()
        assert self.machine.pending is self.flying
        assert self.released == int(self.machine.gone) or self.machine.gone

    @invariant()
    def failures_are_typed(self) -> None:
        failure = self.machine.failure
        assert failure is None or failure.code in BY_CODE

    def teardown(self) -> None:
        """From anywhere, a stop and outcomes that are good lead to the end, with nothing left."""
        self.feed(sm.StopAsked("end"))
        for _ in range(8):
            if self.flying is not None:
                event, self.flying = GOOD[self.flying], None
                self.feed(event)
        assert self.machine.gone and self.machine.state in sm.ENDED
        self.machine.validate()


Sandboxes.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestSandboxes = Sandboxes.TestCase


def test_every_state_can_be_stopped() -> None:
    assert all(sm.StopAsked in events for events in sm.TRANSITIONS.values())


def test_an_event_that_cannot_be_is_refused_with_the_story() -> None:
    machine = SandboxMachine()
    machine.handle(sm.Created())
    machine.handle(sm.Launched())
    with pytest.raises(Internal, match=r"Launched.*story.*Created"):
        machine.handle(sm.Launched())


def test_outcome_of_another_action_is_refused() -> None:
    machine = SandboxMachine()
    machine.handle(sm.Created())
    machine.handle(sm.StopAsked("x"))
    with pytest.raises(Internal):
        machine.handle(sm.Destroyed())


def test_stop_waits_for_the_launch() -> None:
    machine = SandboxMachine()
    assert machine.handle(sm.Created()) == [Action.SAVE, Action.LAUNCH]
    assert machine.handle(sm.StopAsked("x")) == [Action.SAVE, Action.CANCEL_LAUNCH]
    assert machine.handle(sm.Launched()) == [Action.STOP]
    assert machine.handle(sm.Stopped()) == [Action.DESTROY]
    assert machine.handle(sm.Destroyed()) == [Action.SAVE, Action.RELEASE, Action.ANNOUNCE]
    assert machine.state is State.STOPPED


def test_classify() -> None:
    assert sm.classify(sm.Exited(signal=9)).code == "killed_from_inside"
    assert sm.classify(sm.Exited(exit_code=0, log="bye")).message.endswith("bye")
    assert sm.classify(sm.Exited(signal=9, host_oom=True)).code == "node_failed"


def test_story_is_bounded() -> None:
    machine = SandboxMachine()
    machine.handle(sm.Created())
    machine.handle(sm.Launched())
    for _ in range(100):
        machine.handle(sm.DeadlinePassed(FAILURE))
    assert len(machine.story) == sm.STORY_LENGTH
