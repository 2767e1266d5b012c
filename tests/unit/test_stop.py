"""A store that fails for a moment, or for good, costs no signal and no rank's answer, and hangs nobody."""

import queue
import signal
from itertools import count

import pytest
from torch.distributed import HashStore

from wlb_titan.errors import EXIT_AGAIN
from wlb_titan.runtime import ends as alarm_module
from wlb_titan.runtime.ends import Alarm, Stop

pytestmark = pytest.mark.slow

RANKS = 3
PATIENCE = 60


class Flaky:
    """A store of which some calls raise: `fails` says so by the names of all calls so far. `done`: those are
    carried out all the same, and only their answer is lost."""

    def __init__(self, store, fails, done=False):
        self._store, self._fails, self._done, self.calls = store, fails, done, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            failed = self._fails(self.calls)
            answer = getattr(self._store, name)(*arguments) if self._done or not failed else None
            if failed:
                raise RuntimeError("the store does not answer")
            return answer

        return call


def first(name):
    """`fails` of the first call of a name."""
    return lambda calls: calls[-1] == name and calls.count(name) == 1


def looked(stops, times=4):
    """All alarms' threads look so many times; what raises is looked at again, as theirs does."""
    for _ in range(times):
        for stop in stops:
            try:
                stop.look()
            except RuntimeError:
                continue


def stopped(stores):
    """Each rank's status, and how many steps it does; they had begun 3, 4 and 5 when one was asked."""
    stops = [Stop(rank, RANKS, store) for rank, store in enumerate(stores)]
    for rank, stop in enumerate(stops):
        assert all(stop.goes_on() for _ in range(3 + rank))
    stops[1].ask("SIGUSR1", EXIT_AGAIN)
    looked(stops)
    return [stop.last and (stop.status, rank + 3 + done(stop)) for rank, stop in enumerate(stops)]


def done(stop):
    """How many steps a rank still does."""
    return sum(1 for _ in iter(stop.goes_on, False))


@pytest.mark.parametrize("done", [False, True], ids=["not-done", "unanswered"])
def test_whatever_call_of_the_store_fails_once_all_ranks_stop_after_the_same_step(done):
    for rank in range(RANKS):
        for number in count(1):
            shared = HashStore()
            flaky = Flaky(shared, lambda calls, number=number: len(calls) == number, done)
            ends = stopped([flaky if one == rank else shared for one in range(RANKS)])
            assert ends == [(EXIT_AGAIN, 5)] * RANKS, (rank, number, ends)
            if number > len(flaky.calls):
                break


def test_one_rank_needs_no_store():
    stop = Stop(0, 1, None)
    assert stop.goes_on()
    stop.ask("SIGTERM", 143)
    looked([stop])
    assert (stop.status, done(stop)) == (143, 0)


@pytest.mark.parametrize(("status", "last"), [(EXIT_AGAIN, 1), (143, 0)])
def test_a_run_that_is_started_again_by_itself_does_a_step_first(status, last):
    """Asked before its first step, as by a limit of time that is shorter than the start."""
    stops = [Stop(rank, RANKS, store) for rank, store in enumerate([HashStore()] * RANKS)]
    stops[1].ask("SIGUSR1", status)
    looked(stops)
    if status == EXIT_AGAIN:
        assert all(stop.goes_on() for stop in stops)
        looked(stops)
    assert not any(stop.goes_on() for stop in stops)
    assert [(stop.status, stop.last) for stop in stops] == [(status, last)] * RANKS


def test_rank_0_has_answered_for_all_when_it_has_done_its_last_step():
    """Others in that step, who are asked then, do not wait for it."""
    shared = HashStore()
    stops = [Stop(rank, 2, shared) for rank in range(2)]
    assert all(stop.goes_on() for stop in stops)
    stops[0].leave()
    stops[1].ask("SIGTERM", 143)
    looked(stops[1:])
    assert not stops[1].goes_on()


@pytest.fixture
def watching(monkeypatch):
    """Opens alarms of two ranks' jobs on a store of the test's, and tells with what status they end."""
    for name, seconds in {"GRACE": 0.0, "HEARD": 0.0, "SECONDS_BETWEEN_LOOKS": 0.01}.items():
        monkeypatch.setattr(alarm_module, name, seconds)
    ended = queue.Queue()

    def watching(store):
        monkeypatch.setattr(alarm_module, "_store", lambda rank: store)
        alarm = Alarm(0, 2)

        def end(code):
            alarm._closed.set()
            ended.put(code)

        monkeypatch.setattr(alarm_module, "_end", end)
        return alarm, ended

    return watching


def test_a_failure_that_cannot_be_read_at_once_is_followed_all_the_same(watching):
    """The store knows that another rank has failed, and does not answer at first when it is asked why."""
    flaky = Flaky(HashStore(), first("get"))
    flaky.set("failed", '{"rank": 1, "host": "other", "message": "met its test"}')
    alarm, ended = watching(flaky)
    with alarm:
        assert ended.get(timeout=PATIENCE) == alarm_module.EXIT_FAILED
    assert flaky.calls.count("get") == 2


def test_a_signal_that_the_store_does_not_take_at_once_is_not_lost(watching):
    shared = HashStore()
    flaky, other = Flaky(shared, first("compare_set")), Stop(1, 2, shared)
    alarm, _ = watching(flaky)
    with alarm:
        assert alarm.stop.goes_on() and other.goes_on()
        signal.raise_signal(signal.SIGUSR1)
        while not (other.status and alarm.stop.status):
            other.look()
        assert not alarm.stop.goes_on() and alarm.stop.status == EXIT_AGAIN
    assert flaky.calls.count("compare_set") == 2


def test_a_store_that_is_gone_for_good_ends_the_rank(watching, monkeypatch):
    monkeypatch.setattr(alarm_module, "LOST", 0.0)
    alarm, ended = watching(Flaky(HashStore(), lambda calls: True))
    with alarm:
        assert ended.get(timeout=PATIENCE) == alarm_module.EXIT_FAILED


@pytest.mark.parametrize("defect", [TypeError, KeyError])
def test_a_defect_of_ours_is_told_as_what_it_is(watching, monkeypatch, capsys, defect):
    monkeypatch.setattr(Stop, "look", lambda stop: {}[stop] if defect is KeyError else len(stop))
    alarm, ended = watching(HashStore())
    with alarm:
        assert ended.get(timeout=PATIENCE) == alarm_module.EXIT_FAILED
    assert f"error: rank 0 on host {alarm._host}: {defect.__name__}: " in capsys.readouterr().err


def test_a_run_that_is_asked_before_its_first_step_ends_at_once(watching):
    """The main thread, which may build or compile for long, is not waited for."""
    shared = HashStore()
    (alarm, ended), other = watching(shared), Stop(1, 2, shared)
    with alarm:
        signal.raise_signal(signal.SIGTERM)
        while other.last != 0:
            other.look()
        assert ended.get(timeout=PATIENCE) == 143
