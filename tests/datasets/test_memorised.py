"""Texts that answer tasks by heart."""

from assay.datasets import Task
from assay.datasets.keys import overlap
from assay.datasets.memorised import MOST_MEMORISED, memorised

PLACES = ["oven", "kayak", "ladder", "tripod", "violin", "blender", "helmet", "compass", "lantern", "anvil"]
LABELS = ["refund", "billing", "technical", "other"]
TASKS = [
    Task(
        id=f"t{at}",
        inputs={"text": f"Hello, my {place} order came late and I want to know what to do now"},
        expected={"label": LABELS[at % 4]},
    )
    for at, place in enumerate(PLACES)
]
HONEST = """Decide which label fits the message best. Answer refund if the customer asks for money back, billing if an
invoice or a payment is in question, technical if something does not work, and other for everything else. A late order
is a refund only if the customer asks for money. Read the whole message before you answer."""


def test_a_table_of_one_word_and_the_answer_is_found() -> None:
    table = "; ".join(f"{place} means {LABELS[at % 4]}" for at, place in enumerate(PLACES))
    assert overlap(table, [task.inputs["text"] for task in TASKS]) == 0  # no eight words in a row
    assert memorised(f"{HONEST} {table}", TASKS, before=HONEST) == [task.id for task in TASKS]
    assert len(memorised("\n".join(f"- **{p.upper()}**: {LABELS[at % 4]}" for at, p in enumerate(PLACES)), TASKS)) == 10


def test_an_honest_text_is_not_found() -> None:
    assert len(memorised(HONEST, TASKS)) <= MOST_MEMORISED


def test_wrong_answers_and_far_ones_are_not_found() -> None:
    wrong = "; ".join(f"{place} is not right here, {LABELS[(at + 1) % 4]}" for at, place in enumerate(PLACES[:1]))
    assert memorised(wrong, TASKS) == []
    far = f"{PLACES[0]} {' '.join(['word'] * 9)} refund"
    assert memorised(far, TASKS) == []
    assert memorised(far.replace("word ", "", 1), TASKS) == ["t0"]


def test_what_stood_in_the_text_before_is_not_counted() -> None:
    assert memorised("oven: refund", TASKS) == ["t0"]
    assert memorised("oven: refund", TASKS, before="An oven is a device.") == []


def test_numbers_are_rare_words_and_an_answer_of_several_words_is_one_place() -> None:
    tasks = [
        Task(id="sum", inputs={"question": "What is 48 + 37?"}, expected={"answer": 85}),
        Task(id="city", inputs={"question": "Where is Anfield?"}, expected={"answer": "Liverpool, in England"}),
    ]
    assert memorised("48 gives 85. Anfield: Liverpool in England", tasks) == ["sum", "city"]
    assert memorised("Liverpool is not in Anfield", tasks) == []
