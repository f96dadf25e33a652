"""Caps that several processes of a job spend from, on both databases."""

import threading
from collections.abc import Iterator

import pytest

from assay.errors import BudgetExceeded
from assay.models.meter import Caps, Meter, Reservation, Usage
from assay.models.unrecorded import Unrecorded
from assay.traces import Store
from assay.traces.store.shares import CapShare, Member, leads, members_of


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store(database_url) as opened:
        yield opened


def member(store: Store, name: str, caps: Caps) -> Meter:
    meter = Meter(caps)
    meter.shared = CapShare(store.engine, "job", name)
    return meter


def calls_until_refused(meter: Meter, *, at_most: int = 1000) -> int:
    for number in range(at_most):
        try:
            meter.reserve()
        except BudgetExceeded:
            return number
    return at_most


def test_processes_together_make_as_many_calls_as_the_cap_allows(store: Store) -> None:
    caps = Caps(calls=120)
    leader = member(store, "job", caps)
    leader.hold(gate=Usage(calls=20))
    assert not leads(store.engine, "job")
    leader.check()  # reserves what it holds, before others may spend
    assert leads(store.engine, "job")
    meters = [leader, member(store, "a", caps), member(store, "b", caps)]
    made = [0] * len(meters)

    def work(at: int) -> None:
        made[at] = calls_until_refused(meters[at])

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(meters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(made) == 100
    with pytest.raises(BudgetExceeded, match="100 of 120 calls are spent; the rest is reserved for gate"):
        leader.check()
    with leader.during("gate"):
        assert calls_until_refused(leader) == 20


def test_an_ended_process_gives_back_what_it_did_not_use_and_a_killed_one_does_not(store: Store) -> None:
    caps = Caps(calls=200)
    leader, ended, killed = (member(store, name, caps) for name in ("job", "ended", "killed"))
    for meter in (leader, ended, killed):
        meter.reserve()
    assert isinstance(ended.shared, CapShare)
    ended.of("search").repeated += 4  # it had been killed before, and sent these again
    ended.shared.end(ended.phases, Unrecorded(calls=2, lost=4))
    assert sorted(members_of(store.engine, "job"), key=lambda member: member.run_id) == [
        Member("ended", 7, Usage(calls=1, repeated=4), Unrecorded(calls=2, lost=4)),
        Member("killed", 17, None, Unrecorded()),
    ]
    assert calls_until_refused(leader) == 200 - 17 - 7 - 1


def test_dollars_of_other_processes_count(store: Store) -> None:
    caps, call = Caps(cost_usd=1.0), Reservation(cost_usd=0.3, exact=True)
    one, other = member(store, "job", caps), member(store, "other", caps)
    for meter in (one, other, one):
        sent = meter.reserve(reserved=call)
        meter.settle(sent, prompt_tokens=1, completion_tokens=1, cost_usd=0.3, failed=False)
    with pytest.raises(BudgetExceeded, match=r"the next call may take 0\.3"):
        other.check(reserved=call)


def test_a_killed_process_keeps_the_dollars_that_it_had_reserved(store: Store) -> None:
    caps, call = Caps(cost_usd=1.0), Reservation(cost_usd=0.3, exact=True)
    leader, killed = member(store, "job", caps), member(store, "killed", caps)
    killed.reserve(reserved=call)
    CapShare(store.engine, "job", "killed").end({"search": Usage(calls=1)}, Unrecorded(lost=1), killed=True)
    leader.check(reserved=Reservation(cost_usd=0.6, exact=True))
    with pytest.raises(BudgetExceeded, match=r"the next call may take 0\.7"):
        leader.check(reserved=Reservation(cost_usd=0.71, exact=True))
