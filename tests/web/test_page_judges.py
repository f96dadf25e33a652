"""The pages of judges: the list, the card in words, disagreements, audit, drift, and labels as they come in."""

import re
from pathlib import Path

import sqlalchemy as sa
from judged import judge_card, put_judge, put_question
from pages import NOW, Scans, got, links_in, put_report, read

from assay.reports.judges import card_page
from assay.rubrics import JudgeSpec
from assay.traces import Store
from assay.traces.store import tables as schema
from assay.traces.store.listing import finished_report


def page(store: Store, tmp_path: Path, path: str) -> str:
    return read(store, path, where=tmp_path / "page.db")


def test_an_empty_store_says_how_a_judge_gets_onto_the_page_and_an_unknown_judge_is_not_found(store: Store) -> None:
    assert "assay judge label JUDGE --page" in read(store, "/judges")
    ((status, text),) = got(store, "/judges/nothing")
    assert (status, "knows no judge" in text) == (404, True)


def test_the_list_shows_agreement_audit_drift_and_labels(store: Store, tmp_path: Path) -> None:
    key = put_judge(store, tmp_path)
    put_question(store, text="Is it short?")
    text = page(store, tmp_path, "/judges")
    rows = re.findall(r"<tr><th scope=\"row\".*?</tr>", text, re.DOTALL)
    assert "Is it kind?" in rows[0]  # the one with most labels comes first
    assert ">failed<" in rows[0]
    assert ">alarm<" in rows[0]
    assert "44 <small>by 2" in rows[0]
    assert "not compiled" in rows[1]
    assert links_in(text, "/judges/")[:2] == [f"/judges/{key}", f"/judges/{key}/label"]


def test_a_judge_is_described_in_words_with_its_disagreements_first(store: Store, tmp_path: Path) -> None:
    key = put_judge(store, tmp_path)
    text = page(store, tmp_path, f"/judges/{key}")
    assert "Weighted kappa with raters: " in text
    assert "on 22 items of test" in text
    # every third of 22 items is called rude, all others kind; Bob calls every fourth neutral
    assert "Of 22 labelled items that it judged, 12 got another verdict" in text
    gaps = [float(value) for value in re.findall(r'data-label="judge minus raters">([+-]\d\.\d{3})</td>', text)]
    assert gaps == sorted(gaps, key=lambda gap: -abs(gap))
    assert gaps[0] == -1.0  # rude, and both raters said kind
    assert "It fails 1 of 2 attacks" in text
    trust = text[text.index("Is it to be trusted?") : text.index("Weighted kappa with raters: ")]
    assert "It fails 1 of the 2 attacks of its newest" in trust
    assert "It has <a" in trust  # drifted
    assert text.index(">praise<") < text.index(">empty<")  # failed attacks come first
    assert "verdicts shifted" in text
    assert text.index("How close to an alarm") < text.index("Replays of its anchors")
    assert "assay judge compile kind.yaml --labels store" in text


def test_an_audit_of_another_judge_is_not_one_of_the_judge_of_the_card(store: Store, tmp_path: Path) -> None:
    key = put_judge(store, tmp_path)
    kept = finished_report(store, "judge-audit") or {}
    put_report(store, {**kept, "judge": "before it was compiled"}, run_id="judge-audit")
    text = page(store, tmp_path, f"/judges/{key}")
    assert "Not audited yet" in text
    assert "attacks of its newest" not in text
    assert "/runs/judge-audit" in links_in(text, "/runs/")
    rows = re.findall(r"<tr><th scope=\"row\".*?</tr>", page(store, tmp_path, "/judges"), re.DOTALL)
    assert ">failed<" not in rows[0]


def test_the_runs_of_a_judge_lead_to_its_page_and_state_their_result(store: Store, tmp_path: Path) -> None:
    key = put_judge(store, tmp_path)
    compiled, audited = (page(store, tmp_path, f"/runs/judge-{kind}") for kind in ("compile", "audit"))
    for text in (compiled, audited):
        assert f'<a href="/judges/{key}">The judge: its card, audits, drift and labels</a>' in text
        assert "Compare with another run" not in text
    assert "agreement with raters, 22 items of test" in compiled
    assert re.search(r"weighted kappa</bdi></th>(<td[^>]*><bdi>\S+( [^<]*)?</bdi></td>){3}", compiled)
    assert "It passes 1 of the 2 attacks that were tried" in audited


def test_agreement_is_shown_as_it_grows(store: Store, tmp_path: Path) -> None:
    text = page(store, tmp_path, f"/judges/{put_judge(store, tmp_path)}")
    assert "44 labels of 22 items, 22 of them by two raters or more: <bdi>ann</bdi> 22, <bdi>bob</bdi> 22." in text
    assert "same label 73 %" in text  # 16 of 22
    assert "Krippendorff&#39;s alpha as labels came in" in text


def test_a_judge_without_labels_says_what_to_do(store: Store, tmp_path: Path) -> None:
    key = put_question(store)
    text = page(store, tmp_path, f"/judges/{key}")
    assert "Not known: it has no reliability card." in text
    assert "assay judge label kind.yaml" in text
    assert "None yet." in text


def test_a_judge_whose_labels_are_elsewhere_says_where_to_start_the_page(store: Store, tmp_path: Path) -> None:
    key = put_judge(store, tmp_path)
    with store.engine.begin() as connection:  # only the file has labels, and the page is started elsewhere
        connection.execute(sa.delete(schema.labels))
    config = {"judge": "kind.yaml", "labels": "ratings.jsonl"}
    store.put_run("judge-compile", kind="judge compile", config=config, status="done", started_at=NOW)
    store.flush()
    text = page(store, tmp_path, f"/judges/{key}")
    assert "are not found at <bdi>ratings.jsonl</bdi>: start <code>assay view</code>" in text


def test_no_page_of_judges_scans_rollouts(store: Store, tmp_path: Path) -> None:
    key = put_judge(store, tmp_path)
    labelling = f"/judges/{key}/label"
    with Scans(store) as scans:
        paths = ("/judges", f"/judges/{key}", f"{labelling}?rater=ann", f"{labelling}?rater=x&run=run-1")
        pages = got(store, *paths, where=tmp_path / "page.db")
    assert ([status for status, _ in pages], scans) == ([200] * 4, [])


def test_a_card_with_alarms_is_not_praised(tmp_path: Path) -> None:
    rows = [{"output": f"o{at}", "rater": name, "label": "kind"} for at in range(40) for name in "ab"]
    page = card_page(judge_card(rows, JudgeSpec(text="Kind?", scale=("rude", "neutral", "kind"))))
    assert page.tone == "worse"
    assert "undefined" in page.words  # the raters used one label
    assert page.alarms


def test_a_card_of_few_items_is_not_called_sound() -> None:
    labels = ["rude", "kind"] * 3
    rows = [{"output": f"o{at}", "rater": name, "label": label} for at, label in enumerate(labels) for name in "ab"]
    card = judge_card(rows, JudgeSpec(text="Kind?", scale=("rude", "neutral", "kind")))
    page = card_page({**card, "alarms": []})
    assert "do not show whether it can be trusted" in page.words
    assert "breaks no rule" not in page.words
