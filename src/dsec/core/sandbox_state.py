"""The sandbox state machine: events in, actions out. No I/O, no clock, no await.

                   Launched            StopAsked                Destroyed
    creating ────────────────▶ running ──────────▶ stopping ───────────────▶ stopped
        │                       │    ▲                 ▲
        │ LaunchFailed,         │    └─ paused ◀─▶ …   │ StopAsked (while creating)
        │ DeadlinePassed        ▼
        └────────────────────▶ failed      (Exited, Lost, Breached, RecoverFailed)

`handle` is the one door. The edge carries out the actions and feeds their outcome back as events. At most one
action is in flight (`pending`); what would tear the sandbox down waits for it. A sandbox is `gone` when all
that was made for it is removed; only then is its slot given to another.

The manner is that of dask.distributed's worker state machine: a table of small transitions, an invariant
for each state, and a story for debugging.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final

import msgspec

from dsec.core.errors import Internal


class State(StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


LIVE: Final = frozenset({State.CREATING, State.RUNNING, State.PAUSING, State.PAUSED, State.RESUMING})
ENDED: Final = frozenset({State.STOPPED, State.FAILED})


class Action(StrEnum):
    SAVE = "save"
    """Write the durable record, before anything that follows."""
    ANNOUNCE = "announce"
    """Whoever waits for this sandbox shall look again."""
    LAUNCH = "launch"
    CANCEL_LAUNCH = "cancel_launch"
    RECOVER = "recover"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"
    DESTROY = "destroy"
    RETRY = "retry"
    """A stop or destroy failed: feed RetryDue after a while."""
    RELEASE = "release"
    """Nothing is left of it: its slot is free."""


PENDING: Final = {
    Action.LAUNCH,
    Action.RECOVER,
    Action.PAUSE,
    Action.RESUME,
    Action.STOP,
    Action.DESTROY,
    Action.RETRY,
}
"""The actions whose outcome comes back as an event."""


class Failure(msgspec.Struct, frozen=True):
    """A typed reason: `code` is one of dsec.core.errors."""

    code: str
    message: str


class Event(msgspec.Struct, frozen=True):
    pass


class Created(Event, frozen=True):
    """It has a record and a slot."""


class Launched(Event, frozen=True):
    pass


class LaunchFailed(Event, frozen=True):
    failure: Failure
    dead: bool = True
    """No process of it can be running."""


class DeadlinePassed(Event, frozen=True):
    failure: Failure


class StopAsked(Event, frozen=True):
    reason: str


class Exited(Event, frozen=True):
    """Its own process has ended."""

    exit_code: int | None = None
    signal: int | None = None
    host_oom: bool = False
    log: str = ""


class Lost(Event, frozen=True):
    """No answer by the deadline."""

    failure: Failure


class Breached(Event, frozen=True):
    """It broke the protocol too often."""

    failure: Failure


class Restarted(Event, frozen=True):
    """A new edge found its record."""


class Recovered(Event, frozen=True):
    pass


class RecoverFailed(Event, frozen=True):
    failure: Failure


class PauseAsked(Event, frozen=True):
    pass


class Paused(Event, frozen=True):
    pass


class PauseFailed(Event, frozen=True):
    pass


class ResumeAsked(Event, frozen=True):
    pass


class Resumed(Event, frozen=True):
    pass


class ResumeFailed(Event, frozen=True):
    failure: Failure


class Stopped(Event, frozen=True):
    """No process of it runs any more."""


class StopFailed(Event, frozen=True):
    pass


class Destroyed(Event, frozen=True):
    pass


class DestroyFailed(Event, frozen=True):
    pass


class RetryDue(Event, frozen=True):
    pass


def classify(exit: Exited) -> Failure:
    """Why a sandbox that nobody asked to stop has ended."""
    how = f"signal {exit.signal}" if exit.signal is not None else f"exit code {exit.exit_code}"
    log = f": {exit.log[-500:]}" if exit.log else ""
    if exit.host_oom:
        return Failure("node_failed", f"the node ran out of memory and its kernel ended the sandbox{log}")
    return Failure("killed_from_inside", f"what ran in the sandbox ended it ({how}){log}")


Actions = list[Action]
STORY_LENGTH: Final = 24


class SandboxMachine:
    """One sandbox. Attributes are to be read, and changed by `handle` alone."""

    __slots__ = ("dead", "failure", "gone", "pending", "reason", "state", "story")

    def __init__(self) -> None:
        self.state = State.CREATING
        self.pending: Action | None = None
        """In flight. None only in running, paused, and when `gone`."""
        self.reason = ""
        """Why it was stopped. Set exactly in stopping and stopped."""
        self.failure: Failure | None = None
        """Set exactly in failed."""
        self.dead = False
        """No process of it runs. Never in running, paused."""
        self.gone = False
        """Nothing of it is left. Always in stopped, at last in failed, nowhere else."""
        self.story: list[tuple[str, str, str]] = []
        """The last events: (event, state before, state after)."""

    @classmethod
    def restored(cls, state: State, reason: str, failure: Failure | None, gone: bool) -> SandboxMachine:
        """From a record. Unless `gone`, the next event must be Restarted."""
        m = cls()
        m.state, m.reason, m.failure, m.gone = state, reason, failure, gone
        m.dead = gone
        return m

    @property
    def live(self) -> bool:
        return self.state in LIVE

    def handle(self, event: Event) -> Actions:
        """Raises Internal for an event that cannot come in this state: a bug of the caller."""
        before = self.state
        step = TRANSITIONS[before].get(type(event))
        if step is None or OUTCOME_OF.get(type(event), self.pending) is not self.pending:
            raise Internal(f"sandbox {before}: unexpected {event!r}; story {self.story}")
        actions = step(self, event)
        self.story.append((type(event).__name__, before.value, self.state.value))
        if len(self.story) > STORY_LENGTH:
            del self.story[0]
        for action in actions:
            if action in PENDING:
                self.pending = action
        return actions

    # --- transitions ---

    def _ignore(self, event: Event) -> Actions:
        return []

    def _launch(self, event: Event) -> Actions:
        return [Action.SAVE, Action.LAUNCH]

    def _run(self, event: Event) -> Actions:
        self.pending, self.state = None, State.RUNNING
        return [Action.SAVE, Action.ANNOUNCE]

    def _fail(self, failure: Failure) -> Actions:
        self.state, self.failure = State.FAILED, failure
        return [Action.SAVE, Action.ANNOUNCE, *self._tear_down()]

    def _tear_down(self) -> Actions:
        if self.pending is not None:
            return []  # its outcome comes first
        return [Action.DESTROY if self.dead else Action.STOP]

    def _launch_failed(self, event: LaunchFailed) -> Actions:
        self.pending, self.dead = None, event.dead
        return self._fail(event.failure)

    def _deadline(self, event: DeadlinePassed) -> Actions:
        return [*self._fail(event.failure), Action.CANCEL_LAUNCH]

    def _exited(self, event: Exited) -> Actions:
        self.dead = True
        return self._fail(classify(event))

    def _failed(self, event: Lost | Breached) -> Actions:
        return self._fail(event.failure)

    def _outcome_failed(self, event: RecoverFailed | ResumeFailed) -> Actions:
        self.pending = None
        return self._fail(event.failure)

    def _stop(self, event: StopAsked) -> Actions:
        self.state, self.reason = State.STOPPING, event.reason
        return [Action.SAVE, *self._tear_down()]

    def _stop_creating(self, event: StopAsked) -> Actions:
        return [*self._stop(event), Action.CANCEL_LAUNCH]

    def _interrupted(self, event: Restarted) -> Actions:
        return self._fail(Failure("launch_failed", "the server ended while the sandbox was being made"))

    def _recover(self, event: Restarted) -> Actions:
        return [Action.RECOVER]

    def _recover_pausing(self, event: Restarted) -> Actions:
        self.state = State.RUNNING  # resume is idempotent, a second pause need not be
        return [Action.SAVE, Action.RECOVER]

    def _recovered(self, event: Event) -> Actions:
        self.pending = None
        return [Action.ANNOUNCE]

    def _pause(self, event: Event) -> Actions:
        self.state = State.PAUSING
        return [Action.SAVE, Action.PAUSE]

    def _paused(self, event: Event) -> Actions:
        self.pending, self.state = None, State.PAUSED
        return [Action.SAVE, Action.ANNOUNCE]

    def _resume(self, event: Event) -> Actions:
        self.state = State.RESUMING
        return [Action.SAVE, Action.RESUME]

    def _outcome(self, event: Event) -> Actions:
        """What was in flight when the end was decided has come back."""
        self.pending = None
        return self._tear_down()

    def _launch_undone(self, event: LaunchFailed) -> Actions:
        self.dead = self.dead or event.dead
        return self._outcome(event)

    def _outcome_dead(self, event: Event) -> Actions:
        self.dead = True
        return self._outcome(event)

    def _died(self, event: Event) -> Actions:
        self.dead = True
        return []

    def _again(self, event: Event) -> Actions:
        self.pending = None
        return [Action.RETRY]

    def _destroyed(self, event: Event) -> Actions:
        self.pending, self.gone, self.dead = None, True, True
        if self.state is State.STOPPING:
            self.state = State.STOPPED
        return [Action.SAVE, Action.RELEASE, Action.ANNOUNCE]

    # --- invariants ---

    def validate(self) -> None:
        """Raises AssertionError, with the story, if an invariant is broken."""
        try:
            VALIDATORS[self.state](self)
            assert (self.reason != "") == (self.state in {State.STOPPING, State.STOPPED}), "reason"
            assert (self.failure is not None) == (self.state is State.FAILED), "failure"
            assert not self.gone or (self.dead and self.pending is None), "gone"
        except AssertionError as e:
            raise AssertionError(f"{e} ({self.state}, pending {self.pending}); story {self.story}") from e

    def _validate_creating(self) -> None:
        assert self.pending is Action.LAUNCH, "pending"
        assert not self.dead and not self.gone

    def _validate_running(self) -> None:
        assert self.pending in {None, Action.RECOVER}, "pending"
        assert not self.dead and not self.gone

    def _validate_pausing(self) -> None:
        assert self.pending is Action.PAUSE, "pending"
        assert not self.dead and not self.gone

    def _validate_paused(self) -> None:
        assert self.pending in {None, Action.RECOVER}, "pending"
        assert not self.dead and not self.gone

    def _validate_resuming(self) -> None:
        assert self.pending is Action.RESUME, "pending"
        assert not self.dead and not self.gone

    def _validate_stopping(self) -> None:
        assert self.pending is not None, "nobody is tearing it down"
        assert not self.gone, "gone"

    def _validate_stopped(self) -> None:
        assert self.gone, "gone"

    def _validate_failed(self) -> None:
        assert self.gone or self.pending is not None, "nobody is tearing it down"


OUTCOME_OF: Final[dict[type[Event], Action]] = {
    Launched: Action.LAUNCH,
    LaunchFailed: Action.LAUNCH,
    Recovered: Action.RECOVER,
    RecoverFailed: Action.RECOVER,
    Paused: Action.PAUSE,
    PauseFailed: Action.PAUSE,
    Resumed: Action.RESUME,
    ResumeFailed: Action.RESUME,
    Stopped: Action.STOP,
    StopFailed: Action.STOP,
    Destroyed: Action.DESTROY,
    DestroyFailed: Action.DESTROY,
    RetryDue: Action.RETRY,
}
"""An outcome comes only while its action is in flight."""

M = SandboxMachine

_TEARING_DOWN: dict[type[Event], Callable[..., Actions]] = {
    Launched: M._outcome,
    LaunchFailed: M._launch_undone,
    DeadlinePassed: M._ignore,
    Recovered: M._outcome,
    RecoverFailed: M._outcome,
    Paused: M._outcome,
    PauseFailed: M._outcome,
    Resumed: M._outcome,
    ResumeFailed: M._outcome,
    Stopped: M._outcome_dead,
    StopFailed: M._again,
    Destroyed: M._destroyed,
    DestroyFailed: M._again,
    RetryDue: M._outcome,
    Exited: M._died,
    StopAsked: M._ignore,
    Lost: M._ignore,
    Breached: M._ignore,
    Restarted: M._outcome,
}
_NO_MORE: dict[type[Event], Callable[..., Actions]] = {
    StopAsked: M._ignore,
    DeadlinePassed: M._ignore,
    Exited: M._ignore,
    Lost: M._ignore,
    Breached: M._ignore,
}
_FAILING: dict[type[Event], Callable[..., Actions]] = {
    Exited: M._exited,
    Lost: M._failed,
    Breached: M._failed,
    StopAsked: M._stop,
    DeadlinePassed: M._ignore,
}
TRANSITIONS: Final[dict[State, dict[type[Event], Callable[..., Actions]]]] = {
    State.CREATING: {
        Created: M._launch,
        Launched: M._run,
        LaunchFailed: M._launch_failed,
        DeadlinePassed: M._deadline,
        StopAsked: M._stop_creating,
        Exited: M._ignore,
        Restarted: M._interrupted,
    },
    State.RUNNING: {
        **_FAILING,
        Restarted: M._recover,
        Recovered: M._recovered,
        RecoverFailed: M._outcome_failed,
        PauseAsked: M._pause,
    },
    State.PAUSING: {**_FAILING, Paused: M._paused, PauseFailed: M._run, Restarted: M._recover_pausing},
    State.PAUSED: {
        **_FAILING,
        ResumeAsked: M._resume,
        Restarted: M._recover,
        Recovered: M._recovered,
        RecoverFailed: M._outcome_failed,
    },
    State.RESUMING: {
        **_FAILING,
        Resumed: M._run,
        ResumeFailed: M._outcome_failed,
        Restarted: M._recover_pausing,
    },
    State.STOPPING: _TEARING_DOWN,
    State.STOPPED: _NO_MORE,
    State.FAILED: {**_TEARING_DOWN},
}
VALIDATORS: Final[dict[State, Callable[[SandboxMachine], None]]] = {
    s: getattr(SandboxMachine, f"_validate_{s.value}") for s in State
}
