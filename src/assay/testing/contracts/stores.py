"""Contract of a trace store."""

import math
import threading
from contextlib import suppress

from assay.errors import ConfigError, StoreError
from assay.testing.contracts.base import HOSTILE_TEXTS, Contract, require
from assay.traces import Rollout, Store, ToolCall, Transition, Verdict

_THREADS, _EACH = 8, 50


class StoreContract(Contract):
    """Checks a trace store: another database, another server, or a class with the methods of `assay.traces.Store`.

    - A rollout with its transitions is read back as it was written; writing it again replaces it.
    - NaN and infinity are stored as missing, never as numbers.
    - Hostile text is stored without an error and without affecting other rows.
    - Concurrent writes of several threads lose and duplicate nothing.
    - An id prefix that matches no rollout, or more than one, raises `StoreError`; a rating outside [0, 1] raises
      `ConfigError`.
    - `rollouts()` returns the newest first, at most `limit`, of the run `run_id`.
    - After `flush`, another connection to the store sees the rows. Closing twice is allowed.
    """

    def make(self) -> Store:
        """Opens the store. It is empty at the first call of a test; each further call opens the same store again."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def test_a_rollout_is_read_back_equal(self) -> None:
        rollout = _full_rollout()
        with self.context(), self.make() as store:
            store.put_rollout(rollout)
            for transition in reversed(rollout.transitions):
                store.put_transition(rollout.id, transition)
            store.flush()
            stored = store.rollout(rollout.id)
        require(stored == rollout, f"read back {stored!r}, wrote {rollout!r}")

    def test_writing_a_rollout_again_replaces_it(self) -> None:
        rollout = Rollout()
        with self.context(), self.make() as store:
            for score in (0.25, 0.5, 1.0):
                rollout.score = score
                store.put_rollout(rollout)
                store.put_transition(rollout.id, Transition(t=0, model="m", request={}, output=str(score)))
                store.flush()
            scores = [stored.score for stored in store.rollouts()]
            outputs = [transition.output for transition in store.rollout(rollout.id).transitions]
        require(scores == [1.0], f"a rollout written three times has the scores {scores}, expected [1.0]")
        require(outputs == ["1.0"], f"a transition written three times has the outputs {outputs}, expected ['1.0']")

    def test_nan_and_infinity_are_never_numbers(self) -> None:
        rollout = Rollout(score=math.nan, prediction={"x": math.inf}, verdicts=[Verdict(criterion="c", grade=math.nan)])
        with self.context(), self.make() as store:
            store.put_rollout(rollout)
            store.flush()
            stored = store.rollout(rollout.id)
        require(stored.score is None, f"a score of NaN is read back as {stored.score!r}, expected None")
        require(stored.prediction == {"x": None}, f"infinity is read back as {stored.prediction!r}, expected None")
        require(stored.verdicts[0].grade is None, f"a grade of NaN is read back as {stored.verdicts[0].grade!r}")

    def test_hostile_text_is_stored(self) -> None:
        with self.context(), self.make() as store:
            rollouts = [Rollout(task_id=text, inputs={text: text}) for text in HOSTILE_TEXTS]
            for rollout in rollouts:
                store.put_rollout(rollout)
                store.put_transition(rollout.id, Transition(t=0, model="m", request={"text": rollout.task_id}))
            store.flush()
            ids = {rollout.id for rollout in store.rollouts()}
            # a store may replace characters that its database does not accept, so only printable texts are compared
            printable = {rollout.id: rollout.task_id for rollout in rollouts if rollout.task_id.isprintable()}
            inputs = {key: store.rollout(key).inputs for key in printable}
        require(ids == {rollout.id for rollout in rollouts}, f"{len(ids)} of {len(rollouts)} rollouts are stored")
        changed = [text[:50] for key, text in printable.items() if inputs[key] != {text: text}]
        require(not changed, f"texts were changed: {changed}")

    def test_threads_lose_and_duplicate_nothing(self) -> None:
        with self.context(), self.make() as store:

            def write(worker: int) -> None:
                for number in range(_EACH):
                    store.put_rollout(Rollout(id=f"{worker:04x}{number:028x}"))

            threads = [threading.Thread(target=write, args=(worker,)) for worker in range(_THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            store.flush()
            ids = [rollout.id for rollout in store.rollouts()]
        require(len(ids) == len(set(ids)) == _THREADS * _EACH, f"{len(ids)} rows, expected {_THREADS * _EACH}")

    def test_an_id_must_name_exactly_one_rollout(self) -> None:
        with self.context(), self.make() as store:
            store.put_rollout(Rollout(id="ab" * 16))
            store.put_rollout(Rollout(id="ac" * 16))
            store.flush()
            require(store.rollout("ab").id == "ab" * 16, "the prefix of an id does not match its rollout")
            for prefix, matches in (("zz", "no rollout"), ("a", "two rollouts")):
                try:
                    store.rollout(prefix)
                except StoreError:
                    continue
                raise AssertionError(f"an id prefix that matches {matches} raises no StoreError")

    def test_ratings_are_between_0_and_1(self) -> None:
        rollout = Rollout()
        with self.context(), self.make() as store:
            store.put_rollout(rollout)
            store.flush()
            store.rate(rollout.id, 0.5)
            for rating in (-0.1, 1.1, math.nan, math.inf):
                with suppress(ConfigError):
                    store.rate(rollout.id, rating)
                    raise AssertionError(f"a rating of {rating} raises no ConfigError")
            store.put_rollout(rollout)  # a job that writes the rollout again must not remove the rating
            store.flush()
            rating = store.rollout(rollout.id).human_rating or math.nan
        require(rating == 0.5, f"the rating is {rating}, expected 0.5")

    def test_the_newest_rollouts_come_first(self) -> None:
        with self.context(), self.make() as store:
            for number in (1, 3, 2):
                run_id = "a" if number > 1 else "b"
                store.put_rollout(Rollout(task_id=str(number), run_id=run_id, started_at=float(number)))
            store.flush()
            all_ids, newest = ([rollout.task_id for rollout in store.rollouts(limit=limit)] for limit in (None, 1))
            of_run = [rollout.task_id for rollout in store.rollouts(run_id="a")]
        require(all_ids == ["3", "2", "1"], f"the order is {all_ids}, expected the newest first")
        require(newest == ["3"], f"limit=1 returns {newest}")
        require(of_run == ["3", "2"], f"the rollouts of a run are {of_run}, expected ['3', '2']")

    def test_another_connection_sees_flushed_rows(self) -> None:
        rollout = Rollout()
        with self.context(), self.make() as store:
            store.put_rollout(rollout)
            store.flush()
            with self.make() as second:
                ids = [stored.id for stored in second.rollouts()]
        require(ids == [rollout.id], f"a second connection sees {ids}, expected the flushed rollout {rollout.id}")

    def test_closing_twice_is_allowed(self) -> None:
        with self.context():
            store = self.make()
            store.close()
            store.close()


def _full_rollout() -> Rollout:
    transitions = [
        Transition(
            t=t,
            model="m",
            request={"messages": [{"text": "hé\U0001f600"}]},
            response={"x": [1, 2.5, None, True]},
            output="out",
            tools=[ToolCall(name="calculator", arguments={"expression": "1+1"}, result="2")],
            cached=t == 1,
            prompt_tokens=5,
            completion_tokens=0,
            token_ids=(1, 2),
            logprobs=(-0.5, -1.0),
            latency_ms=1.5,
            cost_usd=0.0,
            started_at=3.0,
            step_rewards={"call_runs": 0.05},
            return_=1.0,
        )
        for t in range(3)
    ]
    return Rollout(
        run_id="run",
        task_id="t",
        task_type="sum",
        group_id="g",
        program="p",
        parameters={"temperature": 0.1},
        model="m",
        adapters=("a",),
        seed=0,
        split="val",
        phase="search",
        status="done",
        inputs={"question": "?"},
        prediction={"answer": 2},
        rubric="r@1",
        score=0.0,
        coverage=1.0,
        tenant="x",
        data_subject="y",
        consent="z",
        verdicts=[Verdict(criterion="correct", grade=None, reason="why")],
        started_at=2.0,
        ended_at=9.0,
        transitions=transitions,
    )
