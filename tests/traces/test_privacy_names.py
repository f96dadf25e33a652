"""Names that the lists find completely, and technical prose that they leave as it is."""

import pytest

from assay.traces.privacy import gazetteers as privacy_gazetteers
from assay.traces.privacy.anonymizer import Anonymizer

pytestmark = pytest.mark.skipif(not privacy_gazetteers.available(), reason="the lists of the extra are not installed")


def hidden(text: str) -> str:
    return Anonymizer(b"0123456789abcdef", engine="gazetteers").text(text)


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
    ],
)
def test_the_whole_name_is_replaced(text: str, parts: str) -> None:
    assert not [part for part in parts.split() if part in hidden(text).replace("Person ", "")]


def test_a_family_name_alone_is_replaced_in_every_part_of_a_long_text() -> None:
    filler = "\n\n".join("A paragraph about the weather and the sea. " * 20 for _ in range(6))
    text = (
        f"Coombs likes rain.\n\n{filler}\n\nIt was written by Jason R. Coombs.\n\n{filler}\n\nLater Coombs changed it."
    )
    assert "Coombs" not in hidden(text)


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_words_on_the_lists_are_unchanged_in_technical_prose(text: str) -> None:
    assert hidden(text) == text
