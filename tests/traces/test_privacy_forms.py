"""Telephone numbers, dates, streets, identity numbers, listed names: recall on generated texts, and false positives."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from assay.traces.privacy import names as privacy_gazetteers
from assay.traces.privacy.anonymizer import Anonymizer

KEY = b"0123456789abcdef"
LISTED = pytest.mark.skipif(not privacy_gazetteers.available(), reason="the lists of the extra are not installed")


def hidden(text: str, engine: str = "patterns") -> str:
    return Anonymizer(KEY, engine=engine).text(text)


# -- recall


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


DATES = {"date": 0.80, "longdate": 0.80, "shortdate": 0.80}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "size", "seed", "engine", "goals"),
    [
        ("held-out", 480, 5, "patterns", {"phone": 0.95, "date": 0.80, "street": 0.60}),
        ("stored", 480, 5, "patterns", DATES),  # prompts and outputs as they are stored
        pytest.param("held-out", 1500, 4000, "gazetteers", {"person": 0.80, "place": 0.80}, marks=LISTED),
        pytest.param(
            "stored", 480, 5, "gazetteers", {**DATES, "first": 0.8, "person": 0.8, "place": 0.8}, marks=LISTED
        ),
    ],
)
def test_recall_goals_are_met_on_generated_texts(
    recall: Any, texts: str, size: int, seed: int, engine: str, goals: dict[str, float]
) -> None:
    measured = recall.measure(texts, size, seed, engine, subject=False)
    for kind, goal in goals.items():
        assert measured["types"][kind]["recall"] >= goal, kind
    assert measured["clean_changed"] <= 0.02 * measured["clean"]


# -- what is found


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
        ("The login from 12.3.4.5 was not me", "12.3.4.5"),
        ("; 12.10.10.10 ;", "12.10.10.10"),
        ("口座番号はGB82WEST12345698765432です。", "12345698"),
        ("계좌는GB82WEST12345698765432입니다.", "12345698"),
    ],
)
def test_personal_data_in_the_forms_of_several_countries_is_replaced(text: str, value: str) -> None:
    assert value not in hidden(text)


@LISTED
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("This was written by Jason R. Coombs in 2019.", "Jason R. Coombs"),
        ("Author: Jason R. Coombs", "Jason R. Coombs"),
        ("Seth M Larson fixed it.", "Seth Larson"),
        ("I read J. R. R. Tolkien last summer.", "J. R. Tolkien"),
        ("A book by J.K. Rowling", "J.K. Rowling"),
        ("Coombs, Jason R.", "Coombs Jason R."),
        ("From: SMITH, John A.", "SMITH John"),
        ("to: Smith, John", "Smith John"),
        ("De La Cruz, Juan", "De La Cruz Juan"),
        ("Contact Jean-Luc de la Fontaine about it.", "Jean Luc Fontaine"),
        ("Mr. O'Brien called.", "O'Brien"),
        ("Please ask Dr. Müller-Lüdenscheidt.", "Müller Lüdenscheidt"),
        ("Mr. van der Berg is here.", "van der Berg"),
        ("Ursula K. Le Guin wrote novels.", "Ursula Guin"),
        ("JASON R. COOMBS signed the form.", "JASON COOMBS"),
        ("The form is complete.\n\nKind regards,\njason coombs", "jason coombs"),
        ("my name is jason coombs and i need help", "jason coombs"),
        ("Thanks to @jaraco for the report.", "jaraco"),
        ("It is Jason Coombs's book.", "Jason Coombs"),
        ("It was written by Jason R.\nCoombs long ago.", "Jason Coombs"),
        ("Hello, I'm Jason Coombs.", "Jason Coombs"),
        ("Coombs said that it is fine.", "Coombs"),
        ("Written by Jason R. Coombs. COOMBS left, and Coombs's code stayed.", "Jason Coombs COOMBS"),
        ("Dear Jane Miller, we met Pedro Gonzalez in Barcelona.", "Jane Miller Pedro Gonzalez Barcelona"),
        ("12 Oak Road\nReading, RG1 2AB", "Reading"),
    ],
)
def test_the_whole_name_is_replaced(text: str, parts: str) -> None:
    once = hidden(text, "gazetteers")
    assert not [part for part in parts.split() if part in once.replace("Person ", "")]
    assert hidden(once, "gazetteers") == once


@LISTED
def test_a_family_name_alone_is_replaced_in_every_part_of_a_long_text() -> None:
    filler = "\n\n".join("A paragraph about the weather and the sea. " * 20 for _ in range(6))
    text = (
        f"Coombs likes rain.\n\n{filler}\n\nIt was written by Jason R. Coombs.\n\n{filler}\n\nLater Coombs changed it."
    )
    assert "Coombs" not in hidden(text, "gazetteers")


@LISTED
def test_a_given_name_alone_after_a_number_is_a_person() -> None:
    find = Anonymizer(KEY, engine="gazetteers").find
    assert [(match.type, match.value) for match in find("Order 4711 is late.\nBob")] == [("person", "bob")]
    assert [match.type for match in find("I live in Paris.")] == ["place"]


@LISTED
@pytest.mark.slow
def test_names_in_values_of_json_are_replaced() -> None:
    anonymizer = Anonymizer(KEY, engine="gazetteers")
    others = [{"first_name": "Anaïs"}, {"name": "Widget", "price": 3}, {"name": "search"}]
    data = {"name": "Priya", "patient": "Priya Patel", "others": others}
    for text in (
        json.dumps(anonymizer.value(data)),
        anonymizer.text(json.dumps(data, ensure_ascii=False)),
        anonymizer.text(json.dumps(json.dumps(data, ensure_ascii=False), ensure_ascii=False)),
    ):
        assert not any(name in text for name in ("Priya", "Patel", "Ana"))
        assert "Widget" in text
        assert "search" in text
    assert anonymizer.value({"client": "Acme Corp"}) == {"client": "Acme Corp"}


# -- what is not

NUMBERS = [
    '{"created_at": "2024-05-03"}',
    "1/2/24",
    "1988-04-12",
    "12/4/3 = 1",
    "on 99/99/24 of them we agree",
    "It is 5/3/24 of the whole of it",
    "2024-05-03\n2024-05-04",
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
]
PROSE = [
    "Two sentences.\nEinstein's equation is known",
    "at 5 km/h.\nAlice has 3 apples",
    "Device MAC of the RFC 9953, ISO 8601",
    "`steps` (str):\nAll interactions are structured",
    "(list):\nReading comes first",
    "Step 1\nMobile users skip it",
    "Use Ruby with Jenkins and Travis CI.",
    "Reading Victoria Metrics docs",
    "Deploy Django, Flask or Apache Mercury.",
    "Will Mark May chase the Chase bug with Grace?",
    "Hugo, Julia, Swift, Crystal, Ada, Haskell, Pascal and Kotlin are languages.",
    "# Jordan Release Notes",
    "Install Anaconda or Jupyter Lab.",
    "See [Ruby on Rails](http://x.org) and `Paris`.",
    "Crystal Reports for Java",
    "to Apache Airflow from Celery Beat",
    "The @property and @dataclass decorators",
    "from Jordan import May",
    "Add it to Python, Ruby and Go",
    "Copy from Redis, Ruby uses it",
    "Hugging Face Hub for Deep Learning",
    "Supports Ada Lovelace GPUs",
    "Dear Python users, hello World",
    "Jenkins said the build failed",
    "Written by Apache Software Foundation",
    "name: String",
    "Build tools for Visual Studio, and Visual C++",
    "Will the March release read Reading lists?",
]


@pytest.mark.parametrize("text", NUMBERS)
def test_numbers_that_are_no_personal_data_are_unchanged(text: str) -> None:
    assert hidden(text) == text


@LISTED
@pytest.mark.parametrize("text", [*NUMBERS, *PROSE])
def test_words_on_the_lists_are_unchanged_in_technical_prose(text: str) -> None:
    assert hidden(text, "gazetteers") == text
