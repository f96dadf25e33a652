"""Telephone numbers, dates, streets, identity numbers, listed names: recall on generated texts, and false positives."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from assay.traces.privacy import gazetteers as privacy_gazetteers
from assay.traces.privacy.anonymizer import Anonymizer

KEY = b"0123456789abcdef"
LISTED = pytest.mark.skipif(not privacy_gazetteers.available(), reason="the lists of the extra are not installed")


def hidden(text: str, engine: str = "patterns") -> str:
    return Anonymizer(KEY, engine=engine).text(text)


@pytest.fixture(scope="module")
def recall() -> Any:
    pytest.importorskip("faker")
    path = Path(__file__).parents[2] / "benchmarks" / "privacy_recall.py"
    spec = importlib.util.spec_from_file_location("privacy_recall", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_recall_goals_with_patterns_alone_are_met_on_held_out_texts(recall: Any) -> None:
    measured = recall.measure("held-out", 480, 5, "patterns", subject=False)
    shares = {kind: row["recall"] for kind, row in measured["types"].items()}
    assert shares["phone"] >= 0.95
    assert shares["date"] >= 0.80
    assert shares["street"] >= 0.60
    assert measured["clean_changed"] <= 0.02 * measured["clean"]


@LISTED
@pytest.mark.slow
def test_recall_goals_with_name_lists_are_met_on_held_out_texts(recall: Any) -> None:
    measured = recall.measure("held-out", 1500, 4000, "gazetteers", subject=False)
    shares = {kind: row["recall"] for kind, row in measured["types"].items()}
    assert shares["person"] >= 0.80
    assert shares["place"] >= 0.80
    assert measured["clean_changed"] <= 0.02 * measured["clean"]


@pytest.mark.parametrize("engine", ["patterns", pytest.param("gazetteers", marks=LISTED)])
@pytest.mark.slow
def test_dates_and_names_are_found_in_prompts_and_outputs_as_they_are_stored(recall: Any, engine: str) -> None:
    measured = recall.measure("stored", 480, 5, engine, subject=False)
    shares = {kind: row["recall"] for kind, row in measured["types"].items()}
    for kind in ("date", "longdate", "shortdate", *(("first", "person", "place") if engine == "gazetteers" else ())):
        assert shares[kind] >= 0.80, kind
    assert measured["clean_changed"] <= 0.02 * measured["clean"]


@pytest.mark.parametrize(
    "text",
    [
        "[[ ## answer ## ]]\n1988-04-12\n",
        "the 3rd of May, 1990",
        "due 5/3/24 says the letter",
        '{"answer": "1988-04-12"}',
        "Due: 12.04.1988",
        '{"prompt": "[[ ## date ## ]]\\n1988-04-12\\n"}',
        "[[ ## date ## ]]\n5 May 1988\n",
        "<date>\n1988-04-12\n</date>\n\nRespond with the corresponding output fields wrapped in XML tags `<team>`.",
        "<answer>5 May 1988</answer>",
        '{"prompt": "<date>\\n1988-04-12\\n</date>"}',
    ],
)
def test_dates_alone_in_a_field_and_in_short_forms_are_replaced(text: str) -> None:
    assert not any(part in hidden(text) for part in ("1988", "1990", "5/3/24"))


@pytest.mark.parametrize(
    "text",
    [
        '{"created_at": "2024-05-03"}',
        "1/2/24",
        "1988-04-12",
        "12/4/3 = 1",
        "on 99/99/24 of them we agree",
        "It is 5/3/24 of the whole of it",
        "2024-05-03\n2024-05-04",
    ],
)
def test_numbers_that_are_not_dates_are_unchanged(text: str) -> None:
    assert hidden(text) == text


@LISTED
@pytest.mark.slow
def test_names_in_values_of_json_are_replaced() -> None:
    anonymizer = Anonymizer(KEY, engine="gazetteers")
    data = {
        "name": "Priya",
        "patient": "Priya Patel",
        "others": [{"first_name": "Anaïs"}, {"name": "Widget", "price": 3}, {"name": "search"}],
    }
    for text in (
        json.dumps(anonymizer.value(data)),
        anonymizer.text(json.dumps(data, ensure_ascii=False)),
        anonymizer.text(json.dumps(json.dumps(data, ensure_ascii=False), ensure_ascii=False)),
    ):
        assert not any(name in text for name in ("Priya", "Patel", "Ana"))
        assert "Widget" in text
        assert "search" in text
    assert anonymizer.value({"client": "Acme Corp"}) == {"client": "Acme Corp"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Please call me back on 3354118578 before Friday.", "3354118578"),
        ("The parcel goes to Drubinstraße 47-26 on Monday", "Drubinstraße 47-26"),
        ("She lives at 8, rue Chartier since May", "rue Chartier"),
        ("He moved to Calle de Juan Valera 12 in spring", "Juan Valera"),
        ("Appointment of the customer: 12 March 2024 at noon", "12 March 2024"),
        ("The customer moved out on 03.05.2019 for good", "03.05.2019"),
        ("my PESEL: 44051401359", "44051401359"),
        ("CPF 390.533.447-05 of the buyer", "390.533.447-05"),
        ("Reach the office of the agent on 030 - 901 820 until noon", "901 820"),
        ("For the house in Texas it is 415 - 333 - 2671 at night", "2671"),
        ("Please ring 612 - 345 - 678 before Friday", "345"),
        ("What is 415-333-2671 doing in my list of calls?", "2671"),
        ("The flat is new, please write to the tenant:\nBellevue 12\n8001 Zürich", "Bellevue 12"),
    ],
)
def test_personal_data_in_the_forms_of_several_countries_is_replaced(text: str, value: str) -> None:
    assert value not in hidden(text)


@pytest.mark.parametrize(
    "text",
    [
        "Python 10.15.7.3 and Rust are fast.",
        "Upgrade the driver 2.14.3.9 first.",
        "app 4.3.2.10 and above",
        "2024-05-03 12:30:45,123 INFO worker-3 started the job again",
        "Released 2024-05-03 under the licence of the project",
        "(946) 625-1341 simplifies to -395",
        "How much is 11 - 797 - 682?",
        "Work out 1892 - 0 - 263 - 729. Let me see: 137 - 289 - 4450 - (-795) = 0",
        "What is 415 - 333 - 2671? It is a difference of three numbers",
        "What is 11-797-682? It is a difference of three numbers",
        "They produce 5 650 000 cars in each year, or $156 – (0.20)156.25 each",
        "I would like to see it.\nPerson 2: So do my 4 friends.\nAnd 12+3=15 others come",
        "mode 0755 0644 0600 for the three files of the user",
        "The call took 9141520 cycles of the processor",
        "CPF 111.222.333-44 is no valid one",
        "The Pythagorean theorem: a^2 + b^2 = c^2.",
        "Use Kubernetes in Production and Terraform in Staging.",
        "<message>\nTicket 39: I cannot log in to see my order.\n</message>",
        "<created_at>2024-05-03</created_at>",
        "[[ ## message ## ]]\nTicket 39: I cannot log in to see my order.",
        "[[ ## mail ## ]]\nInvoice 15 of May is wrong.\n\n"
        "Respond with a JSON object in the following order of fields: `team`.",
    ],
)
def test_versions_logs_and_prose_are_unchanged(text: str) -> None:
    assert hidden(text) == text
    if privacy_gazetteers.available():
        assert hidden(text, "gazetteers") == text


@LISTED
@pytest.mark.parametrize(
    "text",
    [
        "Two sentences.\nEinstein's equation is known",
        "at 5 km/h.\nAlice has 3 apples",
        "Device MAC of the RFC 9953, ISO 8601",
        "`steps` (str):\nAll interactions are structured",
        "(list):\nReading comes first",
        "Step 1\nMobile users skip it",
    ],
)
def test_a_capitalised_word_at_the_start_of_a_line_is_not_a_place(text: str) -> None:
    assert hidden(text, "gazetteers") == text
    assert "Reading" not in hidden("12 Oak Road\nReading, RG1 2AB", "gazetteers")


def test_an_ip_address_of_small_numbers_is_found_if_it_is_not_called_a_version() -> None:
    assert "12.3.4.5" not in hidden("The login from 12.3.4.5 was not me")
    assert "12.10.10.10" not in hidden("; 12.10.10.10 ;")


@LISTED
def test_names_and_places_are_found_by_lists() -> None:
    text = hidden("Dear Jane Miller, we met Pedro Gonzalez in Barcelona.", "gazetteers")
    assert not any(name in text for name in ("Jane", "Miller", "Pedro", "Gonzalez", "Barcelona"))
    assert (
        hidden("Will the March release read Reading lists?", "gazetteers")
        == "Will the March release read Reading lists?"
    )
    anonymizer = Anonymizer(KEY, engine="names")
    assert anonymizer.finds_names
    assert anonymizer.text(anonymizer.text("Dear Jane Miller,")) == anonymizer.text("Dear Jane Miller,")


@pytest.mark.timeout(120)
def test_hostile_texts_take_little_time(recall: Any) -> None:
    for text in (
        "1 " * 20_000,
        "A" * 40_000,
        "Aa " * 15_000 + "1",
        "12/" * 15_000,
        "(1" * 15_000,
        "Calle " * 8_000,
        "12 A. " * 8_000,
        "call " * 10_000 + "1",
    ):
        hidden("start of text " + text)


@LISTED
def test_a_given_name_alone_after_a_number_is_a_person() -> None:
    find = Anonymizer(KEY, engine="gazetteers").find
    assert [(match.type, match.value) for match in find("Order 4711 is late.\nBob")] == [("person", "bob")]
    assert [match.type for match in find("I live in Paris.")] == ["place"]


@pytest.mark.parametrize("text", ["口座番号はGB82WEST12345698765432です。", "계좌는GB82WEST12345698765432입니다."])
def test_an_iban_between_letters_of_a_script_without_spaces_is_replaced(text: str) -> None:
    assert "12345698" not in hidden(text)
