"""Labelling in the browser: what is asked, in which order, and what a form may store."""

import re

import pytest
from judged import put_outputs, put_question
from pages import NOW, Browser, browse, read

from assay.judges.questions import known_questions, remember
from assay.traces import Rollout, Store


def fields_of(text: str) -> dict[str, str]:
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', text))


def labelled(store: Store, key: str, who: str = "ann", label: str = "kind", **changed: str) -> tuple[int, str]:
    """Labels the next item of a rater. Returns the status, and the place of the next page or the message."""

    async def visit(browser: Browser) -> tuple[int, str]:
        text = (await browser.get(f"/judges/{key}/label?rater={who}"))[1]
        data = {**fields_of(text), "label": label, "rationale": "why", **changed}
        answer = await browser.send("POST", f"/judges/{key}/labels", data=data, follow=False)
        return answer.status, answer.headers.get("Location") or await answer.text()

    return browse(store, visit)


@pytest.fixture
def key(store: Store) -> str:
    """The key of a question with outputs to label."""
    put_outputs(store)
    return put_question(store)


def test_a_label_is_stored_with_the_content_of_the_store(store: Store, key: str) -> None:
    assert 'name="rater"' in read(store, f"/judges/{key}/label")  # a rater is asked for a name first
    page = f"/judges/{key}/label?rater=ann"
    assert "s skip, u the judge" in read(store, page)
    assert labelled(store, key) == (303, page)
    assert "s skip, b change the last, w withdraw it, u the judge" in read(store, page)
    (row,) = store.labels(key)
    assert (row["rater"], row["label"], row["rationale"]) == ("ann", "kind", "why")
    assert row["output"].startswith("answer ")


def test_sealed_test_outputs_are_never_shown(store: Store, key: str) -> None:

    async def visit(browser: Browser) -> None:
        for _ in range(22):  # two outputs of eleven tasks; those of the twelfth are sealed
            text = (await browser.get(f"/judges/{key}/label?rater=ann"))[1]
            data = {**fields_of(text), "label": "kind"}
            answer = await browser.send("POST", f"/judges/{key}/labels", data=data, follow=False)
            assert answer.status == 303

    browse(store, visit)
    assert all(row["task_input"] != "q0" for row in store.labels(key))
    assert "Nothing is waiting" in read(store, f"/judges/{key}/label?rater=ann")


def test_outputs_of_programs_that_the_judge_never_judged_are_not_offered(store: Store, key: str) -> None:
    other = Rollout(
        run_id="run-2", program="poet", status="done", inputs={"question": "a poem"}, prediction={"answer": "no judge"},
        started_at=NOW,
    )  # fmt: skip
    store.put_rollout(other)
    store.flush()
    assert ", 23 waiting" in read(store, f"/judges/{key}/label?rater=ann").replace("\n", " ")  # it judged nothing yet
    store.put_run("run-1", kind="evaluate", config={"rubric": "tone.yaml"}, status="done", started_at=NOW)
    remember(store, known_questions(store)[key], "tone.yaml:kind")  # as a rubric's criterion
    store.flush()
    assert ", 22 waiting" in read(store, f"/judges/{key}/label?rater=ann")
    assert ", 1 waiting" in read(store, f"/judges/{key}/label?rater=ann&run=run-2")


def test_items_that_others_labelled_come_first_without_their_labels(store: Store, key: str) -> None:
    labelled(store, key, who="bob", label="rude")
    (row,) = store.labels(key)
    text = read(store, f"/judges/{key}/label?rater=ann")
    assert row["output"] in text
    assert 'aria-current="true"' not in text
    labelled(store, key, who="ann")
    assert len({row["item_id"] for row in store.labels(key)}) == 1


@pytest.mark.slow
def test_labelled_items_stay_after_many_newer_rollouts(store: Store, key: str) -> None:
    labelled(store, key, who="bob", label="rude")
    (row,) = store.labels(key)
    for at in range(1_000):
        store.put_rollout(Rollout(id=f"{at:032x}"[::-1], status="done", started_at=NOW + 1_000 + at))
    store.flush()
    page = f"/judges/{key}/label?rater="
    assert row["output"] in read(store, f"{page}ann")
    assert row["output"] in read(store, f"{page}ann&run=run-1")
    assert row["output"] not in read(store, f"{page}ann&run=run-2")
    assert "Nothing is waiting" in read(store, f"{page}bob")


def test_the_last_label_can_be_changed(store: Store, key: str) -> None:
    labelled(store, key, label="rude")
    (row,) = store.labels(key)
    text = read(store, f"/judges/{key}/label?rater=ann&item={row['item_id']}")
    assert "Your label so far: <bdi>rude</bdi>" in text

    async def visit(browser: Browser) -> int:
        data = {**fields_of(text), "csrf": browser.access.csrf, "label": "kind"}
        return (await browser.send("POST", f"/judges/{key}/labels", data=data, follow=False)).status

    assert browse(store, visit) == 303
    assert [row["label"] for row in store.labels(key)] == ["kind"]


def withdrawn(store: Store, key: str, who: str = "ann", **changed: str) -> tuple[int, str]:
    """Withdraws the last label of a rater. Returns the status, and the place of the next page or the message."""

    async def visit(browser: Browser) -> tuple[int, str]:
        text = (await browser.get(f"/judges/{key}/label?rater={who}"))[1]
        data = {**fields_of(text.partition('id="withdraw"')[2].partition("</form>")[0]), **changed}
        answer = await browser.send("POST", f"/judges/{key}/labels/withdraw", data=data, follow=False)
        return answer.status, answer.headers.get("Location") or await answer.text()

    return browse(store, visit)


def test_a_rater_withdraws_only_own_labels(store: Store, key: str) -> None:
    labelled(store, key, who="bob", label="rude")
    labelled(store, key, who="ann", label="kind")  # the same item
    (item,) = {row["item_id"] for row in store.labels(key)}
    status, place = withdrawn(store, key)
    assert (status, place) == (303, f"/judges/{key}/label?rater=ann&item={item}")
    assert [(row["rater"], row["label"]) for row in store.labels(key)] == [("bob", "rude")]
    text = read(store, place)
    assert "0 labelled by <bdi>ann" in text
    assert fields_of(text)["item"] == item  # it is shown again
    assert "withdraw" not in text.partition("<fieldset>")[2].partition("</fieldset>")[0]
    assert withdrawn(store, key, csrf="x", rater="bob", item=item)[0] == 403
    assert "has no label of the item" in withdrawn(store, key, who="bob", rater="ann")[1]
    assert len(list(store.labels(key))) == 1


def test_every_own_label_is_listed_and_can_be_withdrawn(store: Store, key: str) -> None:
    labelled(store, key, label="rude")
    labelled(store, key, label="kind")
    text = read(store, f"/judges/{key}/label?rater=ann")
    places = re.findall(r'<li><a href="([^"]*)"><bdi>(\w+)</bdi></a> <bdi>answer', text)
    assert [label for _, label in places] == ["kind", "rude"]  # newest first
    first = places[1][0].replace("&amp;", "&")
    form = read(store, first).partition('id="withdraw"')[2].partition("</form>")[0]
    assert withdrawn(store, key, item=fields_of(form)["item"])[0] == 303
    assert [row["label"] for row in store.labels(key)] == ["kind"]
    text = read(store, f"/judges/{key}/label?rater=ann")
    assert "1 labelled by <bdi>ann" in text


def test_an_output_of_several_fields_is_shown_field_by_field(store: Store) -> None:
    key = put_question(store)
    fields = {"queue": "bug", "reply": "Thank you!"}
    store.put_rollout(Rollout(task_id="t", status="done", inputs={"q": "x"}, prediction=fields, started_at=NOW))
    store.flush()
    assert ">queue: bug\nreply: Thank you!</pre>" in read(store, f"/judges/{key}/label?rater=ann")


def test_a_skipped_item_makes_way_for_the_next(store: Store, key: str) -> None:

    async def visit(browser: Browser) -> list[str]:
        place, items = f"/judges/{key}/label?rater=ann", []
        for _ in range(3):
            text = (await browser.get(place))[1]
            items.append(fields_of(text)["item"])
            place = re.findall(r'href="([^"]*)" data-key="s"', text)[0].replace("&amp;", "&")
        return items

    assert len(set(browse(store, visit))) == 3


def test_a_skipped_item_stays_skipped_after_the_last_label_is_changed(store: Store, key: str) -> None:
    labelled(store, key)

    async def visit(browser: Browser) -> str:
        text = (await browser.get(f"/judges/{key}/label?rater=ann"))[1]
        skipped = fields_of(text)["item"]
        for name in ("s", "b"):
            place = re.findall(f'href="([^"]*)" data-key="{name}"', text)[0].replace("&amp;", "&")
            text = (await browser.get(place))[1]
        data = fields_of(text) | {"label": "rude"}
        assert data["item"] != skipped
        text = await (await browser.send("POST", f"/judges/{key}/labels", data=data)).text()
        return skipped if fields_of(text)["item"] == skipped else ""

    assert browse(store, visit) == ""


def test_pairs_are_of_two_outputs_of_one_task(store: Store) -> None:
    key = put_question(store, pairs=True, scale=("first", "tie", "second"))
    put_outputs(store)
    assert labelled(store, key, label="second")[0] == 303
    (row,) = store.labels(key)
    assert row["output_a"] != row["output_b"]
    assert row["output_a"].rpartition(" ")[2] == row["output_b"].rpartition(" ")[2] == row["task_input"][1:]


def test_a_form_with_other_values_is_refused(store: Store, key: str) -> None:
    for changed, status, message in (
        ({"label": "lovely"}, 400, "not on the scale"),
        ({"rater": " "}, 400, "name of its rater"),
        ({"item": "0" * 16}, 400, "changed or erased"),
        ({"rollout": "0" * 32}, 400, "changed or erased"),
        ({"csrf": "x"}, 403, "out of date"),
    ):
        code, text = labelled(store, key, **changed)
        assert (code, message in text) == (status, True)
    assert list(store.labels(key)) == []


def test_labels_of_one_digit_are_their_own_keys(store: Store) -> None:
    put_outputs(store)
    key = put_question(store, scale=("0", "1", "2"))
    text = read(store, f"/judges/{key}/label?rater=ann")
    assert re.findall(r'value="(\d)" data-key="(\d)"', text) == [("0", "0"), ("1", "1"), ("2", "2")]
    key = put_question(store)
    text = read(store, f"/judges/{key}/label?rater=ann")
    assert re.findall(r'value="(\w+)" data-key="(\d)"', text) == [("rude", "1"), ("neutral", "2"), ("kind", "3")]
