"""Contract of a memory."""

import threading
import time
from contextlib import suppress

from assay.errors import ConfigError
from assay.programs import Memory
from assay.testing.contracts.base import HOSTILE_TEXTS, Contract, require

_THREADS, _EACH = 8, 10


class MemoryContract(Contract):
    """Checks a memory: over another database, or a class with the methods of `assay.programs.Memory`.

    - A fact is found by its words and those of `about`, by its person only, and case and spaces of the person's name
      are ignored.
    - A fact with the same `about` supersedes the earlier one, which stays in the history with the end of its validity
      and the fact that took its place. The same text is not added twice.
    - Without `about`, contradictory facts are both kept, the newer one first.
    - A forgotten fact is not found and stays in the history. A fact of another person cannot be forgotten.
    - `recall(at=…)` finds what was valid at that time.
    - Hostile texts are stored and searched as text; a query without words finds the newest facts.
    - An empty fact or person, or `k` below 1, raises `ConfigError`.
    - Concurrent writes of several threads lose nothing and leave one valid fact of each `about`.
    """

    def make(self) -> Memory:
        """Returns an empty memory."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def test_a_fact_is_found_by_its_words_and_its_person(self) -> None:
        with self.context():
            memory = self.make()
            memory.remember("Ada Lovelace", "prefers a window seat")
            memory.remember("Ada Lovelace", "is allergic to nuts")
            memory.remember("Bob", "prefers an aisle seat")
            facts = [fact.text for fact in memory.recall("which seat?", subject="  ada LOVELACE ")]
            require(facts == ["prefers a window seat"], f"recall('which seat?') finds {facts!r}")
            require(memory.recall("seat", subject="Carl") == [], "a person without facts has some")
            memory.remember("Ada Lovelace", "555-1234", about="phone_number")
            facts = [fact.text for fact in memory.recall("What is the phone number?", subject="Ada Lovelace")]
            require(facts == ["555-1234"], f"by the words of its `about` a fact is found as {facts!r}")

    def test_a_new_value_supersedes_and_overwrites_nothing(self) -> None:
        with self.context():
            memory = self.make()
            old = memory.remember("Ada", "phone: 555-1", about="phone")
            again = memory.remember("Ada", "phone: 555-1", about="phone")
            require(again == old, "the same fact is added twice")
            new = memory.remember("Ada", "phone: 555-2", about="phone")
            facts = [fact.text for fact in memory.recall("phone", subject="Ada")]
            require(facts == ["phone: 555-2"], f"after a new value recall finds {facts!r}")
            first, second = memory.history("Ada")
            require(first.text == "phone: 555-1", f"the superseded fact became {first.text!r}")
            require(first.superseded_by == new.id, f"it is superseded by {first.superseded_by!r}, expected {new.id}")
            require(first.valid_to is not None and second.valid_to is None, "validity does not end where it should")

    def test_contradictory_facts_are_kept_the_newer_one_first(self) -> None:
        with self.context():
            memory = self.make()
            memory.remember("Ada", "Ada likes tea")
            memory.remember("Ada", "Ada hates tea")
            facts = [fact.text for fact in memory.recall("tea", subject="Ada")]
            require(facts == ["Ada hates tea", "Ada likes tea"], f"contradictory facts are recalled as {facts!r}")

    def test_a_forgotten_fact_is_not_found_and_stays_in_the_history(self) -> None:
        with self.context():
            memory = self.make()
            fact = memory.remember("Ada", "lives in Oslo")
            require(not memory.forget(fact.id, subject="Bob"), "a fact of another person was forgotten")
            require(memory.forget(fact.id, subject="Ada"), "the fact was not forgotten")
            require(not memory.forget(fact.id, subject="Ada"), "a fact is forgotten twice")
            require(memory.recall("Oslo", subject="Ada") == [], "a forgotten fact is found")
            require([f.text for f in memory.history("Ada")] == ["lives in Oslo"], "a forgotten fact left the history")

    def test_facts_are_found_as_they_were_at_a_time(self) -> None:
        with self.context():
            memory = self.make()
            old = memory.remember("Ada", "city: Oslo", about="city")
            time.sleep(0.02)  # longer than a tick of any system's clock
            new = memory.remember("Ada", "city: Graz", about="city")
            at = (old.valid_from + new.valid_from) / 2
            if old.valid_from < at:  # a clock that is given may stand still
                facts = [fact.text for fact in memory.recall("city", subject="Ada", at=at)]
                require(facts == ["city: Oslo"], f"at an earlier time recall finds {facts!r}")

    def test_hostile_texts_are_text(self) -> None:
        with self.context():
            memory = self.make()
            memory.remember("Ada", "likes pears")
            for text in HOSTILE_TEXTS:
                with suppress(ConfigError):  # an empty text
                    memory.remember("Mallory", text)
                memory.recall(text, subject="Mallory")
                memory.recall(text, subject=text or "x")
            require([f.text for f in memory.history("Ada")] == ["likes pears"], "a hostile text changed other facts")
            newest = memory.recall("  ?! ", subject="Ada")
            require([f.text for f in newest] == ["likes pears"], f"a query without words finds {newest!r}")

    def test_empty_facts_and_limits_below_one_are_refused(self) -> None:
        with self.context():
            memory = self.make()
            for subject, text in (("", "x"), ("Ada", " ")):
                try:
                    memory.remember(subject, text)
                except ConfigError:
                    continue
                raise AssertionError(f"remember({subject!r}, {text!r}) raises no ConfigError")
            try:
                memory.recall("x", subject="Ada", k=0)
            except ConfigError:
                return
            raise AssertionError("recall(k=0) raises no ConfigError")

    def test_threads_lose_nothing(self) -> None:
        with self.context():
            memory, errors = self.make(), list[Exception]()

            def write(number: int) -> None:
                try:
                    for at in range(_EACH):
                        memory.remember("Ada", f"note {number} {at}")
                        memory.remember("Ada", f"seat {number} {at}", about="seat")
                except Exception as error:  # reported below
                    errors.append(error)

            threads = [threading.Thread(target=write, args=(number,)) for number in range(_THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            require(not errors, f"concurrent writes raise {errors[:1]!r}")
            facts = memory.history("Ada")
            require(len(facts) == 2 * _THREADS * _EACH, f"{len(facts)} facts of {2 * _THREADS * _EACH} are kept")
            valid = [fact for fact in facts if fact.about == "seat" and fact.valid_to is None]
            require(len(valid) == 1, f"{len(valid)} values of one thing are valid at once")
